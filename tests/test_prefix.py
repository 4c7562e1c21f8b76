"""Steps that a group shares are computed once, exactly; steps after its last event may be a higher-order solver's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers import gradient_of, relative_error, roll
from onetake.core.coefficients import Coefficients
from onetake.core.objectives import Grpo
from onetake.core.records import Address
from onetake.core.selection import Fraction, Single, Window
from onetake.core.transitions import Flow
from onetake.execution import EXECUTIONS, Retain
from onetake.policies.diffusion import DiffusionPolicy
from onetake.policies.finish import DpmSolver, Euler
from onetake.policies.loading import PolicyConfig
from onetake.policies.toy import ToyPolicy
from onetake.rollout.preflight import PreflightError, preflight
from onetake.rollout.sampling import RolloutConfig, deal, sample
from test_diffusion import CALL, PROMPTS, policy_on
from tiny import tiny_sd3

LATE = Window(size=1, start=2, place="fixed")
GROUPS, SIZE, STEPS = 2, 4, 4


def shape(micro_batch: int = 2, **more) -> RolloutConfig:
    return RolloutConfig(groups=GROUPS, group_size=SIZE, micro_batch=micro_batch, **more)


def dealt(policy, config: RolloutConfig, selection=LATE):
    return deal(config, PROMPTS, policy, selection, Grpo(), Address(seed=0, stream="train", update=0))


@pytest.mark.parametrize("way", ["tail", "fast_forward"])
@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_one_by_one_a_shared_prefix_is_bitwise_the_unshared(guidance, way):
    """With one trajectory a call, computing the prefix G times or once is the same arithmetic."""
    policy = policy_on(guidance=guidance)
    policy.way = way
    shared, apart = (
        sample(policy, Retain(), dealt(policy, shape(1, shared_start=True, share_prefix=share)))
        for share in (True, False)
    )
    for one, other in zip(shared.transitions, apart.transitions, strict=True):
        for name in ("sample", "action", "velocity", "mean", "log_prob"):
            assert torch.equal(getattr(one[0], name), getattr(other[0], name)), name
    assert all(torch.equal(a, b) for a, b in zip(shared.outputs, apart.outputs, strict=True))


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_gradients_of_a_shared_prefix(execution):
    """Micro-batches of several rows differ from one-row calls by rounding only; in float64 not even by that much."""
    for policy, tolerance in ((ToyPolicy(Flow()), 1e-12), (policy_on(), 1e-5)):
        found, wanted = (
            gradient_of(policy, execution, selection=LATE, config=shape(shared_start=True, share_prefix=share))
            for share in (True, False)
        )
        assert relative_error(found, wanted) < tolerance


@pytest.mark.parametrize(("execution", "extra"), [("retain", 0), ("reweight", 0), ("recompute", 1)])
@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_forwards_with_a_shared_prefix_are_counted_exactly(execution, extra, guidance):
    """Two steps once per group, two steps for every trajectory; guidance doubles the rows."""
    policy, strategy = policy_on(guidance=guidance), EXECUTIONS[execution]()
    policy.sigmas  # noqa: B018  asks the pipeline for its schedule
    policy.calls = policy.forwards = 0
    rollout = roll(policy, strategy, selection=LATE, config=shape(shared_start=True))
    strategy.accumulate(policy, rollout, Coefficients(Grpo(), rollout))
    rows = GROUPS * 2 + GROUPS * SIZE * 2 + extra * rollout.event_count
    assert policy.forwards == rows * (2 if guidance > 1 else 1)
    batches = GROUPS * SIZE // 2
    assert policy.calls == GROUPS * 2 + batches * 2 + extra * batches


@pytest.mark.parametrize("selection", [Single(), Fraction(fraction=0.4), Window(size=2)], ids=lambda s: s.kind)
def test_only_what_the_whole_group_shares_is_shared(selection):
    """Before the first event of any sample of the group, whatever the micro-batch."""
    policy = ToyPolicy(Flow(), steps=8)
    for batch in dealt(policy, shape(1, shared_start=True), selection):
        group = [b.stochastic for b in dealt(policy, shape(1), selection) if b.group == batch.group]
        events = torch.cat(group).any(0).nonzero().flatten().tolist()
        assert (batch.first, batch.last) == (events[0], events[-1])
    assert all(b.first == 0 for b in dealt(policy, shape(1), selection))  # each sample has noise of its own
    assert all(b.first == 0 for b in dealt(policy, shape(1, shared_start=True, share_prefix=False), selection))


def test_preflight_refuses_a_prefix_that_cannot_be_shared():
    policy = policy_on()
    rollout = policy.rollout

    def depends_on_where_it_began(batch, observe, *, grad, entry=None):
        if entry is not None:
            entry = replace(entry, sample=entry.sample * 1.001)
        return rollout(batch, observe, grad=grad, entry=entry)

    config = shape(4, shared_start=True)
    preflight(policy, Retain(), Grpo(), dealt(policy, config))
    policy.rollout = depends_on_where_it_began
    with pytest.raises(PreflightError, match=r"before event 2 cannot be computed once .* rollout.share_prefix: false"):
        preflight(policy, Retain(), Grpo(), dealt(policy, config))
    preflight(policy, Retain(), Grpo(), dealt(policy, shape(4, shared_start=True, share_prefix=False)))


# A higher-order solver after the window


def solver_policy(steps: int, finish: DpmSolver | Euler) -> DiffusionPolicy:
    pipe = tiny_sd3()
    pipe.transformer.requires_grad_(False)
    return DiffusionPolicy(pipe, PolicyConfig(steps=steps, call=CALL, finish=finish), output_type="latent")


def final(steps: int, finish: DpmSolver | Euler = Euler()) -> torch.Tensor:  # noqa: B008  immutable
    """The latent after one event and the deterministic rest."""
    policy = solver_policy(steps, finish)
    selection = Window(size=1, place="fixed")
    (batch,) = deal(
        RolloutConfig(groups=1, group_size=4, micro_batch=4),
        PROMPTS,
        policy,
        selection,
        Grpo(),
        Address(seed=0, stream="train", update=0),
    )
    return policy.rollout(batch, lambda event: None, grad=False)


def test_kept_steps_hold_both_ends():
    assert DpmSolver(share=0.4).kept(4, 14) == [4, 6, 9, 12, 14]
    for first in range(1, 10):
        kept = DpmSolver(share=0.4).kept(first, 10)
        assert (kept[0], kept[-1]) == (first, 10)
        assert len(kept) - 1 == max(1, int(0.4 * (10 - first)))
        assert kept == sorted(set(kept))
    assert DpmSolver(share=1.0).kept(3, 10) == list(range(3, 11))


def test_first_order_on_all_steps_is_the_euler_step():
    torch.testing.assert_close(final(8, DpmSolver(order=1, share=1.0)), final(8), rtol=1e-4, atol=1e-5)


def solved(order: int, steps: int) -> float:
    """Error at the end of a flow whose data are N(0, 0.3²), where the exact path is x·c(σ)/c(0.9), c² = 0.09(1−σ)² + σ²."""
    sigmas = [0.9 * (1 - i / steps) for i in range(steps + 1)]
    solver = DpmSolver(order=order).solver(sigmas, 1000 * torch.tensor(sigmas[:-1]))
    start = x = torch.linspace(-2, 2, 9, dtype=torch.float64)
    for sigma, timestep in zip(sigmas, solver.timesteps, strict=False):
        square = 0.09 * (1 - sigma) ** 2 + sigma**2
        velocity = x * (sigma - 0.09 * (1 - sigma)) / square
        x = solver.step(velocity, timestep, x, return_dict=False)[0].double()
    exact = start * 0.3 / (0.09 * 0.1**2 + 0.9**2) ** 0.5
    return float((x - exact).norm())


def test_second_order_needs_fewer_steps_for_the_same_accuracy():
    assert solved(1, 40) / solved(1, 80) == pytest.approx(2, rel=0.15)
    assert solved(2, 40) / solved(2, 80) > 2.3  # the last step, to noise 0, is of first order
    assert solved(2, 10) < solved(1, 25)  # a share of 0.4 of the steps


@pytest.mark.parametrize(("share", "rest"), [(1.0, 5), (0.4, 2), (0.1, 1)])
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_a_compressed_rest_keeps_the_gradient_exact_and_costs_what_it_says(execution, share, rest):
    """Events 1 and 2 of 8 steps: three steps up to the window's end, and the kept ones of the other five."""
    policy = policy_on()
    policy = DiffusionPolicy(policy.pipe, PolicyConfig(steps=8, call=CALL, finish=DpmSolver(share=share)))
    window, config = Window(size=2, start=1, place="fixed"), shape(4)
    preflight(policy, Retain(), Grpo(), dealt(policy, config, window))
    policy.forwards = 0
    found = gradient_of(policy, execution, selection=window, config=config)
    extra = 2 if execution == "recompute" else 0
    assert policy.forwards == GROUPS * SIZE * (3 + rest + extra)
    assert relative_error(found, gradient_of(policy, "recompute", selection=window, config=config)) < 1e-5


def test_evaluation_takes_every_step():
    """The solver follows a window; without one the stock steps are taken."""
    policy = solver_policy(8, DpmSolver())
    (batch, *_) = dealt(policy, shape(4), Window(size=1, place="fixed"))
    still = replace(batch, stochastic=torch.zeros_like(batch.stochastic), last=None)
    ours = policy.rollout(still, pytest.fail, grad=False)
    plain = solver_policy(8, Euler())
    assert torch.equal(ours, plain.rollout(still, pytest.fail, grad=False))
    assert policy.forwards == plain.forwards == 4 * 8
