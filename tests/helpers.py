"""Small builders shared by tests: an update of the toy policy, and gradients by name."""

from __future__ import annotations

import torch

from onetake.advantages import Advantages
from onetake.coefficients import Coefficients
from onetake.execution import EXECUTIONS
from onetake.execution.sampling import RolloutConfig, deal, sample
from onetake.noise import generator
from onetake.objectives import Grpo
from onetake.policies import Policy, trainable
from onetake.records import Address, Prompt, Rollout
from onetake.selection import All

PROMPTS = [Prompt(text) for text in ("first", "second", "third")]


def fake_rewards(rollout: Rollout, groups: int, group_size: int) -> None:
    """Random rewards with one dead group when there are three."""
    rewards = torch.rand(groups, group_size, generator=generator("rewards"), dtype=torch.float64)
    if groups > 2:
        rewards[2] = 0.5
    rollout.rewards = rewards
    rollout.advantages = Advantages()(rewards)


def roll(
    policy: Policy, execution, *, selection=None, objective=None, config=None, update: int = 0, prompts=PROMPTS
) -> Rollout:
    config = config or RolloutConfig(groups=3, group_size=4, micro_batch=2)
    batches = deal(
        config, prompts, policy, selection or All(), objective or Grpo(), Address(seed=1, stream="train", update=update)
    )
    rollout = sample(policy, execution, batches)
    fake_rewards(rollout, config.groups, config.group_size)
    return rollout


def move(policy: Policy, size: float = 0.03) -> None:
    """Away from the weights it started with."""
    with torch.no_grad():
        for name, parameter in trainable(policy).items():
            noise = torch.randn(parameter.shape, generator=generator("moved", name), dtype=torch.float64)
            parameter += (size * noise).to(parameter)


def gradient_of(policy: Policy, execution: str, *, objective=None, kl=None, **kwargs) -> dict[str, torch.Tensor]:
    """The gradient of one update under a named execution."""
    objective = objective or Grpo()
    strategy = EXECUTIONS[execution](kl)
    policy.module.zero_grad(set_to_none=True)
    rollout = roll(policy, strategy, objective=objective, **kwargs)
    strategy.accumulate(policy, rollout, Coefficients(objective, rollout))
    return {name: p.grad.clone() for name, p in trainable(policy).items()}


def relative_error(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """‖one − other‖ / ‖other‖ over all tensors."""
    difference = sum((one[n] - other[n]).double().square().sum() for n in other)
    return float((difference / sum(other[n].double().square().sum() for n in other)).sqrt())
