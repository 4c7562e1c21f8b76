"""Every action on a model's units against recomputing them: gradients bit for bit, replays, and what loss of precision costs."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from onetake.activations.calibrate import gradient
from onetake.activations.lossy import norm
from onetake.activations.measure import now
from onetake.activations.plan import EXACT, MIB, Action
from onetake.activations.recovery import Recovery
from onetake.activations.units import CaptureError

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ActionRow:
    """An action on all units, or on one alone and R on the others, against the gradient that R gives; seconds as `measure.now`."""

    action: Action
    units: str
    relative_l2: float  # infinite where recovery refused what was made again
    seconds: float
    replays: int
    kept_mib: float

    @property
    def failed(self) -> bool:
        """Whether an exact action gave another gradient."""
        return self.action in EXACT and self.relative_l2 != 0


def compare(recovery: Recovery, run: Callable[[], object], name: str = "") -> list[ActionRow]:
    """R, P, A, E and H on all units, then L on each alone; empty if the gradient is zero, as where the model does not run.

    `run` does a forward and its backward; `name` is put before the units'. Trained weights that are zero are random meanwhile:
    until the B of a LoRA moves its A has no gradient, so what backward reads for it would not be compared. Gradients are left
    cleared.
    """
    everything = [dict.fromkeys((unit.name for unit in recovery.units), action) for action in reversed(EXACT)]
    alone = [{unit.name: Action.COMPRESS} for unit in recovery.units]
    with _nowhere_zero(recovery.model):
        exact = gradient(recovery, run, {})
        if not norm(exact):
            return []
        for actions in everything:
            _gradient(recovery, run, actions)  # a first forward records what an action keeps; L keeps what E does
        return [_row(recovery, run, name, actions, exact) for actions in everything + alone]


def _row(
    recovery: Recovery, run: Callable[[], object], name: str, actions: dict[str, Action], exact: list[Tensor]
) -> ActionRow:
    replays, start = sum(unit.replays for unit in recovery.units), now(recovery.device)
    found = _gradient(recovery, run, actions)
    seconds = now(recovery.device) - start
    which = "all" if len(actions) == len(recovery.units) else next(iter(actions))
    return ActionRow(
        action=next(iter(actions.values())),
        units=f"{name} {which}".strip(),
        relative_l2=math.inf
        if found is None
        else norm([a - b for a, b in zip(found, exact, strict=True)]) / norm(exact),
        seconds=seconds,
        replays=sum(unit.replays for unit in recovery.units) - replays,
        kept_mib=sum(unit.captured for unit in recovery.units) / MIB,
    )


def _gradient(recovery: Recovery, run: Callable[[], object], actions: dict[str, Action]) -> list[Tensor] | None:
    """None where recovery itself refuses what it made again, which goes to the log."""
    try:
        return gradient(recovery, run, actions)
    except CaptureError as error:
        log.warning("%s", error)
        return None


@contextmanager
def _nowhere_zero(model: nn.Module) -> Iterator[None]:
    zero = [p for p in model.parameters() if p.requires_grad and not p.any()]
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        for parameter in zero:
            parameter.normal_(std=0.01)
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter in zero:
                parameter.zero_()
