"""Objectives turn log-probs and advantages into coefficients ω = ∂L/∂ℓ, by autograd on a leaf: no hand-derived weights.

An objective says what is scored (`log_prob`), how its change becomes a log-ratio (`log_ratio_scale`), and what one event's
loss is (`terms`). On the first update of a rollout every ratio is 1, and all of them are the policy gradient with known
event weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol, cast

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor

from onetake.records import NAMED, Config, MicroBatch, Rollout, Transition
from onetake.transitions import Kernel, gain

EventWeights = Literal["uniform", "rectified"]
"""``rectified`` divides each event by its temporal gain λ (Flash-GRPO), normalised to mean 1 over the update."""


class Surrogate(Protocol):
    """What executions need of an objective."""

    def limit(self, dims: int) -> str:
        """One line: where the trust region ends, in nats of an event with `dims` dimensions."""
        ...

    def weights(self, kernel: Kernel, sigmas: Sequence[float], events: Tensor) -> Tensor:
        """(T,) float64 factor of ∇ℓ at ratio 1, up to a constant; `events` (..., T) bool: what the whole update trains."""
        ...

    def log_prob(self, new: Transition, old: Transition) -> Tensor:
        """(B,) the scored quantity, with the graph of `new`; where the policy is unchanged its gradient is ∇ℓ."""
        ...

    def log_ratio_scale(self, old: Transition) -> float:
        """s in r = exp(s·(log_prob − old log_prob))."""
        ...

    def loss_weight(self, weight: float, old: Transition) -> float:
        """Factor of the event's loss that makes ω = −A·constant·weight at ratio 1."""
        ...

    def terms(self, log_ratio: Tensor, advantage: Tensor, divergence: Tensor) -> Tensor:
        """Loss of each event, elementwise; `divergence` is KL(old ‖ new) per dimension, in nats, without graph."""
        ...

    def removed(self, log_ratio: Tensor, advantage: Tensor, divergence: Tensor) -> Tensor:
        """Events whose gradient `terms` takes away."""
        ...


class _LikelihoodRatio(Config):
    """What objectives on r = exp(s·(ℓ − ℓ_old)) share.

    ``scale: per_dim`` is s = 1/D, as in all public diffusion code, so that published limits keep their meaning.
    ``scale: exact`` is s = 1, the true likelihood ratio.
    """

    scale: Literal["per_dim", "exact"] = "per_dim"
    event_weights: EventWeights = "uniform"

    def weights(self, kernel: Kernel, sigmas: Sequence[float], events: Tensor) -> Tensor:
        return _event_weights(self.event_weights, kernel, sigmas, events)

    def log_prob(self, new: Transition, old: Transition) -> Tensor:
        return new.log_prob

    def log_ratio_scale(self, old: Transition) -> float:
        return 1 / old.dims if self.scale == "per_dim" else 1.0

    def loss_weight(self, weight: float, old: Transition) -> float:
        return weight


class Grpo(_LikelihoodRatio):
    """Clipped GRPO: max(−A·r, −A·clip(r, 1−ε_low, 1+ε_high))."""

    kind: Literal["grpo"] = "grpo"
    clip_low: float = Field(default=1e-4, gt=0)
    clip_high: float = Field(default=1e-4, gt=0)

    def limit(self, dims: int) -> str:
        nats = self.clip_high * (dims if self.scale == "per_dim" else 1)
        return f"clip {self.clip_high:g} ({self.scale}, D = {dims:,}): reached when an event's log_prob moves by {nats:.3g} nats"

    def terms(self, log_ratio: Tensor, advantage: Tensor, divergence: Tensor) -> Tensor:
        return _clip(log_ratio, advantage, self.clip_low, self.clip_high)

    def removed(self, log_ratio: Tensor, advantage: Tensor, divergence: Tensor) -> Tensor:
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

    def limit(self, dims: int) -> str:
        nats = self.clip_high * dims
        return f"clip {self.clip_high:g} (S/D, D = {dims:,}): reached when its re-centred log_prob moves by {nats:.3g}/S nats"

    def weights(self, kernel: Kernel, sigmas: Sequence[float], events: Tensor) -> Tensor:
        steps = range(events.shape[-1])
        balance = [kernel.affine(sigmas, k).std / (sigmas[k] - sigmas[k + 1]) for k in steps]
        return _event_weights(self.event_weights, kernel, sigmas, events) * torch.tensor(balance, dtype=torch.float64)

    def log_prob(self, new: Transition, old: Transition) -> Tensor:
        return new.log_prob + new.kl(old)

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
    counts = events.reshape(-1, steps).sum(0).double()
    inverse = [1 / gain(kernel, sigmas, k) if counts[k] else 1.0 for k in range(steps)]
    inverse_T = torch.tensor(inverse, dtype=torch.float64)
    return inverse_T / ((inverse_T * counts).sum() / counts.sum())


def _clip(log_ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    ratio = log_ratio.exp()
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high))


def _clipped(log_ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    ratio = log_ratio.exp()
    return ((advantage > 0) & (ratio > 1 + high)) | ((advantage < 0) & (ratio < 1 - low))


class Kl(Config):
    """β times the mean over events of s·KL(new ‖ reference), on means over the true S² so that β keeps its meaning.

    It is not in the span of ∇ℓ: executions carry it as a direct term with a cotangent of its own. ``scale`` as in `Grpo`;
    public code averages over dimensions.
    """

    beta: float = Field(default=0.0, ge=0)
    scale: Literal["per_dim", "exact"] = "per_dim"

    def cotangent(self, event: Transition) -> Tensor:
        """(B,) factor of the event's KL in the loss, before the division by the number of events."""
        return event.rows.to(event.log_prob) * (self.beta / event.dims if self.scale == "per_dim" else self.beta)


class Coefficients:
    """ω of a micro-batch's event, and the statistics an update reports about its ratios."""

    def __init__(self, objective: Surrogate, rollout: Rollout) -> None:
        self._objective = objective
        self._rollout = rollout
        self._log_ratios: list[Tensor] = []
        self._removed: list[Tensor] = []
        self.loss = 0.0

    def scored(self, old: Transition, new: Transition) -> Tensor:
        """(B,) what ω is the coefficient of, with the graph of `new`."""
        return self._objective.log_prob(new, old)

    def omega(self, batch: MicroBatch, old: Transition, new: Transition) -> Tensor:
        """(B,) ω = ∂L/∂ℓ at `new`, where L is the mean over all events of the rollout (weights included).

        `new` is `old` itself while the policy is unchanged.
        """
        objective = self._objective
        with torch.no_grad():
            log_prob, divergence = objective.log_prob(new, old), new.kl(old) / old.dims
        advantage = self._rollout.advantage(batch).to(log_prob)
        weight = objective.loss_weight(float(batch.weight[old.index]), old)
        leaf = log_prob.detach().requires_grad_()
        with torch.enable_grad():
            log_ratio = objective.log_ratio_scale(old) * (leaf - old.log_prob)
            terms = objective.terms(log_ratio, advantage, divergence)
            loss = (old.rows * terms).sum() * (weight / self._rollout.event_count)
        (omega,) = torch.autograd.grad(loss, leaf)
        self.loss += float(loss.detach())
        self._log_ratios.append(log_ratio.detach()[old.rows])
        self._removed.append(objective.removed(log_ratio.detach(), advantage, divergence)[old.rows])
        return omega

    def statistics(self) -> dict[str, float]:
        """Ratio and clipping over all events seen so far."""
        log_ratio = torch.cat(self._log_ratios).double()
        ratio = log_ratio.exp()
        return {
            "loss": self.loss,
            "ratio_mean": float(ratio.mean()),
            "ratio_min": float(ratio.min()),
            "ratio_max": float(ratio.max()),
            "clip_fraction": float(torch.cat(self._removed).double().mean()),
            "approx_kl": float((ratio - 1 - log_ratio).mean()),
        }
