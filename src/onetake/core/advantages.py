"""Rewards of a group become advantages."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from onetake.core.records import Config

ROUNDINGS = 2
"""Rounding steps, of a reward's dtype at its largest score in the group, by which equal scores may seem to differ. A score is
known to one such step at best (0.1 + 0.2 is one off 0.3), so that two of them may be two apart."""


class Advantages(Config):
    """A = (r − mean_group) / (std + eps), clamped to ±clamp.

    ``std`` is taken over the group (Flow-GRPO with group std), over the whole update (``global``), is the largest of the
    update's groups (``max_group``), or is left out (``none``: Dr.GRPO). A group is alive if its rewards spread by more than
    ROUNDINGS rounding steps, of the dtype in which they were given; one that is not contributes exactly 0, so that rounding
    is never divided by itself, and ``eps: 0`` is safe. ``best_of: k`` trains only the k best and k worst of each group.

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

    def __call__(self, rewards: Tensor, weights: Tensor | None = None, steps: Tensor | None = None) -> Tensor:
        """(P, G) rewards, or (R, P, G) of several with their (R,) weights → (P, G) advantages in float64.

        `steps` (R,) are the rewards' rounding steps relative to their size, by default those of the tensor's dtype. A weighted
        sum is known as well as its summands are, each with its own step.

        Raises ValueError for G < 2, where a group has nothing to compare with.
        """
        if rewards.shape[-1] < 2:
            raise ValueError("rollout.group_size: 1 gives no advantage (each sample is its own mean); use 2 or more")
        several = rewards.double() if weights is not None else rewards.double()[None]
        weight = torch.ones(1, 1, 1).double() if weights is None else weights.double()[:, None, None]
        steps = torch.full((len(several),), step_of(rewards)) if steps is None else steps
        rounding_RP = ROUNDINGS * steps.double()[:, None] * several.abs().amax(2)
        r_PG, rounding_P = _sum(weight, several, rounding_RP)
        if self.aggregation == "normalize_then_sum":
            each = [self._normalized(one, rounding) for one, rounding in zip(several, rounding_RP, strict=True)]
            scaled, rounding_P = _sum(weight, *(torch.stack(column) for column in zip(*each, strict=True)))
            scaled = torch.where(dead_groups(scaled, rounding_P)[:, None], 0.0, scaled)
            spread = scaled.std(correction=int(self.unbiased)) + self.eps
            scaled = torch.where(scaled == 0, 0.0, scaled / spread)
            order = scaled  # the sum of raw rewards would rank by the reward with the largest scale
        else:
            (scaled, _), order = self._normalized(r_PG, rounding_P), r_PG
        if self.best_of is not None:
            rank = order.argsort(dim=1, stable=True).argsort(dim=1)
            between = (rank >= self.best_of) & (rank < r_PG.shape[1] - self.best_of)
            scaled = torch.where(between, 0.0, scaled)
        return scaled if self.clamp is None else scaled.clamp(-self.clamp, self.clamp)

    def _normalized(self, r_PG: Tensor, rounding_P: Tensor) -> tuple[Tensor, Tensor]:
        """(P, G) exactly 0 in dead groups, and (P,) what rounding of the rewards makes of it."""
        spread = torch.ones(()).double() if self.std == "none" else self._std(r_PG) + self.eps
        dead = dead_groups(r_PG, rounding_P)
        scaled = torch.where(dead[:, None], 0.0, (r_PG - r_PG.mean(1, keepdim=True)) / spread)
        return scaled, torch.where(dead, 0.0, (rounding_P[:, None] / spread)[:, 0])

    def _std(self, r_PG: Tensor) -> Tensor:
        if self.std == "global":
            return r_PG.std(correction=int(self.unbiased))
        groups = r_PG.std(1, keepdim=True, correction=int(self.unbiased))
        return groups.amax() if self.std == "max_group" else groups


def step_of(scores: Tensor) -> float:
    """The rounding step of a tensor's dtype, relative to a number's size; float64's for whole numbers."""
    return torch.finfo(scores.dtype if scores.is_floating_point() else torch.float64).eps


def dead_groups(values: Tensor, rounding_P: Tensor | float = 0.0) -> Tensor:
    """(P,) bool: groups whose rewards (P, G), or advantages, spread by no more than rounding; without it, are all equal."""
    return values.amax(1) - values.amin(1) <= rounding_P


def _sum(weight: Tensor, several_RPG: Tensor, rounding_RP: Tensor) -> tuple[Tensor, Tensor]:
    """(P, G) weighted sum, and (P,) its rounding: that of the summands, and of adding them up in float64."""
    size = weight.abs() * several_RPG.abs()
    added = len(several_RPG) * torch.finfo(torch.float64).eps * size.sum(0).amax(1)
    return (weight * several_RPG).sum(0), (weight[:, :, 0].abs() * rounding_RP).sum(0) + added
