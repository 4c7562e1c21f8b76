"""What one forward of a unit computed, and the least of it that must be kept so that the rest follows exactly (E, A, P).

A region's operations are recorded below autograd, where casts, views and fused kernels are single calls. Blocks of memory
made by random numbers or anything unknown cannot be recomputed; views, elementwise operations, reductions and norms can, and
matrix products under A, and attention too under P. A minimum cut between the two says what to keep (`cut.smallest_kept`);
the rest is obtained by calling the same kernels on the same inputs, so it is equal bit for bit. What backward does not read
is not made again, where a replay of the whole unit would.

The first forward of a shape is recorded in full (`Tracer`) and holds the unit's whole state until it ends; later ones
(`Follower`) hold only what the found `Template` names, and check that the same operations came by.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from onetake.activations.cut import smallest_kept
from onetake.activations.plan import Action

aten = torch.ops.aten
CHEAP = {
    aten._to_copy,
    aten.cat,
    aten.stack,
    aten.repeat,
    aten.constant_pad_nd,
    aten._softmax,
    aten.native_layer_norm,
    aten._fused_rms_norm,
    aten.arange,
    aten.full,
    aten.full_like,
    aten.ones,
    aten.ones_like,
    aten.zeros,
    aten.zeros_like,
    aten.scalar_tensor,
}
"""What is run again beside elementwise operations and reductions, which torch tags."""

PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm}
"""What A and P run again beside that."""

ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention,
}
"""What P runs again beside that, if nothing is dropped out."""

DETACH = aten.detach.default
"""Not recorded: autograd detaches a result or not depending on who else holds it, which recording changes."""


class Argument(NamedTuple):
    """One of an operation, by place or name, or a member of one that is a list."""

    name: int | str
    member: int | None = None


class Made(NamedTuple):
    """The tensor that the op-th operation of a region returned at this place."""

    op: int
    place: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One operation of a template, and what of it a region holds: outputs, and what it takes to run it again."""

    func: OpOverload
    leaves: tuple[Made, ...] = ()  # outputs to hold
    again: bool = False  # whether it may run again; then:
    sources: tuple[tuple[Argument, Made], ...] = ()  # arguments that were made in the region, and by whom
    follows: tuple[Made, ...] = ()  # those of them that are no leaves
    outs: tuple[Made, ...] = ()  # outputs that anybody reads, leaves aside


@dataclass(frozen=True, kw_only=True)
class Template:
    """What E, L, A or P keep of a region of this shape."""

    steps: tuple[Step, ...]  # what runs, in order
    saved: int  # how many tensors autograd saves
    again: dict[int, Made]  # by place among the saved tensors: who makes it again; the others are kept
    wide: frozenset[Made]  # leaves wider than the residual stream, which L may compress
    reads: dict[Made, int]  # how often one backward reads what is made again


NOTHING = Template(steps=(), saved=0, again={}, wide=frozenset(), reads={})
"""H makes nothing again."""


@dataclass(kw_only=True)
class Call:
    """One recorded operation, its tensors alive."""

    func: OpOverload
    args: Sequence[Any]
    kwargs: dict[str, Any]
    outs: Sequence[Any]

    @property
    def arguments(self) -> dict[int | str, Any]:
        return dict(enumerate(self.args)) | self.kwargs

    def tensors(self) -> dict[Argument, Tensor]:
        single = {Argument(name): a for name, a in self.arguments.items() if isinstance(a, Tensor)}
        lists = [(name, a) for name, a in self.arguments.items() if isinstance(a, list)]
        members = {Argument(name, i): m for name, a in lists for i, m in enumerate(a) if isinstance(m, Tensor)}
        return single | members


class Again(NamedTuple):
    """What it takes to run an operation again: its arguments with gaps, and the tensors among them with their versions.

    Tuples, since each container that waits for backward costs Python's garbage collector time, but those of plain values do not.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    beside: tuple[tuple[Tensor, int], ...]

    def run(self, step: Step, value: Callable[[Made], Tensor]) -> Sequence[Any]:
        """The operation's outputs."""
        args, kwargs = _filled(step, self.args, self.kwargs, value)
        return _outputs(step.func(*args, **kwargs))


class Held:
    """What a region holds to make tensors again: leaves, and operations to run by their place."""

    def __init__(self) -> None:
        self.leaves: dict[Made, Tensor] = {}
        self.calls: dict[int, Again] = {}

    def take(self, index: int, step: Step, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        """Hold of operation `index` what the template names."""
        if step.leaves:
            outs = _outputs(out)
            self.leaves.update((made, outs[made.place]) for made in step.leaves)
        if step.again:
            held, named = _filled(step, args, kwargs, _gap)
            flat = [m for a in (*held, *named.values()) for m in (a if isinstance(a, list) else (a,))]
            beside = [(m, m._version) for m in flat if isinstance(m, Tensor)]
            self.calls[index] = Again(tuple(held), named, tuple(beside))


class Tracer(TorchDispatchMode):
    """Records everything."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is not DETACH:
            self.calls.append(Call(func=func, args=args, kwargs=kwargs or {}, outs=_outputs(out)))
        return out

    def held(self, template: Template) -> Held:
        held = Held()
        for index, (step, call) in enumerate(zip(template.steps, self.calls, strict=True)):
            held.take(index, step, call.args, call.kwargs, call.outs)
        return held


class Follower(TorchDispatchMode):
    """Holds what the template names, as long as the operations are the template's."""

    def __init__(self, template: Template) -> None:
        super().__init__()
        self.template = template
        self.held = Held()
        self.strayed = False
        self._coming = enumerate(template.steps)

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is not DETACH and not self.strayed:
            index, step = next(self._coming, (0, None))
            if step is None or step.func is not func:
                self.strayed = True
            elif step.again or step.leaves:
                self.held.take(index, step, args, kwargs or {}, out)
        return out

    def arrived(self) -> bool:
        """Whether these were all of the template's operations. To be asked once, at the end."""
        return not self.strayed and next(self._coming, None) is None


def _gap(made: Made) -> None:
    return None


def _filled(
    step: Step, args: Sequence[Any], kwargs: dict[str, Any], value: Callable[[Made], Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Copies of an operation's arguments with these values where they are made in the region."""
    args, kwargs = [*args], {**kwargs}
    for (name, member), made in step.sources:
        into: Any = args if isinstance(name, int) else kwargs
        if member is None:
            into[name] = value(made)
        else:
            into[name] = [*into[name]]
            into[name][member] = value(made)
    return args, kwargs


def _outputs(out: Any) -> Sequence[Any]:
    return out if isinstance(out, (tuple, list)) else (out,)


def storage_key(tensor: Tensor) -> int:
    """Names a tensor's block of memory, as long as it is alive."""
    return tensor.untyped_storage()._cdata


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for tensors that read the same memory in the same way."""
    return storage_key(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


class _Graph:
    """Who made which block of memory from which, out of recorded calls whose tensors are all alive."""

    def __init__(self, calls: list[Call], action: Action) -> None:
        self.calls = calls
        self.made: dict[tuple[Any, ...], Made] = {}  # first maker of each geometry
        self.node: dict[int, int] = {}  # storage key → node
        self.maker: list[Made] = []
        self.sizes: list[int] = []
        self.sources: list[list[int] | None] = []
        self.written = {storage_key(t) for call in calls for t in _written(call)}
        outside: set[int] = set()
        for index, call in enumerate(calls):
            read = {storage_key(t) for t in call.tensors().values()}
            outside |= read - self.node.keys()
            known = all(storage_key(t) in outside or _geometry(t) in self.made for t in call.tensors().values())
            for place, out in enumerate(call.outs):
                if not isinstance(out, Tensor) or storage_key(out) in outside:
                    continue
                key = storage_key(out)
                if key not in self.node:
                    again = known and _runs_again(call, action) and not self.written & {*read, key}
                    self.node[key] = len(self.sizes)
                    self.maker.append(Made(index, place))
                    self.sizes.append(out.untyped_storage().nbytes())
                    self.sources.append([self.node[k] for k in read if k in self.node and k != key] if again else None)
                    self.made[_geometry(out)] = Made(index, place)
                elif known:
                    self.made.setdefault(_geometry(out), Made(index, place))

    def tensor(self, made: Made) -> Tensor:
        return self.calls[made.op].outs[made.place]

    def inputs(self, op: int) -> dict[Argument, Made]:
        """The arguments that were made in the region, and by whom."""
        tensors = self.calls[op].tensors()
        return {a: self.made[_geometry(tensor)] for a, tensor in tensors.items() if storage_key(tensor) in self.node}

    def needed(self, values: Iterable[Made], kept: set[int]) -> tuple[set[int], set[Made]]:
        """The operations that make `values` again from what is kept, and what of that they start from."""
        ops: set[int] = set()
        leaves: set[Made] = set()
        open_ = list(values)
        while open_:
            made = open_.pop()
            node = self.node[storage_key(self.tensor(made))]
            if node in kept and made == self.maker[node]:
                leaves.add(made)
            elif made.op not in ops:
                ops.add(made.op)
                open_.extend(self.inputs(made.op).values())
        return ops, leaves


def template(calls: list[Call], saved: list[Tensor], action: Action, *, widths: Iterable[int], tokens: int) -> Template:
    """The template of a recorded region that saved these tensors, for E, L, A or P.

    A leaf is wide if its rows are as long as one of `widths`, which only L has, and it has a row per token.
    """
    graph = _Graph(calls, action)
    origin: dict[int, Made] = {}  # place among the saved tensors → maker
    unknown: set[int] = set()  # nodes saved in a shape that no recorded operation returned: kept as they are
    for place, tensor in enumerate(saved):
        if storage_key(tensor) in graph.node:
            made = graph.made.get(_geometry(tensor))
            if made is None:
                unknown.add(graph.node[storage_key(tensor)])
            else:
                origin[place] = made
    node_of = {place: graph.node[storage_key(saved[place])] for place in origin}
    kept = smallest_kept(graph.sizes, graph.sources, set(node_of.values()))
    widths = set(widths)
    wide = {
        graph.maker[node]
        for node, key in ((node, storage_key(graph.tensor(graph.maker[node]))) for node in kept - unknown)
        if key not in graph.written and _is_wide(graph.tensor(graph.maker[node]), widths, tokens)
    }
    again = {
        place: made
        for place, made in origin.items()
        if node_of[place] not in kept or graph.maker[node_of[place]] in wide
    }
    ops, leaves = graph.needed(again.values(), kept)
    sources = {op: graph.inputs(op) for op in ops}
    reads = Counter([*again.values(), *(made for op in ops for made in sources[op].values())])
    return Template(
        steps=tuple(
            Step(
                func=call.func,
                leaves=tuple(made for made in leaves if made.op == op),
                again=op in ops,
                sources=tuple(sources.get(op, {}).items()),
                follows=tuple(made for made in sources.get(op, {}).values() if made not in leaves),
                outs=tuple(made for made in reads if made.op == op and made not in leaves),
            )
            for op, call in enumerate(calls)
        ),
        saved=len(saved),
        again=again,
        wide=frozenset(wide),
        reads=dict(reads),
    )


def _written(call: Call) -> list[Tensor]:
    """The arguments that an operation changes in place. Which of several is not looked up: all count."""
    return [*call.tensors().values()] if call.func._schema.is_mutable else []


def _runs_again(call: Call, action: Action) -> bool:
    """Whether `action` runs it again, and that gives the same bits."""
    func = call.func
    if action == Action.PRUNE and func.overloadpacket in ATTENTION:
        return not _argument(call, "dropout_p")
    if func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags:
        return False
    if action in (Action.ATTENTION, Action.PRUNE) and func.overloadpacket in PRODUCTS:
        return True
    cheap = func.is_view or {torch.Tag.pointwise, torch.Tag.reduction} & set(func.tags)
    return bool(cheap) or func.overloadpacket in CHEAP


def _argument(call: Call, name: str) -> Any:
    """As given, or its default."""
    place, argument = next((p, a) for p, a in enumerate(call.func._schema.arguments) if a.name == name)
    return call.arguments.get(place, call.arguments.get(name, argument.default_value))


def _is_wide(tensor: Tensor, widths: set[int], tokens: int) -> bool:
    return (
        tensor.is_floating_point()
        and tensor.shape[-1:].numel() in widths
        and tensor.numel() // tensor.shape[-1] == tokens
    )
