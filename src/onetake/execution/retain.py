"""LeanGRPO's Retain (arXiv 2609.03528): keep each selected event's graph until its advantage arrives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from onetake.execution.base import refuse_stale
from onetake.objectives import Coefficients
from onetake.policies import Observer, Policy
from onetake.records import MicroBatch, Rollout


class Retain:
    """No second forward. Memory grows with events × trajectories; bitwise equal to recompute on the same kernels."""

    grad = True

    def __init__(self) -> None:
        self._log_probs: list[list[Tensor]] = []

    @contextmanager
    def observing(self, policy: Policy, batch: MicroBatch) -> Iterator[Observer]:
        kept: list[Tensor] = []
        self._log_probs.append(kept)
        yield lambda transition: kept.append(transition.log_prob)

    def accumulate(self, policy: Policy, rollout: Rollout, coefficients: Coefficients) -> None:
        refuse_stale("retain", policy, rollout)
        kept, self._log_probs = self._log_probs, []
        for batch, transitions, log_probs in zip(rollout.batches, rollout.transitions, kept, strict=True):
            for position, old in enumerate(transitions):
                log_probs[position].backward(coefficients.omega(batch, old, old))
                log_probs[position] = log_probs[position].detach()  # frees the graph before the next backward
