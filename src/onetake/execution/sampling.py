"""Deal the trajectories of an update into micro-batches, and sample them under an execution."""

from __future__ import annotations

import torch
from pydantic import Field

from onetake.advantages import Advantages
from onetake.execution.base import Execution
from onetake.noise import prompt_indices
from onetake.objectives import Objective
from onetake.policies import Policy
from onetake.records import Address, Config, MicroBatch, Rollout, Transition
from onetake.rewards import Reward, scores
from onetake.selection import Selection


class RolloutConfig(Config):
    """The trajectories of one update: `groups` prompts with `group_size` samples each."""

    groups: int = Field(default=4, ge=1, description="P, prompts per update")
    group_size: int = Field(default=24, ge=1, description="G, trajectories per prompt")
    micro_batch: int = Field(default=24, ge=1, description="B, trajectories sampled by one call; divides group_size")
    shared_start: bool = Field(default=False, description="all samples of a group start from the same noise")

    def problems(self) -> list[str]:
        found = []
        if self.group_size < 2:
            found.append("rollout.group_size: 1 gives no advantage (each sample is its own mean); use 2 or more")
        if self.group_size % self.micro_batch:
            fits = [b for b in range(1, self.group_size + 1) if self.group_size % b == 0]
            found.append(
                f"rollout.micro_batch: {self.micro_batch} does not divide group_size: {self.group_size}, so samples would be "
                f"dropped; sizes that work: {', '.join(map(str, fits))}"
            )
        return found


def deal(
    config: RolloutConfig,
    prompts: list[str],
    policy: Policy,
    selection: Selection,
    objective: Objective,
    address: Address,
) -> list[MicroBatch]:
    """All micro-batches of one update, by arithmetic on indices alone."""
    sigmas = policy.sigmas
    masks = selection.mask(groups=config.groups, group_size=config.group_size, steps=len(sigmas) - 1, address=address)
    weights = objective.weights(policy.kernel, sigmas, masks)
    chosen = prompt_indices(address.seed, address.update, config.groups, len(prompts))
    batches = []
    for group, prompt_index in enumerate(chosen):
        for first in range(0, config.group_size, config.micro_batch):
            samples = tuple(range(first, first + config.micro_batch))
            batches.append(
                MicroBatch(
                    address=address,
                    group=group,
                    prompt_index=prompt_index,
                    prompt=prompts[prompt_index],
                    samples=samples,
                    stochastic=masks[group, list(samples)],
                    weight=weights,
                    shared_start=config.shared_start,
                )
            )
    return batches


def sample(policy: Policy, execution: Execution, batches: list[MicroBatch]) -> Rollout:
    """Run every micro-batch; the execution sees each event with its graph, the rollout keeps it without."""
    transitions, outputs = [], []
    for batch in batches:
        events: list[Transition] = []
        with execution.observing(policy, batch) as observe:

            def record(transition: Transition) -> None:
                observe(transition)
                events.append(transition.detached())  # noqa: B023

            outputs.append(policy.rollout(batch, record, grad=execution.grad))
        transitions.append(events)
    return Rollout(batches=batches, transitions=transitions, outputs=outputs, version=policy.version)


def score(rollout: Rollout, reward: Reward, advantages: Advantages) -> None:
    """Set the rollout's rewards (P, G), by group index, and their advantages."""
    shape = [1 + max(batch.group for batch in rollout.batches), 1 + max(s for b in rollout.batches for s in b.samples)]
    rewards = torch.empty(shape, dtype=torch.float64)
    for batch, images in zip(rollout.batches, rollout.outputs, strict=True):
        rewards[batch.group, list(batch.samples)] = scores(reward, images, [batch.prompt] * len(images))
    rollout.rewards, rollout.advantages = rewards, advantages(rewards)
