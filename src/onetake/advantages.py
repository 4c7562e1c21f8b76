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
    """

    std: Literal["group", "global", "max_group", "none"] = "group"
    unbiased: bool = False  # population std, as published code computes it on arrays
    eps: float = Field(default=1e-4, ge=0)
    clamp: float | None = Field(default=5.0, gt=0)
    best_of: int | None = Field(default=None, ge=1)

    def problem(self, group_size: int) -> str | None:
        if self.best_of is None or 2 * self.best_of <= group_size:
            return None
        return (
            f"advantages.best_of: {self.best_of} best and as many worst are {2 * self.best_of} of rollout.group_size: "
            f"{group_size}; use {group_size // 2} or less"
        )

    def __call__(self, rewards: Tensor) -> Tensor:
        """(P, G) rewards → (P, G) advantages in float64.

        Raises ValueError for G < 2, where a group has nothing to compare with.
        """
        if rewards.shape[1] < 2:
            raise ValueError("rollout.group_size: 1 gives no advantage (each sample is its own mean); use 2 or more")
        r_PG = rewards.double()
        centred = r_PG - r_PG.mean(1, keepdim=True)
        if self.std != "none":
            centred = centred / (self._std(r_PG) + self.eps)
        if self.best_of is not None:
            rank = r_PG.argsort(dim=1, stable=True).argsort(dim=1)
            between = (rank >= self.best_of) & (rank < r_PG.shape[1] - self.best_of)
            centred = torch.where(between, 0.0, centred)
        if self.clamp is not None:
            centred = centred.clamp(-self.clamp, self.clamp)
        return torch.where(dead_groups(rewards)[:, None], 0.0, centred)

    def _std(self, r_PG: Tensor) -> Tensor:
        if self.std == "global":
            return r_PG.std(correction=int(self.unbiased))
        groups = r_PG.std(1, keepdim=True, correction=int(self.unbiased))
        return groups.amax() if self.std == "max_group" else groups


def dead_groups(rewards: Tensor) -> Tensor:
    """(P,) bool: groups whose rewards are all equal."""
    return rewards.amax(1) == rewards.amin(1)
