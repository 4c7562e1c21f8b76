"""Flow-matching transitions: each kernel is one affine Gaussian step; sampling and density derive from it here.

Conventions: x_σ = (1−σ)x₀ + σε, v = ε − x₀, sigmas fall from σ_0 ≤ 1 to σ_T = 0, Δ = σ_{k+1} − σ_k < 0. Every kernel's
mean is linear in the sample and the velocity, so a kernel states three numbers: mean = a·x + b·v, and std, where std is
the transition's total standard deviation (√(−Δ) included). Sampling is float32 whatever the model's dtype, densities float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from onetake.core.records import NAMED, Config


class Affine(NamedTuple):
    """mean = x·sample + v·velocity, with standard deviation std."""

    x: float
    v: float
    std: float


def _euler_maruyama(sigma: float, sigma_next: float, g: float) -> Affine:
    """μ = x + vΔ + g²/(2σ)·x̂₁·Δ with the noise guess x̂₁ = x + (1−σ)v; S = g√(−Δ)."""
    delta = sigma_next - sigma
    drift = g * g / (2 * sigma) * delta
    return Affine(1 + drift, delta + drift * (1 - sigma), g * math.sqrt(-delta))


class Flow(Config):
    """Flow-GRPO (arXiv 2505.05470): g = a·√(σ/(1−σ)); at σ = 1 the denominator takes σ_1, as its public code does."""

    kind: Literal["flow"] = "flow"
    noise: float = Field(default=0.7, gt=0)

    def affine(self, sigmas: Sequence[float], k: int) -> Affine:
        sigma = sigmas[k]
        g = self.noise * math.sqrt(sigma / (1 - (sigmas[1] if sigma >= 1 else sigma)))
        return _euler_maruyama(sigma, sigmas[k + 1], g)


class Dance(Config):
    """DanceGRPO (arXiv 2505.07818): constant g = η."""

    kind: Literal["dance"] = "dance"
    noise: float = Field(default=0.3, gt=0)

    def affine(self, sigmas: Sequence[float], k: int) -> Affine:
        return _euler_maruyama(sigmas[k], sigmas[k + 1], self.noise)


class Flash(Config):
    """Flash-GRPO (arXiv 2605.15980): g = σ_min + (σ_max − σ_min)σ with σ_max = σ_1 and σ_min = σ_T, as its code does."""

    kind: Literal["flash"] = "flash"

    def affine(self, sigmas: Sequence[float], k: int) -> Affine:
        low, high = sigmas[-1], sigmas[1]
        return _euler_maruyama(sigmas[k], sigmas[k + 1], low + (high - low) * sigmas[k])


class Cps(Config):
    """Coefficients-preserving sampling (arXiv 2509.05952): μ = (1−σ')x̂₀ + √(σ'²−S²)·x̂₁, S = σ'·sin(aπ/2)."""

    kind: Literal["cps"] = "cps"
    noise: float = Field(default=0.8, gt=0, le=1)

    def affine(self, sigmas: Sequence[float], k: int) -> Affine:
        sigma, sigma_next = sigmas[k], sigmas[k + 1]
        std = sigma_next * math.sin(self.noise * math.pi / 2)
        kept = math.sqrt(max(sigma_next**2 - std**2, 0.0))
        return Affine(1 - sigma_next + kept, kept * (1 - sigma) - (1 - sigma_next) * sigma, std)


class Ode(Config):
    """The deterministic Euler step x' = x + vΔ. It has no density: `log_prob` refuses it."""

    kind: Literal["ode"] = "ode"

    def affine(self, sigmas: Sequence[float], k: int) -> Affine:
        return Affine(1.0, sigmas[k + 1] - sigmas[k], 0.0)


Kernel = Flow | Dance | Flash | Cps | Ode
StochasticKernel = Annotated[Flow | Dance | Flash | Cps, Field(discriminator="kind"), NAMED]


def mean_std(kernel: Kernel, x: Tensor, v: Tensor, sigmas: Sequence[float], k: int) -> tuple[Tensor, float]:
    """Mean (B, ...) in float32 or wider, and standard deviation, of transition k from sample `x` with velocity `v`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    a, b, std = kernel.affine(sigmas, k)
    return a * x.to(wide) + b * v.to(wide), std


def log_prob(action: Tensor, mean: Tensor, std: float) -> Tensor:
    """(B,) float64 log-density in nats, summed over dims: Σ [−(x'−μ)²/(2S²) − ln S − ½ ln 2π].

    The sum of 10⁶ dimensions is some 10⁶ nats, of which a float32 holds no more than a tenth of a nat; what counts is its
    change, a few nats. So every term is float64, and a `mean` that was rounded to float32 is off by 10⁻⁴ nats there.

    Raises ValueError for a deterministic transition, whose density does not exist (it is not zero).
    """
    if std <= 0:
        raise ValueError(
            "a deterministic transition (std 0) has no log_prob: select it as an ODE step, not as an event"
        )
    scaled = (action.double() - mean.double()) / std
    constant = action[0].numel() * (math.log(std) + 0.5 * math.log(2 * math.pi))
    return -0.5 * scaled.square().flatten(1).sum(1) - constant


def gain(kernel: Kernel, sigmas: Sequence[float], k: int) -> float:
    """λ_k with ∇ℓ_k = λ_k · ε · ∇v (Flash-GRPO's temporal gain): |∂mean/∂v| / std, from any affine kernel.

    For the Euler–Maruyama family it equals √(−Δ)/g + g√(−Δ)(1−σ)/(2σ).
    """
    _, b, std = kernel.affine(sigmas, k)
    if std <= 0:
        raise ValueError(f"event {k} is deterministic under kernel {kernel.kind!r}: its gain is not defined")
    return abs(b) / std
