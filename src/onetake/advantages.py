"""Rewards of a group become advantages."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from onetake.records import Config


class Advantages(Config):
    """A = (r − mean_group) / (std + eps), clamped to ±clamp.

    ``std`` is taken over the group (Flow-GRPO with group std), over the whole update (``global``), or left out
    (``none``: Dr.GRPO). A group without spread contributes exactly 0, whatever rounding does to its mean.
    """

    std: Literal["group", "global", "none"] = "group"
    unbiased: bool = False  # population std, as published code computes it on arrays
    eps: float = Field(default=1e-4, ge=0)
    clamp: float | None = Field(default=5.0, gt=0)

    def __call__(self, rewards: Tensor) -> Tensor:
        """(P, G) rewards → (P, G) advantages in float64.

        Raises ValueError for G < 2, where a group has nothing to compare with.
        """
        if rewards.shape[1] < 2:
            raise ValueError("rollout.group_size: 1 gives no advantage (each sample is its own mean); use 2 or more")
        r_PG = rewards.double()
        centred = r_PG - r_PG.mean(1, keepdim=True)
        if self.std == "group":
            centred = centred / (r_PG.std(1, keepdim=True, correction=int(self.unbiased)) + self.eps)
        elif self.std == "global":
            centred = centred / (r_PG.std(correction=int(self.unbiased)) + self.eps)
        if self.clamp is not None:
            centred = centred.clamp(-self.clamp, self.clamp)
        return torch.where(dead_groups(rewards)[:, None], 0.0, centred)


def dead_groups(rewards: Tensor) -> Tensor:
    """(P,) bool: groups whose rewards are all equal."""
    return rewards.amax(1) == rewards.amin(1)
