"""Rewards of a group become advantages."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from onetake.records import Config


class Advantages(Config):
    """A = (r − mean_group) / (std + eps), clamped to ±clamp.

    ``std`` is taken over the group (Flow-GRPO with group std), over the whole update (``global``), is the largest of the
    update's groups (``max_group``), or is left out (``none``: Dr.GRPO). A group without spread contributes exactly 0,
    whatever rounding does to its mean. ``best_of: k`` trains only the k best and k worst of each group.

    Several rewards: ``sum_then_normalize`` takes r as their weighted sum; ``normalize_then_sum`` (GDPO, arXiv 2601.05242)
    gives each reward an A of its own, so that an easy reward's spread cannot drown a hard one's, and divides their weighted
    sum by its std over the update. The names are TRL's.
    """

    std: Literal["group", "global", "max_group", "none"] = "group"
    unbiased: bool = False  # population std, as published code computes it on arrays
    eps: float = Field(default=1e-4, ge=0)
    clamp: float | None = Field(default=5.0, gt=0)
    best_of: int | None = Field(default=None, ge=1)
    aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"

    def problem(self, group_size: int) -> str | None:
        if self.best_of is None or 2 * self.best_of <= group_size:
            return None
        return (
            f"advantages.best_of: {self.best_of} best and as many worst are {2 * self.best_of} of rollout.group_size: "
            f"{group_size}; use {group_size // 2} or less"
        )

    def __call__(self, rewards: Tensor, weights: Tensor | None = None) -> Tensor:
        """(P, G) rewards, or (R, P, G) of several with their (R,) weights → (P, G) advantages in float64.

        Raises ValueError for G < 2, where a group has nothing to compare with.
        """
        if rewards.shape[-1] < 2:
            raise ValueError("rollout.group_size: 1 gives no advantage (each sample is its own mean); use 2 or more")
        several = rewards.double() if weights is not None else rewards.double()[None]
        weight = torch.ones(1, 1, 1).double() if weights is None else weights.double()[:, None, None]
        r_PG = (weight * several).sum(0)
        if self.aggregation == "normalize_then_sum":
            scaled = (weight * torch.stack([self._normalized(one) for one in several.unbind()])).sum(0)
            scaled = scaled / (scaled.std(correction=int(self.unbiased)) + self.eps)
            order = scaled  # the sum of raw rewards would rank by the reward with the largest scale
        else:
            scaled, order = self._normalized(r_PG), r_PG
        if self.best_of is not None:
            rank = order.argsort(dim=1, stable=True).argsort(dim=1)
            between = (rank >= self.best_of) & (rank < r_PG.shape[1] - self.best_of)
            scaled = torch.where(between, 0.0, scaled)
        return scaled if self.clamp is None else scaled.clamp(-self.clamp, self.clamp)

    def _normalized(self, r_PG: Tensor) -> Tensor:
        centred = r_PG - r_PG.mean(1, keepdim=True)
        scaled = centred if self.std == "none" else centred / (self._std(r_PG) + self.eps)
        return torch.where(dead_groups(r_PG)[:, None], 0.0, scaled)

    def _std(self, r_PG: Tensor) -> Tensor:
        if self.std == "global":
            return r_PG.std(correction=int(self.unbiased))
        groups = r_PG.std(1, keepdim=True, correction=int(self.unbiased))
        return groups.amax() if self.std == "max_group" else groups


def dead_groups(values: Tensor) -> Tensor:
    """(P,) bool: groups whose rewards (P, G), or advantages, are all equal."""
    return values.amax(1) == values.amin(1)
