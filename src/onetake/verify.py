"""One update's gradient under every execution, side by side: how equal, how fast, how much memory, how many forwards."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from onetake.allocator import keep_freed_memory
from onetake.coefficients import Coefficients
from onetake.execution import EXECUTIONS
from onetake.execution.preflight import preflight
from onetake.execution.sampling import deal, sample, score
from onetake.memory import PeakMemory
from onetake.policies import Policy, trainable
from onetake.recipe import Recipe
from onetake.records import Address
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


def _taken(policy: Policy) -> Tensor:
    """The whole gradient as one float64 vector; p.grad is cleared."""
    gradient = torch.cat([p.grad.double().flatten() for p in trainable(policy).values() if p.grad is not None])
    policy.module.zero_grad(set_to_none=True)
    return gradient
