"""The gradient of events by plain recomputation, and what rounding makes of it: what the checks hold executions against."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from onetake.core.coefficients import Coefficients
from onetake.core.noise import generator
from onetake.core.records import MicroBatch, Rollout, Transition
from onetake.execution.base import Execution
from onetake.policies import Policy, leaves
from onetake.rollout.compare_gradients import Rounding

Repetition = Sequence[tuple[Tensor, float]]
"""Factors (B,) of an event's cotangents, each with the number that multiplies its gradient, so that they sum to the whole."""


def by_rows(batch: MicroBatch, draw: int = 0) -> Repetition:
    """Half of the trajectories, then the rest: each is computed as before, only the sums over trajectories are rounded otherwise.

    First it is every other one, then it is random. One alone is halved, which rounds nothing: what is left is what the kernels
    do not repeat.
    """
    samples = len(batch.samples)
    order = torch.randperm(samples, generator=generator("halves", draw)) if draw else torch.arange(samples)
    half = (order % 2 == 0).double() if samples > 1 else torch.full((1,), 0.5, dtype=torch.float64)
    return [(half, 1.0), (1 - half, 1.0)]


def scaled(batch: MicroBatch, factor: float) -> Repetition:
    """The cotangents times a number: unless it is a power of two, everything in the backward is rounded otherwise."""
    return [(torch.full((len(batch.samples),), factor, dtype=torch.float64), 1 / factor)]


class Native:
    """Σ ω ∇ℓ, and the KL's gradient, of the events that were added; p.grad is neither used nor touched."""

    def __init__(
        self, policy: Policy, execution: Execution, rollout: Rollout, coefficients: Coefficients, draws: int = 1
    ) -> None:
        """In the order of roundings of `execution`: what it multiplies in after the backward is multiplied in after it here.

        `draws` is how often every event's gradient will be repeated to see its rounding.
        """
        self._policy, self._rollout, self._coefficients = policy, rollout, coefficients
        self._kl = execution.kl if execution.kl is not None and not execution.kl.as_reward else None
        self._late = execution.late
        self._leaves = leaves(policy)
        self._found: dict[str, Tensor] = {}
        self._direct: dict[str, Tensor] = {}  # of a KL whose division by the number of events is late
        self.rounding = Rounding(draws)
        self.shift = 0.0  # largest |ℓ − ℓ_old| of an event, nats

    @property
    def gradients(self) -> dict[str, Tensor]:
        return _added(self._found, self._divided(self._direct))

    def add(self, batch: MicroBatch, old: Transition, repetitions: Sequence[Repetition]) -> None:
        """One event, and its `repetitions`. A forward and backward for it and for each of their summands; two with a late KL."""
        found, direct = self._gradients(batch, old, torch.ones(len(batch.samples), dtype=torch.float64))
        self._found, self._direct = _added(self._found, found), _added(self._direct, direct)
        whole = _added(found, self._divided(direct))
        for repetition in repetitions:
            again: list[dict[str, Tensor]] = []
            for factor, multiplier in repetition:
                summands, more = self._gradients(batch, old, factor)
                again.append({n: g * multiplier for n, g in _added(summands, self._divided(more)).items()})
            for name, gradient in whole.items():
                self.rounding.add(name, gradient, [summands[name] for summands in again])

    def _gradients(
        self, batch: MicroBatch, old: Transition, factor: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Of one event, each trajectory's cotangents times its `factor`; and of its KL, undivided, where that is late."""
        new = self._policy.score(batch, old)
        self.shift = max(self.shift, float((new.log_prob.detach() - old.log_prob).abs().max()))
        omega = self._coefficients.omega(batch, old, new.detached())
        scored, omega = self._coefficients.scored(old, new), omega * factor.to(omega)
        if self._kl is None:
            return self._of([scored], [omega]), {}
        cotangent = self._kl.cotangent(old) * factor.to(omega)
        if not self._late:
            return self._of([scored, self._kl.of(new, old)], [omega, cotangent / self._rollout.event_count]), {}
        found = self._of([scored], [omega])
        return found, self._of([self._kl.of(self._policy.score(batch, old), old)], [cotangent])

    def _divided(self, direct: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: 1 / self._rollout.event_count * gradient for name, gradient in direct.items()}

    def _of(self, outputs: list[Tensor], cotangents: list[Tensor]) -> dict[str, Tensor]:
        wanted = list(self._leaves.values())
        gradients = torch.autograd.grad(outputs, wanted, cotangents, allow_unused=True)
        return {n: g.detach() for n, g in zip(self._leaves, gradients, strict=True) if g is not None}


def _added(one: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, Tensor]:
    """The sum of two gradients, of which either may lack tensors."""
    both = {name: one[name] + other[name] for name in one.keys() & other.keys()}
    return one | other | both


@contextmanager
def set_aside(parameters: dict[str, nn.Parameter]) -> Iterator[None]:
    """Inside, no parameter has a gradient; afterwards each has the one it had before."""
    before = {name: p.grad for name, p in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = None
    try:
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.grad = before[name]
