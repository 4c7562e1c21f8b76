"""Gradients compared tensor by tensor and entry by entry, before the first update and in the middle of a run."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import planted_faults as bench
from helpers import move, roll
from onetake.core.coefficients import Coefficients
from onetake.core.objectives import Grpo, GrpoGuard, Kl
from onetake.core.selection import All, Fraction
from onetake.core.transitions import Flow
from onetake.execution import EXECUTIONS, Retain, Reweight
from onetake.policies import trainable
from onetake.policies.toy import ToyPolicy
from onetake.rollout.compare_gradients import Rounding, Spread
from onetake.rollout.preflight import PreflightError, preflight
from onetake.rollout.recheck import default_interval, recheck
from onetake.rollout.sampling import RolloutConfig
from onetake.run import config
from planted import Faulty, Setting, factor
from test_field_cases import run
from tiny import tiny_recipe

SIZE = RolloutConfig(groups=3, group_size=4, micro_batch=2)
TOY = Setting(case="toy")


def toy_batches(policy: ToyPolicy):
    return TOY.batches(policy)


# Rounding, as it is measured


def test_a_gradient_that_cancels_is_judged_by_what_cancelled():
    """A tensor whose summands leave nothing may be off by their rounding, and by no more."""
    rounding, one = Rounding(), torch.linspace(1, 2, 12).view(3, 4)
    for sign in (1.0, -1.0):
        rounding.add("cancels", sign * one, [sign * one * 0.4, sign * one * 0.6])
    native = torch.zeros(3, 4)
    within, beyond = (rounding.judge("cancels", native + off, native, rounding.level) for off in (1e-7, 1e-3))
    assert within.excess < 1 < beyond.excess
    assert within.native_norm == 0


def test_entries_have_limits_of_their_own():
    """Row by column: a fault that is small beside the largest row is large in a small one."""
    rounding = Rounding()
    native = torch.tensor([[1.0, 1.0], [1e-4, 1e-4], [1e-8, 1e-8]])
    rounding.add("matrix", native, [native * (1 + 1e-7)])
    for row in range(3):
        wrong = native.clone()
        wrong[row, 1] *= 1.001
        verdict = rounding.judge("matrix", wrong, native, rounding.level)
        assert verdict.excess > 1
        assert verdict.worst == (row, 1)
    assert rounding.judge("matrix", native.clone(), native, rounding.level).excess == 0


def test_what_is_zero_throughout_must_be_zero():
    rounding, zero = Rounding(), torch.zeros(2, 2)
    rounding.add("silent", zero, [zero])
    assert rounding.judge("silent", zero, zero, 0.0).excess == 0
    assert rounding.judge("silent", zero + 1e-30, zero, 0.0).excess == torch.inf


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4)])
def test_factors_are_exact_where_squares_are_products(shape):
    tensor = torch.ones(shape)
    for size in range(len(shape)):
        tensor = tensor * torch.linspace(1, 3, shape[size]).view(-1, *[1] * (len(shape) - size - 1))
    spread = Spread(tensor, draws=2)
    for _ in range(6):
        spread.add(tensor)
    rows, columns, whole = spread.means()
    found = (rows[:, None] * columns / whole / spread.terms).sqrt().reshape(shape)
    assert spread.terms == 3
    torch.testing.assert_close(found, tensor.double(), rtol=1e-6, atol=0)


# Before the first update


@pytest.mark.parametrize("kl", [None, Kl(beta=0.1), Kl(beta=0.1, as_reward=True)])
@pytest.mark.parametrize("objective", [Grpo(), GrpoGuard()], ids=lambda o: o.kind)
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_weights_and_gradients_are_left_as_they_were(execution, objective, kl):
    policy, strategy = ToyPolicy(Flow()), EXECUTIONS[execution](kl)
    with torch.no_grad():
        policy.module.outer.weight.zero_()  # as an adapter that starts as the identity
    for parameter in trainable(policy).values():
        parameter.grad = torch.ones_like(parameter)
    before = {name: p.detach().clone() for name, p in trainable(policy).items()}
    found = preflight(policy, strategy, objective, toy_batches(policy))
    assert found.gradient_error < 1e-12
    assert found.silent == []  # the layers before it were woken
    assert strategy.kl is kl
    for name, parameter in trainable(policy).items():
        assert torch.equal(parameter, before[name])
        assert torch.equal(parameter.grad, torch.ones_like(parameter))


def test_the_message_names_the_tensor_both_values_and_the_limit():
    policy = ToyPolicy(Flow())
    faulty = Faulty(Reweight(), "norm.bias", factor(0.14))  # a PReLU's 86 %, a small part of the whole
    message = (
        r"in 1 of 6 tensors\. The worst is norm\.bias \(float64, 8\): entry \[\d\] is \S+ where the native gradient has \S+ "
        r"\(rounding moves it by \S+ at most\); norms \S+ and \S+, \S+ apart .* Use rollout\.micro_batch: 1 or execution: retain"
    )
    with pytest.raises(PreflightError, match=message):
        preflight(policy, faulty, Grpo(), toy_batches(policy))
    with pytest.raises(PreflightError, match=r"Use execution: recompute"):
        preflight(policy, Faulty(Retain(), "norm.bias", factor(0.14)), Grpo(), toy_batches(policy))


def test_a_bank_that_takes_prelu_for_a_scale_does_not_pass():
    """Whether the bank refuses such a layer, is wrong in it, or right: never a wrong gradient."""
    policy = ToyPolicy(Flow())
    policy.module.norm = nn.PReLU(8, init=0.3).double()
    batches = toy_batches(policy)
    preflight(policy, Retain(), Grpo(), batches)
    with contextlib.suppress(ValueError):
        assert preflight(policy, Reweight(), Grpo(), batches).gradient_error < 1e-12


def test_a_tensor_without_gradient_is_told():
    policy = ToyPolicy(Flow())
    with torch.no_grad():
        policy.module.norm.weight[:], policy.module.norm.bias[:] = 0.0, 0.0
    found = preflight(policy, Retain(), Grpo(), toy_batches(policy))
    assert found.silent == ["inner.weight", "inner.bias", "outer.weight"]


# In the middle of a run


@pytest.mark.parametrize("selection", [All(), Fraction(fraction=0.6)], ids=lambda s: s.kind)
@pytest.mark.parametrize("kl", [None, Kl(beta=0.3)])
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_a_recheck_changes_no_bit_of_the_update(execution, kl, selection):
    found = {}
    for checked in (False, True):
        policy, strategy = ToyPolicy(Flow()), EXECUTIONS[execution](kl)
        move(policy, 0.1)
        rollout = roll(policy, strategy, config=SIZE, selection=selection)
        coefficients = Coefficients(Grpo(), rollout)
        forwards = policy.forwards
        if checked:
            verdict = recheck(policy, strategy, rollout, coefficients, Grpo())
            assert verdict.excess < 1
        else:
            strategy.accumulate(policy, rollout, coefficients)
        found[checked] = (
            {n: p.grad for n, p in trainable(policy).items()},
            coefficients.statistics(),
            policy.forwards - forwards,
        )
    (plain, statistics, forwards), (checked, same, more) = found[False], found[True]
    assert all(torch.equal(checked[name], plain[name]) for name in plain)
    assert same == statistics
    events = int(rollout.batches[0].stochastic.any(0).sum()) if rollout.batches else 0
    passes = 4 if kl is not None and execution == "reweight" else 2
    assert more - forwards == passes * SIZE.micro_batch * len(rollout.transitions[0])
    assert events == len(rollout.transitions[0])


@pytest.mark.parametrize("execution", ["retain", "reweight"])
def test_a_recheck_adds_to_what_was_there(execution):
    policy, strategy = ToyPolicy(Flow()), EXECUTIONS[execution]()
    rollout = roll(policy, strategy, config=SIZE)
    recheck(policy, strategy, rollout, Coefficients(Grpo(), rollout), Grpo())
    wanted = {name: p.grad + 1 for name, p in trainable(policy).items()}
    rollout = roll(policy, strategy, config=SIZE)
    for parameter in trainable(policy).values():
        parameter.grad = torch.ones_like(parameter)
    recheck(policy, strategy, rollout, Coefficients(Grpo(), rollout), Grpo())
    for name, parameter in trainable(policy).items():
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-12, atol=1e-15)
    with pytest.raises(AssertionError, match="accumulated twice"):
        strategy.accumulate(policy, rollout, Coefficients(Grpo(), rollout))


def test_a_recheck_takes_a_micro_batch_that_trains():
    policy, strategy = ToyPolicy(Flow()), Retain()
    rollout = roll(policy, strategy, config=SIZE)
    rollout.advantages[:2] = 0
    rollout.advantages[2] = torch.tensor([0.0, 0.0, 1.0, -1.0])
    faulty = Faulty(strategy, "outer.bias", factor(1.01))
    with pytest.raises(PreflightError, match=r"a micro-batch of group 2 \('.*'\).* outer\.bias"):
        recheck(policy, faulty, rollout, Coefficients(Grpo(), rollout), Grpo())
    rollout = roll(policy, strategy, config=SIZE)
    rollout.advantages[:] = 0
    assert recheck(policy, strategy, rollout, Coefficients(Grpo(), rollout), Grpo()) is None


class Shortcut(nn.Module):
    """The same values, but from some call on without the gradient of a branch: routing that changes after the first update."""

    def __init__(self, inner: nn.Module, calls: int) -> None:
        super().__init__()
        self.inner, self.calls = inner, calls

    def forward(self, x, sigma, prompt):
        self.calls -= torch.is_grad_enabled()
        hidden = self.inner(x, sigma, prompt)
        return hidden if self.calls >= 0 else 0.5 * hidden + 0.5 * hidden.detach()


@pytest.mark.parametrize("execution", ["retain", "reweight"])
def test_routing_that_changes_later_is_caught_by_the_recheck(execution):
    policy, strategy = ToyPolicy(Flow()), EXECUTIONS[execution]()
    policy.module = Shortcut(policy.module, 10**6)
    preflight(policy, strategy, Grpo(), toy_batches(policy))
    rollout = roll(policy, strategy, config=SIZE)
    recheck(policy, strategy, rollout, Coefficients(Grpo(), rollout), Grpo())
    rollout = roll(policy, strategy, config=SIZE)
    policy.module.calls = 0  # what is recomputed now takes another branch than what was sampled
    with pytest.raises(PreflightError, match=r"is not the native one on a micro-batch of group 0 .* in 6 of 6 tensors"):
        recheck(policy, strategy, rollout, Coefficients(Grpo(), rollout), Grpo())


@pytest.fixture(scope="module")
def recipe_text(tmp_path_factory) -> str:
    return tiny_recipe(
        tmp_path_factory.mktemp("base"),
        rollout={"groups": 2, "group_size": 4, "micro_batch": 2},
        optimizer={"learning_rate": 0.02},
        evaluation={"every": 50, "samples": 1},
        updates=5,
    )


@pytest.mark.parametrize("execution", ["retain", "reweight"])
@pytest.mark.parametrize(
    "more", [[], ["kl.beta=0.1", "policy.dtype=bfloat16", "updates_per_rollout=1"]], ids=["plain", "kl"]
)
def test_a_run_that_is_rechecked_is_the_same_run(recipe_text, tmp_path, execution, more):
    asked = [f"execution={execution}", *more]
    often, _ = run(recipe_text, tmp_path, *asked, "recheck=1", name="often")
    never, _ = run(recipe_text, tmp_path, *asked, "recheck=100", name="never")
    assert [line["grad_norm"] for line in often] == [line["grad_norm"] for line in never]
    assert [line["loss"] for line in often] == [line["loss"] for line in never]
    spent = often[-1]["forwards"] - never[-1]["forwards"]
    once = (
        2 * 2 * (2 if more and execution == "reweight" else 1)
    )  # rows, events, and a forward of its own for a late KL
    assert spent >= 4 * 2 * once  # rollouts, passes
    assert (spent - 4 * 2 * once) % (9 * once) == 0  # and where that one repetition was lucky, eight others


def test_by_default_rechecks_take_a_hundredth_of_the_time():
    assert [default_interval(n) for n in (1, 4, 24, 1000)] == [300, 75, 13, 1]
    recipe = config.load("rollout: {groups: 4, group_size: 24, micro_batch: 6}")
    assert (recipe.recheck_every(1), recipe.recheck_every(4)) == (19, 75)
    assert config.load("recheck: 7").recheck_every(1) == 7


# Planted faults and sound settings: benchmarks/planted_faults.py prints both counts


def test_planted_faults_are_caught_and_sound_settings_pass(capsys):
    """A part of them; all of them are slow."""
    settings = [TOY, *(s for s in bench.FAULTY if s.dtype == "bfloat16" and s.case == "wan-2.1")]
    assert bench.plant(12, settings)["pre-flight"] == 12, capsys.readouterr().out
    assert bench.sound(3)[0] == 0, capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # what libraries say of tiny models of twelve families
def test_all_planted_faults_are_caught_without_a_false_alarm(capsys):
    assert bench.plant(100)["pre-flight"] == 100, capsys.readouterr().out
    alarms, _ = bench.sound(len(bench.SOUND))
    assert len(bench.SOUND) >= 60
    assert alarms == 0, capsys.readouterr().out
