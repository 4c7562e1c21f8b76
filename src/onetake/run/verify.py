"""Gradients side by side: of one update under every execution, and of two events under every action on blocks' state."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from onetake.activations.compare import ActionRow, compare
from onetake.activations.joint import leave_one_out
from onetake.activations.plan import Plan
from onetake.activations.recoveries import Recoveries
from onetake.allocator import keep_freed_memory
from onetake.core.coefficients import Coefficients
from onetake.core.records import Address
from onetake.execution import EXECUTIONS, Recompute
from onetake.memory import PeakMemory
from onetake.policies import Policy, trainable
from onetake.rollout.preflight import preflight
from onetake.rollout.sampling import deal, sample, score
from onetake.run.recipe import Recipe
from onetake.tasks import Task


@dataclass(frozen=True, kw_only=True)
class Row:
    """An execution against native recomputation (its own row: cosine 1, errors 0)."""

    execution: str
    cosine: float
    relative_l2: float
    max_abs: float
    seconds: float
    peak_mib: float | None
    calls: int
    forwards: int


def verify(recipe: Recipe, policy: Policy, task: Task) -> list[Row]:
    """Run update 0 under each execution, native first, with the same prompts, noise and rewards."""
    keep_freed_memory()
    address = Address(seed=recipe.seed, stream="train", update=0)
    batches = deal(recipe.rollout, task.train, policy, recipe.selection, recipe.objective, address)
    preflight(policy, EXECUTIONS["recompute"](recipe.penalty), recipe.objective, batches)
    peak = PeakMemory(next(policy.module.parameters()).device)
    rows, native = [], None
    for name, kind in EXECUTIONS.items():
        execution = kind(recipe.penalty)
        calls, forwards = policy.calls, policy.forwards
        known = peak.restart()
        start = time.perf_counter()
        rollout = sample(policy, execution, batches)
        score(rollout, task.rewards, recipe.advantages, recipe.penalty)
        execution.accumulate(policy, rollout, Coefficients(recipe.objective, rollout))
        seconds = time.perf_counter() - start
        gradient = _taken(policy)
        native = gradient if native is None else native
        rows.append(
            Row(
                execution=name,
                cosine=float(torch.nn.functional.cosine_similarity(gradient, native, dim=0)),
                relative_l2=float((gradient - native).norm() / native.norm()),
                max_abs=float((gradient - native).abs().max()),
                seconds=seconds,
                peak_mib=peak.bytes / 2**20 if known else None,
                calls=policy.calls - calls,
                forwards=policy.forwards - forwards,
            )
        )
    return rows


def verify_actions(recipe: Recipe, policy: Policy, task: Task) -> list[ActionRow]:
    """Every action on the units of each transformer, on the first and the last event of the first micro-batch."""
    run = _events(recipe, policy, task)
    recoveries = Recoveries(policy.module, "0%")
    rows = [row for name, recovery in recoveries.each.items() for row in compare(recovery, run, name)]
    for recovery in recoveries.each.values():
        recovery.detach()
    return rows


def measured_plans(recipe: Recipe, policy: Policy, task: Task, together: bool = False) -> dict[str, Plan]:
    """What `activations` would do with each unit, by transformer if there are two: measured on the first and the last event.

    If `together`, without the actions that save nothing beside the others (`joint.leave_one_out`).
    """
    assert recipe.activations is not None
    score = _events(recipe, policy, task)
    recoveries = Recoveries(policy.module, recipe.activations)

    def run() -> None:
        score()
        policy.module.zero_grad()  # of both transformers: what stays in use would change the plan

    with recoveries.step():
        run()
    planned = {name: recovery for name, recovery in recoveries.each.items() if recovery.plans}
    if together:
        return {name: leave_one_out(recovery, run) for name, recovery in planned.items()}
    return {name: plan for name, recovery in planned.items() for plan in recovery.plans.values()}


def _events(recipe: Recipe, policy: Policy, task: Task) -> Callable[[], None]:
    """A function that adds the gradient of the log-probs of the first micro-batch's first and last event."""
    address = Address(seed=recipe.seed, stream="train", update=0)
    (batch, *_) = deal(recipe.rollout, task.train, policy, recipe.selection, recipe.objective, address)
    preflight(policy, Recompute(recipe.penalty), recipe.objective, [batch])  # chooses the way to re-score
    (events,) = sample(policy, Recompute(), [batch]).transitions

    def run() -> None:
        for event in {events[0].index: events[0], events[-1].index: events[-1]}.values():
            policy.score(batch, event).log_prob.sum().backward()

    return run


def _taken(policy: Policy) -> Tensor:
    """The whole gradient as one float64 vector; p.grad is cleared."""
    gradient = torch.cat([p.grad.double().flatten() for p in trainable(policy).values() if p.grad is not None])
    policy.module.zero_grad(set_to_none=True)
    return gradient
