"""What a unit keeps for its backward, on top of torch's non-reentrant checkpointing.

`torch.utils.checkpoint` enters the context we hand it above its own saved-tensor hooks, and there a `Region` lays a second pair
over them. H keeps every saved tensor, R none, E, A, P and L those of a template (`template`). Replay, random state, autocast,
early stop and the comparison of what a replay saved all stay torch's.

A unit's first forward is surveyed (`state`): if it changes anything but its result, it is never run again, neither to be
measured nor in backward, but stored.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

from onetake.activations.plan import Action
from onetake.activations.region import Region
from onetake.activations.state import Survey
from onetake.activations.units import CaptureError, Known, Templates, Unit, kind, named_tensors
from onetake.parallel.shard import FSDPModule

Choose = Callable[[Unit, Tensor], Action]
"""What to do with a unit, given the first tensor it is called with."""


Weigh = Callable[[Unit, Tensor, bool], bool]
"""Called with a unit, the gradient that arrives at its output and whether it compressed: whether that may be read."""


class Measure(Protocol):
    """Called after a unit's forward, to measure it; with no function if it must not run again."""

    def __call__(self, unit: Unit, kind: Any, function: Callable[..., Any] | None, args: tuple[Any, ...]) -> None: ...


class Capture:
    """Runs units under the actions that `choose` names. Attach it to a model with `attach.Attachment`."""

    def __init__(self, choose: Choose, templates: Templates | None = None) -> None:
        self.choose = choose
        self.known = Known(templates)
        self.weigh: Weigh | None = None  # what was compressed is read at once without it
        self.probe: Measure | None = None

    def run(self, unit: Unit, checkpoint: Callable[..., Any], function: Callable[..., Any], *args: Any) -> Any:
        """`function(*args)` of one unit under `checkpoint`, which must be torch's non-reentrant one or call it.

        Raises CaptureError if the unit would have to run again though its forward changes more than its result.
        """
        if torch.compiler.is_compiling():
            _refuse_compilation(unit.name)  # pyright: ignore[reportArgumentType]
        if not torch.is_grad_enabled():
            return function(*args)
        given = args, function.keywords if isinstance(function, partial) else {}
        arguments = tree_leaves(given)
        first = next(leaf for leaf in arguments if isinstance(leaf, Tensor))
        unit.forwards += 1
        action = self.choose(unit, first)
        unit.executed, unit.captured, unit.sampled = (Action.STORE if unit.changes else action), 0, 0
        region = Region(self.known, unit, first, _survey(unit, given), judged=self.weigh is not None)
        unit.region = weakref.ref(region)
        forward = region.forward(arguments)
        del region  # its slots hold it
        output = checkpoint(function, *args, use_reentrant=False, context_fn=lambda: (forward, unit))
        if unit.executed == Action.RECOMPUTE:
            unit.region = None
        if self.probe is not None:
            key = kind(unit, named_tensors(unit.module), arguments, first.device.type)
            self.probe(unit, key, None if unit.changes else function, args)
        if self.weigh is not None:
            leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
            streams = [leaf for leaf in leaves if leaf.ndim > 1]  # no losses of the block's own
            register_multi_grad_hook(streams, partial(self._arrive, unit, unit.region), mode="any")
        return output

    def _arrive(self, unit: Unit, reference: weakref.ref[Region] | None, gradient: Tensor) -> None:
        region = reference() if reference is not None else None
        assert self.weigh is not None
        if region is None or not region.lossy:
            self.weigh(unit, gradient, False)
        elif self.weigh(unit, gradient, True):
            region.accepted = True
        else:
            region.drop()


def _survey(unit: Unit, given: tuple[Any, ...]) -> Survey | None:
    """Of a unit's first forward. FSDP's hooks move weights in and out inside of it, which is no state of the block."""
    if unit.changes is None and any(isinstance(module, FSDPModule) for module in unit.module.modules()):
        unit.changes = ""
    return Survey(unit.module, given) if unit.changes is None else None


@torch.compiler.disable
def _refuse_compilation(name: str) -> None:
    """Not to be traced: what the compiler cannot trace it runs, while an error that it meets in tracing only makes it stop."""
    raise CaptureError(
        f"{name} is being compiled together with its recovery; torch.compile must stay inside units: compile each block's "
        "attention or MLP instead of the model, or train without recovery"
    )
