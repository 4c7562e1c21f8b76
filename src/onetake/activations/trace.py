"""What one forward of a unit computed, and the least of it that must be kept so that the rest follows exactly (action E).

A region's operations are recorded below autograd, where casts, views and fused kernels are single calls. Blocks of memory
made by matrix products, attention, random numbers or anything unknown cannot be recomputed; views, elementwise operations,
reductions and norms can. A minimum cut between the two says what to keep (`cut.smallest_kept`); the rest is obtained by
calling the same kernels on the same inputs, so it is equal bit for bit.

The first forward of a shape is recorded in full (`Tracer`) and holds the unit's whole state until it ends; later ones
(`Follower`) hold only what the found `Template` names, and check that the same operations came by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from onetake.activations.cut import smallest_kept

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

DETACH = aten.detach.default
"""Not recorded: autograd detaches a result or not depending on who else holds it, which recording changes."""


class Made(NamedTuple):
    """The tensor that the op-th operation of a region returned at this place."""

    op: int
    place: int


class Recipe(NamedTuple):
    """How a saved tensor is had again: run `ops` in order, starting from `leaves`; `value` is the result."""

    value: Made
    ops: tuple[int, ...]
    leaves: tuple[Made, ...]


@dataclass(frozen=True, kw_only=True)
class Template:
    """What E and L keep of a region of this shape."""

    funcs: tuple[OpOverload, ...]  # what runs, in order
    saved: int  # how many tensors autograd saves
    recipes: dict[int, Recipe]  # by place among the saved tensors; the others are kept
    wide_recipes: dict[int, Recipe]  # for kept tensors that are views of wide leaves
    leaves: dict[int, tuple[int, ...]]  # op → places of the outputs to hold
    wide: frozenset[Made]  # leaves wider than the residual stream, which L may compress
    sources: dict[int, dict[int, Made]]  # op to run again → place among its flat arguments → who made it
    bytes: int  # kept, beyond the region's inputs and parameters


@dataclass(kw_only=True)
class Call:
    """One recorded operation, with its arguments flat and its tensors alive."""

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    flat: list[Any]
    outs: list[Any]

    def tensors(self) -> list[Tensor]:
        return [a for a in self.flat if isinstance(a, Tensor)]


class Tracer(TorchDispatchMode):
    """Records everything."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is DETACH:
            return out
        kwargs = kwargs or {}
        flat, outs = tree_flatten((args, kwargs))[0], tree_flatten(out)[0]
        self.calls.append(Call(func=func, args=args, kwargs=kwargs, out=out, flat=flat, outs=outs))
        return out

    def held(self, template: Template) -> Held:
        held = Held()
        for index, call in enumerate(self.calls):
            held.take(template, index, call.func, call.args, call.kwargs, call.out)
        return held


class Again(NamedTuple):
    """An operation to run again: its flat arguments with gaps, what fills the gaps, and versions of the tensors beside them."""

    func: OpOverload
    flat: list[Any]
    spec: TreeSpec
    sources: dict[int, Made]
    versions: dict[int, int]

    def unchanged(self) -> bool:
        return all(self.flat[place]._version == version for place, version in self.versions.items())

    def run(self, fill: Callable[[Made], Tensor]) -> list[Any]:
        """Its outputs, flat."""
        flat = list(self.flat)
        for place, made in self.sources.items():
            flat[place] = fill(made)
        args, kwargs = tree_unflatten(flat, self.spec)
        return tree_flatten(self.func(*args, **kwargs))[0]


@dataclass(kw_only=True)
class Held:
    """What a region holds for its recipes: leaves, and the arguments of the operations to run again."""

    leaves: dict[Made, Tensor] = field(default_factory=dict)
    calls: dict[int, Again] = field(default_factory=dict)

    def take(self, template: Template, index: int, func: OpOverload, args: Any, kwargs: Any, out: Any) -> None:
        """Hold of operation `index` what the template names: outputs, and arguments but for what is recomputed."""
        places = template.leaves.get(index)
        if places:
            outs = tree_flatten(out)[0]
            self.leaves.update({Made(index, place): outs[place] for place in places})
        sources = template.sources.get(index)
        if sources is not None:
            flat, spec = tree_flatten((args, kwargs))
            flat = [None if p in sources else a for p, a in enumerate(flat)]
            versions = {p: a._version for p, a in enumerate(flat) if isinstance(a, Tensor)}
            self.calls[index] = Again(func, flat, spec, sources, versions)


class Follower(TorchDispatchMode):
    """Holds what the template names, as long as the operations are the template's."""

    def __init__(self, template: Template) -> None:
        super().__init__()
        self.template = template
        self.held = Held()
        self.count = 0
        self.strayed = False

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is DETACH:
            return out
        index, self.count = self.count, self.count + 1
        if index >= len(self.template.funcs) or self.template.funcs[index] is not func:
            self.strayed = True
        if not self.strayed:
            self.held.take(self.template, index, func, args, kwargs or {}, out)
        return out


def storage_key(tensor: Tensor) -> int:
    """Names a tensor's block of memory, as long as it is alive."""
    return tensor.untyped_storage()._cdata


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for tensors that read the same memory in the same way."""
    return storage_key(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


class _Graph:
    """Who made which block of memory from which, out of recorded calls whose tensors are all alive."""

    def __init__(self, calls: list[Call]) -> None:
        self.calls = calls
        self.made: dict[tuple[Any, ...], Made] = {}  # first maker of each geometry
        self.node: dict[int, int] = {}  # storage key → node
        self.maker: list[Made] = []
        self.sizes: list[int] = []
        self.sources: list[list[int] | None] = []
        self.written = {storage_key(t) for call in calls for t in _written(call)}
        outside: set[int] = set()
        for index, call in enumerate(calls):
            read = {storage_key(t) for t in call.tensors()}
            outside |= read - self.node.keys()
            known = all(storage_key(t) in outside or _geometry(t) in self.made for t in call.tensors())
            for place, out in enumerate(call.outs):
                if not isinstance(out, Tensor) or storage_key(out) in outside:
                    continue
                key = storage_key(out)
                if key not in self.node:
                    again = known and _runs_again(call.func) and not self.written & {*read, key}
                    self.node[key] = len(self.sizes)
                    self.maker.append(Made(index, place))
                    self.sizes.append(out.untyped_storage().nbytes())
                    self.sources.append([self.node[k] for k in read if k in self.node and k != key] if again else None)
                    self.made[_geometry(out)] = Made(index, place)
                elif known:
                    self.made.setdefault(_geometry(out), Made(index, place))

    def tensor(self, made: Made) -> Tensor:
        return self.calls[made.op].outs[made.place]

    def inputs(self, op: int) -> dict[int, Made]:
        """Flat place → maker, of the arguments that were made in the region."""
        flat = self.calls[op].flat
        tensors = {p: a for p, a in enumerate(flat) if isinstance(a, Tensor) and storage_key(a) in self.node}
        return {place: self.made[_geometry(tensor)] for place, tensor in tensors.items()}

    def recipe(self, value: Made, kept: set[int]) -> Recipe:
        ops: set[int] = set()
        leaves: set[Made] = set()
        open_ = [value]
        while open_:
            made = open_.pop()
            node = self.node[storage_key(self.tensor(made))]
            if node in kept and made == self.maker[node]:
                leaves.add(made)
            elif made.op not in ops:
                ops.add(made.op)
                open_.extend(self.inputs(made.op).values())
        return Recipe(value, tuple(sorted(ops)), tuple(sorted(leaves)))


def template(calls: list[Call], saved: list[Tensor], *, widths: Iterable[int], tokens: int) -> Template:
    """The template of a recorded region that saved these tensors.

    A leaf is wide if its rows are as long as one of `widths` and it has a row per token.
    """
    graph = _Graph(calls)
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
    recipes, wide_recipes = {}, {}
    widths = set(widths)
    wide = {
        graph.maker[node]
        for node, key in ((node, storage_key(graph.tensor(graph.maker[node]))) for node in kept - unknown)
        if key not in graph.written and _is_wide(graph.tensor(graph.maker[node]), widths, tokens)
    }
    for place, made in origin.items():
        if node_of[place] not in kept:
            recipes[place] = graph.recipe(made, kept)
        elif graph.maker[node_of[place]] in wide:
            wide_recipes[place] = graph.recipe(made, kept)
    used = [*recipes.values(), *wide_recipes.values()]
    leaves: dict[int, set[int]] = {}
    for leaf in {leaf for recipe in used for leaf in recipe.leaves}:
        leaves.setdefault(leaf.op, set()).add(leaf.place)
    return Template(
        funcs=tuple(call.func for call in calls),
        saved=len(saved),
        recipes=recipes,
        wide_recipes=wide_recipes,
        leaves={op: tuple(sorted(places)) for op, places in leaves.items()},
        wide=frozenset(wide),
        sources={op: graph.inputs(op) for recipe in used for op in recipe.ops},
        bytes=sum(graph.sizes[node] for node in kept | unknown),
    )


def _written(call: Call) -> list[Tensor]:
    """The arguments that an operation changes in place. Which of several is not looked up: all count."""
    return call.tensors() if call.func._schema.is_mutable else []


def _runs_again(func: OpOverload) -> bool:
    """Whether running it again is cheap and gives the same bits."""
    if func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags:
        return False
    cheap = func.is_view or {torch.Tag.pointwise, torch.Tag.reduction} & set(func.tags)
    return bool(cheap) or func.overloadpacket in CHEAP


def _is_wide(tensor: Tensor, widths: set[int], tokens: int) -> bool:
    return (
        tensor.is_floating_point()
        and tensor.shape[-1:].numel() in widths
        and tensor.numel() // tensor.shape[-1] == tokens
    )
