"""How strongly a unit's loss of precision reaches the gradient: κ, measured one unit at a time on training micro-batches.

For micro-batch i the gradient is taken twice, exactly and with one unit under L; κ is the slope through the origin of
‖Δg‖/‖g‖ on E/‖g‖, by least squares over the micro-batches of one kind of unit (HiLoRe, arXiv 2609.33570, takes 16 in all). The
paper's reconstruction error ē is part of κ here: units of one kind have the same codec.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onetake.activations.lossy import norm
from onetake.activations.plan import Action
from onetake.activations.recovery import Recovery


@dataclass(frozen=True, kw_only=True)
class Intervention:
    """One unit under L on one micro-batch."""

    unit: str
    exposure: float  # relative to the gradient's norm
    error: float  # relative L2 error of the gradient


def intervene(recovery: Recovery, run: Callable[[], None], actions: dict[str, Action]) -> Intervention:
    """The error that `actions` on some units put into the gradient of one micro-batch; the others run under R.

    `run` does the forward, hands the log-probs to ``recovery.watch``, and does the backward. Gradients are left cleared. Without a
    gradient, as of dead groups, exposure and error are 0.
    """
    exact = gradient(recovery, run, {})
    exposure, size = recovery.require_lossy().exposure, norm(exact)
    if not size:
        return Intervention(unit=" ".join(actions), exposure=0.0, error=0.0)
    lossy = gradient(recovery, run, actions)
    error = norm([a - b for a, b in zip(lossy, exact, strict=True)])
    return Intervention(unit=" ".join(actions), exposure=exposure / size, error=error / size)


def calibrate(recovery: Recovery, runs: Sequence[Callable[[], None]]) -> list[Intervention]:
    """Fill in the recovery's sensitivities from one intervention per run, units taken in an even stride.

    Raises ValueError if none of the runs that tried a kind of unit had a gradient.
    """
    units = recovery.units
    kinds: dict[Any, list[Intervention]] = {}
    for index, run in enumerate(runs):
        unit = units[index * len(units) // len(runs) if len(runs) < len(units) else index % len(units)]
        found = intervene(recovery, run, {unit.name: Action.COMPRESS})
        kinds.setdefault(type(unit.module), []).append(found)
    for kind, found in kinds.items():
        if not any(intervention.exposure for intervention in found):
            raise ValueError(
                f"calibrate: all {len(found)} micro-batches that tried a {kind.__name__} had a zero gradient, which tells nothing "
                "of its sensitivity; use micro-batches whose groups are not all dead"
            )
    slopes = {kind: slope([(i.exposure, i.error) for i in found]) for kind, found in kinds.items()}
    recovery.learn_sensitivity({u.name: slopes[type(u.module)] for u in units if type(u.module) in slopes})
    return [intervention for found in kinds.values() for intervention in found]


def slope(points: Sequence[tuple[float, float]]) -> float:
    """κ of error = κ · exposure, through the origin, by least squares; 0 without exposure."""
    square = sum(x * x for x, _ in points)
    return sum(x * y for x, y in points) / square if square else 0.0


def gradient(recovery: Recovery, run: Callable[[], object], actions: dict[str, Action]) -> list[Tensor]:
    """Of all trainable parameters of the model, zero where `run` gives none; drawn from the same random state. Left cleared.

    `run` does a forward and its backward, with `actions` on some units and R on the others.
    """
    parameters = [p for p in recovery.model.parameters() if p.requires_grad]
    for parameter in parameters:
        parameter.grad = None
    with torch.random.fork_rng(), recovery.forced(actions):
        run()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    return gradients
