"""The least of a recorded forward that must be kept so that the rest follows exactly (E, A, P).

Blocks of memory made by random numbers or anything unknown cannot be recomputed; views, elementwise operations, reductions
and norms can, and matrix products under A, and attention too under P. A minimum cut between the two says what to keep
(`cut.smallest_kept`); the rest is obtained by calling the same kernels on the same inputs, so it is equal bit for bit. What
backward does not read is not made again, where a replay of the whole unit would.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from onetake.activations.cut import smallest_kept
from onetake.activations.plan import Action
from onetake.activations.trace import Argument, Call, Made, Step, Template, Tracer, Unfollowable, storage_key

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


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for tensors that read the same memory in the same way."""
    size, stride = tensor.shape, tensor.stride()
    return storage_key(tensor), tensor.storage_offset(), size, stride, tensor.dtype, tensor.is_conj(), tensor.is_neg()


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


def template(mode: Tracer, saved: list[Tensor], action: Action, *, widths: Iterable[int], tokens: int) -> Template:
    """The template of a recorded region that saved these tensors, for E, L, A or P.

    A leaf is wide if its rows are as long as one of `widths`, which only L has, and it has a row per token. Raises Unfollowable
    if the region cannot be told from others, or gave a tensor other memory after it was made (``t_()``, ``.data =``).
    """
    calls = mode.calls
    for call in calls if mode.problem is None else ():
        if mode.names.operation(call.func, call.args, call.kwargs, call.outs) != call.sign:
            mode.problem = f"a tensor of {call.func} was given other memory after it"
    if mode.problem is not None:
        raise Unfollowable(mode.problem)
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
                sign=call.sign,
                leaves=tuple(made for made in leaves if made.op == op),
                again=op in ops,
                sources=tuple(sources.get(op, {}).items()),
                follows=tuple(made for made in sources.get(op, {}).values() if made not in leaves),
                outs=tuple(made for made in reads if made.op == op and made not in leaves),
            )
            for op, call in enumerate(calls)
        ),
        saved=tuple(mode.saved),
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
