"""The seam: a scheduler that any diffusers flow-matching pipeline accepts, and that turns its loop into a policy.

The pipeline stays untouched. Between two model calls it asks its scheduler for the next latent; this scheduler draws it,
scores it, tells the observer and decides whether the next model call builds a graph. Outside of an episode it is
`FlowMatchEulerDiscreteScheduler`.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    SchedulerMixin,
    UniPCMultistepScheduler,
)
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteSchedulerOutput
from torch import Tensor

from onetake.policies.episode import Episode
from onetake.policies.finish import DpmSolver


class Finished(Exception):
    """Ends a pipeline call as soon as what was asked of it is known. Never leaves the policy."""


class RolloutScheduler(FlowMatchEulerDiscreteScheduler):
    """Plays an `Episode`: stochastic events through its kernel, all other steps through the parent's own `step`.

    A call that begins at event k is the caller's own call once more, by one of two ways. ``tail``: the call starts from x_k
    with the rest of the schedule. ``fast_forward``: the call starts as ever, the model is skipped before k (see
    `DiffusionPolicy`), and the step before k hands out x_k; it is right even where guidance depends on the index.

    With `finish`, the steps after a group's last stochastic event are DPM-Solver++'s, on a part of the schedule.
    """

    finish: DpmSolver | None = None

    _episode: Episode | None = None
    _way = "tail"
    _schedule_only = False
    last_step_at = 0.0
    """`time.perf_counter()` after the latest step: what follows it in a call is decoding."""
    grid: list[float]
    """(T+1) noise levels of the whole schedule, falling from at most 1, set by `set_timesteps`."""
    _lender: SchedulerMixin | None = None
    _stream = 0
    """0, or the number of a companion: a copy that a pipeline makes inside its call for another stream of the same steps."""

    @classmethod
    def replacing(cls, scheduler: SchedulerMixin) -> RolloutScheduler:
        """One with the noise levels of a pipeline's own scheduler.

        UniPC and DPM-Solver lend the grid they compute: their flow grids differ from the Euler one with equal settings. ODE
        steps on it are Euler's. Raises ValueError if the scheduler is not flow matching, or draws noise of its own.
        """
        name, config = type(scheduler).__name__, scheduler.config
        if isinstance(scheduler, RolloutScheduler) and scheduler._lender is not None:
            scheduler = scheduler._lender
            name, config = type(scheduler).__name__, scheduler.config
        if isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
            if config.stochastic_sampling:
                raise ValueError(
                    "policy.pipeline: its scheduler has stochastic_sampling on, whose noise has no log_prob; turn it off"
                )
            return cls.from_config(config)
        if not isinstance(scheduler, UniPCMultistepScheduler | DPMSolverMultistepScheduler):
            raise ValueError(
                f"policy.pipeline: it samples with {name}, which is not a flow-matching scheduler onetake can replace; "
                "those are FlowMatchEulerDiscreteScheduler, and UniPC and DPM-Solver with use_flow_sigmas"
            )
        if not config.use_flow_sigmas or config.prediction_type != "flow_prediction":
            raise ValueError(
                f"policy.pipeline: its {name} has use_flow_sigmas: {config.use_flow_sigmas} and prediction_type: "
                f"{config.prediction_type}; flow matching needs use_flow_sigmas: true and flow_prediction"
            )
        replacement = cls(num_train_timesteps=config.num_train_timesteps)
        replacement._lender = copy.deepcopy(scheduler)
        return replacement

    def __deepcopy__(self, memo: dict) -> RolloutScheduler:
        """In the middle of an episode, the companion for a further stream of it (LTX-2's audio); else just a copy."""
        copied = copy.copy(self)
        copied._schedule_only = False  # the call may go on: this scheduler's own schedule comes after its copies'
        if self._episode is not None:
            copied._stream = self._episode.streams
            self._episode.streams += 1
        return copied

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
        if self._lender is None:
            super().set_timesteps(num_inference_steps, device, sigmas, mu, timesteps)
        else:
            self._borrow(num_inference_steps, device, sigmas=sigmas, mu=mu, timesteps=timesteps)
        levels = 1 - self.sigmas.double() if self.config.invert_sigmas else self.sigmas.double()
        self.grid = levels.tolist()
        if max(self.grid) > 1 + 1e-6:
            raise ValueError(
                f"policy.pipeline: its noise levels start at {max(self.grid):.4g}; flow matching has them in [0, 1]"
            )
        if self._schedule_only:
            raise Finished
        self._offset, self._solver = 0, None
        if self._episode is not None:
            if self.finish is not None and self._episode.batch.last is not None:
                self._solver_from = self._episode.batch.last + 1
                kept = self.finish.kept(self._solver_from, len(self.timesteps))
                self._solver = self.finish.solver([self.grid[i] for i in kept], self.timesteps[kept[:-1]])
                whole = [*range(self._solver_from), *kept]
                self.timesteps, self.sigmas = self.timesteps[whole[:-1]], self.sigmas[whole]
            if self._episode.begin is not None and self._way == "tail":
                self._offset = self._episode.begin.index
                self.timesteps, self.sigmas = self.timesteps[self._offset :], self.sigmas[self._offset :]
            self._set_grad_for(self.upcoming)

    def _borrow(self, steps: int | None, device: str | torch.device | None, **custom: Any) -> None:
        """The lender's grid; of `custom` it gets what the pipeline gives."""
        assert self._lender is not None
        given = {name: value for name, value in custom.items() if value is not None}
        self._lender.set_timesteps(steps, device, **given)
        self.timesteps, self.sigmas = self._lender.timesteps.float(), self._lender.sigmas.float()
        self.num_inference_steps = len(self.timesteps)
        self._step_index = self._begin_index = None

    @property
    def upcoming(self) -> int:
        """Index of the event whose model call comes next."""
        return self._offset + (self.step_index or self.begin_index or 0)

    @property
    def skipping(self) -> bool:
        """Whether the next model call's answer will be thrown away (fast-forward to where the call begins)."""
        begin = self._episode.begin if self._episode is not None else None
        return begin is not None and self.upcoming < begin.index

    @property
    def _last_stream(self) -> bool:
        """Whether the model is called after this scheduler's step, with no other stream's step between."""
        return self._episode is not None and self._stream == self._episode.streams - 1

    def _set_grad_for(self, index: int) -> None:
        """Grad mode for the next model call; the pipeline runs inside a no_grad block, which restores the caller's."""
        assert self._episode is not None
        steps = self._offset + len(self.timesteps)
        torch.set_grad_enabled(index < steps and self._episode.wants_grad(index))

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
        levels = kwargs.get(
            "per_token_timesteps"
        )  # the parent takes x₀ − ε then, as it does on inverted levels; ours is ε − x₀
        velocity = -model_output if self.config.invert_sigmas or levels is not None else model_output
        if episode.stochastic(index):
            waiting = None if levels is None else _waiting(levels, timestep, sample)
            following = episode.transition(index, sample, velocity, self.grid, self._stream, waiting)
            if episode.replay is not None and self._last_stream:
                raise Finished
            self._step_index += 1
        elif self.skipping:
            assert episode.begin is not None
            enters = index + 1 == episode.begin.index
            following = episode.entered(sample, self._stream) if enters else sample
            self._step_index += 1
        elif self._solver is not None and index >= self._solver_from:
            following = self._solver.step(velocity, timestep, sample, return_dict=False)[0].to(sample.dtype)
            self._step_index += 1
        else:
            following = super().step(model_output, timestep, sample, *args, return_dict=False, **kwargs)[0]
            following = following.to(sample.dtype)
        if index + 1 == episode.stop:
            episode.arrive(following)
            if self._last_stream:
                raise Finished
        if self._last_stream:
            self._set_grad_for(index + 1)
        self.last_step_at = time.perf_counter()
        return FlowMatchEulerDiscreteSchedulerOutput(prev_sample=following) if return_dict else (following,)


def _waiting(levels: Tensor, timestep: float | Tensor, sample: Tensor) -> Tensor | None:
    """True where tokens (S, C) of a sample are on a lower level than the event's: the pipeline leaves them as they are.

    `levels` is (B, S), or (B, 1) where no token has a level of its own.
    """
    behind = levels[0] < timestep - 1e-3  # timesteps, of a thousand; the samples of a call have one prompt
    return behind[:, None].expand(sample.shape[1:]) if behind.any() else None
