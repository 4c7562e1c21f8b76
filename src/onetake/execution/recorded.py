"""A layer's forward whose backward, while its bank collects, hands over (input, output gradient) and forms no weight gradient.

The bits of the forward are the layer's own. Since the weights get no gradient from here, any that autograd brings to one while
the bank collects comes from a use that was not recorded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from onetake.execution.layers import Kind


class Collector(Protocol):
    """What a recorded layer tells."""

    banking: bool

    def record(self, call: Any, x: Tensor, grad: Tensor) -> None: ...


class Recorded(torch.autograd.Function):
    """Its context, which is also the graph's node, is one call of a layer. Its `place` is told before it goes backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: nn.Module, kind: Kind, bank: Collector
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.kind, ctx.bank, ctx.place = layer, kind, bank, None
        ctx.weights = weight, bias  # themselves: what is saved may come back as a copy
        ctx.autocast = _autocast(x)
        output = type(layer).forward(layer, x)
        if not output._is_view():
            return output
        # a linear layer's, of a product that nothing else holds: as what it is, so that it may be changed in place
        return torch.ops.aten._unsafe_view.default(output, output.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[:3])
        if ctx.bank.banking:
            ctx.bank.record(ctx, x.detach(), grad)
            wanted[1:] = [False, False]
        if not any(wanted):
            return (None,) * 6
        if ctx.kind.backward is not None:
            return (*ctx.kind.backward(ctx.layer, x, weight, grad, wanted), None, None, None)
        return (*_by_running_again(ctx, x, grad, wanted), None, None, None)


def parameters_of(call: Any) -> dict[str, Tensor]:
    """Those of the layer that are trained, as they were at the call."""
    named = zip(("weight", "bias"), call.weights, call.needs_input_grad[1:3], strict=True)
    return {name: parameter for name, parameter, trained in named if trained}


def is_recorded(node: Any) -> bool:
    """Whether a graph's node is a recorded call."""
    return type(node) is Recorded._backward_cls


def _by_running_again(ctx: Any, x: Tensor, grad: Tensor, wanted: list[bool]) -> Iterator[Tensor | None]:
    device, enabled, dtype = ctx.autocast
    with torch.enable_grad(), torch.autocast(device, dtype, enabled):
        again = x.detach().requires_grad_(wanted[0])
        output = type(ctx.layer).forward(ctx.layer, again)
    inputs = [tensor for tensor, want in zip((again, *ctx.weights), wanted, strict=True) if want]
    gradients = iter(torch.autograd.grad(output, inputs, grad))
    return (next(gradients) if want else None for want in wanted)


def _autocast(x: Tensor) -> tuple[str, bool, torch.dtype]:
    device = x.device.type
    return device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
