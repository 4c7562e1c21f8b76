"""One sampling call seen by event: draws or replays actions and scores them. Shared by every policy that denoises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onetake.noise import transition_noise
from onetake.policies import Observer
from onetake.records import MicroBatch, Transition
from onetake.transitions import Kernel, Ode, log_prob, mean_std


@dataclass(kw_only=True)
class Episode:
    """The sampling of one micro-batch, or the re-scoring of one of its events (`replay`)."""

    batch: MicroBatch
    kernel: Kernel
    observe: Observer
    grad: bool
    replay: Transition | None = None
    overwritten: Callable[[Tensor], Tensor] | None = None  # latent of one sample → True where nothing is acted upon

    def stochastic(self, index: int) -> bool:
        """Whether any trajectory draws (and trains) event `index` in this call."""
        if self.replay is not None:
            return index == self.replay.index
        return bool(self.batch.stochastic[:, index].any())

    def wants_grad(self, index: int) -> bool:
        return self.grad and self.stochastic(index)

    def transition(self, index: int, sample: Tensor, velocity: Tensor, sigmas: Sequence[float]) -> Tensor:
        """Take event `index` from `sample`, tell the observer, and return x_{k+1} (detached, in the sample's dtype).

        The action is rounded to the sample's dtype *before* it is scored: rounding it afterwards would move log_prob by
        more than published clip ranges allow.
        """
        rows = self.batch.stochastic[:, index]
        mean, std = mean_std(self.kernel, sample, velocity, sigmas, index)
        if self.replay is not None:
            action = self.replay.action
        else:
            action = mean.detach() + std * transition_noise(self.batch, index, mean)
            if not rows.all():
                euler, _ = mean_std(Ode(), sample, velocity.detach(), sigmas, index)
                action = torch.where(rows.to(mean.device).view(-1, *[1] * (mean.dim() - 1)), action, euler)
            action = action.to(sample.dtype)
        scored = action, mean
        hidden = self.overwritten(sample[0]) if self.overwritten is not None else None
        if hidden is not None:  # no reward depends on these entries: they would add noise to the gradient, and to D
            mean = torch.where(hidden, action.to(mean.dtype), mean)
            scored = action[:, ~hidden], mean[:, ~hidden]
        score = torch.where(rows.to(mean.device), log_prob(*scored, std), 0)
        self.observe(
            Transition(
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
        )
        return action
