"""What a unit's action saves while all others follow the plan, too: leave-one-out on the joint plan.

Units are measured alone (`measure`). Together they share caches, an allocator and an accelerator's queue, and what they save
need not add up. So whole updates are run in pairs, under the plan and with one unit recomputed, and an action stays only if it
really saves time (HiLoRe, arXiv 2609.33570).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace

import torch

from onetake.activations.measure import now
from onetake.activations.plan import Action, Plan
from onetake.activations.recovery import Recovery


def leave_one_out(recovery: Recovery, run: Callable[[], object], *, rounds: int = 3) -> Plan:
    """The plan without the actions that save nothing among the others; ``joint`` tells the seconds of each.

    `run` does a forward and its backward, of a shape that was measured; a unit takes `rounds` pairs of it, of which the median
    counts. Gradients are left cleared. Raises ValueError if no plan belongs to what ran.
    """
    with recovery.step(strict=False):
        run()
    plan = recovery.plan
    if plan is None:
        raise ValueError("no plan belongs to this shape yet: take a step of it first, which measures its units")

    def seconds(actions: dict[str, Action]) -> float:
        with torch.random.fork_rng(), recovery.forced(actions):
            started = now(recovery.device)
            run()
            taken = now(recovery.device) - started
        recovery.model.zero_grad()
        return taken

    chosen = plan.by_unit
    joint: dict[str, float] = {}
    for name in (name for name, action in chosen.items() if action != Action.RECOMPUTE):
        without = chosen | {name: Action.RECOMPUTE}
        joint[name] = statistics.median(seconds(without) - seconds(chosen) for _ in range(rounds))
    useless = {name: chosen[name] for name, saved in joint.items() if saved <= 0}
    return replace(recovery.forgo(plan, useless), joint=joint)
