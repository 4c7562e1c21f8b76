"""The seam: a scheduler that any diffusers flow-matching pipeline accepts, and that turns its loop into a policy.

The pipeline stays untouched. Between two model calls it asks its scheduler for the next latent; this scheduler draws it,
scores it, tells the observer and decides whether the next model call builds a graph. Outside of an episode it is
`FlowMatchEulerDiscreteScheduler`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteSchedulerOutput
from torch import Tensor

from onetake.policies.episode import Episode


class Finished(Exception):
    """Ends a pipeline call as soon as what was asked of it is known. Never leaves the policy."""


class RolloutScheduler(FlowMatchEulerDiscreteScheduler):
    """Plays an `Episode`: stochastic events through its kernel, all other steps through the parent's own `step`.

    Re-scoring event k is the caller's own call once more, by one of two ways. ``tail``: the call starts from x_k with the
    rest of the schedule. ``fast_forward``: the call starts as ever, the model is skipped before k (see
    `DiffusionPolicy`), and the step before k hands out x_k; it is right even where guidance depends on the index.
    """

    _episode: Episode | None = None
    _way = "tail"
    _schedule_only = False
    last_step_at = 0.0
    """`time.perf_counter()` after the latest step: what follows it in a call is decoding."""
    grid: list[float]
    """(T+1) sigmas of the whole schedule, set by `set_timesteps`."""

    @contextmanager
    def playing(self, episode: Episode, way: str = "tail") -> Iterator[None]:
        """Everything the pipeline does inside belongs to `episode`."""
        self._episode, self._way = episode, way
        try:
            yield
        finally:
            self._episode = None

    @contextmanager
    def schedule_only(self) -> Iterator[None]:
        """The pipeline call inside ends (with `Finished`) once its schedule is known."""
        self._schedule_only = True
        try:
            yield
        finally:
            self._schedule_only = False

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: str | torch.device | None = None,
        sigmas: list[float] | None = None,
        mu: float | None = None,
        timesteps: list[float] | None = None,
    ) -> None:
        super().set_timesteps(num_inference_steps, device, sigmas, mu, timesteps)
        self.grid = self.sigmas.double().tolist()
        if self._schedule_only:
            raise Finished
        self._offset = 0
        if self._episode is not None:
            if self._episode.replay is not None and self._way == "tail":
                self._offset = self._episode.replay.index
                self.timesteps, self.sigmas = self.timesteps[self._offset :], self.sigmas[self._offset :]
            self._set_grad_for(self.upcoming)

    @property
    def upcoming(self) -> int:
        """Index of the event whose model call comes next."""
        return self._offset + (self.step_index or self.begin_index or 0)

    @property
    def skipping(self) -> bool:
        """Whether the next model call's answer will be thrown away (fast-forward towards the replayed event)."""
        replay = self._episode.replay if self._episode is not None else None
        return replay is not None and self.upcoming < replay.index

    def _set_grad_for(self, index: int) -> None:
        """Grad mode for the next model call; the pipeline runs inside a no_grad block, which restores the caller's."""
        assert self._episode is not None
        torch.set_grad_enabled(index < len(self.grid) - 1 and self._episode.wants_grad(index))

    def step(
        self,
        model_output: Tensor,
        timestep: float | Tensor,
        sample: Tensor,
        *args,
        return_dict: bool = True,
        **kwargs,
    ) -> FlowMatchEulerDiscreteSchedulerOutput | tuple[Tensor]:
        episode = self._episode
        if episode is None:
            return super().step(model_output, timestep, sample, *args, return_dict=return_dict, **kwargs)
        if self.step_index is None:
            self._init_step_index(timestep)
        index = self.upcoming
        if episode.stochastic(index):
            following = episode.transition(index, sample, model_output, self.grid)
            if episode.replay is not None:
                raise Finished
            self._step_index += 1
        elif self.skipping:
            assert episode.replay is not None
            following = episode.replay.sample.clone() if index + 1 == episode.replay.index else sample
            self._step_index += 1
        else:
            following = super().step(model_output, timestep, sample, *args, return_dict=False, **kwargs)[0]
            following = following.to(sample.dtype)
        self._set_grad_for(index + 1)
        self.last_step_at = time.perf_counter()
        return FlowMatchEulerDiscreteSchedulerOutput(prev_sample=following) if return_dict else (following,)
