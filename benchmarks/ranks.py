"""One update on several ranks, from per-event reductions to Reweight: the rows of LeanGRPO's Table 1 (arXiv 2609.03528).

    python benchmarks/ranks.py [--ranks 2] [--shard 1] [--rounds 5] [--group 4] [--steps 6] [--width 128] [--tokens 64]

Processes on this machine, gloo, one thread each; the transformer of `executions.py`, as many prompts as ranks, the same
micro-batch everywhere. An update is sampling, scores exchanged, backward and the reduction of gradients; no decoding,
no reward, no optimizer. Rows add one change at a time to the native way, which samples whole groups on a rank, runs every
event again and reduces its gradient at once. Each round runs every row once, in another order; times are medians over the rounds
of the ranks' mean process CPU seconds, and of the slowest rank's wall clock, which other load on the machine stretches. Collectives
and bytes are those of one rank in the whole update, counted in the first round, which is not timed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from executions import policy as sized_policy
from onetake.core.coefficients import Coefficients
from onetake.core.objectives import Grpo
from onetake.core.records import Address, Prompt, Rollout
from onetake.core.selection import All
from onetake.execution import EXECUTIONS
from onetake.execution.base import backpropagate
from onetake.parallel import ParallelConfig, World
from onetake.policies import leaves, trainable
from onetake.policies.adapters import Full, Lora
from onetake.policies.diffusion import DiffusionPolicy
from onetake.rollout.sampling import RolloutConfig, deal, sample
from processes import spawn

ROWS = {  # (layout, execution, reduced after every event)
    "native": ("conventional", "recompute", True),
    "+ shared prompts": ("shared-prompt", "recompute", True),
    "+ coalesced": ("shared-prompt", "recompute", False),
    "retain": ("shared-prompt", "retain", False),
    "reweight": ("shared-prompt", "reweight", False),
}


class Sent(TorchDispatchMode):
    """Counts collectives, and the bytes of this rank's tensors in them."""

    collectives = size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        local = ("wait_tensor", "_wrap_tensor_autograd")
        if func.namespace in ("c10d", "_c10d_functional") and func.overloadpacket.__name__ not in local:
            self.collectives += 1
            self.size += sum(t.numel() * t.element_size() for t in tree_leaves(args[0]) if isinstance(t, torch.Tensor))
        return func(*args, **(kwargs or {}))


def reduce(policy: DiffusionPolicy, ranks: World) -> None:
    ranks.sum_gradients(trainable(policy).values(), leaves(policy).values())


def event_by_event(policy: DiffusionPolicy, rollout: Rollout, coefficients: Coefficients, ranks: World) -> None:
    """Recompute, with the gradient of each event reduced as soon as it is there."""
    totals = dict.fromkeys(trainable(policy))
    for batch, transitions in zip(rollout.batches, rollout.transitions, strict=True):
        for old in transitions:
            backpropagate(rollout, batch, old, policy.score(batch, old), coefficients, None)
            reduce(policy, ranks)
            for name, parameter in trainable(policy).items():
                gradient, parameter.grad = parameter.grad, None
                totals[name] = gradient if totals[name] is None else totals[name] + gradient
    for name, parameter in trainable(policy).items():
        parameter.grad = totals[name]


def one_update(policy: DiffusionPolicy, row: str, ranks: World, arguments: argparse.Namespace) -> tuple[float, float]:
    """(process CPU seconds, wall-clock seconds) of this rank."""
    layout, execution, eager = ROWS[row]
    size = RolloutConfig(
        groups=ranks.size, group_size=arguments.group, micro_batch=arguments.group // ranks.size, layout=layout
    )
    address = Address(seed=0, stream="train", update=0)
    dealt = deal(size, [Prompt("a prompt")], policy, All(), Grpo(), address)
    strategy = EXECUTIONS[execution]()
    policy.module.zero_grad(set_to_none=True)
    cpu, wall = time.process_time(), time.perf_counter()
    rollout = sample(policy, strategy, size.over(ranks.size).share(dealt, ranks.rank), dealt)
    scores = torch.linspace(-1, 1, arguments.group, dtype=torch.float64).repeat(ranks.size, 1)
    made = rollout.table([scores[b.group, list(b.samples)] for b in rollout.batches])
    rollout.advantages = ranks.table(made)
    coefficients = Coefficients(Grpo(), rollout)
    if eager:
        event_by_event(policy, rollout, coefficients, ranks)
    else:
        strategy.accumulate(policy, rollout, coefficients)
        reduce(policy, ranks)
    return time.process_time() - cpu, time.perf_counter() - wall


def lines(ranks: World, arguments: argparse.Namespace) -> Iterator[str]:
    yield "| trained | row | CPU s | ratio | wall s | ratio | collectives | MB |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, adapter in (("full", Full()), ("LoRA", Lora(rank=arguments.rank, alpha=1))):
        policy = sized_policy(arguments, adapter, checkpointing=False)
        mesh = ParallelConfig(shard=arguments.shard).mesh(ranks.size, torch.device("cpu"))
        if mesh is not None:
            policy.shard(mesh)
        sent, times = {}, {row: [] for row in ROWS}
        for number in range(arguments.rounds + 1):
            order = list(ROWS)[number % len(ROWS) :] + list(ROWS)[: number % len(ROWS)]
            for row in order:
                ranks.rows(torch.zeros(1))  # all begin at once
                if number == 0:
                    with Sent() as sent[row]:
                        one_update(policy, row, ranks, arguments)
                else:
                    each = ranks.rows(torch.tensor([one_update(policy, row, ranks, arguments)]))
                    times[row].append((float(each[:, 0].mean()), float(each[:, 1].max())))
        cpu, wall = ({row: statistics.median(t[i] for t in times[row]) for row in ROWS} for i in (0, 1))
        for row in ROWS:
            ratios = [f"{measured[row]:.2f} | {measured['native'] / measured[row]:.2f}×" for measured in (cpu, wall)]
            yield f"| {name} | {row} | {' | '.join(ratios)} | {sent[row].collectives} | {sent[row].size / 1e6:.2f} |"


def show(ranks: World, arguments: argparse.Namespace) -> None:
    for line in lines(ranks, arguments):
        ranks.once(lambda: print(line, flush=True))  # noqa: B023


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {
        "ranks": 2,
        "shard": 1,
        "rounds": 5,
        "group": 4,
        "steps": 6,
        "width": 128,
        "tokens": 64,
        "layers": 4,
        "rank": 16,
    }
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    chosen = parser.parse_args()
    if chosen.group % chosen.ranks:
        parser.error(f"--group {chosen.group} is not a multiple of --ranks {chosen.ranks}")
    spawn(chosen.ranks, show, chosen)
