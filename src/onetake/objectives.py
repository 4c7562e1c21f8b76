"""Objectives turn log-probs and advantages into coefficients ω = ∂L/∂ℓ, by autograd on a leaf: no hand-derived weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from onetake.records import Config, MicroBatch, Rollout, Transition
from onetake.transitions import Kernel, gain


class Grpo(Config):
    """Clipped GRPO: max(−A·r, −A·clip(r, 1−ε_low, 1+ε_high)) with r = exp(s·(ℓ − ℓ_old)).

    ``scale: per_dim`` is s = 1/D, as in all public diffusion code, so that published ε keep their meaning: clipping
    starts when ℓ moved by about ε·D nats. ``scale: exact`` is s = 1, the true likelihood ratio.
    """

    kind: Literal["grpo"] = "grpo"
    clip_low: float = Field(default=1e-4, gt=0)
    clip_high: float = Field(default=1e-4, gt=0)
    scale: Literal["per_dim", "exact"] = "per_dim"
    event_weights: Literal["uniform", "rectified"] = "uniform"
    """``rectified`` divides each event by its temporal gain λ (Flash-GRPO), normalised to mean 1 over the update."""

    def weights(self, kernel: Kernel, sigmas: Sequence[float], events: Tensor) -> Tensor:
        """(T,) float64 factor of each event; `events` (..., T) bool says which events the whole update trains."""
        steps = events.shape[-1]
        counts = events.reshape(-1, steps).sum(0).double()
        if self.event_weights == "uniform":
            return torch.ones(steps, dtype=torch.float64)
        inverse = torch.tensor(
            [1 / gain(kernel, sigmas, k) if counts[k] else 1.0 for k in range(steps)], dtype=torch.float64
        )
        return inverse / ((inverse * counts).sum() / counts.sum())

    def log_ratio_scale(self, dims: int) -> float:
        return 1 / dims if self.scale == "per_dim" else 1.0

    def terms(self, log_ratio: Tensor, advantage: Tensor) -> Tensor:
        """Loss of each event, elementwise in the shape of `log_ratio` (already scaled by s)."""
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        return torch.maximum(-advantage * ratio, -advantage * clipped)

    def clipped(self, log_ratio: Tensor, advantage: Tensor) -> Tensor:
        """Events whose gradient the clip removes."""
        ratio = log_ratio.exp()
        return ((advantage > 0) & (ratio > 1 + self.clip_high)) | ((advantage < 0) & (ratio < 1 - self.clip_low))


Objective = Grpo


class Coefficients:
    """ω of a micro-batch's event, and the statistics an update reports about its ratios."""

    def __init__(self, objective: Objective, rollout: Rollout) -> None:
        self._objective = objective
        self._rollout = rollout
        self._log_ratios: list[Tensor] = []
        self._clipped: list[Tensor] = []
        self.loss = 0.0

    def omega(self, batch: MicroBatch, old: Transition, log_prob: Tensor) -> Tensor:
        """(B,) ω = ∂L/∂ℓ at `log_prob`, where L is the mean over all events of the rollout (weights included)."""
        advantage = self._rollout.advantage(batch).to(log_prob)
        scale = self._objective.log_ratio_scale(old.dims)
        leaf = log_prob.detach().requires_grad_()
        with torch.enable_grad():
            log_ratio = scale * (leaf - old.log_prob)
            terms = self._objective.terms(log_ratio, advantage)
            loss = (old.rows * terms).sum() * (float(batch.weight[old.index]) / self._rollout.event_count)
        (omega,) = torch.autograd.grad(loss, leaf)
        self.loss += float(loss.detach())
        self._log_ratios.append(log_ratio.detach()[old.rows])
        self._clipped.append(self._objective.clipped(log_ratio.detach(), advantage)[old.rows])
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
            "clip_fraction": float(torch.cat(self._clipped).double().mean()),
            "approx_kl": float((ratio - 1 - log_ratio).mean()),
        }
