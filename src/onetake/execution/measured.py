"""Which trajectory a row belongs to, measured: for graphs that do not tell (see `rows`).

A backward is linear in its cotangent, and multiplying by a power of two commutes with rounding. So the event is
backpropagated again with trajectory i's cotangent times 2^(5·digit) for each digit of i to the base 8: a row that comes back
multiplied by exactly that belongs to trajectory i, and one that comes back otherwise belongs to several. The exponents lie
5 apart because a mixture of ratio 2, 3 or 1/4 could pass for a third trajectory if they were neighbours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

BASE, SPACING = 8, 5


@dataclass(frozen=True)
class Regular:
    """Row r belongs to trajectory (r // run) % samples; all have equally many."""

    samples: int
    run: int

    def grouped(self, rows: Tensor) -> Tensor:
        """(R, ...) → (B, R / B, ...)"""
        parts = rows.unflatten(0, (-1, self.samples, self.run))
        return parts[0] if len(parts) == 1 else parts.transpose(0, 1).flatten(1, 2)


@dataclass(frozen=True)
class Listed:
    """Row r belongs to trajectory `owners[r]`, or, where that is −1, to none."""

    samples: int
    owners: Tensor

    def grouped(self, rows: Tensor) -> Tensor:
        """(R, ...) → (B, n, ...), filled up with zeros where a trajectory has fewer rows than another."""
        mine = torch.nn.functional.one_hot(self.owners + 1, self.samples + 1)[:, 1:]
        place = (mine.cumsum(0) - 1)[torch.arange(len(rows)), self.owners.clamp(min=0)]
        owned = self.owners >= 0
        grouped = rows.new_zeros(self.samples, int(mine.sum(0).max()), *rows.shape[1:])
        grouped[self.owners[owned], place[owned]] = rows[owned]
        return grouped


Owners = Regular | Listed


def digits(samples: int, device: torch.device) -> list[Tensor]:
    """(B,) each: of the trajectories' numbers to the base 8, lowest first."""
    numbers = torch.arange(samples, device=device)
    count = next(n for n in range(1, 64) if BASE**n >= samples)
    return [numbers // BASE**n % BASE for n in range(count)]


def scale(digit: Tensor) -> Tensor:
    """What a trajectory's cotangent is multiplied by."""
    return torch.ldexp(torch.ones_like(digit, dtype=torch.float64), SPACING * digit)


def digit_of(plain: Tensor, scaled: Tensor) -> Tensor | None:
    """(R,) the digits of the rows of two output gradients (R, ...), −1 for rows of zeros; None if some row has none.

    Exact on CPU. Other devices may add up in another order each time, which is allowed for by two roundings.
    """
    plain, scaled = (rows.reshape(len(rows), math.prod(rows.shape[1:])) for rows in (plain, scaled))
    size, pivot = plain.abs().max(1)
    ratio = scaled.gather(1, pivot[:, None])[:, 0].double() / plain.gather(1, pivot[:, None])[:, 0].double()
    digit = torch.where(size != 0, (ratio.log2() / SPACING).round(), 0).nan_to_num(-1, -1, -1).clamp(-1, BASE)
    factor = torch.ldexp(torch.ones_like(digit), SPACING * digit)[:, None]
    limits = torch.finfo(plain.dtype)
    rounding = 0.0 if plain.device.type == "cpu" else 2 * limits.eps
    allowed = (size[:, None].double() * rounding + 4 * limits.tiny * limits.eps) * factor
    differs = ((scaled.double() - plain.double() * factor).abs() <= allowed).logical_not()
    if bool(differs.any() | ((digit < 0) | (digit == BASE))[size != 0].any()):
        return None
    return torch.where(size != 0, digit, -1).long()
