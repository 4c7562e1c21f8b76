"""Objectives: what one event's loss is, given its log-prob and advantage. `coefficients` turns them into ω = ∂L/∂ℓ.

An objective says what is scored (`log_prob`), how its change becomes a log-ratio (`log_ratio_scale`), and what one event's
loss is (`terms`). On the first update of a rollout every ratio is 1, and all of them are the policy gradient with known
event weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, cast

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor

from onetake.core.records import NAMED, Config, Transition
from onetake.core.transitions import Kernel, gain

EventWeights = Literal["uniform", "rectified", "noise_aware"]
"""Known factor of each event, normalised to mean 1 over the update's events. ``rectified`` divides by the temporal gain λ
(Flash-GRPO); ``noise_aware`` multiplies by the transition's std (TempFlow-GRPO, arXiv 2508.04324)."""


class _LikelihoodRatio(Config):
    """What objectives on r = exp(s·(ℓ − ℓ_old)) share. Its methods and those of `Grpo` are what every objective has.

    ``scale: per_dim`` is s = 1/D, as in all public diffusion code, so that published limits keep their meaning.
    ``scale: exact`` is s = 1, the true likelihood ratio. ``scale: published_cps`` is s = 2S²/D: public code for the kernel
    `cps` leaves 1/(2S²) out of the log-prob, which also weighs the events by 2S².
    """

    scale: Literal["per_dim", "exact", "published_cps"] = "per_dim"
    event_weights: EventWeights = "uniform"

    def problem(self, kernel: Kernel) -> str | None:
        """Why it cannot be used with `kernel`, or None."""
        if self.scale == "published_cps" and kernel.kind != "cps":
            return (
                f"objective.scale: published_cps is what public code does under policy.kernel: cps, but the kernel is "
                f"{kernel.kind}; use objective.scale: per_dim"
            )
        return None

    def weights(self, kernel: Kernel, sigmas: Sequence[float], events: Tensor) -> Tensor:
        """(T,) float64 factor of ∇ℓ at ratio 1, up to a constant; `events` (..., T) bool: what the whole update trains."""
        weights = _event_weights(self.event_weights, kernel, sigmas, events)
        if self.scale != "published_cps":
            return weights
        return weights * torch.tensor(
            [2 * kernel.affine(sigmas, k).std ** 2 for k in range(len(weights))], dtype=torch.float64
        )

    def log_prob(self, new: Transition, old: Transition) -> Tensor:
        """(B,) the scored quantity, with the graph of `new`; where the policy is unchanged its gradient is ∇ℓ."""
        return new.log_prob

    def log_ratio_scale(self, old: Transition) -> float:
        """s in r = exp(s·(log_prob − old log_prob))."""
        if self.scale == "published_cps":
            return 2 * old.std**2 / old.dims
        return 1 / old.dims if self.scale == "per_dim" else 1.0

    def loss_weight(self, weight: float, old: Transition) -> float:
        """Factor of the event's loss that makes ω = −A·constant·weight at ratio 1."""
        return weight / (2 * old.std**2) if self.scale == "published_cps" else weight


class Grpo(_LikelihoodRatio):
    """Clipped GRPO: max(−A·r, −A·clip(r, 1−ε_low, 1+ε_high))."""

    kind: Literal["grpo"] = "grpo"
    clip_low: float = Field(default=1e-4, gt=0)
    clip_high: float = Field(default=1e-4, gt=0)

    def limit(self, dims: int) -> str:
        """One line: where the trust region ends, in nats of an event with `dims` dimensions."""
        nats = self.clip_high * (1 if self.scale == "exact" else dims)
        if self.scale == "published_cps":
            return f"clip {self.clip_high:g} (2S²/D, D = {dims:,}): reached when its log_prob moves by {nats:.3g}/(2S²) nats"
        return f"clip {self.clip_high:g} ({self.scale}, D = {dims:,}): reached when an event's log_prob moves by {nats:.3g} nats"

    def terms(self, log_ratio: Tensor, advantage: Tensor, divergence: Tensor) -> Tensor:
        """Loss of each event, elementwise; `divergence` is KL(old ‖ new) per dimension, in nats, without graph."""
        return _clip(log_ratio, advantage, self.clip_low, self.clip_high)

    def removed(self, log_ratio: Tensor, advantage: Tensor, divergence: Tensor) -> Tensor:
        """Events whose gradient `terms` takes away."""
        return _clipped(log_ratio, advantage, self.clip_low, self.clip_high)


class GrpoGuard(Config):
    """GRPO-Guard (arXiv 2510.22319): the ratio's drift is taken out and its spread made equal over events.

    r = exp(S/D·(ℓ − ℓ_old + ‖μ − μ_old‖²/(2S²))) and the loss is divided by −Δ, as in the public code; so at ratio 1 it
    is the policy gradient with event weights S/(−Δ) (times 1/D), which is what "per-step balance" amounts to there.
    """

    kind: Literal["grpo-guard"] = "grpo-guard"
    clip_low: float = Field(default=2e-6, gt=0)
    clip_high: float = Field(default=2e-6, gt=0)
    event_weights: EventWeights = "uniform"

    def problem(self, kernel: Kernel) -> str | None:
        return None

    def limit(self, dims: int) -> str:
        nats = self.clip_high * dims
        return f"clip {self.clip_high:g} (S/D, D = {dims:,}): reached when its re-centred log_prob moves by {nats:.3g}/S nats"

    def weights(self, kernel: Kernel, sigmas: Sequence[float], events: Tensor) -> Tensor:
        steps = range(events.shape[-1])
        balance = [kernel.affine(sigmas, k).std / (sigmas[k] - sigmas[k + 1]) for k in steps]
        return _event_weights(self.event_weights, kernel, sigmas, events) * torch.tensor(balance, dtype=torch.float64)

    def log_prob(self, new: Transition, old: Transition) -> Tensor:
        return new.log_prob + new.kl(old.mean)

    def log_ratio_scale(self, old: Transition) -> float:
        return old.std / old.dims

    def loss_weight(self, weight: float, old: Transition) -> float:
        return weight / old.std

    def terms(self, log_ratio: Tensor, advantage: Tensor, divergence: Tensor) -> Tensor:
        return _clip(log_ratio, advantage, self.clip_low, self.clip_high)

    def removed(self, log_ratio: Tensor, advantage: Tensor, divergence: Tensor) -> Tensor:
        return _clipped(log_ratio, advantage, self.clip_low, self.clip_high)


class FlowDppo(_LikelihoodRatio):
    """Flow-DPPO (arXiv 2606.11025): no clip; an event is masked when its divergence exceeds `threshold` and it moves on.

    Divergence is KL(old ‖ new) = ‖μ − μ_old‖²/(2S²) per dimension; moving on is A > 0 with r > 1, or A < 0 with r < 1.
    """

    kind: Literal["flow-dppo"] = "flow-dppo"
    threshold: float = Field(default=1e-5, gt=0)

    def limit(self, dims: int) -> str:
        nats = self.threshold * dims
        return (
            f"mask {self.threshold:g} (D = {dims:,}): an event that moves on is masked beyond a KL of {nats:.3g} nats"
        )

    def terms(self, log_ratio: Tensor, advantage: Tensor, divergence: Tensor) -> Tensor:
        return torch.where(self.removed(log_ratio, advantage, divergence), 0, -advantage * log_ratio.exp())

    def removed(self, log_ratio: Tensor, advantage: Tensor, divergence: Tensor) -> Tensor:
        return (advantage * log_ratio > 0) & (divergence > self.threshold)


Objective = Grpo | GrpoGuard | FlowDppo


def _grpo_by_default(value: Any) -> Any:
    return {"kind": "grpo", **cast(dict[str, Any], value)} if isinstance(value, dict) else value


ObjectiveConfig = Annotated[Objective, Field(discriminator="kind"), BeforeValidator(_grpo_by_default), NAMED]


def _event_weights(kind: EventWeights, kernel: Kernel, sigmas: Sequence[float], events: Tensor) -> Tensor:
    steps = events.shape[-1]
    if kind == "uniform":
        return torch.ones(steps, dtype=torch.float64)

    def factor(k: int) -> float:
        return 1 / gain(kernel, sigmas, k) if kind == "rectified" else kernel.affine(sigmas, k).std

    counts = events.reshape(-1, steps).sum(0).double()
    factors_T = torch.tensor([factor(k) if counts[k] else 1.0 for k in range(steps)], dtype=torch.float64)
    return factors_T / ((factors_T * counts).sum() / counts.sum())


def _clip(log_ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    ratio = log_ratio.exp()
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high))


def _clipped(log_ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    ratio = log_ratio.exp()
    return ((advantage > 0) & (ratio > 1 + high)) | ((advantage < 0) & (ratio < 1 - low))


class Kl(Config):
    """β times the mean over events of s·KL(new ‖ reference), on means over the true S² so that β keeps its meaning.

    It is not in the span of ∇ℓ: executions carry it as a direct term with a cotangent of its own. ``as_reward`` subtracts
    β·(a trajectory's mean) from its reward instead, which needs no cotangent. ``scale`` as in `Grpo`; public code averages
    over dimensions. With a ``target`` β follows the measured KL (Ziegler et al., arXiv 1909.08593, section 2.2): after each
    rollout β grows by the factor 1 + rate·(KL/target − 1), the bracket held within ±0.2.
    """

    beta: float = Field(default=0.0, ge=0)
    scale: Literal["per_dim", "exact"] = "per_dim"
    as_reward: bool = False
    target: float | None = Field(default=None, gt=0)
    rate: float = Field(default=0.1, gt=0, le=1)

    def problem(self) -> str | None:
        if self.target is not None and self.beta == 0:
            return "kl.target: β is multiplied until the KL is on target, but kl.beta: 0 stays 0; start with kl.beta above 0"
        return None

    def of(self, event: Transition, sampled: Transition) -> Tensor:
        """(B,) s·KL(new ‖ reference) of an event, with its graph; the reference was asked when it was `sampled`."""
        assert sampled.reference_mean is not None, "measured at sampling"
        kl = event.kl(sampled.reference_mean)
        return kl / event.dims if self.scale == "per_dim" else kl

    def cotangent(self, event: Transition) -> Tensor:
        """(B,) factor of the event's `of` in the loss, before the division by the number of events."""
        return event.rows.to(event.log_prob) * self.beta

    def controlled(self, measured: float) -> Kl:
        """With the β that follows from a rollout's mean `of`."""
        if self.target is None:
            return self
        error = min(max(measured / self.target - 1, -0.2), 0.2)
        return self.model_copy(update={"beta": self.beta * (1 + self.rate * error)})
