"""One sampling call seen by event: draws or replays actions and scores them. Shared by every policy that denoises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from onetake.core.noise import transition_noise
from onetake.core.records import Entry, MicroBatch, Transition
from onetake.core.transitions import Kernel, Ode, log_prob, mean_std
from onetake.policies import Observer


@dataclass(kw_only=True)
class Episode:
    """The sampling of one micro-batch, whole or from an `entry` or up to a `stop`; or the re-scoring of one event (`replay`).

    Streams that are denoised side by side on one schedule (LTX-2's video and audio) take each event one after the other;
    the observer is told once, of all of them as one transition.
    """

    batch: MicroBatch
    kernel: Kernel
    observe: Observer
    grad: bool
    replay: Transition | None = None
    entry: Entry | None = None
    stop: int | None = None  # the call ends before this event
    reached: Tensor | None = None  # the sample there
    overwritten: Callable[[Tensor], Tensor] | None = None  # latent of one sample → True where nothing is acted upon
    streams: int = 1
    _parts: list[Transition] = field(default_factory=list)  # of the event in progress, one for each stream so far
    _handed_out: int = 0  # latent dimensions of the entry that streams have taken

    @property
    def begin(self) -> Entry | None:
        """Where the call begins, if not at the start."""
        return self.entry if self.replay is None else Entry(index=self.replay.index, sample=self.replay.sample)

    def stochastic(self, index: int) -> bool:
        """Whether any trajectory draws (and trains) event `index` in this call."""
        if self.replay is not None:
            return index == self.replay.index
        return bool(self.batch.stochastic[:, index].any())

    def wants_grad(self, index: int) -> bool:
        return self.grad and self.stochastic(index)

    def entered(self, like: Tensor, stream: int) -> Tensor:
        """The part of the sample where the call begins that belongs to `stream`, in the shape of `like`."""
        assert self.begin is not None
        first = 0 if stream == 0 else self._handed_out
        self._handed_out = first + like[0].numel()
        return _slice(self.begin.sample.expand(len(like), *self.begin.sample.shape[1:]), like, first)

    def arrive(self, sample: Tensor) -> None:
        """A stream's sample at the stop; streams follow each other in `reached`."""
        self.reached = sample if self.reached is None else torch.cat([self.reached.flatten(1), sample.flatten(1)], 1)

    def transition(
        self,
        index: int,
        sample: Tensor,
        velocity: Tensor,
        sigmas: Sequence[float],
        stream: int = 0,
        waiting: Tensor | None = None,
    ) -> Tensor:
        """Take event `index` from `sample`, tell the observer, and return x_{k+1} (detached, in the sample's dtype).

        `waiting` is True, in the shape of one sample, where the event acts upon nothing.

        The action is rounded to the sample's dtype *before* it is scored: rounding it afterwards would move log_prob by
        more than published clip ranges allow.
        """
        rows = self.batch.stochastic[:, index]
        mean, std = mean_std(self.kernel, sample, velocity, sigmas, index)
        if self.replay is not None:
            action = _slice(self.replay.action, sample, sum(part.action[0].numel() for part in self._parts))
        else:
            action = mean.detach() + std * transition_noise(self.batch, index, mean, stream)
            if not rows.all():
                euler, _ = mean_std(Ode(), sample, velocity.detach(), sigmas, index)
                action = torch.where(rows.to(mean.device).view(-1, *[1] * (mean.dim() - 1)), action, euler)
            action = action.to(sample.dtype)
        exact, _ = mean_std(self.kernel, sample.double(), velocity.double(), sigmas, index)
        scored = action, exact
        hidden = self.overwritten(sample[0]) if self.overwritten is not None else waiting
        if hidden is not None:  # no reward depends on these entries: they would add noise to the gradient, and to D
            mean = torch.where(hidden, action.to(mean.dtype), mean)
            scored = action[:, ~hidden], exact[:, ~hidden]
        score = torch.where(rows.to(mean.device), log_prob(*scored, std), 0)
        part = Transition(
            index=index,
            rows=rows.to(mean.device),
            sample=sample.detach(),
            action=action,
            velocity=velocity.detach(),
            mean=mean,
            log_prob=score,
            std=std,
            overwritten=0 if hidden is None else int(hidden.sum()),
        )
        self._parts.append(part)
        if len(self._parts) == self.streams:
            parts, self._parts = self._parts, []
            self.observe(part if len(parts) == 1 else _joined(parts))
        return action


def _slice(whole: Tensor, like: Tensor, first: int) -> Tensor:
    """A copy of the dimensions of `whole` from `first` on, in the shape of `like`.

    Also in its memory layout: matrix products of another layout round otherwise, and in bfloat16 it shows.
    """
    if whole.shape == like.shape:
        return whole.clone()
    return torch.empty_like(like).copy_(whole[:, first : first + like[0].numel()].view(like.shape))


def _joined(parts: list[Transition]) -> Transition:
    """One transition of (B, D) tensors from those of its streams, which share the schedule and so the std."""
    return replace(
        parts[0],
        sample=torch.cat([part.sample.flatten(1) for part in parts], 1),
        action=torch.cat([part.action.flatten(1) for part in parts], 1),
        velocity=torch.cat([part.velocity.flatten(1) for part in parts], 1),
        mean=torch.cat([part.mean.flatten(1) for part in parts], 1),
        log_prob=torch.stack([part.log_prob for part in parts]).sum(0),
        overwritten=sum(part.overwritten for part in parts),
    )
