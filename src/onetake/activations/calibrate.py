"""How strongly a unit's loss of precision reaches the gradient: κ, measured one unit at a time on training micro-batches.

For micro-batch i the gradient is taken twice, exactly and with one unit under L; a unit's κ is the slope through the origin of
‖Δg‖/‖g‖ on s/‖g‖, by least squares over its micro-batches, s the unit's signal (`lossy`). HiLoRe (arXiv 2609.33570, with 16
micro-batches in all) has one κ for all units of a kind; but errors grow with depth. So every unit has its own here, and those that
no micro-batch was left for lie between their neighbours. The paper's reconstruction error ē is part of κ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from onetake.activations.lossy import norm
from onetake.activations.plan import Action
from onetake.activations.steps import Steps

MICRO_BATCHES = 16  # the paper's

Run = Callable[[], None]
"""Forward and backward of one micro-batch, and ``recovery.watch(log_probs)`` in between if risk goes by coefficients."""


@dataclass(frozen=True, kw_only=True)
class Intervention:
    """Some units under L on one micro-batch."""

    signals: dict[str, float]  # of these units, relative to the gradient's norm
    error: float  # relative L2 error of the gradient


def intervene(recovery: Steps, run: Run, actions: dict[str, Action]) -> Intervention:
    """The error that `actions` on some units put into the gradient of one micro-batch; the others run under R.

    Without a gradient, as of dead groups, signals and error are 0.
    """
    exact = gradient(recovery, run, {})
    signals, size = recovery.require_lossy().signals, norm(exact)
    if not size:
        return Intervention(signals=dict.fromkeys(actions, 0.0), error=0.0)
    error = norm([a - b for a, b in zip(gradient(recovery, run, actions), exact, strict=True)])
    return Intervention(signals={name: signals[name] / size for name in actions}, error=error / size)


class Calibration:
    """Fills in a recovery's sensitivities after one intervention on each of `micro_batches`, units taken in an even stride."""

    def __init__(self, recovery: Steps, micro_batches: int = MICRO_BATCHES) -> None:
        names, few = [unit.name for unit in recovery.units], micro_batches < len(recovery.units)
        self._left = [names[i * len(names) // micro_batches if few else i % len(names)] for i in range(micro_batches)]
        self._recovery = recovery
        self.found: dict[str, list[Intervention]] = {}  # by unit

    @property
    def done(self) -> bool:
        return not self._left

    def add(self, run: Run) -> None:
        """Raises ValueError if it was the last, and none that tried a kind of unit had a gradient."""
        unit = self._left.pop(0)
        self.found.setdefault(unit, []).append(intervene(self._recovery, run, {unit: Action.COMPRESS}))
        if self.done:
            self._finish()

    def _finish(self) -> None:
        kinds: dict[type, list[str]] = {}
        for unit in self._recovery.units:
            kinds.setdefault(type(unit.module), []).append(unit.name)
        sensitivity: dict[str, float] = {}
        for kind, names in kinds.items():
            sensitivity |= _along(kind.__name__, names, self.found)
        self._recovery.learn_sensitivity(sensitivity)


def calibrate(recovery: Steps, runs: Sequence[Run]) -> list[Intervention]:
    """A whole calibration, a micro-batch a run. Raises ValueError as `Calibration.add` does."""
    calibration = Calibration(recovery, len(runs))
    for run in runs:
        calibration.add(run)
    return [intervention for found in calibration.found.values() for intervention in found]


def _along(kind: str, names: list[str], found: dict[str, list[Intervention]]) -> dict[str, float]:
    """κ of units of one kind, in order; nothing if none of them was tried."""
    points = {
        place: [(i.signals[name], i.error) for i in found[name]] for place, name in enumerate(names) if name in found
    }
    live = {place: slope(seen) for place, seen in points.items() if any(signal for signal, _ in seen)}
    if points and not live:
        raise ValueError(
            f"calibrate: all {sum(map(len, points.values()))} micro-batches that tried a {kind} had a zero gradient, which tells "
            "nothing of its sensitivity; use micro-batches whose groups are not all dead"
        )
    if not live:
        return {}
    between = np.interp(range(len(names)), list(live), list(live.values()))
    return dict(zip(names, map(float, between), strict=True))


def slope(points: Sequence[tuple[float, float]]) -> float:
    """κ of error = κ · signal, through the origin, by least squares; 0 without a signal."""
    square = sum(x * x for x, _ in points)
    return sum(x * y for x, y in points) / square if square else 0.0


def gradient(recovery: Steps, run: Callable[[], object], actions: dict[str, Action]) -> list[Tensor]:
    """Of all trainable parameters of the model, zero where `run` gives none; drawn from the same random state.

    `run` does a forward and its backward, with `actions` on some units and R on the others. What gradients were there stay.
    """
    parameters = [p for p in recovery.model.parameters() if p.requires_grad]
    before = [p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        with torch.random.fork_rng(), recovery.forced(actions):
            run()
        return [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    finally:
        for parameter, kept in zip(parameters, before, strict=True):
            parameter.grad = kept
