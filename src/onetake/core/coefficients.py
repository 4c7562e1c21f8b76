"""Coefficients ω = ∂L/∂ℓ of any objective, by autograd on a leaf of log-probs: no hand-derived weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from onetake.core.objectives import Objective
from onetake.core.records import MicroBatch, Rollout, Transition


class Coefficients:
    """ω of a micro-batch's event, and the statistics an update reports about its ratios."""

    def __init__(self, objective: Objective, rollout: Rollout) -> None:
        self._objective = objective
        self._rollout = rollout
        self._seen: list[
            Tensor
        ] = []  # (n, 4) float64 of n events each: index, log-ratio, removed or not, |ℓ − ℓ_old| in nats
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
        shift = (new.log_prob - old.log_prob).abs()
        removed = objective.removed(log_ratio, advantage, divergence)
        columns = (torch.full_like(shift, old.index), log_ratio, removed, shift)
        self._seen.append(torch.stack([column[old.rows].double() for column in columns], 1))
        return omega

    def share(self, rows: Callable[[Tensor], Tensor]) -> None:
        """Take in what the other ranks saw; `rows` puts all ranks' rows (n_r, ...) one after the other."""
        self._seen = [rows(torch.cat(self._seen))]
        self.loss = float(rows(torch.tensor([self.loss], dtype=torch.float64)).sum())

    @property
    def shift(self) -> float:
        """Largest |ℓ − ℓ_old| of an event so far, nats."""
        return float(torch.cat(self._seen)[:, 3].max())

    def statistics(self) -> dict[str, float | list[float] | list[int]]:
        """Ratio and clipping over all events seen so far, and event by event."""
        seen = torch.cat(self._seen)
        overall, indices = _summary(seen), sorted(int(k) for k in seen[:, 0].unique())
        each = [_summary(seen[seen[:, 0] == k]) for k in indices]
        return {
            "loss": self.loss,
            **overall,
            "events": indices,
            **{f"event_{name}": [summary[name] for summary in each] for name in overall},
        }


def _summary(seen: Tensor) -> dict[str, float]:
    _, log_ratio, removed, shift = seen.unbind(1)
    ratio = log_ratio.exp()
    return {
        "ratio_mean": float(ratio.mean()),
        "ratio_min": float(ratio.min()),
        "ratio_max": float(ratio.max()),
        "clip_fraction": float(removed.mean()),
        "approx_kl": float((ratio - 1 - log_ratio).mean()),
        "log_prob_shift": float(shift.max()),
    }
