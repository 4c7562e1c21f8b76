"""Transitions: densities against torch.distributions, limits, the published numbers, and the gain as it is measured."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch.distributions import Normal

from onetake.core.noise import generator, transition_noise
from onetake.core.records import Address, MicroBatch, Prompt, Transition
from onetake.core.transitions import Cps, Dance, Flash, Flow, Ode, gain, log_prob, mean_std
from onetake.policies import trainable
from onetake.policies.episode import Episode
from onetake.policies.toy import ToyPolicy

STOCHASTIC = {"flow": Flow(), "dance": Dance(), "flash": Flash(), "cps": Cps()}
EULER_MARUYAMA = {name: kernel for name, kernel in STOCHASTIC.items() if name != "cps"}

proved = settings(derandomize=True, deadline=None, max_examples=60)


def shifted(steps: int, *, shift: float = 3.0, top: float = 1.0) -> list[float]:
    """σ = shift·s/(1 + (shift−1)s) on a linear s from `top` to 0, as SD3 and Wan sample."""
    levels = [top * (1 - k / steps) for k in range(steps + 1)]
    return [shift * s / (1 + (shift - 1) * s) for s in levels]


def normal(*shape: int, address: str = "x", dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=generator("transitions", address), dtype=torch.float64).to(dtype)


def diffusion_coefficient(kernel, sigmas: list[float], k: int) -> float:
    """g(σ) of each method, written out from its paper once more."""
    sigma = sigmas[k]
    if kernel.kind == "flow":
        return kernel.noise * math.sqrt(sigma / (1 - (sigmas[1] if sigma == 1 else sigma)))
    return kernel.noise if kernel.kind == "dance" else sigmas[-1] + (sigmas[1] - sigmas[-1]) * sigma


@st.composite
def schedules(draw) -> tuple[list[float], int]:
    """A falling schedule to 0, and an event that is not its last."""
    steps = draw(st.integers(2, 40))
    sigmas = shifted(steps, shift=draw(st.floats(0.5, 12)), top=draw(st.floats(0.5, 1)))
    return sigmas, draw(st.integers(0, steps - 2))


# Density


@pytest.mark.parametrize("kernel", STOCHASTIC.values(), ids=STOCHASTIC)
@pytest.mark.parametrize("k", [0, 3, 8])
def test_log_prob_is_the_normal_density_and_so_is_its_gradient(kernel, k):
    """Value and derivatives by action, sample and velocity, in float64."""
    sigmas = shifted(10)

    def leaves() -> list[torch.Tensor]:
        return [normal(3, 2, 5, address=name).requires_grad_() for name in ("sample", "velocity", "action")]

    found, wanted = leaves(), leaves()
    mean, std = mean_std(kernel, found[0], found[1], sigmas, k)
    ours = log_prob(found[2], mean, std)
    assert ours.shape == (3,)
    mean, std = mean_std(kernel, wanted[0], wanted[1], sigmas, k)
    theirs = Normal(mean, std).log_prob(wanted[2]).sum((1, 2))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    ours.sum().backward()
    theirs.sum().backward()
    for one, other in zip(found, wanted, strict=True):
        assert other.grad.abs().min() > 0
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-12)


@proved
@given(std=st.floats(1e-3, 1e3), mean=st.floats(-10, 10), action=st.floats(-10, 10))
def test_log_prob_for_any_std(std, mean, action):
    mean, action = (torch.tensor([[value]], dtype=torch.float64) for value in (mean, action))
    torch.testing.assert_close(
        log_prob(action, mean, std), Normal(mean, std).log_prob(action)[:, 0], rtol=1e-12, atol=1e-12
    )


def test_a_deterministic_step_has_no_log_prob():
    x, v = normal(2, 3), normal(2, 3, address="v")
    for kernel, k in ((Ode(), 0), (Cps(), 9)):  # the last step of cps has std 0
        mean, std = mean_std(kernel, x, v, shifted(10), k)
        with pytest.raises(
            ValueError, match=r"a deterministic transition \(std 0\) has no log_prob: select it as an ODE"
        ):
            log_prob(x, mean, std)
        with pytest.raises(ValueError, match=rf"event {k} is deterministic under kernel '{kernel.kind}'"):
            gain(kernel, shifted(10), k)


def test_noise_zero_is_refused_by_every_kernel():
    """Its density would not exist; ODE steps are a matter of the selection."""
    for kind in (Flow, Dance, Cps):
        with pytest.raises(ValidationError, match="greater than 0"):
            kind(noise=0.0)


# Kernels


@pytest.mark.parametrize("kind", [Flow, Dance, Cps])
@proved
@given(at=schedules())
def test_without_noise_every_kernel_is_the_euler_step(kind, at):
    sigmas, k = at
    a, b, std = kind(noise=1e-9).affine(sigmas, k)
    euler = Ode().affine(sigmas, k)
    assert euler == (1.0, sigmas[k + 1] - sigmas[k], 0.0)
    assert (a, b) == pytest.approx(euler[:2], rel=1e-12, abs=1e-12)
    assert std < 1e-6


def test_without_noise_flash_is_the_euler_step():
    """Its g has no factor of its own: it vanishes with σ_1 → σ_T = 0."""
    sigmas = [1.0, 1e-9, 0.0]
    a, b, std = Flash().affine(sigmas, 0)
    assert (a, b) == pytest.approx((1.0, 1e-9 - 1.0), rel=1e-12)
    assert std == pytest.approx(1e-9)


@pytest.mark.parametrize("kernel", EULER_MARUYAMA.values(), ids=EULER_MARUYAMA)
@proved
@given(at=schedules())
def test_euler_maruyama_family(kernel, at):
    """μ = x + vΔ + g²/(2σ)·x̂₁·Δ and S = g√(−Δ)."""
    sigmas, k = at
    sigma, delta, g = sigmas[k], sigmas[k + 1] - sigmas[k], diffusion_coefficient(kernel, sigmas, k)
    x, v = normal(2, 4), normal(2, 4, address="v")
    mean, std = mean_std(kernel, x, v, sigmas, k)
    torch.testing.assert_close(mean, x + v * delta + g**2 / (2 * sigma) * (x + (1 - sigma) * v) * delta)
    assert std == pytest.approx(g * math.sqrt(-delta), rel=1e-12)


@proved
@given(at=schedules(), eta=st.floats(0.05, 1.5))
def test_dance_as_its_paper_writes_it(at, eta):
    """Drift v + η²(x − (1−σ)x̂₀)/(2σ²), the score written with the clean guess x̂₀ = x − σv."""
    sigmas, k = at
    sigma, delta = sigmas[k], sigmas[k + 1] - sigmas[k]
    x, v = normal(2, 4), normal(2, 4, address="v")
    drift = v + eta**2 * (x - (1 - sigma) * (x - sigma * v)) / (2 * sigma**2)
    torch.testing.assert_close(
        mean_std(Dance(noise=eta), x, v, sigmas, k)[0], x + drift * delta, rtol=1e-10, atol=1e-10
    )


@proved
@given(at=schedules(), noise=st.floats(0.01, 1))
def test_cps_keeps_the_coefficients(at, noise):
    """μ = (1−σ')x̂₀ + √(σ'²−S²)·x̂₁, S = σ' sin(aπ/2): signal and total noise are those of level σ'."""
    sigmas, k = at
    sigma, sigma_next = sigmas[k], sigmas[k + 1]
    x0, x1 = normal(2, 4), normal(2, 4, address="v")
    x, v = (1 - sigma) * x0 + sigma * x1, x1 - x0
    mean, std = mean_std(Cps(noise=noise), x, v, sigmas, k)
    assert std == pytest.approx(sigma_next * math.sin(noise * math.pi / 2), rel=1e-12)
    kept = math.sqrt(sigma_next**2 - std**2)
    assert kept**2 + std**2 == pytest.approx(sigma_next**2, rel=1e-12)
    torch.testing.assert_close(mean, (1 - sigma_next) * x0 + kept * x1, rtol=1e-9, atol=1e-9)


def test_published_std_of_flow():
    """T = 10, σ = 3s/(1+2s), a = 0.7; the first takes σ_1 in the denominator."""
    sigmas = shifted(10)
    found = [Flow(noise=0.7).affine(sigmas, k).std for k in range(9)]
    assert [round(std, 2) for std in found] == [0.70, 0.74, 0.53, 0.44, 0.39, 0.35, 0.32, 0.29, 0.26]


# Precision


@pytest.mark.parametrize("kernel", STOCHASTIC.values(), ids=STOCHASTIC)
def test_arithmetic_is_float32_for_bfloat16(kernel):
    sigmas = shifted(10)
    x, v, action = (normal(2, 3, 8, address=name, dtype=torch.bfloat16) for name in "xva")
    mean, std = mean_std(kernel, x, v, sigmas, 4)
    assert mean.dtype == torch.float32
    assert torch.equal(mean, mean_std(kernel, x.float(), v.float(), sigmas, 4)[0])
    assert not torch.equal(mean, mean.bfloat16().float())
    scored = log_prob(action, mean, std)
    assert scored.dtype == torch.float64
    assert torch.equal(scored, log_prob(action.float(), mean, std))
    assert mean_std(kernel, x.double(), v.double(), sigmas, 4)[0].dtype == torch.float64


def two_trajectories(steps: int) -> MicroBatch:
    stochastic = torch.ones(2, steps, dtype=torch.bool)
    stochastic[:, -1] = False
    return MicroBatch(
        address=Address(seed=0, stream="train", update=0),
        group=0,
        prompt_index=0,
        prompt=Prompt(""),
        samples=(0, 1),
        stochastic=stochastic,
        weight=torch.ones(steps, dtype=torch.float64),
    )


def bf16_event(kernel, k: int = 5) -> tuple[MicroBatch, Transition, list[float]]:
    """One event of a bfloat16 latent of 65,536 dimensions."""
    batch, sigmas = two_trajectories(10), shifted(10)
    seen: list[Transition] = []
    x, v = (normal(2, 16, 64, 64, address=name, dtype=torch.bfloat16) for name in "xv")
    returned = Episode(batch=batch, kernel=kernel, observe=seen.append, grad=False).transition(k, x, v, sigmas)
    assert returned is seen[0].action
    return batch, seen[0], sigmas


@pytest.mark.parametrize("kernel", STOCHASTIC.values(), ids=STOCHASTIC)
def test_the_ratio_of_a_stored_bfloat16_action_is_one(kernel):
    batch, old, sigmas = bf16_event(kernel)
    again: list[Transition] = []
    replay = Episode(batch=batch, kernel=kernel, observe=again.append, grad=True, replay=old)
    replay.transition(old.index, old.sample, old.velocity, sigmas)
    assert old.action.dtype == torch.bfloat16
    assert torch.equal(again[0].log_prob, old.log_prob)


@pytest.mark.parametrize("kernel", [Flow(), Cps()], ids=["flow", "cps"])
def test_scoring_before_rounding_would_move_the_ratio(kernel):
    """ℓ/D of the drawn action and of the stored one differ by what published clips (1e-5, 1e-4) allow."""
    batch, old, sigmas = bf16_event(kernel)
    mean, std = mean_std(kernel, old.sample, old.velocity, sigmas, old.index)
    drawn = mean + std * transition_noise(batch, old.index, mean)
    assert torch.equal(drawn.bfloat16(), old.action)
    moved = (log_prob(old.action, mean, std) - log_prob(drawn, mean, std)).abs() / old.dims
    assert 1e-6 < moved.min()
    assert moved.max() < 1e-4


# Gain


WAN_INVERSE_GAIN = [7.4770, 7.0414, 6.6112, 6.1867, 5.7682, 5.3559, 4.9502, 4.5513, 4.1596, 3.7754]
WAN_TIMESTEPS = [999, 982, 963, 944, 922, 899, 874, 847, 817, 785]


def test_published_gain_table_of_flash():
    """1/λ of Wan's 20 steps, events 0..9: right in all four published decimals (half a unit is 5e-5)."""
    sigmas = shifted(20, top=0.999)
    assert [int(1000 * sigma) for sigma in sigmas[:10]] == WAN_TIMESTEPS
    found = [1 / gain(Flash(), sigmas, k) for k in range(10)]
    assert found == pytest.approx(WAN_INVERSE_GAIN, abs=5e-5, rel=0)


@pytest.mark.parametrize("kernel", EULER_MARUYAMA.values(), ids=EULER_MARUYAMA)
@proved
@given(at=schedules())
def test_gain_in_closed_form(kernel, at):
    """λ = √(−Δ)/g + g√(−Δ)(1−σ)/(2σ)."""
    sigmas, k = at
    root, g = math.sqrt(sigmas[k] - sigmas[k + 1]), diffusion_coefficient(kernel, sigmas, k)
    closed = root / g + g * root * (1 - sigmas[k]) / (2 * sigmas[k])
    assert gain(kernel, sigmas, k) == pytest.approx(closed, rel=1e-10)


@pytest.mark.parametrize("kernel", STOCHASTIC.values(), ids=STOCHASTIC)
@proved
@given(at=schedules())
def test_gain_is_the_gradient_gain(kernel, at):
    """‖∇_v ℓ‖ = λ‖ε‖, measured by autograd for every trajectory."""
    sigmas, k = at
    x, v, noise = (normal(3, 50, address=name) for name in ("x", "v", "noise"))
    v.requires_grad_()
    mean, std = mean_std(kernel, x, v, sigmas, k)
    log_prob((mean + std * noise).detach(), mean, std).sum().backward()
    measured = v.grad.norm(dim=1) / noise.norm(dim=1)
    torch.testing.assert_close(
        measured, torch.full((3,), gain(kernel, sigmas, k), dtype=torch.float64), rtol=1e-8, atol=0
    )


@pytest.mark.parametrize("kernel", STOCHASTIC.values(), ids=STOCHASTIC)
@pytest.mark.parametrize("k", [0, 2, 3])
def test_gain_of_a_policy(kernel, k):
    """∇_θ ℓ_k = −λ_k · ε·∇_θ v on the toy policy's own transitions (b < 0, hence the sign)."""
    policy, seen = ToyPolicy(kernel), []
    policy.rollout(two_trajectories(5), seen.append, grad=True)
    assert len(seen) == 4
    event = seen[k]
    parameters = list(trainable(policy).values())
    found = torch.autograd.grad(event.log_prob.sum(), parameters)
    mean, std = mean_std(kernel, event.sample, event.velocity, policy.sigmas, k)
    velocity = policy.module(event.sample, policy.sigmas[k], 0)
    rescaled = -gain(kernel, policy.sigmas, k) * (event.action - mean) / std
    wanted = torch.autograd.grad(velocity, parameters, rescaled)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
