"""Plans: the solver against brute force, an integer programme and the paper's grid; its preferences, its speed, its table."""

from __future__ import annotations

import itertools
import math
import random
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from onetake.activations.plan import MIB, Action, Option, Plan, UnitOptions
from onetake.activations.solve import SLACK, solve

H, E, L, R = Action.STORE, Action.ELEMENTWISE, Action.COMPRESS, Action.RECOMPUTE


def options() -> st.SearchStrategy[Option]:
    """Costs from small ranges, so that ties and exact fits occur."""
    exact = st.builds(
        Option, action=st.sampled_from([H, E]), bytes=st.integers(0, 12), seconds=st.integers(-1, 6).map(float)
    )
    lossy = st.builds(
        Option,
        action=st.just(L),
        bytes=st.integers(0, 9),
        seconds=st.floats(0, 6),
        risk=st.integers(0, 8).map(lambda r: r / 8),
    )
    return exact | lossy


UNITS = st.lists(st.lists(options(), max_size=3).map(tuple), max_size=7).map(
    lambda rows: [UnitOptions(name=f"block {i}", options=row) for i, row in enumerate(rows)]
)


def preference(combination: tuple[Option, ...]) -> tuple[int, ...]:
    """What the docstring promises, most important first; the largest is best."""
    stored = [u for u, option in enumerate(combination) if option.action != R]
    microseconds = sum(round(option.seconds * 1e6) for option in combination)
    return microseconds, -sum(option.action == L for option in combination), -len(stored), sum(stored)


def best_by_hand(units: list[UnitOptions], memory: int, risk: float) -> tuple[int, ...]:
    useful = [[o for o in unit.all if o.seconds > 0 or o.action == R] for unit in units]
    return max(
        preference(combination)
        for combination in itertools.product(*useful)
        if sum(o.bytes for o in combination) <= memory and sum(o.risk for o in combination) <= risk * SLACK
    )


@given(units=UNITS, memory=st.integers(0, 50), risk=st.sampled_from([0.0, 0.25, 1.0, 2.5, math.inf]))
@settings(max_examples=300, deadline=None)
def test_optimal_against_brute_force(units, memory, risk):
    plan = solve(units, memory=memory, risk=risk)
    assert plan.bytes <= memory
    assert plan.risk <= risk * SLACK
    assert preference(plan.chosen) == best_by_hand(units, memory, risk)


def random_units(count: int, seed: int, *, equal: bool = False) -> list[UnitOptions]:
    """Shaped like decoder layers: H, E and L of one unit at falling bytes and time, with noise unless `equal`."""
    noise = random.Random(seed)

    def unit(index: int) -> UnitOptions:
        def about(value: float) -> float:
            return value * (1 if equal else noise.uniform(0.7, 1.3))

        rows = [
            Option(action=H, bytes=int(about(32e6)), seconds=about(0.020)),
            Option(action=E, bytes=int(about(18e6)), seconds=about(0.017)),
            Option(action=L, bytes=int(about(13e6)), seconds=about(0.015), risk=about(1e-4) ** 2),
        ]
        return UnitOptions(name=f"layers.{index}", options=tuple(rows))

    return [unit(index) for index in range(count)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("share", [0.1, 0.4, 0.8])
def test_optimal_against_an_integer_programme(seed, share):
    units = random_units(24, seed)
    memory, risk = int(share * 24 * 18e6), 8e-8
    plan = solve(units, memory=memory, risk=risk)
    flat = [option for unit in units for option in unit.all]
    member = np.repeat(np.eye(24), 4, axis=1)
    found = milp(
        -np.array([option.seconds for option in flat]) * 1e3,
        integrality=np.ones(len(flat)),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(member, 1, 1),
            LinearConstraint(np.array([option.bytes for option in flat])[None] / 1e6, ub=memory / 1e6),
            LinearConstraint(np.array([option.risk for option in flat])[None] * 1e8, ub=risk * 1e8),
        ],
        options={"mip_rel_gap": 0.0},
    )
    assert found.success
    assert plan.seconds * 1e3 == pytest.approx(-found.fun, abs=0.024)  # seconds count in whole µs, 24 units


def on_the_papers_grid(units: list[UnitOptions], memory: int, risk: float, cells: int) -> float:
    """Seconds of the best plan on a cells × cells grid of both budgets, costs rounded up (HiLoRe's reference)."""
    best = np.zeros((cells + 1, cells + 1))
    for unit in units:
        taken = best.copy()
        for option in unit.options:
            b, r = math.ceil(option.bytes / memory * cells), math.ceil(option.risk / risk * cells)
            if b <= cells and r <= cells:
                taken[b:, r:] = np.maximum(taken[b:, r:], best[: cells + 1 - b, : cells + 1 - r] + option.seconds)
        best = taken
    return float(best[-1, -1])


def test_beats_the_papers_grid_and_only_by_its_rounding():
    units = random_units(12, seed=0)
    memory, risk = int(6 * 18e6), 4e-8
    ours = solve(units, memory=memory, risk=risk).seconds
    grids = [on_the_papers_grid(units, memory, risk, cells) for cells in (32, 1024)]
    assert grids[0] < grids[1] <= ours + 1e-6
    assert ours - grids[1] < 0.01 * ours


@given(units=UNITS, low=st.integers(0, 40), more=st.integers(0, 20), risk=st.sampled_from([0.0, 0.5, 3.0]))
@settings(max_examples=100, deadline=None)
def test_more_budget_never_costs_time(units, low, more, risk):
    tight = solve(units, memory=low, risk=risk).seconds
    assert solve(units, memory=low + more, risk=risk).seconds >= tight - 1e-6
    assert solve(units, memory=low, risk=risk + more / 8).seconds >= tight - 1e-6


@pytest.mark.parametrize("risk", [math.inf, 1e-7])
@pytest.mark.parametrize("equal", [True, False], ids=["equal units", "all different"])
def test_36_units_in_50_milliseconds(equal, risk):
    times = []
    for share in (0.1, 0.3, 0.6, 0.9):
        units = random_units(36, seed=1, equal=equal)
        started = time.process_time()
        solve(units, memory=int(share * 36 * 32e6), risk=risk)
        times.append(time.process_time() - started)
    assert sorted(times)[len(times) // 2] <= 0.05


def test_ties_recompute_first_then_exact_then_late_units():
    same = (Option(action=L, bytes=1, seconds=1.0), Option(action=E, bytes=1, seconds=1.0))
    useless = (Option(action=H, bytes=0, seconds=0.0),)
    units = [UnitOptions(name=n, options=o) for n, o in [("a", same), ("b", same), ("c", useless), ("d", same)]]
    assert solve(units, memory=2, risk=1.0).actions == (R, E, R, E)


def test_refuses_budgets_that_nothing_fits():
    with pytest.raises(ValueError, match=r"5\.0 MiB below the peak of recomputing every unit; raise it by that much"):
        solve([], memory=-5 * MIB)
    with pytest.raises(ValueError, match="0 allows exact actions only"):
        solve([], memory=0, risk=-1.0)
    with pytest.raises(ValueError, match="must not be negative"):
        Option(action=H, bytes=-1)


def test_the_table_says_what_stands_in_the_way():
    wide = Option(action=H, bytes=3 * MIB, seconds=0.03)
    tail = Option(action=E, bytes=2 * MIB, seconds=0.02)
    code = Option(action=L, bytes=MIB, seconds=0.025, risk=0.5)
    units = [UnitOptions(name="first", options=(tail, code)), UnitOptions(name="second", options=(wide, tail))]
    plan = solve(units, memory=5 * MIB, risk=0.25)
    lines = plan.table().splitlines()
    assert lines[1].split(maxsplit=4) == ["first", "E", "2.0", "20.0", "L adds risk 5.0e-01, 2.5e-01 left"]
    assert lines[2].split(maxsplit=4) == ["second", "H", "3.0", "30.0", "saves most"]
    assert lines[3].split() == ["total", "5.0", "50.0", "of", "5.0", "MiB"]
    tight = solve(units, memory=2 * MIB)
    assert isinstance(tight, Plan)
    assert tight.actions == (L, R)
    assert "total" in tight.table()
    assert tight.reason(1) == "H needs 3.0 MiB more, 1.0 MiB left"
