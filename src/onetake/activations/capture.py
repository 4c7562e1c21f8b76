"""What a unit keeps for its backward, on top of torch's non-reentrant checkpointing.

`torch.utils.checkpoint` enters the context we hand it above its own saved-tensor hooks. There we lay a second pair over
them: packing calls checkpoint's pack *and* notes the tensor in a slot; unpacking reads the slot if it is filled, and else
checkpoint's unpack, which replays the unit once. H fills every slot, R none, E, A, P and L those of a template (`trace`).
Replay, random state, autocast, early stop and the comparison of what a replay saved all stay torch's.

State lives on the slots, which the graph owns: when the graph dies, also in an aborted backward, so does all of it.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

from onetake.activations.codecs import Fp8, encode
from onetake.activations.plan import Action
from onetake.activations.trace import NOTHING, Follower, Held, Made, Template, Tracer, storage_key, template

log = logging.getLogger(__name__)

_private: Any = torch._C
_top_hooks: Callable[[bool], Any] | None = getattr(_private._autograd, "_top_saved_tensors_default_hooks", None)
"""The package's one use of torch's private interface for hooks."""


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
    region: weakref.ref[Region] | None = field(default=None, repr=False)

    @contextmanager
    def replaying(self) -> Iterator[None]:
        self.replays += 1
        yield


Choose = Callable[[Unit, Tensor], Action]
"""What to do with a unit, given the first tensor it is called with."""


Templates = dict[Any, Template]
"""What was recorded, by action, kind of unit and shape."""


Weigh = Callable[[Unit, Tensor, bool], bool]
"""Called with a unit, the gradient that arrives at its output and whether it compressed: whether that may be read."""


class Capture:
    """Runs units under the actions that `choose` names. Attach it to a model with `attach.Attachment`."""

    def __init__(self, choose: Choose, templates: Templates | None = None) -> None:
        self.choose = choose
        self.templates = {} if templates is None else templates
        self.weigh: Weigh | None = None  # what was compressed is read at once without it
        self.probe: Callable[[Unit, Any, Callable[..., Any], tuple[Any, ...]], None] | None = None
        self._told: set[str] = set()

    def run(self, unit: Unit, checkpoint: Callable[..., Any], function: Callable[..., Any], *args: Any) -> Any:
        """`function(*args)` of one unit under `checkpoint`, which must be torch's non-reentrant one or call it."""
        if torch.compiler.is_compiling():
            _refuse_compilation(unit.name)  # pyright: ignore[reportArgumentType]
        if not torch.is_grad_enabled():
            return function(*args)
        arguments = tree_leaves((args, function.keywords if isinstance(function, partial) else {}))
        first = next(leaf for leaf in arguments if isinstance(leaf, Tensor))
        unit.forwards += 1
        unit.executed, unit.captured, unit.region = self.choose(unit, first), 0, None
        if self.probe is not None:
            self.probe(unit, _kind(unit, _named_tensors(unit.module), arguments, first.device.type), function, args)
        if unit.executed == Action.RECOMPUTE:
            forward = nullcontext()
        else:
            region = Region(self, unit, first)
            unit.region = weakref.ref(region)
            forward = region.forward(arguments)
        output = checkpoint(function, *args, use_reentrant=False, context_fn=lambda: (forward, unit.replaying()))
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

    def tell_once(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            log.warning(message)


class Slot:
    """One saved tensor: what checkpoint packed, and perhaps the tensor itself or who makes it again."""

    __slots__ = ("__weakref__", "below", "kept", "made", "region", "version")

    def __init__(self, below: Any, region: Region, version: int, kept: Tensor | None, made: Made | None) -> None:
        self.below = below
        self.region = region
        self.version = version
        self.kept = kept
        self.made = made

    def read(self, unpack: Callable[[Any], Tensor]) -> Tensor:
        if self.kept is not None:
            if self.kept._version != self.version:
                raise self.region.changed(f"a saved {tuple(self.kept.shape)} tensor")
            return self.kept
        if self.made is not None and self.region.accepted:
            return self.region.make(self.made)
        return unpack(self.below)


class Region:
    """One forward of a unit under any action but R: notes what autograd saves, keeps its part, and gives all of it back.

    Held by its slots alone, and holds them weakly.
    """

    def __init__(self, capture: Capture, unit: Unit, first: Tensor) -> None:
        self.capture = capture
        self.unit = unit
        self.lossy = unit.executed == Action.COMPRESS
        self.accepted = not (self.lossy and capture.weigh is not None)
        self.device, self.shape = first.device.type, first.shape
        self.slots: list[weakref.ref[Slot]] = []
        self.template = NOTHING
        self.held = Held()
        self.versions: dict[Made, int] = {}  # of leaves
        self.codes: dict[Made, Fp8] = {}  # of others
        self.memo: dict[Made, Tensor] = {}
        self.left: dict[Made, int] = {}  # how often a memo will still be read

    @contextmanager
    def forward(self, arguments: list[Any]) -> Iterator[None]:
        """Entered by checkpoint above its own hooks."""
        pack, unpack = _hooks_below()
        slots: list[Slot] = []
        named = _named_tensors(self.unit.module)
        free = {storage_key(t) for t in (*(t for _, t in named), *arguments) if isinstance(t, Tensor)}
        key = mode = None
        if self.unit.executed != Action.STORE:
            key = self.unit.executed, _kind(self.unit, named, arguments, self.device)
            known = self.capture.templates.get(key)
            mode = Tracer() if known is None else Follower(known)
        again = mode.template.again if isinstance(mode, Follower) else {}

        def note(tensor: Tensor) -> Slot:
            made = again.get(len(slots))
            slots.append(Slot(pack(tensor), self, tensor._version, tensor if made is None else None, made))
            return slots[-1]

        try:
            with torch.autograd.graph.saved_tensors_hooks(note, partial(_read, unpack)), mode or nullcontext():
                yield
            self.slots = [weakref.ref(slot) for slot in slots]
            if isinstance(mode, Follower) and not (mode.arrived() and len(slots) == mode.template.saved):
                self._give_up()
            else:
                with torch.no_grad():
                    if isinstance(mode, Tracer):
                        self.capture.templates[key] = self._record(mode, slots)
                    elif isinstance(mode, Follower):
                        self._keep(mode.held, mode.template)
                    self.unit.captured = self._settle(slots, free)
        finally:  # autograd holds on to `note`, and so to these, for as long as the graph lives
            slots.clear()

    def _give_up(self) -> None:
        self.drop()
        self.capture.tell_once(
            f"{self.unit.name} ran other operations than before on the same shapes; such forwards are recomputed (R)"
        )

    def _record(self, mode: Tracer, slots: list[Slot]) -> Template:
        widths: set[int] = set()
        if self.unit.executed == Action.COMPRESS:
            weights = [tensor.shape for _, tensor in _named_tensors(self.unit.module) if tensor.ndim == 2]
            widths = {size for shape in weights for size in shape if size > self.shape[-1]}
        saved = [slot.kept for slot in slots if slot.kept is not None]
        found = template(mode.calls, saved, self.unit.executed, widths=widths, tokens=self.shape[:-1].numel())
        for place, made in found.again.items():
            slots[place].kept, slots[place].made = None, made
        self._keep(mode.held(found), found)
        return found

    def _keep(self, held: Held, template: Template) -> None:
        """Leaves as codes or with their versions."""
        for made in template.wide & held.leaves.keys():
            code = encode(held.leaves[made])
            if code is None:
                self.capture.tell_once(
                    f"{self.unit.name} made values that are not finite; such tensors are kept as they are"
                )
            else:
                self.codes[made] = code
                del held.leaves[made]
        held.leaves = {made: _without_graph(leaf) for made, leaf in held.leaves.items()}
        self.versions = {made: leaf._version for made, leaf in held.leaves.items()}
        self.template, self.held, self.left = template, held, template.reads.copy()

    def _settle(self, slots: list[Slot], free: set[int]) -> int:
        """Let what is kept not keep itself alive. How many bytes that is, beside blocks of memory that are free."""
        kept = [*self.held.leaves.values()]
        for slot in slots:
            if slot.kept is not None:
                slot.kept = _without_graph(slot.kept)
                kept.append(slot.kept)
        blocks = {block._cdata: block for block in (tensor.untyped_storage() for tensor in kept)}
        codes = sum(code.nbytes for code in self.codes.values())
        return sum(block.nbytes() for key, block in blocks.items() if key not in free) + codes

    def make(self, made: Made) -> Tensor:
        """The tensor again. What others are made of, too, is remembered until the last of them was.

        After a backward of a part of the graph, reads of the next are miscounted: what was let go of too early is made once more.
        """
        if torch.is_grad_enabled() or torch.is_autocast_enabled(self.device):  # not as in most backwards
            with torch.no_grad(), torch.autocast(self.device, enabled=False):
                return self._value(made)
        return self._value(made)

    def _value(self, made: Made) -> Tensor:
        value = self.memo.get(made)
        if value is None:
            leaf = self.held.leaves.get(made)
            if leaf is not None:
                if leaf._version != self.versions[made]:
                    raise self.changed(f"a kept {tuple(leaf.shape)} tensor")
                return leaf
            self._remember(made)
            value = self.memo[made]
        self.left[made] -= 1
        if not self.left[made]:
            del self.memo[made]
            self.left[made] = self.template.reads[made]  # for another backward of a retained graph
        return value

    def _remember(self, made: Made) -> None:
        if made in self.codes:
            self.memo[made] = self.codes[made].decode()
            return
        for op in self._missing(made):
            step, again = self.template.steps[op], self.held.calls[op]
            for tensor, version in again.beside:
                if tensor._version != version:
                    raise self.changed(f"an input of {step.func}")
            outs = again.run(step, self._value)
            for out in step.outs:
                self.memo[out] = outs[out.place]

    def _missing(self, made: Made) -> list[int]:
        """The operations to run for it, in order."""
        ops: set[int] = set()
        open_ = [made]
        while open_:
            wanted = open_.pop()
            if wanted.op not in ops and wanted not in self.memo:
                ops.add(wanted.op)
                open_ += self.template.steps[wanted.op].follows
        return sorted(ops)

    def drop(self) -> None:
        """Free all that was kept: backward replays the unit."""
        self.unit.executed, self.unit.captured = Action.RECOMPUTE, 0
        for reference in self.slots:
            slot = reference()
            if slot is not None:
                slot.kept = slot.made = None
        self.held, self.codes, self.memo = Held(), {}, {}

    def changed(self, what: str) -> CaptureError:
        return CaptureError(
            f"{self.unit.name}: {what} was changed in place between forward and backward. Let the change make a new tensor, or "
            f"run it after backward; action R does not help where the change is of the unit's input"
        )


@torch.compiler.disable
def _refuse_compilation(name: str) -> None:
    """Not to be traced: what the compiler cannot trace it runs, while an error that it meets in tracing only makes it stop."""
    raise CaptureError(
        f"{name} is being compiled together with its recovery; torch.compile must stay inside units: compile each block's "
        "attention or MLP instead of the model, or train without recovery"
    )


def _read(unpack: Callable[[Any], Tensor], slot: Slot) -> Tensor:
    return slot.read(unpack)


def _without_graph(tensor: Tensor) -> Tensor:
    """An output that held itself would never die."""
    return tensor if tensor.is_leaf else tensor.detach()  # not `grad_fn`, which would make an object of every node


def _named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Its parameters and buffers. Torch's own iterators take ten times as long, which every forward would pay."""
    modules: list[tuple[str, nn.Module]] = [("", module)]
    found: list[tuple[str, Tensor]] = []
    for path, inner in modules:  # which grows meanwhile
        modules += [(f"{path}.{name}", child) for name, child in inner._modules.items() if child is not None]
        tensors = (*inner._parameters.items(), *inner._buffers.items())
        found += [(f"{path}.{name}", tensor) for name, tensor in tensors if tensor is not None]
    return found


def _kind(unit: Unit, named: list[tuple[str, Tensor]], arguments: list[Any], device: str) -> Any:
    """Equal for forwards that run the same operations, as far as can be told beforehand."""

    def sign(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad
        return leaf if isinstance(leaf, (bool, int, float, str)) else type(leaf)

    inner = tuple((name, t.shape, t.dtype, t.requires_grad) for name, t in named)
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return type(unit.module), unit.module.training, autocast, inner, tuple(map(sign, arguments))


def _hooks_below() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """Checkpoint's own pack and unpack."""
    hooks = _top_hooks and _top_hooks(False)
    if not hooks or not hooks[0].__qualname__.startswith("_checkpoint_hook."):
        raise CaptureError(
            f"torch {torch.__version__} keeps checkpoint's hooks where recovery cannot find them (2.11 to 2.15 are known to "
            "work); use one of those, or the actions R only"
        )
    return hooks
