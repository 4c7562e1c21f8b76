"""Are two gradients one but for rounding? Judged entry by entry and tensor by tensor, by rounding as it was measured.

A norm over all tensors hides a small one that is wrong, and one tolerance for all dtypes hides whatever the coarsest lets
pass. Here each entry has a limit of its own: `ENTRY` times the standard deviation of its rounding, and `STEPS` steps of the
gradient's dtype at the size of the summands. Both come from the native gradient itself, computed a second time in such a way
that only rounding can differ, event by event (`native`): so a gradient that cancels is measured by what cancelled.

What is known of one entry's rounding is a handful of numbers. It is taken as row · column / whole of root mean squares, as sums of
products have it, which a weight's gradient is; where there are few numbers, its share of the summands is drawn towards the
tensor's, and the tensor's towards the model's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

ENTRY = 32.0
"""Standard deviations of rounding that one entry may be off. A billion normal entries stay within 7; the rest is for what the
product of row and column misses (with n summands in an entry it may be √n too small), and for deviations known from few events."""
TENSOR = 6.0
"""And that a whole tensor may: its root mean square has thinner tails, but one rounding early in a backward moves much of it."""
STEPS = 4.0
"""Rounding steps of the gradient's dtype, at its summands' size, that an entry may be off; a quarter of it a whole tensor."""
Number = TypeVar("Number", float, Tensor)
_DRAWN = 4.0  # numbers that the estimate one level above counts for


class Spread:
    """Sums of squares of tensors of one shape, along rows (its first dimension), columns (all others) and as a whole.

    Each is there `draws` times, of which the mean counts.
    """

    def __init__(self, like: Tensor, draws: int = 1) -> None:
        rows, columns = _matrix(like).shape
        self.shape, self.draws = (rows, columns), draws
        self.count = 0  # of all that was added
        self.rows_R = torch.zeros(rows, dtype=torch.float64, device=like.device)
        self.columns_C = torch.zeros(columns, dtype=torch.float64, device=like.device)

    def add(self, tensor: Tensor) -> None:
        matrix_RC = _matrix(tensor)
        self.count += 1
        self.rows_R += torch.linalg.vector_norm(matrix_RC, dim=1, dtype=torch.float64).square() / self.draws
        self.columns_C += torch.linalg.vector_norm(matrix_RC, dim=0, dtype=torch.float64).square() / self.draws

    @property
    def terms(self) -> float:
        """Tensors of one draw."""
        return self.count / self.draws

    @property
    def whole(self) -> float:
        """Σ of all squares of one draw."""
        return float(self.rows_R.sum())

    def means(self) -> tuple[Tensor, Tensor, float]:
        """(R,), (C,) and a number: the mean over a row's, a column's and all entries of their sums of squares."""
        rows, columns = self.shape
        return self.rows_R / columns, self.columns_C / rows, self.whole / (rows * columns)


def _factors(rows_R: Tensor, columns_C: Tensor, whole: float) -> tuple[Tensor, Tensor]:
    """(R,) and (C,) whose products are the roots of the entries' sums of squares, as if these were row · column / whole."""
    if whole == 0:
        return torch.zeros_like(rows_R), torch.zeros_like(columns_C)
    return rows_R.sqrt(), (columns_C / whole).sqrt()


def _drawn(found: Number, numbers: int, towards: Number) -> Number:
    """A mean of squares, known from that many numbers, drawn towards what is known one level above."""
    return (numbers * found + _DRAWN * towards) / (numbers + _DRAWN)


def _matrix(tensor: Tensor) -> Tensor:
    return tensor.reshape(len(tensor), -1) if tensor.dim() > 1 else tensor.reshape(-1, 1)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One tensor's gradient against the native one."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    worst: tuple[int, ...]  # the entry that is furthest off, for its limit
    found: float  # there
    native: float
    limit: float  # what rounding may do there
    norm: float  # of the whole tensor's gradient
    native_norm: float
    distance: float  # norm of the difference
    norm_limit: float
    excess: float  # the difference over its limit: above 1 it is not rounding

    def __str__(self) -> str:
        place = f"[{', '.join(map(str, self.worst))}]"
        shape = "×".join(map(str, self.shape)) or "a number"
        return (
            f"{self.name} ({str(self.dtype).removeprefix('torch.')}, {shape}): entry {place} is {self.found:.6g} where the native "
            f"gradient has {self.native:.6g} (rounding moves it by {self.limit:.1e} at most); norms {self.norm:.6g} and "
            f"{self.native_norm:.6g}, {self.distance:.2e} apart (at most {self.norm_limit:.1e})"
        )


class Rounding:
    """What rounding may make of a gradient, tensor by tensor, from repetitions of the native one that differ by nothing else."""

    def __init__(self, draws: int = 1) -> None:
        """`draws` repetitions will be added of every event."""
        self._draws = draws
        self._noise: dict[str, Spread] = {}
        self._size: dict[str, Spread] = {}

    def add(self, name: str, whole: Tensor, again: list[Tensor]) -> None:
        """One event's gradient of a tensor, and the summands `again` of a repetition, whose sum is the same but for rounding."""
        noise = self._noise.setdefault(name, Spread(whole, self._draws))
        size = self._size.setdefault(name, Spread(whole, self._draws))
        total = again[0]
        for summand in again[1:]:
            total = total + summand
        noise.add(total - whole)
        for summand in again:
            size.add(summand)

    @property
    def level(self) -> float:
        """The model's: mean square of rounding over that of the summands."""
        size = sum(spread.whole * spread.terms for spread in self._size.values())
        return sum(spread.whole for spread in self._noise.values()) / size if size else 0.0

    def _factors_of(self, name: str, level: float) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Row and column factors, of the size of Σ|summands| in an entry, and of the deviation of its rounding."""
        size, noise = self._size[name], self._noise[name]
        (rows, columns), found = size.shape, noise.count
        size_R, size_C, size_whole = (
            size.means()
        )  # times their number below: (Σ|summands|)² is no more than that Σ of squares
        noise_R, noise_C, noise_whole = noise.means()
        noise_whole = float(_drawn(noise_whole, rows * columns * found, level * size.terms * size_whole))
        share = noise_whole / size_whole if size_whole else 0.0
        noise_R = _drawn(noise_R, columns * found, share * size_R)
        noise_C = _drawn(noise_C, rows * found, share * size_C)
        size_R, size_C = _factors(size.terms * size_R, size_C, size_whole)
        return (size_R, size_C), _factors(noise_R, noise_C, noise_whole)

    def judge(self, name: str, found: Tensor, native: Tensor, level: float) -> Verdict:
        """Compare a tensor's gradient with the native one. `level` is the model's."""
        step = torch.finfo(found.dtype).eps
        (size_R, size_C), (noise_R, noise_C) = self._factors_of(name, level)
        worst, squares = _Entry(excess=0.0, place=0, limit=0.0), 0.0
        found_RC, native_RC = _matrix(found), _matrix(native)
        for first, last in _blocks(*found_RC.shape):
            off_RC = (found_RC[first:last].double() - native_RC[first:last].double()).abs()
            limit_RC = ENTRY * noise_R[first:last, None] * noise_C + STEPS * step * size_R[first:last, None] * size_C
            excess_RC = torch.where(off_RC > 0, off_RC / limit_RC, 0.0)  # ∞ where nothing may differ
            squares += float(off_RC.square().sum())
            at = int(excess_RC.argmax())
            if first == 0 or float(excess_RC.view(-1)[at]) > worst.excess:
                excess, limit = (float(each.view(-1)[at]) for each in (excess_RC, limit_RC))
                worst = _Entry(excess=excess, place=first * found_RC.shape[1] + at, limit=limit)
        distance = math.sqrt(squares)
        noise, summands = (float(row.norm() * column.norm()) for row, column in ((noise_R, noise_C), (size_R, size_C)))
        norm_limit = TENSOR * noise + STEPS / 4 * step * summands
        return Verdict(
            name=name,
            dtype=found.dtype,
            shape=tuple(found.shape),
            worst=tuple(int(i) for i in np.unravel_index(worst.place, found.shape)),
            found=float(found_RC.reshape(-1)[worst.place]),
            native=float(native_RC.reshape(-1)[worst.place]),
            limit=worst.limit,
            norm=_norm(found),
            native_norm=_norm(native),
            distance=distance,
            norm_limit=norm_limit,
            excess=max(worst.excess, distance / norm_limit if norm_limit else worst.excess),
        )


class _Entry(NamedTuple):
    """The entry furthest off, as far as looked."""

    excess: float
    place: int  # in the flattened tensor
    limit: float


def _blocks(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """Rows [first, last) of a matrix, some four million entries at a time: judging takes several float64s for each."""
    height = max(1, 2**22 // columns)
    for first in range(0, rows, height):
        yield first, min(first + height, rows)


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def judge_all(found: dict[str, Tensor], native: dict[str, Tensor], rounding: Rounding) -> list[Verdict]:
    """A verdict for each tensor, the worst first."""
    level = rounding.level
    verdicts = [rounding.judge(name, found[name], native[name], level) for name in native]
    return sorted(verdicts, key=lambda verdict: verdict.excess, reverse=True)


def relative_error(verdicts: list[Verdict]) -> float:
    """L2 distance of the whole gradient to the native one, relative to it."""
    distance = math.sqrt(sum(verdict.distance**2 for verdict in verdicts))
    size = math.sqrt(sum(verdict.native_norm**2 for verdict in verdicts))
    return distance / size if size else distance
