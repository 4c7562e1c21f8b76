"""What a model's regions know of it: its units, and what was recorded of them."""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from onetake.activations.plan import Action
from onetake.activations.trace import Template

log = logging.getLogger(__name__)


class CaptureError(RuntimeError):
    """What was kept cannot give the right gradient; the message names the unit and the way out."""


@dataclass(eq=False, kw_only=True)
class Unit:
    """A block whose saved state shares one fate, and what happened to it so far."""

    name: str
    module: nn.Module
    forwards: int = 0
    replays: int = 0
    executed: Action = Action.RECOMPUTE  # by the latest forward, after what it had to fall back to
    captured: int = 0  # bytes kept by the latest forward, beyond inputs and parameters
    sampled: int = 0  # and of values that backward compares
    region: weakref.ref[Any] | None = field(default=None, repr=False)  # of the latest forward, if it kept anything
    changes: str | None = (
        None  # what its forward changes beside its result, in words; None if that was not surveyed yet
    )

    def __enter__(self) -> None:
        """Around a replay, of which a graph that is kept for several backwards has several."""
        self.replays += 1

    def __exit__(self, *of_error: object) -> None:
        pass


Templates = dict[Any, Template | None]
"""What was recorded, by action, kind of unit and shape; None where that cannot be followed."""


class Known:
    """What regions of a model tell each other: templates, units that have some of their own, and what the log has said."""

    def __init__(self, templates: Templates | None = None) -> None:
        self.templates = {} if templates is None else templates
        self.apart: set[Any] = set()  # units with templates of their own, with the key that they share with others
        self._told: set[str] = set()

    def tell_once(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            log.warning(message)


def named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Its parameters and buffers. Torch's own iterators take ten times as long, which every forward would pay."""
    modules: list[tuple[str, nn.Module]] = [("", module)]
    found: list[tuple[str, Tensor]] = []
    for path, inner in modules:  # which grows meanwhile
        modules += [(f"{path}.{name}", child) for name, child in inner._modules.items() if child is not None]
        tensors = (*inner._parameters.items(), *inner._buffers.items())
        found += [(f"{path}.{name}", tensor) for name, tensor in tensors if tensor is not None]
    return found


def kind(unit: Unit, named: list[tuple[str, Tensor]], arguments: list[Any], device: str) -> Any:
    """Equal for forwards that run the same operations, as far as can be told beforehand."""

    def sign(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad
        return leaf if isinstance(leaf, (bool, int, float, str)) else type(leaf)

    inner = tuple((name, t.shape, t.dtype, t.requires_grad) for name, t in named)
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return type(unit.module), unit.module.training, autocast, inner, tuple(map(sign, arguments))
