"""A recovery for every transformer of a policy, for phases in which many forwards follow each other's backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from onetake.activations.recovery import Recovery


class Recoveries:
    """`memory` is `Recovery`'s; without it all of this does nothing.

    A policy with two transformers (Wan 2.2) runs one or the other in an event, so each is given all of the memory.
    """

    def __init__(self, module: nn.Module, memory: str | None) -> None:
        models = dict(module.items()) if isinstance(module, nn.ModuleDict) else {"": module}
        self.each = {} if memory is None else {name: Recovery(model, memory=memory) for name, model in models.items()}
        self.told: dict[str, float] = {}  # of the latest phase with gradients, by transformer if there are two

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a phase: a forward with gradients follows the plan of its shape, or, the first time, is measured."""
        with ExitStack() as stack:
            for recovery in self.each.values():
                stack.enter_context(recovery.step(strict=False))
            yield
        for name, recovery in self.each.items():
            if recovery.ran:
                prefix = f"{name}/" if name else ""
                self.told |= {f"{prefix}{key}": value for key, value in recovery.report().items()}

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Inside, every unit is recomputed and nothing is measured."""
        with ExitStack() as stack:
            for recovery in self.each.values():
                stack.enter_context(recovery.forced({}))
            yield
