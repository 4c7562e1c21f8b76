"""log_prob and its change where a latent has millions of dimensions: right to a millionth, whatever is stored in float32."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onetake.core.coefficients import Coefficients
from onetake.core.objectives import Grpo, GrpoGuard
from onetake.core.records import MicroBatch, Rollout, Transition
from onetake.core.transitions import Cps, Flow, log_prob
from onetake.policies.episode import Episode
from test_transitions import normal, proved, shifted, two_trajectories

MANY = 2_000_000


def video_event(kernel, dtype: torch.dtype) -> tuple[MicroBatch, Transition, Transition, list[float], torch.Tensor]:
    """An event of two million dimensions as it was sampled, and again under a velocity that moved a little."""
    batch, sigmas = two_trajectories(10), shifted(10)
    x, v, shift = (normal(2, MANY, address=name, dtype=torch.float32) for name in ("x", "v", "shift"))
    x, v = x.to(dtype), v.to(dtype)
    moved = (v + 4e-3 * shift).to(dtype).requires_grad_()
    seen: list[Transition] = []
    Episode(batch=batch, kernel=kernel, observe=seen.append, grad=False).transition(5, x, v, sigmas)
    Episode(batch=batch, kernel=kernel, observe=seen.append, grad=True, replay=seen[0]).transition(5, x, moved, sigmas)
    return batch, *seen, sigmas, moved


def in_long_double(*tensors: torch.Tensor) -> list[np.ndarray]:
    return [tensor.detach().double().numpy().astype(np.longdouble) for tensor in tensors]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernel", [Flow(), Cps()], ids=["flow", "cps"])
def test_log_probs_of_two_million_dimensions_move_by_the_right_nats(kernel, dtype):
    """Against 64-bit mantissas of what the model saw, answered and drew: ratio, gradient, KL, and what GRPO-Guard scores."""
    _, old, new, sigmas, moved = video_event(kernel, dtype)
    a, b, std = kernel.affine(sigmas, 5)
    x, v, w, action = in_long_double(old.sample, old.velocity, moved, old.action)
    was, now = (action - (a * x + b * v)) / std, (action - (a * x + b * w)) / std
    wanted = torch.from_numpy((-(now**2 - was**2) / 2).sum(1).astype(np.float64))
    torch.testing.assert_close(new.log_prob.detach() - old.log_prob, wanted, rtol=1e-6, atol=1e-7)
    assert 0.5 < wanted.abs().max() < 5
    if dtype == torch.float32:
        kl = torch.from_numpy(((b * (w - v) / std) ** 2 / 2).sum(1).astype(np.float64))
        torch.testing.assert_close(new.kl(old.mean).detach(), kl, rtol=1e-6, atol=0)
        guard = GrpoGuard().log_prob(new, old) - GrpoGuard().log_prob(old, old)
        torch.testing.assert_close(guard.detach(), wanted + kl, rtol=1e-6, atol=1e-6)
    (found,) = torch.autograd.grad(new.log_prob.sum(), moved)
    gradient = torch.from_numpy((now * b / std).astype(np.float64))
    torch.testing.assert_close(found.double(), gradient, rtol=float(torch.finfo(dtype).eps), atol=1e-9)


def test_the_exact_ratio_of_two_million_dimensions():
    """ω under ``scale: exact`` is −A·r/n of a ratio that float32 sums would miss by a tenth."""
    batch, old, new, _, _ = video_event(Flow(noise=0.9), torch.float32)
    rollout = Rollout(batches=[batch], transitions=[[old]], outputs=[], kept=[], trained=[], version=0, dealt=[batch])
    rollout.advantages = torch.tensor([[1.0, -1.0]], dtype=torch.float64)
    coefficients = Coefficients(Grpo(scale="exact", clip_low=1e9, clip_high=1e9), rollout)
    omega = coefficients.omega(batch, old, new.detached())
    ratio = (new.log_prob.detach() - old.log_prob).exp()
    torch.testing.assert_close(
        omega, torch.tensor([-1.0, 1.0]).double() * ratio / rollout.event_count, rtol=1e-12, atol=0
    )
    assert torch.equal(coefficients.omega(batch, old, old) * rollout.event_count, torch.tensor([-1.0, 1.0]).double())


@proved
@given(st.lists(st.floats(-4, 4, width=32), min_size=1, max_size=30), st.floats(0.05, 2))
def test_log_prob_against_fractions(values, std):
    """Each term by exact rational arithmetic."""
    action = torch.tensor([values], dtype=torch.float32)
    mean = action.flip(1) / 3
    exact = sum(
        (
            ((Fraction(x) - Fraction(m)) / Fraction(std)) ** 2
            for x, m in zip(action[0].tolist(), mean[0].tolist(), strict=True)
        ),
        start=Fraction(0),
    )
    constant = len(values) * (math.log(std) + 0.5 * math.log(2 * math.pi))
    assert float(log_prob(action, mean, std)) == pytest.approx(float(-exact / 2) - constant, rel=1e-12, abs=1e-12)
