"""The best plan under two budgets: a multiple-choice knapsack, solved exactly.

HiLoRe's reference solver (arXiv 2609.33570) is a dynamic programme on a 1024 × 1024 grid of memory and risk, with costs
rounded up. Here the states are the undominated (bytes, risk, score) themselves, so nothing is rounded; Lagrangian bounds
discard those that cannot beat a plan already found. Seconds count in whole microseconds. `scipy.optimize.milp` would be 140 lines
less, with one call for each preference among equals; it finds the same plans once risks are scaled above its absolute tolerance,
but takes 0.1 to 1 s for 24 to 80 unlike units, up to 3 s, where this takes 0.01 to 0.1 s, and under a budget of risk every step has
a plan of its own.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onetake.activations.plan import MIB, Action, Option, Plan, UnitOptions

SLACK = 1 + 1e-12
"""Relative rounding allowed when risks are summed in different orders."""


def solve(units: Sequence[UnitOptions], *, memory: int, risk: float = math.inf) -> Plan:
    """The plan that saves most seconds with at most `memory` bytes and `risk` summed over units.

    Among equals: fewest L, then most R, then stores late units, whose state is freed before earlier units replay.
    Options that save no time are never taken. Raises ValueError if `memory` or `risk` is negative.
    """
    if memory < 0:
        raise ValueError(
            f"the memory budget is {-memory / MIB:.1f} MiB below the peak of recomputing every unit; raise it by that much, "
            "or use a smaller micro-batch"
        )
    if risk < 0:
        raise ValueError(f"the risk budget {risk} is negative; 0 allows exact actions only")
    options = [[option for option in unit.all if option.seconds > 0 or option.action == "R"] for unit in units]
    scores = _scores(options)
    problem = _Problem(
        bytes=_padded([[option.bytes for option in row] for row in options], memory + 1, np.int64),
        risk=_padded([[option.risk for option in row] for row in options], math.inf, np.float64),
        score=_padded(scores, 0, np.int64),
        memory=memory,
        limit=risk * SLACK,
    )
    choice = problem.solve() if units else []
    chosen = tuple(row[c] for row, c in zip(options, choice, strict=True))
    return Plan(units=tuple(units), chosen=chosen, memory=memory, risk_budget=risk)


def _scores(options: list[list[Option]]) -> list[list[int]]:
    """Microseconds saved, with the preferences among equals below the unit digit."""
    count = len(options)
    stored = count * count + 1  # outweighs all places
    lossy = (count + 1) * (stored + count)  # outweighs all stored
    second = (count + 1) * lossy  # outweighs all of them

    def score(unit: int, option: Option) -> int:
        if option.action == Action.RECOMPUTE:
            return 0
        preference = stored + (count - 1 - unit) + (lossy if option.action == Action.COMPRESS else 0)
        return round(option.seconds * 1e6) * second - preference

    return [[score(unit, option) for option in row] for unit, row in enumerate(options)]


def _padded(rows: Sequence[Sequence[float]], fill: float, dtype: type) -> np.ndarray:
    width = max((len(row) for row in rows), default=0)
    return np.array([[*row, *[fill] * (width - len(row))] for row in rows], dtype=dtype)


@dataclass(frozen=True, kw_only=True)
class _Problem:
    """(U, A) costs and scores of every option; option 0 is R and costs nothing."""

    bytes: np.ndarray
    risk: np.ndarray
    score: np.ndarray
    memory: int
    limit: float

    def solve(self) -> list[int]:
        """(U,) index of the chosen option of each unit."""
        allowed = (self.bytes <= self.memory) & (self.risk <= self.limit)
        per_byte, per_risk, incumbent = self._multipliers(allowed)
        net = self._net(allowed, per_byte, per_risk)
        order = _clearest_first(net)
        after = np.append(
            np.cumsum(net.max(1)[order][::-1])[::-1], 0.0
        )  # (U+1,) the most that later units can add, net
        budget = per_byte * self.memory + (per_risk * self.limit if per_risk else 0.0)

        bytes_, risk, score = np.zeros(1, np.int64), np.zeros(1), np.zeros(1, np.int64)
        steps: list[tuple[np.ndarray, np.ndarray]] = []
        for place, unit in enumerate(order):
            columns = np.flatnonzero(allowed[unit])
            parent = np.repeat(np.arange(len(score)), len(columns))
            option = np.tile(columns, len(score))
            b = bytes_[parent] + self.bytes[unit, option]
            r = risk[parent] + self.risk[unit, option]
            s = score[parent] + self.score[unit, option]
            bound = s - per_byte * b - per_risk * r + after[place + 1] + budget
            kept = np.flatnonzero((b <= self.memory) & (r <= self.limit) & (bound * SLACK + 1 >= incumbent))
            kept = kept[_undominated(b[kept], r[kept], s[kept])]
            bytes_, risk, score = b[kept], r[kept], s[kept]
            steps.append((parent[kept], option[kept]))

        state, choice = int(score.argmax()), [0] * len(order)
        for unit, (parent, option) in zip(order[::-1], reversed(steps), strict=True):
            choice[unit] = int(option[state])
            state = int(parent[state])
        return choice

    def _net(self, allowed: np.ndarray, per_byte: float, per_risk: float) -> np.ndarray:
        cost = per_byte * self.bytes + (per_risk * np.where(allowed, self.risk, 0.0) if per_risk else 0.0)
        return np.where(allowed, self.score - cost, -math.inf)

    def _multipliers(self, allowed: np.ndarray) -> tuple[float, float, int]:
        """Prices of a byte and of a unit of risk that bound the score most tightly, and the best score met on the way.

        The bound is convex in the prices. For one price of risk the best price of a byte is found by bisection (the least
        at which what is spent fits); the price of risk itself by golden section over its logarithm.
        """
        best, chosen = 0, np.zeros(len(self.score), np.int64)
        rows = np.arange(len(self.score))

        def fits(per_byte: float, per_risk: float) -> bool:
            nonlocal best, chosen
            pick = self._net(allowed, per_byte, per_risk).argmax(1)
            b, r, s = (costs[rows, pick].sum() for costs in (self.bytes, self.risk, self.score))
            if b <= self.memory and r <= self.limit and s > best:
                best, chosen = int(s), pick
            return bool(b <= self.memory)

        steepest = float((np.where(allowed, self.score, 0) / np.maximum(self.bytes, 1)).max()) + 1.0

        def per_byte(per_risk: float) -> float:
            if fits(0.0, per_risk):
                return 0.0
            low, high = 0.0, steepest
            for _ in range(18):
                middle = (low + high) / 2
                low, high = (low, middle) if fits(middle, per_risk) else (middle, high)
            return high

        if math.isinf(self.limit) or not self.risk[allowed].any():
            return per_byte(0.0), 0.0, self._exchanged(allowed, chosen)

        def bound(exponent: float) -> float:
            per_risk = 2.0**exponent
            price = per_byte(per_risk)
            return price * self.memory + per_risk * self.limit + self._net(allowed, price, per_risk).max(1).sum()

        smallest = self.risk[allowed & (self.risk > 0)].min()
        high = math.log2(float(self.score.max() + 1)) - math.log2(smallest) + 1
        low = high - 30
        ratio = (math.sqrt(5) - 1) / 2
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        at_left, at_right = bound(left), bound(right)
        for _ in range(14):
            if at_left < at_right:
                high, right, at_right = right, left, at_left
                left = high - ratio * (high - low)
                at_left = bound(left)
            else:
                low, left, at_left = left, right, at_right
                right = low + ratio * (high - low)
                at_right = bound(right)
        per_risk = 2.0 ** (left if at_left < at_right else right)
        return per_byte(per_risk), per_risk, self._exchanged(allowed, chosen)

    def _exchanged(self, allowed: np.ndarray, pick: np.ndarray) -> int:
        """Score of a feasible choice after changing pairs of units for as long as that helps."""
        rows, pick = np.arange(len(pick)), pick.copy()
        while True:
            now = [costs[rows, pick] for costs in (self.bytes, self.risk, self.score)]
            left_b, left_r = self.memory - now[0].sum(), self.limit - now[1].sum()
            b = (self.bytes - now[0][:, None]).ravel()
            r = (np.where(allowed, self.risk, 0.0) - now[1][:, None]).ravel()
            s = (self.score - now[2][:, None]).ravel()
            s[~allowed.ravel()] = -(2**61)  # a sum of two stays within 64 bits
            unit = np.repeat(rows, self.score.shape[1])
            fits = (b[:, None] + b <= left_b) & (r[:, None] + r <= left_r) & (unit[:, None] != unit)
            gain = np.where(fits, s[:, None] + s, 0)
            first, second = np.unravel_index(gain.argmax(), gain.shape)
            if gain[first, second] <= 0:
                return int(now[2].sum())
            for place in (first, second):
                pick[unit[place]] = place % self.score.shape[1]


def _clearest_first(net: np.ndarray) -> np.ndarray:
    """(U,) order in which the choice is least in doubt first, so that few states survive until the doubtful ones."""
    if net.shape[1] < 2:
        return np.arange(len(net))
    two = np.partition(net, -2, axis=1)[:, -2:]
    return np.argsort(two[:, 0] - two[:, 1], kind="stable")


def _undominated(bytes_: np.ndarray, risk: np.ndarray, score: np.ndarray) -> np.ndarray:
    """Indices of states that no other matches at no more bytes and risk with at least the score."""
    order = np.lexsort((-score, risk, bytes_))
    if not risk.any():
        best = np.maximum.accumulate(score[order])
        return order[np.append(True, best[1:] > best[:-1])] if len(order) else order
    risks: list[float] = []  # a staircase: both ascending
    scores: list[int] = []
    kept = []
    for index, r, s in zip(order.tolist(), risk[order].tolist(), score[order].tolist(), strict=True):
        place = bisect_right(risks, r)
        if place and scores[place - 1] >= s:
            continue
        kept.append(index)
        end = place
        while end < len(scores) and scores[end] <= s:
            end += 1
        risks[place:end], scores[place:end] = [r], [s]
    return np.array(kept, dtype=np.int64)
