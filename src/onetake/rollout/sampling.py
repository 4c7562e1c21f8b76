"""Deal the trajectories of an update into micro-batches, and sample them under an execution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from pydantic import Field
from torch import Tensor

from onetake.core.advantages import Advantages, step_of
from onetake.core.noise import choice, prompt_indices
from onetake.core.objectives import Kl, Objective
from onetake.core.records import Address, Config, MicroBatch, Prompt, Rollout, Transition
from onetake.core.selection import Selection
from onetake.execution.base import Execution
from onetake.parallel import ALONE, Layout, LayoutKind, World
from onetake.policies import Policy
from onetake.rewards import Rewards


class RolloutConfig(Config):
    """The trajectories of one update: `groups` prompts with `group_size` samples each."""

    groups: int = Field(default=4, ge=1, description="P, prompts per update")
    group_size: int = Field(default=24, ge=1, description="G, trajectories per prompt")
    micro_batch: int = Field(default=24, ge=1, description="B, trajectories sampled by one call; divides group_size")
    layout: LayoutKind = Field(
        default="shared-prompt", description="on several ranks: divide each group among them, or deal them whole groups"
    )
    shared_start: bool = Field(default=False, description="all samples of a group start from the same noise")
    share_prefix: bool = Field(
        default=True,
        description="with shared_start, steps before a group's first event are computed once for the group",
    )
    resample: int = Field(
        default=0, ge=0, description="times that groups with equal rewards are drawn again with other prompts"
    )

    def over(self, ranks: int) -> Layout:
        """Who samples what on `ranks` processes."""
        return Layout(
            kind=self.layout,
            ranks=ranks,
            groups=self.groups,
            group_size=self.group_size,
            micro_batch=self.micro_batch,
        )

    def problems(self, ranks: int = 1) -> list[str]:
        found = []
        if self.group_size < 2:
            found.append("rollout.group_size: 1 gives no advantage (each sample is its own mean); use 2 or more")
        if self.group_size % self.micro_batch:
            fits = [b for b in range(1, self.group_size + 1) if self.group_size % b == 0]
            found.append(
                f"rollout.micro_batch: {self.micro_batch} does not divide group_size: {self.group_size}, so samples would be "
                f"dropped; sizes that work: {', '.join(map(str, fits))}"
            )
        return found + self.over(ranks).problems()


def deal(
    config: RolloutConfig,
    prompts: Sequence[Prompt],
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
        events = masks[group].any(0).nonzero().flatten().tolist()
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
                    first=events[0] if config.shared_start and config.share_prefix else 0,
                    last=events[-1],
                )
            )
    return batches


def redeal(batches: list[MicroBatch], groups: set[int], prompts: Sequence[Prompt], attempt: int) -> list[MicroBatch]:
    """The micro-batches of `groups` again, with other prompts and other noise and the same selected events."""
    address = batches[0].address
    order = torch.randperm(len(prompts), generator=choice(address, "prompts again", attempt)).tolist()
    prompt_of = {group: order[i % len(order)] for i, group in enumerate(sorted(groups))}
    again = replace(address, stream=f"{address.stream}, attempt {attempt}")
    return [
        replace(batch, address=again, prompt_index=prompt_of[batch.group], prompt=prompts[prompt_of[batch.group]])
        for batch in batches
        if batch.group in groups
    ]


def sample(
    policy: Policy,
    execution: Execution,
    batches: list[MicroBatch],
    dealt: list[MicroBatch] | None = None,
    rewards: Rewards | None = None,
) -> Rollout:
    """Run every micro-batch; the execution sees each event with its graph, the rollout keeps it without.

    What a group's samples share, the steps before its first event, is computed once (for micro-batches dealt in a row).
    `batches` may be a rank's share of those that were `dealt` to all ranks. Those of `rewards` that have threads begin as soon as
    a micro-batch is there.
    """
    rollout = Rollout(
        batches=[],
        transitions=[],
        outputs=[],
        kept=[],
        trained=[],
        version=policy.version,
        dealt=list(batches if dealt is None else dealt),
    )
    entry, entered = None, None
    for batch in batches:
        if batch.group != entered:
            entry, entered = policy.prefix(batch) if batch.first else None, batch.group
        events: list[Transition] = []
        trained = policy.trained_forwards
        with execution.observing(policy, batch) as (observe, kept):

            def record(transition: Transition) -> None:
                if execution.kl is not None:
                    reference = policy.reference(batch, transition.detached())  # noqa: B023
                    transition = replace(transition, reference_mean=reference.mean)
                observe(transition)
                events.append(transition.detached())  # noqa: B023

            rollout.outputs.append(policy.rollout(batch, record, grad=execution.grad, entry=entry))
        if rewards is not None:
            rewards.ahead(rollout.outputs[-1], [batch.prompt] * len(batch.samples))
        rollout.batches.append(batch)
        rollout.transitions.append(events)
        rollout.kept.append(kept)
        rollout.trained.append(policy.trained_forwards - trained)
    return rollout


def score(
    rollout: Rollout, rewards: Rewards, advantages: Advantages, kl: Kl | None = None, world: World = ALONE
) -> None:
    """Score the micro-batches that have no score yet; set the rollout's rewards and advantages (P, G), by group index.

    With ``kl.as_reward`` the divergence from the reference is one more reward, of weight −β, for the advantages only.
    Every rank scores what it sampled; rewards and advantages are the whole update's on all of them.
    """
    for batch, outputs in list(zip(rollout.batches, rollout.outputs, strict=True))[len(rollout.parts) :]:
        rollout.parts.append(rewards(outputs, [batch.prompt] * len(outputs)))
    tables = [rollout.table([part[name] for part in rollout.parts]) for name in rewards.weights]
    weights = list(rewards.weights.values())
    steps = [max(step_of(part[name]) for part in rollout.parts) for name in rewards.weights]
    if kl is not None:
        tables.append(trajectory_kl(rollout, kl))
        weights.append(-kl.beta)
        steps.append(torch.finfo(torch.float32).eps)  # of the means that it compares
    signals = world.table(torch.stack(tables))
    rollout.scores = dict(zip(rewards.weights, signals, strict=False))  # the KL, if it is there, comes last
    rollout.rewards = rewards.total(rollout.scores)
    if kl is not None:
        rollout.kl = signals[-1]
        if not kl.as_reward:
            signals, weights, steps = signals[:-1], weights[:-1], steps[:-1]
    factors, rounding = torch.tensor([weights, steps], dtype=torch.float64)
    rollout.advantages = advantages(signals, factors, rounding)


def trajectory_kl(rollout: Rollout, kl: Kl) -> Tensor:
    """(P, G) mean over each trajectory's events of its scaled KL to the reference; NaN where another rank sampled."""
    return rollout.table(
        [
            torch.stack([kl.of(event, event) for event in events]).sum(0).cpu() / batch.stochastic.sum(1)
            for batch, events in zip(rollout.batches, rollout.transitions, strict=True)
        ]
    )
