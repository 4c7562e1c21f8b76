"""What a micro-batch's loss says of its log-probs, read between forward and backward; where that is nothing, skip the latter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def exposure(loss: Tensor, scored: Sequence[Tensor]) -> float | None:
    """Σ|∂L/∂t| over the tensors of `scored`, which the loss was made of; None if it depends on parameters past them too.

    Exactly 0 means that no parameter would get a gradient other than 0: every group of the micro-batch is dead, and its backward
    may be skipped. Only the loss's own operations run backward, and the graph is kept.
    """
    if _passed(loss, scored):
        return None
    given = torch.autograd.grad(loss, scored, retain_graph=True, allow_unused=True)
    return sum(float(gradient.abs().sum(dtype=torch.float32)) for gradient in given if gradient is not None)


def _passed(loss: Tensor, scored: Sequence[Tensor]) -> bool:
    """Whether a path leads from the loss to a parameter without going through `scored`, as an auxiliary loss's does."""
    seen = {tensor.grad_fn for tensor in scored}
    left = [loss.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        if not node.next_functions:  # a parameter's
            return True
        seen.add(node)
        left += [below for below, _ in node.next_functions]
    return False


class Skip:
    """Decides for an accelerate `Accelerator`, on all ranks alike, whether a micro-batch's backward is left out.

    On one process it is wherever the caller's is `dead`. Under DistributedDataParallel all ranks' must be, and the backward that
    sums gradients runs unless those that it would sum are all skipped. FSDP and DeepSpeed count backwards: none is skipped.
    """

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self._accumulated = False  # a backward of this update ran, and its gradients were not summed yet

    def __call__(self, model: nn.Module, dead: bool) -> bool:
        """`model` as the trainer calls it."""
        parallel = isinstance(model, DistributedDataParallel)
        if not parallel and self._accelerator.distributed_type.name != "NO":
            return False
        alive = torch.tensor(float(not dead), device=self._accelerator.device)
        skipped = not self._accelerator.reduce(alive, reduction="sum").item()
        if parallel and model.require_backward_grad_sync and self._accumulated:
            skipped = False
        self._accumulated = not self._accelerator.sync_gradients and (self._accumulated or not skipped)
        return skipped
