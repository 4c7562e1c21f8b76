"""Coefficients ω = ∂L/∂ℓ of any objective, by autograd on a leaf of log-probs: no hand-derived weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from onetake.objectives import Surrogate
from onetake.records import MicroBatch, Rollout, Transition


class Coefficients:
    """ω of a micro-batch's event, and the statistics an update reports about its ratios."""

    def __init__(self, objective: Surrogate, rollout: Rollout) -> None:
        self._objective = objective
        self._rollout = rollout
        self._seen: dict[int, list[_Seen]] = {}
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
            log_prob, divergence = objective.log_prob(new, old), new.kl(old.mean) / old.dims
        advantage = self._rollout.advantage(batch).to(log_prob)
        weight = objective.loss_weight(float(batch.weight[old.index]), old)
        leaf = log_prob.detach().requires_grad_()
        with torch.enable_grad():
            log_ratio = objective.log_ratio_scale(old) * (leaf - old.log_prob)
            terms = objective.terms(log_ratio, advantage, divergence)
            loss = (old.rows * terms).sum() * (weight / self._rollout.event_count)
        (omega,) = torch.autograd.grad(loss, leaf)
        self.loss += float(loss.detach())
        log_ratio = log_ratio.detach()
        seen = _Seen(
            log_ratio=log_ratio[old.rows].double(),
            removed=objective.removed(log_ratio, advantage, divergence)[old.rows].double(),
            shift=(new.log_prob - old.log_prob)[old.rows].abs().double(),
        )
        self._seen.setdefault(old.index, []).append(seen)
        return omega

    def share(self, rows: Callable[[Tensor], Tensor]) -> None:
        """Take in what the other ranks saw; `rows` puts all ranks' rows (n_r, ...) one after the other."""
        own = [
            torch.stack([torch.full_like(seen.shift, k), seen.log_ratio, seen.removed, seen.shift], 1)
            for k, event in self._seen.items()
            for seen in event
        ]
        everyone = rows(torch.cat(own))
        self.loss = float(rows(torch.tensor([self.loss], dtype=torch.float64)).sum())
        self._seen = {}
        for k in dict.fromkeys(everyone[:, 0].tolist()):
            log_ratio, removed, shift = everyone[everyone[:, 0] == k, 1:].unbind(1)
            self._seen[int(k)] = [_Seen(log_ratio=log_ratio, removed=removed, shift=shift)]

    @property
    def shift(self) -> float:
        """Largest |ℓ − ℓ_old| of an event so far, nats."""
        return max(float(seen.shift.max()) for event in self._seen.values() for seen in event if len(seen.shift))

    def statistics(self) -> dict[str, float | list[float] | list[int]]:
        """Ratio and clipping over all events seen so far, and event by event."""
        overall = _Seen.joined([seen for event in self._seen.values() for seen in event]).summary()
        indices = sorted(self._seen)
        each = [_Seen.joined(self._seen[k]).summary() for k in indices]
        return {
            "loss": self.loss,
            **overall,
            "events": indices,
            **{f"event_{name}": [summary[name] for summary in each] for name in overall},
        }


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """What was seen of some events (n,), in float64."""

    log_ratio: Tensor
    removed: Tensor
    shift: Tensor  # |ℓ − ℓ_old|, nats

    @staticmethod
    def joined(several: list[_Seen]) -> _Seen:
        return _Seen(
            log_ratio=torch.cat([one.log_ratio for one in several]),
            removed=torch.cat([one.removed for one in several]),
            shift=torch.cat([one.shift for one in several]),
        )

    def summary(self) -> dict[str, float]:
        ratio = self.log_ratio.exp()
        return {
            "ratio_mean": float(ratio.mean()),
            "ratio_min": float(ratio.min()),
            "ratio_max": float(ratio.max()),
            "clip_fraction": float(self.removed.mean()),
            "approx_kl": float((ratio - 1 - self.log_ratio).mean()),
            "log_prob_shift": float(self.shift.max()),
        }
