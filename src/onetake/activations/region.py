"""One forward of a unit: what of its saved state is kept, what makes the rest again, and the proof that it is the same.

Slots lie over torch's checkpoint: packing calls checkpoint's pack *and* notes the tensor; unpacking reads the slot if it is
filled, makes the tensor again from what a template holds, or asks checkpoint, which replays the unit once. Of every tensor that
is not kept a few values are, and what backward gets instead must have these values.

State lives on the slots, which the graph owns: when the graph dies, also in an aborted backward, so does all of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from onetake.activations.codecs import Fp8, encode
from onetake.activations.plan import Action
from onetake.activations.state import Survey, equal
from onetake.activations.template import template
from onetake.activations.trace import (
    NOTHING,
    Follower,
    Held,
    Made,
    Recorder,
    Template,
    Tracer,
    Unfollowable,
    is_plain,
    storage_key,
)
from onetake.activations.units import CaptureError, Known, Unit, kind, named_tensors

_private: Any = torch._C
_top_hooks: Callable[[bool], Any] | None = getattr(_private._autograd, "_top_saved_tensors_default_hooks", None)
"""The package's one use of torch's private interface for hooks."""

SAMPLE = 128  # values of a tensor that backward must find again
EVERY = 16  # forwards; on an accelerator, where comparing waits for the device, others than the first are not compared
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""How far a kernel that adds in no fixed order may be off, relative, on an accelerator."""


class Slot:
    """One saved tensor: what checkpoint packed, and the tensor itself, or who makes it again and a sample of its values."""

    __slots__ = ("__weakref__", "below", "kept", "made", "region", "sample", "version")

    def __init__(self, below: Any, region: Region, tensor: Tensor, made: Made | None) -> None:
        self.below = below
        self.region = region
        self.version = tensor._version
        self.kept: Tensor | None = tensor
        self.made = made
        self.sample: Tensor | None = None

    def release(self, made: Made | None = None) -> None:
        """Keep the tensor no longer. `made` makes it again; without, a replay of the unit does."""
        if self.kept is not None:
            self.sample = self.region.sampled(self.kept)
        self.kept, self.made = None, made

    def read(self, unpack: Callable[[Any], Tensor]) -> Tensor:
        if self.kept is not None:
            if self.kept._version != self.version:
                raise self.region.changed(f"a saved {tuple(self.kept.shape)} tensor")
            return self.kept
        if self.made is None or not self.region.accepted:
            value = unpack(self.below)
        else:
            value = self.region.make(self.made)
            if self.region.lossy:
                return value
        if self.sample is not None:
            self.region.compare(self.sample, value)
        return value


class Region:
    """One forward of a unit: notes what autograd saves, keeps its part, and gives all of it back.

    Held by its slots alone, and holds them weakly.
    """

    def __init__(self, known: Known, unit: Unit, first: Tensor, survey: Survey | None, *, judged: bool) -> None:
        """`judged`: what was compressed is not read before it was accepted."""
        self.known = known
        self.unit = unit
        self.survey = survey
        self.lossy = unit.executed == Action.COMPRESS
        self.accepted = not (self.lossy and judged)
        self.device, self.shape = first.device.type, first.shape
        self.compares = self.device == "cpu" or unit.forwards <= 2 or unit.forwards % EVERY == 0
        self.slots: list[weakref.ref[Slot]] = []
        self.template = NOTHING
        self.held = Held()
        self.versions: dict[Made, int] = {}  # of leaves
        self.codes: dict[Made, Fp8] = {}  # of others
        self.memo: dict[Made, Tensor] = {}
        self.left: dict[Made, int] = {}  # how often a memo will still be read
        self._weights: set[int] = set()  # blocks of memory that are not sampled

    @contextmanager
    def forward(self, arguments: list[Any]) -> Iterator[None]:
        """Entered by checkpoint above its own hooks."""
        below = _hooks_below()
        if below is None:
            self._go_without()
            yield
            return
        pack, unpack = below
        slots: list[Slot] = []
        named = named_tensors(self.unit.module)
        versions = [tensor._version for _, tensor in named]
        self._weights = {storage_key(tensor) for _, tensor in named if isinstance(tensor, nn.Parameter)}
        key, mode = self._recorder(named, arguments)
        again = mode.template.again if isinstance(mode, Follower) else {}

        def note(tensor: Tensor) -> Slot:
            made = again.get(len(slots))
            slots.append(Slot(pack(tensor), self, tensor, made))
            if mode is not None:
                mode.save(tensor)
            if self.survey is None and (made is not None or self.unit.executed == Action.RECOMPUTE):
                if mode is not None:
                    mode.paused = True
                slots[-1].release(made)
                if mode is not None:
                    mode.paused = False
            return slots[-1]

        try:
            watch = nullcontext() if self.survey is None else self.survey.watch
            with torch.autograd.graph.saved_tensors_hooks(note, partial(_read, unpack)), watch, mode or nullcontext():
                yield
            self.slots = [weakref.ref(slot) for slot in slots]
            self._note_changes([n for (n, t), v in zip(named, versions, strict=True) if t._version != v])
            with torch.no_grad():
                self._decide(key, mode, slots)
                if self.unit.executed != Action.RECOMPUTE:
                    free = {storage_key(t) for t in (*(t for _, t in named), *arguments) if isinstance(t, Tensor)}
                    self.unit.captured = self._settle(slots, free)
        finally:  # autograd holds on to `note`, and so to these, for as long as the graph lives
            slots.clear()
            if mode is not None:
                mode.forget()

    def _go_without(self) -> None:
        """Where torch hides the hooks below: raises CaptureError unless the unit is to be recomputed, then unproven."""
        version = (
            f"torch {torch.__version__} keeps checkpoint's hooks where recovery cannot find them (2.11 to 2.15 are known to "
            "work)"
        )
        if self.unit.executed != Action.RECOMPUTE:
            raise CaptureError(f"{version}; use one of those, or the actions R only")
        self.known.tell_once(f"{version}: whether recomputing a block gives the values of its forward is not checked")

    def _recorder(self, named: list[tuple[str, Tensor]], arguments: list[Any]) -> tuple[Any, Recorder | None]:
        """Under which key the template lies, and what records or follows."""
        if self.unit.executed in (Action.STORE, Action.RECOMPUTE):
            return None, None
        key: Any = self.unit.executed, kind(self.unit, named, arguments, self.device)
        if (self.unit.name, key) in self.known.apart:
            key = self.unit.name, key
        if key not in self.known.templates:
            return key, Tracer()
        recorded = self.known.templates[key]
        if recorded is None:
            self._give_up(f"{self.unit.name} does what cannot be followed")
            return key, None
        return key, Follower(recorded)

    def _note_changes(self, written: list[str]) -> None:
        """Once the forward is over: whether it changed anything but its result, which must not happen twice."""
        changes = self.survey.changes() if self.survey is not None else ""
        if written and not changes:
            changes = f"writes to {', '.join(written)}"
        if self.unit.changes is None:
            self.unit.changes = changes
        elif changes and not self.unit.changes:
            self.unit.changes = changes
            self._refuse_replay()
        if changes and self.survey is not None:
            self.unit.executed = Action.STORE
            self.known.tell_once(
                f"{self.unit.name} {changes} in its forward, so it must not run again: all that its backward reads is stored (H)"
            )

    def _refuse_replay(self) -> None:
        """Raises CaptureError if the unit would have to run again."""
        if self.unit.changes and self.unit.executed in (Action.RECOMPUTE, Action.COMPRESS):
            raise CaptureError(
                f"{self.unit.name} {self.unit.changes} in its forward, which it did not do at first. To recompute it would do so "
                "twice. Change such state outside of the block's forward, or train without checkpointing and recovery"
            )

    def _decide(self, key: Any, mode: Recorder | None, slots: list[Slot]) -> None:
        """Keep what the action says, now that all is known."""
        if self.unit.executed == Action.RECOMPUTE:
            self.drop()
        elif self.unit.executed == Action.STORE:
            for slot in slots:
                slot.made = None  # nothing was released
        elif isinstance(mode, Tracer):
            try:
                self.known.templates[key] = self._record(mode, slots)
            except Unfollowable as error:
                self.known.templates[key] = None
                self._give_up(f"{self.unit.name} cannot be followed: {error}")
        elif isinstance(mode, Follower):
            mode.end()
            if mode.problem is None:
                for slot in slots:
                    if slot.made is not None and slot.kept is not None:  # until it was surveyed
                        slot.release(slot.made)
                self._keep(mode.held, mode.template)
            else:
                self.known.apart.add((self.unit.name, key))  # of which the next forward records a template of its own
                self._give_up(f"{self.unit.name} computed otherwise than what was recorded on the same shapes")

    def _give_up(self, why: str) -> None:
        self.drop()
        self._refuse_replay()
        self.known.tell_once(f"{why}; such forwards are recomputed (R)")

    def _record(self, mode: Tracer, slots: list[Slot]) -> Template:
        widths: set[int] = set()
        if self.unit.executed == Action.COMPRESS:
            weights = [tensor.shape for _, tensor in named_tensors(self.unit.module) if tensor.ndim == 2]
            widths = {size for shape in weights for size in shape if size > self.shape[-1]}
        saved = [slot.kept for slot in slots if slot.kept is not None]
        recorded = template(mode, saved, self.unit.executed, widths=widths, tokens=self.shape[:-1].numel())
        for place, made in recorded.again.items():
            slots[place].release(made)
        self._keep(mode.held(recorded), recorded)
        return recorded

    def _keep(self, held: Held, template: Template) -> None:
        """Leaves as codes or with their versions."""
        for made in template.wide & held.leaves.keys():
            code = encode(held.leaves[made])
            if code is None:
                self.known.tell_once(
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

    def sampled(self, tensor: Tensor) -> Tensor | None:
        """A copy of some of its values; none of a weight's, which no replay makes."""
        if not self.compares or not is_plain(tensor):
            return None
        if storage_key(tensor) in self._weights:
            return None
        sample = _sample(tensor)
        self.unit.sampled += sample.nbytes
        return sample

    def compare(self, sample: Tensor, value: Tensor) -> None:
        """Raises CaptureError if what was made again is not what was sampled."""
        again = _sample(value)
        if equal(sample, again):
            return
        if self.device != "cpu" and sample.dtype in ROUNDING:
            off = float((sample.double() - again.double()).norm() / sample.double().norm())
            if off <= ROUNDING[sample.dtype]:
                self.known.tell_once(f"{self.unit.name}: a replay rounded otherwise than its forward, by {off:.1e}")
                return
        raise CaptureError(
            f"{self.unit.name} made other values again than in its forward (a {tuple(value.shape)} tensor that backward reads). "
            "Its forward depends on what recovery cannot see: a counter, a cache, random numbers that are not torch's, or memory "
            "that was written without torch. Pass such state in as an argument, or train without checkpointing and recovery"
        )

    def drop(self) -> None:
        """Free all that was kept: backward replays the unit."""
        self.unit.executed, self.unit.captured = Action.RECOMPUTE, 0
        for reference in self.slots:
            slot = reference()
            if slot is not None:
                slot.release()
        self.held, self.codes, self.memo = Held(), {}, {}

    def changed(self, what: str) -> CaptureError:
        return CaptureError(
            f"{self.unit.name}: {what} was changed in place between forward and backward. Let the change make a new tensor, or "
            f"run it after backward; action R does not help where the change is of the unit's input"
        )


def _sample(tensor: Tensor) -> Tensor:
    """Copies of values all over it."""
    tensor, size = tensor.detach(), tensor.numel()
    if size <= SAMPLE:
        return tensor.clone()
    if tensor.is_contiguous():
        return tensor.as_strided((SAMPLE,), (size // SAMPLE,), tensor.storage_offset()).clone()
    left = size // SAMPLE
    for dim, length in enumerate(tensor.shape):
        step = max(min(left, length), 1)
        tensor, left = tensor[(slice(None),) * dim + (slice(None, None, step),)], left // step
    return tensor.clone()


def _read(unpack: Callable[[Any], Tensor], slot: Slot) -> Tensor:
    return slot.read(unpack)


def _without_graph(tensor: Tensor) -> Tensor:
    """An output that held itself would never die."""
    return tensor if tensor.is_leaf else tensor.detach()  # not `grad_fn`, which would make an object of every node


def _hooks_below() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """Checkpoint's own pack and unpack, if they are where they are known to be."""
    hooks = _top_hooks and _top_hooks(False)
    return hooks if hooks and hooks[0].__qualname__.startswith("_checkpoint_hook.") else None
