"""Policies: whose log-probability is trained. A policy samples micro-batches and re-scores single events of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor, nn

from onetake.core.records import Entry, MicroBatch, Transition
from onetake.core.transitions import Kernel

Observer = Callable[[Transition], None]


class Policy(Protocol):
    """What executions and the training loop need of a model that generates by transitions."""

    kernel: Kernel
    """How stochastic transitions are drawn and scored."""
    version: int
    """Grows by one with every optimizer step, so that a graph kept from an older version can be refused."""
    ways: tuple[str, ...]
    """Ways to re-score an event, cheapest first."""
    way: str
    """The one in use; the pre-flight check chooses it."""
    calls: int
    """Forward calls of the model so far; an index-skipping stub does not count."""
    forwards: int
    """Rows of those calls (a call with classifier-free guidance on B samples has 2B): the unit of compute."""
    trained_forwards: int
    """Those of them that ran with gradients."""
    gathered: dict[str, nn.Parameter]
    """Where weights are sharded over ranks: by name, the whole tensors that a forward uses in their place."""

    @property
    def module(self) -> nn.Module:
        """The module that holds every trainable parameter."""
        ...

    @property
    def sigmas(self) -> list[float]:
        """(T+1) noise levels of the schedule, falling to 0."""
        ...

    def prefix(self, batch: MicroBatch) -> Entry:
        """x (1, ...) before the group's first stochastic event, which all samples share when they share their start."""
        ...

    def rollout(self, batch: MicroBatch, observe: Observer, *, grad: bool, entry: Entry | None = None) -> Tensor:
        """Sample the micro-batch, all of it or from `entry` on, and return what the reward sees (B, ...).

        `observe` is called right after each stochastic event; with `grad` its log_prob carries the event's own graph
        (the next sample is detached), and every other step runs without gradients.
        """
        ...

    def reference(self, batch: MicroBatch, old: Transition) -> Transition:
        """Event `old` under the frozen reference weights, without a graph. May be called while `rollout` observes."""
        ...

    def score(self, batch: MicroBatch, old: Transition) -> Transition:
        """Event `old` again under the current weights, with a graph: same sample, same action, new log_prob."""
        ...


def trainable(policy: Policy) -> dict[str, nn.Parameter]:
    """Name → parameter, in the module's order."""
    return {name: p for name, p in policy.module.named_parameters() if p.requires_grad}


def leaves(policy: Policy) -> dict[str, nn.Parameter]:
    """Name → where autograd puts the gradient of a `trainable` parameter: itself, or what it is gathered into."""
    return {name: policy.gathered.get(name, p) for name, p in trainable(policy).items()}
