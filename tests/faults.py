"""Faults planted into a policy, each with the cause that the pre-flight check must name."""

from __future__ import annotations

import pytest

from onetake.policies.diffusion import DiffusionPolicy
from onetake.policies.scheduler import RolloutScheduler


class Late(RolloutScheduler):
    """Re-scoring sees the schedule one step later."""

    def set_timesteps(self, num_inference_steps=None, device=None, sigmas=None, mu=None, timesteps=None):
        super().set_timesteps(num_inference_steps, device, sigmas, mu, timesteps)
        if self._episode is not None and self._episode.replay is not None:
            self.timesteps = self.timesteps.roll(-1)


class Loud(RolloutScheduler):
    """Re-scoring answers with 1 % more velocity."""

    def step(self, model_output, *args, **kwargs):
        replay = self._episode is not None and self._episode.replay is not None
        return super().step(model_output * (1.01 if replay else 1.0), *args, **kwargs)


def off_by_one(policy: DiffusionPolicy, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(policy.scheduler, "__class__", Late)


def one_percent(policy: DiffusionPolicy, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(policy.scheduler, "__class__", Loud)


def dtype_drift(policy: DiffusionPolicy, patch: pytest.MonkeyPatch) -> None:
    """The stored action was rounded after it was scored."""
    rollout = policy.rollout

    def rounded(batch, observe, *, grad, entry=None):
        def later(transition):
            object.__setattr__(transition, "action", transition.action.bfloat16().float())
            observe(transition)

        return rollout(batch, later, grad=grad, entry=entry)

    patch.setattr(policy, "rollout", rounded)


FAULTS = [
    (off_by_one, "another velocity|schedule is shifted by a step"),
    (one_percent, "another velocity"),
    (dtype_drift, "stored in another dtype"),
]
