"""Layers whose per-trajectory weight gradients are known, each by its exact type: what its rows are, and what one row gives.

A row is the part of an output that one use of the weights makes: a token of a linear layer or a normalisation, a picture of a
convolution. A matrix's gradient is a sum of outer products, so that of a row is handed on as its two factors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onetake.parallel.shard import FSDPModule

Pair = tuple[Tensor, Tensor]
"""Factors (R, t, i) and (R, t, o) of R rows: the gradient of row r is Σ_t of their outer products, (o, i)."""


@dataclass(frozen=True)
class Kind:
    """What the bank has to know of a type of layer."""

    lead: Callable[[Any, int], int]
    """Of an output (or input) with so many dimensions, how many number the rows."""
    weight: Callable[[Any, Tensor, Tensor], Pair | Tensor]
    """(layer, input, output gradient) → the weight's gradient by row, as a pair or (R, *shape)."""
    bias: Callable[[Tensor, int], Tensor] = lambda grad, lead: rows_of(grad, lead)
    """(output gradient, lead) → the bias's gradient by row, (R, *shape)."""
    backward: Callable[[Any, Tensor, Tensor, Tensor, list[bool]], tuple[Tensor | None, ...]] | None = None
    """(layer, input, weight, output gradient, which are wanted) → gradients of input, weight and bias; None if autograd is to
    find them by running the layer again, which is cheap where no matrix is multiplied."""
    batched: Callable[[Any, Any], bool] = lambda layer, x: isinstance(x, Tensor)
    """Whether an input has dimensions that number rows."""
    problem: Callable[[Any], str | None] = lambda layer: None
    """Why a layer of this type with these settings is not known."""


def rows_of(tensor: Tensor, lead: int) -> Tensor:
    """The first `lead` dimensions as one."""
    return tensor.reshape(math.prod(tensor.shape[:lead]), *tensor.shape[lead:])


def _all_but_last(layer: nn.Module, dims: int) -> int:
    return dims - 1


def _first(layer: nn.Module, dims: int) -> int:
    return 1


def _linear_weight(layer: nn.Linear, x: Tensor, grad: Tensor) -> Pair:
    return rows_of(x, x.dim() - 1)[:, None], rows_of(grad, grad.dim() - 1)[:, None]


def _linear_backward(
    layer: nn.Linear, x: Tensor, weight: Tensor, grad: Tensor, wanted: list[bool]
) -> tuple[Tensor | None, ...]:
    of_x, of_weight, of_bias = wanted
    rows = grad.reshape(-1, grad.shape[-1])
    return (
        (grad @ weight.to(grad.dtype)).to(x.dtype) if of_x else None,
        (rows.mT @ x.reshape(-1, x.shape[-1]).to(rows.dtype)).to(weight.dtype) if of_weight else None,
        rows.sum(0).to(weight.dtype) if of_bias else None,
    )


def _scale(normalised: Callable[[Any, Tensor], Tensor], lead: Callable[[Any, int], int]) -> Kind:
    """A normalisation whose weight multiplies what it has normalised."""
    return Kind(lead, lambda layer, x, grad: rows_of(grad * normalised(layer, _fine(x, grad)), lead(layer, x.dim())))


def _fine(x: Tensor, grad: Tensor) -> Tensor:
    """In the dtype that was computed in: autocast normalises bfloat16 in float32."""
    return x.to(torch.promote_types(x.dtype, grad.dtype))


def _all_but_weights(layer: Any, dims: int) -> int:
    return dims - layer.weight.dim()


def _by_root_mean_square(layer: Any, x: Tensor) -> Tensor:
    """diffusers'."""
    return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + layer.eps)


def _channels(tensor: Tensor) -> Tensor:
    """(R, C) sums over all positions of (R, C, ...)."""
    return tensor.flatten(2).sum(2) if tensor.dim() > 2 else tensor


def _prelu_weight(layer: nn.PReLU, x: Tensor, grad: Tensor) -> Tensor:
    passed = grad * x.clamp(max=0)
    return _channels(passed) if layer.num_parameters > 1 else passed.reshape(len(x), -1).sum(1, keepdim=True)


def _embedding_weight(layer: nn.Embedding, x: Tensor, grad: Tensor) -> Pair:
    chosen = F.one_hot(x.reshape(-1), layer.num_embeddings).to(grad.dtype)
    if layer.padding_idx is not None:
        chosen[:, layer.padding_idx] = 0
    return rows_of(grad, grad.dim() - 1)[:, None], chosen[:, None]


def _embedding_problem(layer: nn.Embedding) -> str | None:
    return "with max_norm, scale_grad_by_freq or sparse" if _unusual(layer) else None


def _unusual(layer: nn.Embedding) -> bool:
    return layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse


def _patches(layer: Any, x: Tensor) -> Tensor:
    """(R, positions, in, *kernel): what each output position sees."""
    seen = F.pad(x, [amount for padding in reversed(layer.padding) for amount in (padding, padding)])
    sizes = zip(layer.kernel_size, layer.stride, layer.dilation, strict=True)
    for dim, (kernel, stride, dilation) in enumerate(sizes, start=2):
        seen = seen.unfold(dim, dilation * (kernel - 1) + 1, stride)[..., ::dilation]
    spatial = len(layer.kernel_size)
    return seen.movedim(1, 1 + spatial).flatten(1, spatial)


def _conv_weight(layer: Any, x: Tensor, grad: Tensor) -> Pair | Tensor:
    patches, grads = _patches(layer, x), grad.flatten(2).mT
    if layer.groups == 1:
        return patches.flatten(2), grads
    by_group = patches.unflatten(2, (layer.groups, -1)).flatten(3)
    products = torch.einsum("rtgo,rtgi->rgoi", grads.unflatten(2, (layer.groups, -1)), by_group)
    return products.reshape(len(x), *layer.weight.shape)


def _conv_backward(
    layer: Any, x: Tensor, weight: Tensor, grad: Tensor, wanted: list[bool]
) -> tuple[Tensor | None, ...]:
    sizes, settings = (
        [len(weight)],
        (layer.stride, layer.padding, layer.dilation, False, [0] * (x.dim() - 2), layer.groups),
    )
    found = torch.ops.aten.convolution_backward(grad, x.to(grad.dtype), weight.to(grad.dtype), sizes, *settings, wanted)
    dtypes = (x.dtype, weight.dtype, weight.dtype)
    return tuple(None if part is None else part.to(dtype) for part, dtype in zip(found, dtypes, strict=True))


def _conv_problem(layer: Any) -> str | None:
    if layer.padding_mode != "zeros":
        return f"with padding_mode {layer.padding_mode}"
    return f"with padding {layer.padding!r}" if isinstance(layer.padding, str) else None


CONVOLUTION = Kind(
    _first,
    _conv_weight,
    lambda grad, lead: _channels(grad),
    backward=_conv_backward,
    batched=lambda layer, x: isinstance(x, Tensor) and x.dim() == layer.weight.dim(),
    problem=_conv_problem,
)
KINDS = {
    "torch.nn.modules.linear.Linear": Kind(_all_but_last, _linear_weight, backward=_linear_backward),
    "torch.nn.modules.conv.Conv1d": CONVOLUTION,
    "torch.nn.modules.conv.Conv2d": CONVOLUTION,
    "torch.nn.modules.conv.Conv3d": CONVOLUTION,
    "torch.nn.modules.sparse.Embedding": Kind(
        lambda layer, dims: dims - 1, _embedding_weight, problem=_embedding_problem
    ),
    "torch.nn.modules.activation.PReLU": Kind(_first, _prelu_weight),
    "torch.nn.modules.normalization.GroupNorm": Kind(
        _first,
        lambda layer, x, grad: _channels(grad * F.group_norm(_fine(x, grad), layer.num_groups, eps=layer.eps)),
        lambda grad, lead: _channels(grad),
    ),
    "torch.nn.modules.normalization.LayerNorm": _scale(
        lambda layer, x: F.layer_norm(x, layer.normalized_shape, eps=layer.eps), _all_but_weights
    ),
    "torch.nn.modules.normalization.RMSNorm": _scale(
        lambda layer, x: F.rms_norm(x, layer.normalized_shape, eps=layer.eps), _all_but_weights
    ),
    "diffusers.models.normalization.FP32LayerNorm": _scale(
        lambda layer, x: F.layer_norm(x.float(), layer.normalized_shape, eps=layer.eps), _all_but_weights
    ),
    "diffusers.models.normalization.RMSNorm": _scale(_by_root_mean_square, _all_but_weights),
    "diffusers.models.normalization.MochiRMSNorm": _scale(_by_root_mean_square, _all_but_weights),
}
"""By a type's full name: a subclass may compute something else. Parametrized and weight-normalised layers are other types, or
own other parameters."""


def kind_of(layer: nn.Module) -> Kind | None:
    """What is known of the layer's type, if anything. Sharding puts a type of its own over a layer's."""
    return _kind_of(type(layer).__bases__[-1] if isinstance(layer, FSDPModule) else type(layer))


@cache
def _kind_of(stock: type) -> Kind | None:
    return KINDS.get(f"{stock.__module__}.{stock.__qualname__}")


def unknown(layer: nn.Module, trained: list[str]) -> str | None:
    """Why per-trajectory gradients of the layer's own parameters named `trained` are not known, in a word or two; else None."""
    kind = kind_of(layer)
    if kind is None or not {"weight", "bias"}.issuperset(trained):
        return type(layer).__name__
    if "forward" in vars(layer):
        return f"{type(layer).__name__} whose forward has been replaced"
    problem = kind.problem(layer)
    return None if problem is None else f"{type(layer).__name__} {problem}"
