"""The protocol of executions."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from onetake.core.coefficients import Coefficients
from onetake.core.objectives import Kl
from onetake.core.records import MicroBatch, Rollout, Transition
from onetake.policies import Observer, Policy


class Execution(Protocol):
    """One update's life: `observing` around the sampling of each micro-batch, then one `accumulate`. Holds no state."""

    kl: Kl | None
    """Divergence from the reference, measured at sampling; a direct term beside the objective unless it is a reward."""
    grad: bool
    """Whether selected events run with gradients during sampling."""
    late: bool
    """Whether what the reward decides is multiplied in after the backward, which in the model's dtype is rounded otherwise."""

    def observing(self, policy: Policy, batch: MicroBatch) -> AbstractContextManager[tuple[Observer, Any]]:
        """Inside, the policy samples `batch` and hands each event to the yielded observer: drop, keep, or bank it.

        The second thing yielded is what is kept; it travels in the rollout.
        """
        ...

    def accumulate(self, policy: Policy, rollout: Rollout, coefficients: Coefficients) -> None:
        """p.grad += Σ ω ∇ℓ over all events of the rollout, exactly once; what was kept is freed.

        Raises ValueError if what was kept during sampling cannot give this gradient.
        """
        ...


def fresh(name: str, policy: Policy, rollout: Rollout) -> list[Any]:
    """What was kept, per micro-batch. Raises ValueError if it belongs to other weights than the present ones."""
    if policy.version != rollout.version:
        raise ValueError(
            f"execution: {name} holds what version {rollout.version} of the policy sampled, but the weights are now at "
            f"version {policy.version}; further updates on the same rollout need execution: recompute"
        )
    return rollout.take_kept()


def backpropagate(
    rollout: Rollout,
    batch: MicroBatch,
    old: Transition,
    new: Transition,
    coefficients: Coefficients,
    kl: Kl | None,
) -> None:
    """p.grad += ω ∇ℓ, and the KL's gradient, of one event whose graph `new` holds."""
    outputs = [coefficients.scored(old, new)]
    cotangents = [coefficients.omega(batch, old, new.detached())]
    if kl is not None and not kl.as_reward:
        outputs.append(kl.of(new, old))
        cotangents.append(kl.cotangent(old) / rollout.event_count)
    torch.autograd.backward(outputs, cotangents)
