"""Which trajectory a row belongs to, read off the autograd graph: no value is looked at, so it holds for every value.

A gradient's elements, counted in row-major order, come in blocks that belong to one trajectory after the other. Going from
the log-probs (B,) towards the weights, every operation either leaves these blocks in place (elementwise operations and views
do, and so does whatever happens inside a row), or moves them by a known offset (`cat` and `split` along the rows), or its
gradient is not followed: what lies behind it is unknown here, and is measured instead (see `measured`).

An operation that is not in the table below may do anything to its input. That is still within one trajectory where its whole
output belongs to one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple, cast

from torch import Tensor
from torch.autograd.function import BackwardCFunction


class Place(NamedTuple):
    """Element f of a tensor, in row-major order, belongs to trajectory ((f + phase) // block) % B."""

    block: int
    phase: int

    def of(self, numel: int, samples: int) -> Place:
        """The same for the first `numel` elements, written in one way only, so that two can be compared."""
        owner, inside = divmod(self.phase, self.block)
        if inside + numel <= self.block:  # one trajectory's
            return Place(numel, owner % samples * numel)
        return Place(self.block, self.phase % (samples * self.block))


class Edge(NamedTuple):
    """An operation seen from one of its inputs: which dimensions it leaves alone is told by its name and settings."""

    node: Any
    number: int
    """Of the input among the operation's."""
    places: dict[int, Place]
    """Where the gradient of each of its outputs that is used has its trajectories."""
    output: tuple[int, ...]
    input: tuple[int, ...]
    samples: int

    def kept(self, lead: int) -> Place | None:
        """The input's place if the first `lead` dimensions are left alone, and anything happens inside the others."""
        return self._agreed(
            [self._kept(place, _shape(self.node, output), lead) for output, place in self.places.items()]
        )

    def moved(self, offsets: dict[int, int]) -> Place | None:
        """The input's place if output j is what the input, or a part of it, has `offsets[j]` elements further on."""
        numel, period = math.prod(self.input), self.samples
        return self._agreed(
            [
                Place(place.block, (place.phase - offsets[output]) % (period * place.block)).of(numel, self.samples)
                for output, place in self.places.items()
            ]
        )

    def _kept(self, place: Place, output: tuple[int, ...], lead: int) -> Place | None:
        before, after = math.prod(output[lead:]), math.prod(self.input[lead:])
        if not before or not after:
            return None
        if output[:lead] == self.input[:lead] and not place.block % before and not place.phase % before:
            moved = Place(place.block // before * after, place.phase // before * after)
            return moved.of(math.prod(self.input), self.samples)
        numel, whole = math.prod(self.input), place.of(math.prod(output), self.samples)
        if whole.block == math.prod(output):  # all of it is one trajectory's, and so is what it was made of
            return Place(numel, whole.phase // whole.block * numel)
        return None

    def _agreed(self, places: list[Place | None]) -> Place | None:
        return places[0] if places.count(places[0]) == len(places) else None


def _shape(node: Any, output: int) -> tuple[int, ...]:
    return node._input_metadata[output].shape


Rule = Callable[[Edge], Place | None]


def _pointwise(edge: Edge) -> Place | None:
    """Elements stay where they are, up to broadcasting along dimensions of size 1."""
    if edge.output == edge.input:
        return edge.places.get(0)
    return edge.kept(_common(edge) if len(edge.output) == len(edge.input) else 0)


def _common(edge: Edge) -> int:
    """Leading dimensions that output and input have in common."""
    pairs = list(zip(edge.output, edge.input, strict=False))
    return next((n for n, (one, other) in enumerate(pairs) if one != other), len(pairs))


def _view(edge: Edge) -> Place | None:
    """Row-major order stays what it is, whatever the shape."""
    return edge.places[0] if math.prod(edge.output) == math.prod(edge.input) else edge.kept(0)


def _leading(lead: int, *inputs: int) -> Rule:
    """The first `lead` dimensions are a batch for these inputs."""
    return lambda edge: edge.kept(lead if edge.number in inputs else 0)


def _trailing(dims: int) -> Rule:
    """Works on the last `dims` dimensions."""
    return lambda edge: edge.kept(max(len(edge.input) - dims, 0))


def _along(*names: str) -> Rule:
    """Works along the dimensions that these settings name; without any it works along all."""

    def rule(edge: Edge) -> Place | None:
        dims = [dim for name in names for dim in _listed(getattr(edge.node, name))]
        return edge.kept(min((_signed(dim) % len(edge.input) for dim in dims), default=0))

    return rule


def _listed(value: Any) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value or ())


def _signed(value: int) -> int:
    """torch hands out negative settings as unsigned numbers."""
    return value - 2**64 if value >= 2**63 else value


def _permute(edge: Edge) -> Place | None:
    dims = [_signed(dim) % len(edge.input) for dim in edge.node._saved_dims]
    return edge.kept(next((n for n, dim in enumerate(dims) if n != dim), len(dims)))


def _cat(edge: Edge) -> Place | None:
    dim = _signed(edge.node._saved_dim) % len(edge.output)
    if dim:
        return edge.kept(dim)
    edges = edge.node.next_functions
    before, after = edges[: edge.number], edges[edge.number + 1 :]
    if all(child is not None for child, _ in before):
        return edge.moved({0: -sum(map(_numel, before))})
    if all(child is not None for child, _ in after):  # the size of an input without gradient is not told
        return edge.moved({0: math.prod(edge.input) + sum(map(_numel, after)) - math.prod(edge.output)})
    return edge.kept(0)


def _numel(edge: tuple[Any, int]) -> int:
    return math.prod(_shape(*edge))


def _stack(edge: Edge) -> Place | None:
    dim = _signed(edge.node._saved_dim) % len(edge.output)
    return edge.kept(dim) if dim else edge.moved({0: -edge.number * math.prod(edge.input)})


def _cut(starts: Callable[[Any, int], list[int]]) -> Rule:
    """Parts along `_saved_dim`; `starts` says in which row each output begins if that is the first dimension."""

    def rule(edge: Edge) -> Place | None:
        dim = _signed(edge.node._saved_dim) % len(edge.input)
        if dim:
            return edge.kept(dim)
        row = math.prod(edge.input[1:])
        return edge.moved({n: start * row for n, start in enumerate(starts(edge.node, edge.input[0]))})

    return rule


def _start(node: Any, rows: int) -> list[int]:
    start = _signed(node._saved_start)
    return [min(max(start + rows * (start < 0), 0), rows)]


def _slice(edge: Edge) -> Place | None:
    return (_cut(_start) if edge.node._saved_step == 1 else _along("_saved_dim"))(edge)


def _index(edge: Edge) -> Place | None:
    """Tensors as indices: the dimensions before them are left alone if they stand side by side."""
    used = [n for n, index in enumerate(edge.node._saved_indices) if index is not None]
    return edge.kept(used[0] if used[-1] - used[0] < len(used) else 0)


def _repeat(edge: Edge) -> Place | None:
    repeats = edge.node._saved_repeats
    lead = next((n for n, times in enumerate(repeats) if times != 1), len(repeats))
    return edge.kept(lead if len(repeats) == len(edge.input) else 0)


def _batch_norm(edge: Edge) -> Place | None:
    return edge.kept(0 if edge.node._saved_training or edge.number else len(edge.input))


def _normalised(edge: Edge) -> Place | None:
    return edge.kept(0 if edge.number else len(edge.input) - len(edge.node._saved_normalized_shape))


def _linear(edge: Edge) -> Place | None:
    return edge.kept(0 if edge.number else len(edge.input) - 1)


def _added(edge: Edge) -> Place | None:
    """`addmm` and `baddbmm`: a summand, then the factors."""
    if not edge.number:
        return _pointwise(edge)
    return edge.kept(1 if len(edge.input) == 3 or edge.number == 1 else 0)


def _padded(name: str) -> Rule:
    return lambda edge: edge.kept(max(len(edge.input) - len(getattr(edge.node, name)) // 2, 0))


def _identity(edge: Edge) -> Place | None:
    """Output j is input j, as in the function by which FSDP2 learns that a block's backward is over."""
    return edge.places.get(edge.number)


def _named(rule: Rule, names: str) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


RULES: dict[str, Rule] = {
    **_named(
        _pointwise,
        "Abs Add Addcdiv Addcmul Alias Angle Atan Atan2 Celu Clamp ClampMax ClampMin Clone Copy Cos Cosh Div Elu Erf Exp Exp2 "
        "Expand Expm1 FusedDropout Gelu Hardsigmoid Hardswish Hardtanh LeakyRelu Lerp Log Log10 Log1P Log2 LogSigmoid Logaddexp "
        "MaskedFill Maximum Minimum Mish Mul NanToNum NativeDropout Neg Polar Pow Reciprocal Relu Rsqrt Rsub Selu Sgn Sigmoid "
        "Silu Sin Sinh Softplus Softshrink Sqrt Sub Tan Tanh Threshold ToCopy Tril Triu Where",
    ),
    **_named(_view, "ReshapeAlias Squeeze UnsafeView Unsqueeze View"),
    **_named(lambda edge: edge.kept(_common(edge)), "ViewAsComplex ViewAsReal"),
    **_named(_permute, "Permute"),
    **_named(_along("_saved_dim0", "_saved_dim1"), "Transpose"),
    **_named(_along("_saved_dimension"), "Unfold"),
    **_named(_along("_saved_dims"), "Flip Roll"),
    **_named(
        _along("_saved_dim"),
        "Amax Amin Cumsum FftC2C FftC2R FftR2C Gather Glu IndexAdd IndexSelect LinalgVectorNorm LogSoftmax Logsumexp Max0 Mean1 "
        "Min0 Scatter ScatterAdd Softmax Sort Std Sum1 Topk Var",
    ),
    **_named(_cat, "Cat"),
    **_named(_stack, "Stack"),
    **_named(_slice, "Slice"),
    **_named(_cut(lambda node, rows: [_signed(node._saved_index) % rows]), "Select"),
    **_named(_cut(lambda node, rows: list(range(rows))), "Unbind"),
    **_named(_cut(lambda node, rows: list(range(0, rows, node._saved_split_size))), "Split UnsafeSplit"),
    **_named(_cut(lambda node, rows: list(accumulate(node._saved_split_sizes, initial=0))), "SplitWithSizes"),
    **_named(_index, "Index"),
    **_named(_repeat, "Repeat"),
    **_named(_leading(1, 0), "Convolution Mm Mv NativeGroupNorm"),
    **_named(_leading(1, 0, 1), "Bmm"),
    **_named(_added, "Addmm Baddbmm"),
    **_named(_linear, "Linear"),
    **_named(_normalised, "FusedRmsNorm NativeLayerNorm"),
    **_named(_batch_norm, "NativeBatchNorm"),
    **_named(
        _leading(1, 0, 1, 2),
        "ScaledDotProductCudnnAttention ScaledDotProductEfficientAttention ScaledDotProductFlashAttention "
        "ScaledDotProductFlashAttentionForCpu ScaledDotProductFusedAttentionOverrideable",
    ),
    **_named(_padded("_saved_pad"), "ConstantPadNd"),
    **_named(
        _padded("_saved_padding"), "ReflectionPad1D ReflectionPad2D ReplicationPad1D ReplicationPad2D ReplicationPad3D"
    ),
    **_named(
        _leading(1, 0),
        "AdaptiveAvgPool2D AdaptiveAvgPool3D AvgPool2D AvgPool3D Im2Col MaxPool2DWithIndices PixelShuffle PixelUnshuffle "
        "UpsampleBicubic2D UpsampleBilinear2D UpsampleLinear1D UpsampleNearest1D UpsampleNearest2D UpsampleNearest3D "
        "UpsampleTrilinear3D",
    ),
    "RegisterPostBackwardFunctionBackward": _identity,
}
"""By an autograd node's name, without "Backward", with its number only where the numbers differ in what they do."""


@cache
def _rule(name: str) -> Rule:
    """Anything may happen to the input of an operation that is not known."""
    short = name.replace("Backwards", "Backward").replace("Backward", "") if name not in RULES else name
    return RULES.get(short, RULES.get(short.rstrip("0123456789"), lambda edge: edge.kept(0)))


class Followed(NamedTuple):
    """What was found out about some nodes of a graph."""

    places: dict[Any, Place | None]
    """Where the gradient of a node's output has its trajectories; None if the graph does not tell."""
    opaque: set[str]
    """Python functions of others that take part: inside there may be graphs of their own."""


def follow(log_prob: Tensor, leads: Callable[[Any], int | None]) -> Followed:
    """Follow the gradient of `log_prob` (B,) to the nodes for which `leads` tells a number of dimensions.

    Those leave that many dimensions of their first input alone.
    """
    samples, root = len(log_prob), cast(Any, log_prob.grad_fn)
    found: dict[Any, dict[int, Place]] = {root: {log_prob.output_nr: Place(1, 0).of(samples, samples)}}
    edges, waiting = _graph(root)
    unknown: set[Any] = set()
    followed = Followed({}, set())
    ready = [root]
    while ready:
        node = ready.pop()
        name, lead, here = type(node).__name__, leads(node), found.pop(node, {})
        if lead is not None:
            followed.places[node] = None if node in unknown else here[0]
        elif isinstance(node, BackwardCFunction) and name not in RULES:
            followed.opaque.add(name)
        rule = _rule(name) if lead is None else _leading(lead, 0)
        output = _shape(node, min(here, default=0))
        for number, (child, place) in enumerate(edges[node]):
            if child is None:
                continue
            waiting[child] -= 1
            if not waiting[child]:
                ready.append(child)
            if not edges[child]:  # a leaf
                continue
            known = None
            if node not in unknown:
                known = rule(Edge(node, number, here, output, _shape(child, place), samples))
            if known is None or found.setdefault(child, {}).setdefault(place, known) != known:
                unknown.add(child)
    return followed


def _graph(root: Any) -> tuple[dict[Any, Any], dict[Any, int]]:
    """By node: where its edges lead, and how many lead to it."""
    edges, count, ready = {}, {root: 0}, [root]
    while ready:
        node = ready.pop()
        edges[node] = node.next_functions
        for child, _ in edges[node]:
            if child is not None:
                if child not in count:
                    count[child] = 0
                    ready.append(child)
                count[child] += 1
    return edges, count
