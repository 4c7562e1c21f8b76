"""Limits in which methods become each other, and the temporal gain as it is measured on a policy."""

from __future__ import annotations

import math

import pytest
import torch

from helpers import gradient_of, relative_error, roll
from onetake.core.noise import generator
from onetake.core.objectives import FlowDppo, Grpo, GrpoGuard
from onetake.core.selection import All, Fraction, Single, Window
from onetake.core.transitions import Cps, Dance, Flash, Flow, gain, mean_std
from onetake.execution import EXECUTIONS, Recompute
from onetake.policies.toy import ToyPolicy
from onetake.rollout.sampling import RolloutConfig
from onetake.run import config

KERNELS = {"flow": Flow(), "dance": Dance(), "flash": Flash(), "cps": Cps(noise=0.5)}


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("selection", [Window(size=4), Fraction(fraction=1.0)], ids=lambda s: s.kind)
def test_a_window_over_all_events_is_flow_grpo(execution, selection):
    policy = ToyPolicy(Flow())  # five steps, four events
    found, wanted = (gradient_of(policy, execution, selection=s) for s in (selection, All()))
    assert relative_error(found, wanted) == 0


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("update", range(4))
def test_one_event_of_single_is_a_window_of_size_one(execution, update):
    """With one group both choose one event for everybody."""
    policy, config_ = ToyPolicy(Flow(), steps=9), RolloutConfig(groups=1, group_size=4, micro_batch=2)
    (event,) = roll(policy, Recompute(), selection=Single(), config=config_, update=update).batches[0].events
    window = Window(size=1, start=event, place="fixed")
    found, wanted = (
        gradient_of(policy, execution, selection=s, config=config_, update=update) for s in (Single(), window)
    )
    assert relative_error(found, wanted) == 0


def test_naive_single_draws_for_each_sample():
    """Flash-GRPO's point of comparison: a group's samples differ by their event as well."""
    policy, size = ToyPolicy(Flow(), steps=16), RolloutConfig(groups=2, group_size=8, micro_batch=8)
    naive, shared = (roll(policy, Recompute(), selection=Single(per=per), config=size) for per in ("sample", "group"))
    for rollout, events in ((naive, 8), (shared, 1)):
        masks = [batch.stochastic for batch in rollout.batches]
        assert all((mask.sum(1) == 1).all() for mask in masks)
        assert sum(mask.any(0).sum() for mask in masks) >= events
    counts = torch.cat([batch.stochastic for batch in naive.batches]).sum(0)
    assert counts.tolist() == [2] * 8 + [0] * 8  # stratified over all samples of the update


def test_guard_at_ratio_one_is_the_plain_gradient_with_its_documented_weights():
    """S/(−Δ) for each event; with one event, the plain direction."""
    policy, window = ToyPolicy(Flow()), Window(size=1, start=1, place="fixed")
    guard, plain = (gradient_of(policy, "retain", selection=window, objective=o) for o in (GrpoGuard(), Grpo()))
    scale = policy.kernel.affine(policy.sigmas, 1).std / (policy.sigmas[1] - policy.sigmas[2])
    assert relative_error({name: g / scale for name, g in guard.items()}, plain) < 1e-12


def test_dppo_with_a_wide_mask_is_reinforce():
    policy = ToyPolicy(Flow())
    found, wanted = (gradient_of(policy, "retain", objective=o) for o in (FlowDppo(threshold=1e6), Grpo()))
    assert relative_error(found, wanted) == 0


def test_published_cps_scale_is_refused_elsewhere():
    with pytest.raises(ValueError, match=r"objective.scale: published_cps is what public code does .* per_dim"):
        config.load("objective: {scale: published_cps}")
    assert config.load("objective: {scale: published_cps}\npolicy: {kernel: cps}").objective.scale == "published_cps"


# The temporal gain λ


def score_gradients(policy: ToyPolicy, k: int, count: int) -> tuple[float, float]:
    """Root mean squares over `count` draws at event k of ‖∇ℓ‖ and of ‖∇v‖_F, over all parameters."""
    parameters = list(policy.module.parameters())
    random = generator("states", k)
    x = torch.randn(1, policy.dims, generator=random, dtype=torch.float64)
    velocity = policy.module(x, policy.sigmas[k], 0)
    mean, std = mean_std(policy.kernel, x, velocity, policy.sigmas, k)
    rows = [torch.autograd.grad(velocity[0, d], parameters, retain_graph=True) for d in range(policy.dims)]
    jacobian = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
    squares = []
    for _ in range(count):
        action = mean.detach() + std * torch.randn(mean.shape, generator=random, dtype=torch.float64)
        log_prob = -((action - mean) ** 2).sum() / (2 * std**2)
        gradient = torch.autograd.grad(log_prob, parameters, retain_graph=True)
        squares.append(sum(float(g.square().sum()) for g in gradient))
    return math.sqrt(sum(squares) / count), float(jacobian.norm())


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_gradient_norm_follows_lambda_and_rectification_makes_it_flat(kernel):
    """E‖∇ℓ_k‖² = λ_k²·‖∇v‖², within 2 %; weighted by 1/λ it is the same at every event."""
    policy = ToyPolicy(KERNELS[kernel], dims=24, steps=6, width=24)
    events = torch.ones(1, 6, dtype=torch.bool)
    events[0, -1] = False
    weights = Grpo(event_weights="rectified").weights(policy.kernel, policy.sigmas, events)
    measured, rectified = [], []
    for k in range(5):
        score, velocity = score_gradients(policy, k, 1500)
        measured.append(score / velocity / gain(policy.kernel, policy.sigmas, k))
        rectified.append(float(weights[k]) * score / velocity)
    assert measured == pytest.approx([1.0] * 5, rel=0.02)
    assert max(rectified) / min(rectified) < 1.03
    plain = [gain(policy.kernel, policy.sigmas, k) for k in range(5)]
    assert max(plain) / min(plain) > 1.08  # what was to be made flat
