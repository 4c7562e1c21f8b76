"""Selections: which transitions of which trajectory are stochastic and trained. The last step never is.

Each is a pure function of the seed and the update, so every rank draws the same choice without communication. `per` says
whose choice it is: events are the same for all trajectories of the update, of a group, or differ from sample to sample.
"""

from __future__ import annotations

import itertools
import math
from typing import Annotated, Literal, Protocol

import torch
from pydantic import Field
from torch import Tensor

from onetake.core.axes import Axis
from onetake.core.noise import choice
from onetake.core.records import Address, Config

Per = Literal["update", "group", "sample"]


class Selector(Protocol):
    """What every selection has."""

    @property
    def per(self) -> Per:
        """Whose choice it is; a layout that gives a group's samples to several ranks needs one that is not the sample's."""
        ...

    def problem(self, steps: int) -> str | None:
        """Why it cannot choose among `steps` steps, or None."""
        ...

    def mask(self, *, groups: int, group_size: int, steps: int, address: Address) -> Tensor:
        """(groups, group_size, steps) bool: the events that are stochastic and trained; never the last step."""
        ...


class All(Config):
    """Every step but the last (Flow-GRPO)."""

    kind: Literal["all"] = "all"

    @property
    def per(self) -> Per:
        return "update"

    def problem(self, steps: int) -> str | None:
        return (
            None
            if steps >= 2
            else f"policy.steps: {steps} leaves no event to train (the last step never is); use 2 or more"
        )

    def mask(self, *, groups: int, group_size: int, steps: int, address: Address) -> Tensor:
        mask = torch.ones(groups, group_size, steps, dtype=torch.bool)
        mask[..., -1] = False
        return mask


class Fraction(Config):
    """A random subset of ⌊(T−1)·fraction⌋ events, per sample (DanceGRPO) or shared by the update."""

    kind: Literal["fraction"] = "fraction"
    fraction: float = Field(default=0.6, gt=0, le=1)
    per: Literal["sample", "update"] = "sample"

    def _count(self, steps: int) -> int:
        return math.floor((steps - 1) * self.fraction + 1e-9)  # 100 · 0.29 is 28.999… in floats

    def problem(self, steps: int) -> str | None:
        if self._count(steps) >= 1:
            return None
        least = math.ceil(1000 / max(steps - 1, 1)) / 1000
        return f"selection.fraction: {self.fraction} of {steps - 1} events is none; use at least {least:.3f}"

    def mask(self, *, groups: int, group_size: int, steps: int, address: Address) -> Tensor:
        mask = torch.zeros(groups, group_size, steps, dtype=torch.bool)
        for group in range(groups):
            for sample in range(group_size):
                place = (group, sample) if self.per == "sample" else ()
                order = torch.randperm(steps - 1, generator=choice(address, "fraction", *place))
                mask[group, sample, order[: self._count(steps)]] = True
        return mask


class Window(Config):
    """`size` contiguous events inside [start, until), the same for all trajectories of an update.

    ``random`` draws the place for each update (Flow-GRPO-Fast); ``fixed`` leaves it at `start`. ``sliding`` moves it by
    `stride` every `interval` updates, so that windows overlap if the stride is below the size, and at the end starts over
    (`roll_back`) or stays (MixGRPO, arXiv 2507.21802: size 4, stride 1, interval 25). With a `decay` later places get fewer
    updates, interval·exp(−decay·max(first event − decay_from, 0)), as MixGRPO's public code offers (0.1 from event 13).
    """

    kind: Literal["window"] = "window"
    size: int = Field(default=2, ge=1)
    place: Literal["random", "sliding", "fixed"] = "random"
    start: int = Field(default=0, ge=0)
    until: int | None = Field(default=None, ge=1)  # None: up to the last trainable event
    stride: int = Field(default=1, ge=1)
    interval: int = Field(default=25, ge=1)
    roll_back: bool = True
    decay: float = Field(default=0.0, ge=0)
    decay_from: int = Field(default=13, ge=0)

    @property
    def per(self) -> Per:
        return "update"

    def _limit(self, steps: int) -> int:
        return min(self.until or steps - 1, steps - 1)

    def problem(self, steps: int) -> str | None:
        end, limit = self.start + self.size, self._limit(steps)
        if end <= limit:
            return None
        cause = f"policy.steps: {steps}, the last step never is"
        if limit < steps - 1:
            cause = f"selection.until: {self.until}"
        return (
            f"selection: a window of size {self.size} from event {self.start} needs {end} events but "
            f"{limit} can be trained ({cause})"
        )

    def first(self, steps: int, address: Address) -> int:
        """Index of the window's first event in the update of `address`."""
        places = self._limit(steps) - self.size - self.start + 1
        if self.place == "random":
            return self.start + int(torch.randint(places, (), generator=choice(address, "window")))
        if self.place == "sliding":
            return self._sliding(range(self.start, self.start + places, self.stride), address.update)
        return self.start

    def _sliding(self, firsts: range, update: int) -> int:
        """The place whose turn `update` is."""
        lengths = [
            max(1, round(self.interval * math.exp(-self.decay * max(first - self.decay_from, 0)))) for first in firsts
        ]
        if not self.roll_back and update >= sum(lengths):
            return firsts[-1]
        left = update % sum(lengths)
        return next(f for f, end in zip(firsts, itertools.accumulate(lengths), strict=True) if left < end)

    def mask(self, *, groups: int, group_size: int, steps: int, address: Address) -> Tensor:
        first = self.first(steps, address)
        mask = torch.zeros(groups, group_size, steps, dtype=torch.bool)
        mask[..., first : first + self.size] = True
        return mask


class Single(Config):
    """One event per prompt, shared by its whole group (iso-temporal, Flash-GRPO), stratified over the update's groups.

    ``until`` bounds the range [0, until); by default the first half of the steps, as in the public code. ``per: sample`` draws
    an event for each sample instead, so that a group's rewards differ by their event as well: what Flash-GRPO compares with.
    """

    kind: Literal["single"] = "single"
    per: Literal["group", "sample"] = "group"
    until: int | None = Field(default=None, ge=1)

    def _range(self, steps: int) -> int:
        return self.until if self.until is not None else max(steps // 2, 1)

    def problem(self, steps: int) -> str | None:
        if self._range(steps) <= steps - 1:
            return None
        return (
            f"selection.until: {self._range(steps)} exceeds the {steps - 1} trainable events of policy.steps: {steps}"
        )

    def mask(self, *, groups: int, group_size: int, steps: int, address: Address) -> Tensor:
        draws = groups if self.per == "group" else groups * group_size
        random = choice(address, "single")
        stratum = torch.randperm(draws, generator=random)
        within = torch.rand(draws, generator=random, dtype=torch.float64)
        events = ((stratum + within) / draws * self._range(steps)).long().view(groups, -1, 1)
        mask = torch.zeros(groups, group_size, steps, dtype=torch.bool)
        return mask.scatter(2, events.expand(groups, group_size, 1), True)


Selection = Annotated[Selector, Axis((All, Fraction, Window, Single))]
