"""The protocol of executions."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from onetake.objectives import Coefficients
from onetake.policies import Observer, Policy
from onetake.records import MicroBatch, Rollout


class Execution(Protocol):
    """One update's life: `observing` around the sampling of each micro-batch, then one `accumulate`."""

    grad: bool
    """Whether selected events run with gradients during sampling."""

    def observing(self, policy: Policy, batch: MicroBatch) -> AbstractContextManager[Observer]:
        """Inside, the policy samples `batch` and hands each event to the yielded observer: drop, keep, or bank it."""
        ...

    def accumulate(self, policy: Policy, rollout: Rollout, coefficients: Coefficients) -> None:
        """p.grad += Σ ω ∇ℓ over all events of the rollout, exactly once; what was kept is freed.

        Raises ValueError if what was kept during sampling cannot give this gradient.
        """
        ...


def refuse_stale(name: str, policy: Policy, rollout: Rollout) -> None:
    """Graphs and banks belong to the weights that sampled them."""
    if policy.version != rollout.version:
        raise ValueError(
            f"execution: {name} holds what version {rollout.version} of the policy sampled, but the weights are now at "
            f"version {policy.version}; further updates on the same rollout need execution: recompute"
        )
