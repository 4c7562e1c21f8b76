"""Faults planted into a policy, each with the cause that the pre-flight check must name."""

from __future__ import annotations

from functools import wraps

from onetake.policies.diffusion import DiffusionPolicy


def off_by_one(policy: DiffusionPolicy) -> None:
    """Re-scoring sees the schedule one step later."""
    scheduler, set_timesteps = policy.scheduler, policy.scheduler.set_timesteps

    @wraps(set_timesteps)
    def shifted(*args, **kwargs):
        set_timesteps(*args, **kwargs)
        if scheduler._episode is not None and scheduler._episode.replay is not None:
            scheduler.timesteps = scheduler.timesteps.roll(-1)

    scheduler.set_timesteps = shifted


def one_percent(policy: DiffusionPolicy) -> None:
    """Re-scoring answers with 1 % more velocity."""
    answer = policy.scheduler.step

    def step(model_output, *args, **kwargs):
        replay = policy.scheduler._episode is not None and policy.scheduler._episode.replay is not None
        return answer(model_output * (1.01 if replay else 1.0), *args, **kwargs)

    policy.scheduler.step = step


def dtype_drift(policy: DiffusionPolicy) -> None:
    """The stored action was rounded after it was scored."""
    rollout = policy.rollout

    def rounded(batch, observe, *, grad):
        def later(transition):
            object.__setattr__(transition, "action", transition.action.bfloat16().float())
            observe(transition)

        return rollout(batch, later, grad=grad)

    policy.rollout = rounded


FAULTS = [(off_by_one, "another velocity"), (one_percent, "another velocity"), (dtype_drift, "stored in another dtype")]
