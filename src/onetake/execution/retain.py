"""LeanGRPO's Retain (arXiv 2609.03528): keep each selected event's graph until its advantage arrives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from onetake.core.coefficients import Coefficients
from onetake.core.objectives import Kl
from onetake.core.records import MicroBatch, Rollout, Transition
from onetake.execution.base import backpropagate, fresh
from onetake.policies import Observer, Policy


class Retain:
    """No second forward. Memory grows with events × trajectories; bitwise equal to recompute on the same kernels."""

    grad = True
    late = False

    def __init__(self, kl: Kl | None = None) -> None:
        self.kl = kl

    @contextmanager
    def observing(self, policy: Policy, batch: MicroBatch) -> Iterator[tuple[Observer, list[Transition]]]:
        kept: list[Transition] = []
        yield kept.append, kept

    def accumulate(self, policy: Policy, rollout: Rollout, coefficients: Coefficients) -> None:
        kept = fresh("retain", policy, rollout)
        for batch, transitions, graphs in zip(rollout.batches, rollout.transitions, kept, strict=True):
            graphs.reverse()
            for old in transitions:
                new = graphs.pop()  # its graph is freed when the next one takes its place
                backpropagate(rollout, batch, old, new, coefficients, self.kl)
