"""An exponential moving average of the trained weights: what is evaluated, and saved beside the raw weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from pydantic import Field
from torch import Tensor, nn

from onetake.core.records import Config


class EmaConfig(Config):
    """Flow-GRPO's schedule: every `every` updates, mean ← d·mean + (1−d)·weights with d = min((1+n)/(10+n), decay).

    n is the number of the update, so the average follows quickly at first.
    """

    decay: float = Field(default=0.9, gt=0, lt=1)
    every: int = Field(default=8, ge=1)

    def decay_at(self, update: int) -> float:
        return min((1 + update) / (10 + update), self.decay)


class Ema:
    """The averages of `parameters`, kept in their dtype and on their device."""

    def __init__(self, config: EmaConfig, parameters: dict[str, nn.Parameter]) -> None:
        self._config = config
        self._parameters = list(parameters.values())
        self._means: list[Tensor] = [p.detach().clone() for p in self._parameters]

    @torch.no_grad()
    def update(self, update: int) -> None:
        """After update number `update` (from 1)."""
        if update % self._config.every == 0:
            for mean, parameter in zip(self._means, self._parameters, strict=True):
                mean.lerp_(parameter, 1 - self._config.decay_at(update))

    @torch.no_grad()
    def take(self) -> None:
        """Set the averages to the parameters' present values (which were just loaded)."""
        for mean, parameter in zip(self._means, self._parameters, strict=True):
            mean.copy_(parameter)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the parameters hold the averages."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for mean, parameter in zip(self._means, self._parameters, strict=True):
            weights = parameter.clone()
            parameter.copy_(mean)  # in place: a sharded parameter's memory is FSDP2's
            mean.copy_(weights)
