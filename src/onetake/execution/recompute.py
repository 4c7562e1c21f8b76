"""The native way: sample without gradients, then run every selected event again. The honest baseline."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from onetake.core.coefficients import Coefficients
from onetake.core.objectives import Kl
from onetake.core.records import MicroBatch, Rollout
from onetake.execution.base import backpropagate
from onetake.policies import Observer, Policy


class Recompute:
    """Costs a second forward per selected event; exact for any version of the policy, with ratio and clipping."""

    grad = False
    late = False

    def __init__(self, kl: Kl | None = None) -> None:
        self.kl = kl

    @contextmanager
    def observing(self, policy: Policy, batch: MicroBatch) -> Iterator[tuple[Observer, None]]:
        yield lambda transition: None, None

    def accumulate(self, policy: Policy, rollout: Rollout, coefficients: Coefficients) -> None:
        for batch, transitions in zip(rollout.batches, rollout.transitions, strict=True):
            for old in transitions:
                backpropagate(rollout, batch, old, policy.score(batch, old), coefficients, self.kl)
