"""Layouts: which rank samples which trajectories of an update, by arithmetic on indices alone.

Both are one rule. The R ranks form `sets`; a set takes whole groups, and its `width` ranks divide each group's samples.
``shared-prompt`` (LeanGRPO, arXiv 2609.03528) makes sets as wide as they get: G samples over R ranks, Q = G/R each, or
R/G sets of G ranks where G < R. ``conventional`` makes them one rank wide: whole groups to ranks. The gradient is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from onetake.core.records import MicroBatch

LayoutKind = Literal["shared-prompt", "conventional"]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """P groups of G trajectories, dealt in micro-batches of B to `ranks` processes."""

    kind: LayoutKind
    ranks: int
    groups: int
    group_size: int
    micro_batch: int

    @property
    def width(self) -> int:
        """Ranks that divide the samples of one group."""
        return min(self.group_size, self.ranks) if self.kind == "shared-prompt" else 1

    @property
    def sets(self) -> int:
        """Sets of ranks, each with groups of its own."""
        return self.ranks // self.width

    def rank_of(self, batch: MicroBatch) -> int:
        """The rank that samples `batch`; its samples all belong to one rank where `problems` finds nothing."""
        place = batch.samples[0] // (self.group_size // self.width)
        return batch.group // (self.groups // self.sets) * self.width + place

    def share(self, batches: Iterable[MicroBatch], rank: int) -> list[MicroBatch]:
        """Those of `batches` that `rank` samples, in their order."""
        return [batch for batch in batches if self.rank_of(batch) == rank]

    def problems(self) -> list[str]:
        """Why the update cannot be divided evenly over the ranks, in the recipe's words, with the nearest sizes that work."""
        if self.group_size % self.width or self.ranks % self.width:
            fits = _nearest(
                self.group_size,
                lambda size: size % self.ranks == 0 or self.ranks % size == 0,
                least=2,
                most=self.group_size + self.ranks,
            )
            return [
                f"rollout.group_size: {self.group_size} samples cannot be divided evenly over {self.ranks} ranks (rollout.layout: "
                f"shared-prompt); rollout.group_size: {fits} works, or {self._ranks_that_work()} ranks"
            ]
        if self.groups % self.sets:
            whom = f"{self.sets} sets of {self.width} ranks" if self.width > 1 else f"{self.sets} ranks"
            fits = _nearest(self.groups, lambda groups: groups % self.sets == 0, most=self.groups + self.sets)
            return [
                f"rollout.groups: {self.groups} prompts cannot be dealt evenly to {whom} (rollout.layout: {self.kind}); "
                f"rollout.groups: {fits} works, or {self._ranks_that_work()} ranks"
            ]
        share = self.group_size // self.width
        if self.width > 1 and share % self.micro_batch:
            fits = ", ".join(str(b) for b in range(1, share + 1) if share % b == 0)
            return [
                f"rollout.micro_batch: {self.micro_batch} does not divide the samples of a group that one of {self.ranks} ranks "
                f"takes, {share} of rollout.group_size: {self.group_size} (rollout.layout: shared-prompt); "
                f"sizes that work: {fits}"
            ]
        return []

    def _ranks_that_work(self) -> str:
        def works(ranks: int) -> bool:
            if self.kind == "conventional" or ranks <= self.group_size:
                return (self.groups if self.kind == "conventional" else self.group_size) % ranks == 0
            return ranks % self.group_size == 0 and self.groups % (ranks // self.group_size) == 0

        return _nearest(self.ranks, works, most=self.groups * self.group_size)


def _nearest(wanted: int, works: Callable[[int], bool], *, most: int, least: int = 1) -> str:
    """The largest number below `wanted` and the smallest above it that work, as ``a or b``."""
    lower = next((n for n in range(wanted - 1, least - 1, -1) if works(n)), None)
    upper = next((n for n in range(wanted + 1, most + 1) if works(n)), None)
    return " or ".join(str(n) for n in (lower, upper) if n is not None)
