"""The first test and the last: every execution yields the gradient that plain autograd takes of the formula."""

from __future__ import annotations

import itertools

import pytest
import torch

from helpers import fake_rewards, gradient_of, move, relative_error, roll
from onetake.core.coefficients import Coefficients
from onetake.core.objectives import FlowDppo, Grpo, GrpoGuard, Kl
from onetake.core.selection import All, Fraction, Single, Window
from onetake.core.transitions import Cps, Dance, Flash, Flow, gain, log_prob, mean_std
from onetake.execution import EXECUTIONS, Recompute, Retain, Reweight
from onetake.policies import trainable
from onetake.policies.toy import ToyPolicy
from onetake.rollout.sampling import RolloutConfig

SELECTIONS = {
    "all": All(),
    "fraction": Fraction(fraction=0.6),
    "fraction shared": Fraction(fraction=0.6, per="update"),
    "window": Window(size=2),
    "single": Single(),
    "single per sample": Single(per="sample"),
    "sliding": Window(size=2, place="sliding"),
}
OBJECTIVES = {
    "per_dim": Grpo(),
    "noise_aware": Grpo(event_weights="noise_aware"),
    "exact": Grpo(scale="exact", clip_low=0.1, clip_high=0.3),
    "rectified": Grpo(event_weights="rectified"),
    "guard": GrpoGuard(),
    "dppo": FlowDppo(event_weights="rectified"),
}
KERNELS = {"flow": Flow(), "dance": Dance(), "flash": Flash(), "cps": Cps()}
GRID = list(itertools.product(EXECUTIONS, SELECTIONS, OBJECTIVES, KERNELS))


def loss_by_hand(objective, old, mean, std, delta, advantage):
    """One event's loss as the papers write it, once more."""
    ell, dims = log_prob(old.action, mean, std), old.dims
    drift = ((mean - old.mean) ** 2).flatten(1).sum(1) / (2 * std**2)
    if isinstance(objective, GrpoGuard):
        ratio = torch.exp(std / dims * (ell - old.log_prob + drift))
        clipped = ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high)
        return torch.maximum(-advantage * ratio, -advantage * clipped) / -delta
    scale = {"per_dim": 1 / dims, "exact": 1.0, "published_cps": 2 * std**2 / dims}[objective.scale]
    ratio = torch.exp(scale * (ell - old.log_prob))
    if isinstance(objective, FlowDppo):
        moving_on = ((advantage > 0) & (ratio > 1)) | ((advantage < 0) & (ratio < 1))
        return -advantage * ratio * ~(moving_on & (drift / dims > objective.threshold)).detach()
    clipped = ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high)
    return torch.maximum(-advantage * ratio, -advantage * clipped)


def by_formula(policy: ToyPolicy, objective, rollout, kl=None) -> dict[str, torch.Tensor]:
    """Plain autograd of the mean over events of w·loss + β·s·KL, without executions."""
    total, sigmas = torch.zeros((), dtype=torch.float64), policy.sigmas
    events = torch.cat([batch.stochastic for batch in rollout.batches])
    weights = {k: 1.0 for k in range(len(sigmas) - 1)}
    if objective.event_weights != "uniform":
        present = [k for k in weights if events[:, k].any()]
        factor = {
            "rectified": lambda k: 1 / gain(policy.kernel, sigmas, k),
            "noise_aware": lambda k: policy.kernel.affine(sigmas, k).std,
        }[objective.event_weights]
        mean = sum(factor(k) * int(events[:, k].sum()) for k in present) / int(events.sum())
        weights = {k: factor(k) / mean for k in present}
    for batch, transitions in zip(rollout.batches, rollout.transitions, strict=True):
        advantage = rollout.advantages[batch.group][list(batch.samples)]
        for old in transitions:
            velocity = policy.module(old.sample, sigmas[old.index], batch.prompt_index)
            mean, std = mean_std(policy.kernel, old.sample, velocity, sigmas, old.index)
            delta = sigmas[old.index + 1] - sigmas[old.index]
            losses = loss_by_hand(objective, old, mean, std, delta, advantage)
            total = total + weights[old.index] * losses[old.rows].sum()
            if kl is not None:
                frozen = policy._reference(old.sample, sigmas[old.index], batch.prompt_index)
                shift = mean - mean_std(policy.kernel, old.sample, frozen, sigmas, old.index)[0]
                scale = kl.beta / old.dims if kl.scale == "per_dim" else kl.beta
                total = total + scale * (shift.square().flatten(1).sum(1) / (2 * std**2))[old.rows].sum()
    parameters = trainable(policy)
    gradients = torch.autograd.grad(total / int(events.sum()), list(parameters.values()))
    return dict(zip(parameters, gradients, strict=True))


@pytest.mark.parametrize(("execution", "selection", "objective", "kernel"), GRID)
def test_execution_equals_autograd_of_the_formula(execution, selection, objective, kernel):
    policy = ToyPolicy(KERNELS[kernel])
    config = RolloutConfig(groups=3, group_size=4, micro_batch=2)
    rollout = roll(policy, Recompute(), selection=SELECTIONS[selection], objective=OBJECTIVES[objective], config=config)
    wanted = by_formula(policy, OBJECTIVES[objective], rollout)
    found = gradient_of(
        policy, execution, objective=OBJECTIVES[objective], config=config, selection=SELECTIONS[selection]
    )
    assert all(gradient.abs().max() > 0 for gradient in wanted.values())
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_published_cps_scale_equals_autograd_of_the_formula(execution):
    """Public CPS code leaves 1/(2S²) out of its log-prob: the ratio, and the gradient at ratio 1, are 2S² times the true one."""
    policy, objective = ToyPolicy(Cps(noise=0.6)), Grpo(scale="published_cps", clip_low=1e-5, clip_high=1e-5)
    wanted = by_formula(policy, objective, roll(policy, Recompute(), objective=objective))
    assert relative_error(gradient_of(policy, execution, objective=objective), wanted) < 1e-9
    assert relative_error(gradient_of(policy, execution), wanted) > 0.1


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("micro_batch", [1, 2])
@pytest.mark.parametrize("selection", [All(), Fraction(fraction=0.6), Single()], ids=lambda s: s.kind)
@pytest.mark.parametrize("objective", [Grpo(), GrpoGuard()], ids=lambda o: o.kind)
@pytest.mark.parametrize("kl", [Kl(beta=0.04), Kl(beta=0.7, scale="exact")], ids=lambda k: k.scale)
def test_kl_equals_autograd_of_the_formula(execution, micro_batch, selection, objective, kl):
    policy = ToyPolicy(Flow())
    move(policy, 0.1)
    config = RolloutConfig(groups=3, group_size=4, micro_batch=micro_batch)
    rollout = roll(policy, Recompute(), selection=selection, objective=objective, config=config)
    wanted = by_formula(policy, objective, rollout, kl)
    without = by_formula(policy, objective, rollout)
    found = gradient_of(policy, execution, objective=objective, kl=kl, config=config, selection=selection)
    assert relative_error(found, wanted) < 1e-9
    assert relative_error(without, wanted) > 1e-3  # β changes the gradient, in every execution


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_kl_is_continuous_at_zero_and_costs_one_reference_forward_an_event(execution):
    policy = ToyPolicy(Flow())
    move(policy, 0.1)
    without = gradient_of(policy, execution)
    rows = policy.forwards
    errors = [relative_error(gradient_of(policy, execution, kl=Kl(beta=beta)), without) for beta in (1e-2, 1e-3, 1e-4)]
    assert policy.forwards - rows == 3 * (rows + 12 * 4)
    assert errors == pytest.approx([errors[0], errors[0] / 10, errors[0] / 100], rel=1e-6)


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_micro_batch_size_cannot_change_the_gradient(execution):
    policy = ToyPolicy(Flow())
    one, four = (
        gradient_of(policy, execution, config=RolloutConfig(groups=3, group_size=4, micro_batch=b)) for b in (1, 4)
    )
    assert relative_error(one, four) < 1e-12


def test_retain_is_bitwise_recompute():
    policy = ToyPolicy(Flow())
    retain, recompute = gradient_of(policy, "retain"), gradient_of(policy, "recompute")
    assert all(torch.equal(retain[name], recompute[name]) for name in recompute)


@pytest.mark.parametrize(("execution", "extra"), [("retain", 0), ("reweight", 0), ("recompute", 1)])
@pytest.mark.parametrize("selection", [All(), Window(size=2), Single()])
def test_forwards_are_counted_exactly(execution, extra, selection):
    """T rows per trajectory; recompute adds one row per selected event."""
    policy, strategy = ToyPolicy(Flow()), EXECUTIONS[execution]()
    rollout = roll(policy, strategy, selection=selection)
    strategy.accumulate(policy, rollout, Coefficients(Grpo(), rollout))
    steps = len(policy.sigmas) - 1
    assert policy.forwards == 12 * steps + extra * rollout.event_count
    assert policy.calls == 6 * steps + extra * sum(len(batch.events) for batch in rollout.batches)


def test_bank_holds_at_most_two_gradients_per_trajectory():
    """However many events there are; with retain, what is kept grows with them."""
    policy, strategy = ToyPolicy(Flow(), steps=40), Reweight()
    rollout = roll(policy, strategy)
    for bank in rollout.kept:
        for account in bank._accounts.values():
            size = 2 * account.parameter.numel()
            assert account._waiting <= size
            assert account._sum_Boi.numel() == size
            assert not any(t.requires_grad for pair in account._pairs for t in pair)  # no graph outlives its backward
    assert len(rollout.kept) == len(rollout.batches)


def test_second_update_on_a_rollout_needs_recompute():
    """The hybrid: rollout graphs serve the first update only."""
    policy = ToyPolicy(Flow())
    for strategy in (Retain(), Reweight()):
        rollout = roll(policy, strategy)
        policy.version += 1
        with pytest.raises(ValueError, match=r"further updates on the same rollout need execution: recompute"):
            strategy.accumulate(policy, rollout, Coefficients(Grpo(), rollout))


@pytest.mark.parametrize(
    "objective",
    [
        Grpo(scale="exact", clip_low=0.05, clip_high=0.05),
        GrpoGuard(clip_low=0.002, clip_high=0.002),
        FlowDppo(scale="exact", threshold=0.0005),
        Grpo(scale="published_cps", clip_low=0.005, clip_high=0.005),
    ],
    ids=["grpo", "guard", "dppo", "published_cps"],
)
def test_second_update_equals_autograd_of_the_formula(objective):
    """Off the behaviour policy: ratios, clips and masks are active, and some events survive them."""
    kernel = Cps(noise=0.6) if objective.kind == "grpo" and objective.scale == "published_cps" else Flow()
    policy, strategy = ToyPolicy(kernel), Retain()
    rollout = roll(policy, strategy, objective=objective)
    move(policy)
    wanted = by_formula(policy, objective, rollout)
    coefficients = Coefficients(objective, rollout)
    Recompute().accumulate(policy, rollout, coefficients)
    assert relative_error({n: p.grad for n, p in trainable(policy).items()}, wanted) < 1e-9
    assert 0.05 < coefficients.statistics()["clip_fraction"] < 0.95


def test_hybrid_second_update_equals_native():
    """First update by retain, second by recompute: the same as two native updates, ratio and clip included."""
    objective = Grpo(scale="exact", clip_low=0.05, clip_high=0.05)

    def two_updates(first: str) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        policy, strategy = ToyPolicy(Flow()), EXECUTIONS[first]()
        optimizer = torch.optim.AdamW(policy.module.parameters(), lr=0.02)
        rollout = roll(policy, strategy, objective=objective)
        strategy.accumulate(policy, rollout, Coefficients(objective, rollout))
        optimizer.step()
        optimizer.zero_grad()
        policy.version += 1
        coefficients = Coefficients(objective, rollout)
        Recompute().accumulate(policy, rollout, coefficients)
        statistics = {n: v for n, v in coefficients.statistics().items() if not n.startswith("event")}
        return {n: p.grad for n, p in trainable(policy).items()}, statistics

    native, native_statistics = two_updates("recompute")
    for first in ("retain", "reweight"):
        found, statistics = two_updates(first)
        assert relative_error(found, native) < 1e-9
        assert statistics["ratio_mean"] != 1
        assert statistics == pytest.approx(native_statistics, rel=1e-9)
    assert native_statistics["clip_fraction"] > 0


def test_wide_clip_is_reinforce():
    """With one update per rollout the objective is the plain policy gradient, whatever the clip."""
    policy = ToyPolicy(Flow())
    wide, narrow = (gradient_of(policy, "retain", objective=Grpo(clip_low=c, clip_high=c)) for c in (1e6, 1e-6))
    assert relative_error(wide, narrow) == 0

    rollout = roll(policy, Recompute())
    total = 0
    for batch, transitions in zip(rollout.batches, rollout.transitions, strict=True):
        for old in transitions:
            total = total - (rollout.advantage(batch) * policy.score(batch, old).log_prob).sum() / old.dims
    reinforce = torch.autograd.grad(total / rollout.event_count, list(trainable(policy).values()))
    assert relative_error(dict(zip(trainable(policy), reinforce, strict=True)), wide) < 1e-12


def test_reweight_refuses_coefficients_that_vary_inside_a_trajectory():
    class Fading(Grpo):
        """A weight that only becomes known with the reward, different for each event."""

        def terms(self, log_ratio, advantage, divergence):
            self.calls.append(1)
            return super().terms(log_ratio, advantage, divergence) * len(self.calls)

        calls: list = []  # noqa: RUF012  pydantic copies defaults

    policy, strategy = ToyPolicy(Flow()), Reweight()
    rollout = roll(policy, strategy)
    with pytest.raises(ValueError, match=r"weighs the events of one trajectory differently .* Use execution: retain"):
        strategy.accumulate(policy, rollout, Coefficients(Fading(), rollout))


def test_reweight_refuses_parameters_it_cannot_tell_apart():
    class Shifted(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.shift = inner, torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))

        def forward(self, *args):
            return self.inner(*args) + self.shift

    policy = ToyPolicy(Flow())
    policy.module = Shifted(policy.module)
    with pytest.raises(ValueError, match=r"shift \(Shifted\)\. Use rollout\.micro_batch: 1, policy\.trainable: lora"):
        gradient_of(policy, "reweight")
    single = RolloutConfig(groups=3, group_size=4, micro_batch=1)
    assert (
        relative_error(gradient_of(policy, "reweight", config=single), gradient_of(policy, "recompute", config=single))
        < 1e-12
    )


def test_dead_group_contributes_nothing():
    policy, strategy = ToyPolicy(Flow()), Retain()
    rollout = roll(policy, strategy)
    assert (rollout.advantages[2] == 0).all()
    rollout.advantages = torch.zeros_like(rollout.advantages)
    strategy.accumulate(policy, rollout, Coefficients(Grpo(), rollout))
    assert all((p.grad == 0).all() for p in trainable(policy).values())
    fake_rewards(rollout, 3, 4)
