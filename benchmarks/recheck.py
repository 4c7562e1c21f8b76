"""What comparing a micro-batch's gradient with the native one costs in the middle of a run, on the built-in base.

    python benchmarks/recheck.py [--groups 2] [--group-size 12] [--micro-batch 6] [--repetitions 3]

Seconds of an update (sampling and accumulating, without reward, optimizer and evaluation, which would only lower the share)
with and without the check, interleaved, medians of CPU seconds; the updates that checking every micro-batch would take, which
`execution.recheck.COST` must not be below; and the share of a run's time at the default interval.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from onetake.allocator import keep_freed_memory
from onetake.core.coefficients import Coefficients
from onetake.core.noise import generator
from onetake.core.records import Address
from onetake.execution import EXECUTIONS
from onetake.policies import trainable
from onetake.policies.diffusion import DiffusionPolicy
from onetake.rollout.recheck import recheck
from onetake.rollout.sampling import deal, sample
from onetake.run import config


def seconds(recipe, policy: DiffusionPolicy, execution: str, update: int, *, checked: bool) -> float:
    """CPU seconds of one update."""
    strategy, task = EXECUTIONS[execution](recipe.penalty), recipe.task.load()
    address = Address(seed=0, stream="train", update=update)
    batches = deal(recipe.rollout, task.train, policy, recipe.selection, recipe.objective, address)
    policy.embed(batch.prompt for batch in batches)
    start = time.process_time()
    rollout = sample(policy, strategy, batches)
    shape = recipe.rollout.groups, recipe.rollout.group_size
    rollout.advantages = torch.randn(shape, generator=generator("advantages", update), dtype=torch.float64)
    coefficients = Coefficients(recipe.objective, rollout)
    if checked:
        recheck(policy, strategy, rollout, coefficients, recipe.objective)
    else:
        strategy.accumulate(policy, rollout, coefficients)
    spent = time.process_time() - start
    policy.module.zero_grad(set_to_none=True)
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"groups": 2, "group-size": 12, "micro-batch": 6, "repetitions": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    chosen = parser.parse_args()
    keep_freed_memory()
    print(
        "| trained | execution | update, s | with a check, s | updates to check all | default `recheck` | share of the time |"
    )
    print("|---|---|---|---|---|---|---|")
    size = {"groups": chosen.groups, "group_size": chosen.group_size, "micro_batch": chosen.micro_batch}
    for kind in ("lora", "full"):
        overrides = [f"rollout.{name}={value}" for name, value in size.items()]
        recipe = config.load(config.recipe_text("shapes" if kind == "lora" else "shapes-full"), overrides)
        policy = DiffusionPolicy.from_config(recipe.policy, recipe.pipeline_source, 0)
        with torch.no_grad():
            for name, parameter in trainable(policy).items():
                parameter += 1e-3 * torch.randn(parameter.shape, generator=generator("moved", name))
        for execution in ("retain", "reweight"):
            took = {False: [], True: []}
            for update in range(chosen.repetitions):
                for checked in took:
                    took[checked].append(seconds(recipe, policy, execution, update, checked=checked))
            plain, checked = (statistics.median(each) for each in took.values())
            micro_batches = chosen.groups * chosen.group_size // chosen.micro_batch
            extra, interval = checked - plain, recipe.recheck_every(1)
            print(
                f"| {kind} | `{execution}` | {plain:.1f} | {checked:.1f} | {extra * micro_batches / plain:.2f} | {interval} | "
                f"{extra / plain / interval:.2%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
