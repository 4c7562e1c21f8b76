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
from collections import Counter
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
from onetake.activations.trace import Follower, Held, Made, Template, Tracer, storage_key, template

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
        arguments = (args, function.keywords if isinstance(function, partial) else {})
        tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
        unit.forwards += 1
        unit.executed, unit.captured, unit.region = self.choose(unit, tensors[0]), 0, None
        if self.probe is not None:
            self.probe(unit, _kind(unit, arguments, tensors[0].device.type), function, args)
        if unit.executed == Action.RECOMPUTE:
            forward = nullcontext()
        else:
            region = Region(self, unit, arguments, tensors)
            unit.region = weakref.ref(region)
            forward = region.forward()
        output = checkpoint(function, *args, use_reentrant=False, context_fn=lambda: (forward, unit.replaying()))
        if self.weigh is not None:
            made = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
            register_multi_grad_hook(made, partial(self._arrive, unit, unit.region), mode="any")
        return output

    def _arrive(self, unit: Unit, reference: weakref.ref[Region] | None, gradient: Tensor) -> None:
        region = reference() if reference is not None else None
        held = region is not None and region.lossy
        assert self.weigh is not None
        accepted = self.weigh(unit, gradient, held)
        if region is not None and held:
            region.settle(accepted)

    def tell_once(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            log.warning(message)


class Slot:
    """One saved tensor: what checkpoint packed, and perhaps the tensor itself or who makes it again."""

    __slots__ = ("__weakref__", "below", "kept", "made", "region", "version")

    def __init__(self, below: Any, region: Region, version: int) -> None:
        self.below = below
        self.region = region
        self.version = version
        self.kept: Tensor | None = None
        self.made: Made | None = None

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

    def __init__(self, capture: Capture, unit: Unit, arguments: Any, tensors: list[Tensor]) -> None:
        self.capture = capture
        self.unit = unit
        self.lossy = unit.executed == Action.COMPRESS
        self.accepted = not (self.lossy and capture.weigh is not None)
        owned = [*unit.module.parameters(), *unit.module.buffers()]
        self.free = {storage_key(tensor) for tensor in (*owned, *tensors)}
        self.tokens, width = tensors[0].numel() // tensors[0].shape[-1], tensors[0].shape[-1]
        self.widths = {size for p in owned if p.ndim == 2 for size in p.shape if size > width}
        self.action = Action.ELEMENTWISE if self.lossy else unit.executed
        self.key = None
        if self.action != Action.STORE:
            self.key = self.action, _kind(unit, arguments, tensors[0].device.type)
        self.device = tensors[0].device.type
        self.slots: list[weakref.ref[Slot]] = []
        self.held = Held()
        self.versions: dict[Made, int] = {}
        self.codes: dict[Made, Fp8] = {}
        self.memo: dict[int | Made, list[Any]] = {}  # by operation, or by leaf that was decoded
        self.uses: Counter[int | Made] = Counter()  # how often a memo is read in one backward
        self.left: Counter[int | Made] = Counter()  # how often it will still be

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Entered by checkpoint above its own hooks."""
        pack, unpack = _hooks_below()
        slots: list[Slot] = []
        tensors: list[Tensor | None] = []
        mode = self._mode()
        lazily = _again(mode.template, self.lossy) if isinstance(mode, Follower) else {}

        def note(tensor: Tensor) -> Slot:
            tensors.append(None if len(slots) in lazily else tensor)
            slots.append(Slot(pack(tensor), self, tensor._version))
            return slots[-1]

        try:
            with torch.autograd.graph.saved_tensors_hooks(note, partial(_read, unpack)), mode or nullcontext():
                yield
            self.slots = [weakref.ref(slot) for slot in slots]
            with torch.no_grad():
                self._fill(mode, slots, tensors)
        finally:  # autograd holds on to `note`, and so to these, for as long as the graph lives
            slots.clear()
            tensors.clear()

    def _mode(self) -> Tracer | Follower | None:
        if self.key is None:
            return None
        known = self.capture.templates.get(self.key)
        return Tracer() if known is None else Follower(known)

    def _fill(self, mode: Tracer | Follower | None, slots: list[Slot], tensors: list[Tensor | None]) -> None:
        again: dict[int, Made] = {}
        if isinstance(mode, Tracer):
            saved = [tensor for tensor in tensors if tensor is not None]
            found = template(mode.calls, saved, self.action, widths=self.widths, tokens=self.tokens)
            self.capture.templates[self.key] = found
            self.held = mode.held(found)
            again = _again(found, self.lossy)
        elif isinstance(mode, Follower):
            if mode.strayed or mode.count != len(mode.template.funcs) or len(slots) != mode.template.saved:
                self.unit.executed = Action.RECOMPUTE
                self.capture.tell_once(
                    f"{self.unit.name} ran other operations than before on the same shapes; such forwards are recomputed (R)"
                )
                return
            self.held = mode.held
            again = _again(mode.template, self.lossy)
        self._keep_leaves()
        storages = {storage_key(leaf): leaf.untyped_storage().nbytes() for leaf in self.held.leaves.values()}
        for place, (slot, tensor) in enumerate(zip(slots, tensors, strict=True)):
            if place in again:
                slot.made = again[place]
            else:
                assert tensor is not None
                slot.kept = (
                    tensor if tensor.grad_fn is None else tensor.detach()
                )  # an output holding itself would never die
                storages[storage_key(tensor)] = tensor.untyped_storage().nbytes()
        read = [*again.values(), *(made for call in self.held.calls.values() for made in call.sources.values())]
        self.uses = Counter(self._memo_of(made) for made in read if made not in self.held.leaves)
        self.left = self.uses.copy()
        codes = sum(code.nbytes for code in self.codes.values())
        self.unit.captured = sum(size for key, size in storages.items() if key not in self.free) + codes

    def _keep_leaves(self) -> None:
        wide = self.capture.templates[self.key].wide if self.lossy else frozenset()
        for made, leaf in self.held.leaves.items():
            code = encode(leaf) if made in wide else None
            if made in wide and code is None:
                self.capture.tell_once(
                    f"{self.unit.name} made values that are not finite; such tensors are kept as they are"
                )
            if code is not None:
                self.codes[made] = code
            else:
                self.held.leaves[made] = leaf.detach()
                self.versions[made] = leaf._version
        for made in self.codes:
            del self.held.leaves[made]

    def make(self, made: Made) -> Tensor:
        """The tensor again. What others are made of, too, is remembered until the last of them was.

        After a backward of a part of the graph, reads of the next are miscounted: what was let go of too early is made once more.
        """
        with torch.no_grad(), torch.autocast(self.device, enabled=False):
            for op in self._missing(made):
                again = self.held.calls[op]
                if not again.unchanged():
                    raise self.changed(f"an input of {again.func}")
                self.memo[op] = again.run(self._value)
                for source in again.sources.values():
                    self._done_with(source)
            value = self._value(made)
        self._done_with(made)
        return value

    def _missing(self, made: Made) -> list[int]:
        """The operations to run for it, in order."""
        ops: set[int] = set()
        open_ = [made]
        while open_:
            source = open_.pop()
            if (
                source not in self.held.leaves
                and source not in self.codes
                and source.op not in self.memo
                and source.op not in ops
            ):
                ops.add(source.op)
                open_.extend(self.held.calls[source.op].sources.values())
        return sorted(ops)

    def _memo_of(self, made: Made) -> int | Made:
        return made if made in self.codes else made.op

    def _done_with(self, made: Made) -> None:
        if made in self.held.leaves:
            return
        memo = self._memo_of(made)
        self.left[memo] -= 1
        if not self.left[memo]:
            self.memo.pop(memo, None)
            self.left[memo] = self.uses[memo]  # for another backward of a retained graph

    def _value(self, made: Made) -> Tensor:
        leaf = self.held.leaves.get(made)
        if leaf is not None:
            if leaf._version != self.versions[made]:
                raise self.changed(f"a kept {tuple(leaf.shape)} tensor")
            return leaf
        if made in self.codes:
            if made not in self.memo:
                self.memo[made] = [self.codes[made].decode()]
            return self.memo[made][0]
        return self.memo[made.op][made.place] if made.op in self.memo else self.make(made)

    def settle(self, accepted: bool) -> None:
        """Let backward read what was compressed, or free all that was kept, so that it replays the unit."""
        self.accepted = accepted
        if accepted:
            return
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


def _again(template: Template, lossy: bool) -> dict[int, Made]:
    return template.again | template.wide_again if lossy else template.again


def _kind(unit: Unit, arguments: Any, device: str) -> Any:
    """Equal for forwards that run the same operations, as far as can be told beforehand."""

    def sign(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad
        return leaf if isinstance(leaf, bool | int | float | str) else type(leaf)

    inner = tuple((n, p.shape, p.dtype, p.requires_grad) for n, p in unit.module.named_parameters())
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return type(unit.module), unit.module.training, autocast, inner, tuple(map(sign, tree_leaves(arguments)))


def _hooks_below() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """Checkpoint's own pack and unpack. This is the package's one call of torch's private interface for hooks."""
    private: Any = torch._C
    try:
        hooks = private._autograd._top_saved_tensors_default_hooks(False)
    except AttributeError as error:
        raise _unknown_torch() from error
    if hooks is None or not hooks[0].__qualname__.startswith("_checkpoint_hook."):
        raise _unknown_torch()
    return hooks


def _unknown_torch() -> CaptureError:
    return CaptureError(
        f"torch {torch.__version__} keeps checkpoint's hooks where recovery cannot find them (2.11 to 2.13 are known to work); "
        "use one of those, or the actions R only"
    )
