"""What `onetake.forecast.scaling` predicts, beside what was published or is measured here.

    python benchmarks/scaling.py published
    python benchmarks/scaling.py measure [--updates 5]

`published`: LeanGRPO's ablation (arXiv 2609.03528, Table 1). FLUX.1-dev on 8 × A6000, every step trained, seconds per update.
Put in are the published row "+ coalesced", of each kind of training, which gives the seconds of a forward, and the row
"native" of full fine-tuning, which gives the number of reductions that coalescing saves. A backward is two forwards of a full
fine-tune, one of LoRA. The other rows are predicted. Weights are taken to be whole on every device, and PCIe 4.0 to send 25 GB/s.

`measure`: recipe `shapes`, made smaller, trained by 1, 2 and 4 processes of this machine (gloo, one thread each); seconds per
update of rank 0, medians over all updates but the first. The run of one rank under recompute is the profile from which all rows
are predicted. A core is slower while its neighbours work, so the runs of one rank are started as often as there are cores, side by
side: a rank then finds the same machine in all rows. The profile's seconds on the clock are multiplied by the share of a core that
its process had, so that they are CPU seconds; where there are more ranks than cores, the clock is predicted for ranks that take
turns. What a rank sends in a second is timed first, on sums as large as the run's gradient.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console

from onetake.forecast.scaling import LATENCY, Machine, Message, Profile, Share, predictions
from onetake.metrics import Log
from onetake.parallel import World
from onetake.run import config
from onetake.run.session import opened, train_and_report
from processes import spawn, start

PUBLISHED = {
    "full": {
        "native": 1850.06,
        "+ shared prompts": 1851.75,
        "+ coalesced": 1387.56,
        "retain": 1438.53,
        "reweight": 1022.64,
    },
    "LoRA": {
        "native": 1277.30,
        "+ shared prompts": 1279.21,
        "+ coalesced": 1263.35,
        "retain": 901.99,
        "reweight": 880.68,
    },
}
FITTED = {("full", "native"), ("full", "+ coalesced"), ("LoRA", "+ coalesced")}
EXECUTIONS = {"retain": "retain", "reweight": "reweight"}  # the other rows run `recompute`
BACKWARD = {"full": 2, "LoRA": 1}  # forwards
GRADIENT = {"full": 11.9e9 * 2, "LoRA": 52.3e6 * 4}  # bytes: all weights in bfloat16; rank 32 on attention in float32
A6000 = Machine(ranks=8, link=25e9)
UPDATE = Share(trajectories=1, steps=1, events=1, calls=1, event_calls=1)  # all of a rank's forwards are one unit


def reduction(kind: str) -> float:
    """Seconds of one sum of gradients: of a full fine-tune a reduce-scatter, whose optimizer is sharded."""
    operation = "reduce_scatter" if kind == "full" else "all_reduce"
    return A6000.seconds([Message(operation=operation, count=1, size=int(GRADIENT[kind]), among=8, span=8)])


def predicted() -> dict[str, dict[str, float]]:
    saved = (PUBLISHED["full"]["native"] - PUBLISHED["full"]["+ coalesced"]) / reduction("full")  # reductions
    found = {}
    for kind, rows in PUBLISHED.items():
        computing = rows["+ coalesced"] - reduction(kind)
        forward = computing / (2 + BACKWARD[kind])
        profile = Profile(forward=forward, backward=BACKWARD[kind] * forward)
        found[kind] = {}
        for row in rows:
            eager = saved * reduction(kind) if row in ("native", "+ shared prompts") else 0.0
            seconds = profile.seconds(UPDATE, EXECUTIONS.get(row, "recompute"))
            found[kind][row] = seconds + reduction(kind) + eager
    return found


def lines() -> Iterator[str]:
    yield "| trained | row | published, s | predicted, s | error | published ratio | predicted ratio |"
    yield "|---|---|---|---|---|---|---|"
    for kind, rows in predicted().items():
        for row, seconds in rows.items():
            wanted = PUBLISHED[kind][row]
            error = "put in" if (kind, row) in FITTED else f"{seconds / wanted - 1:+.1%}"
            ratios = f"{PUBLISHED[kind]['native'] / wanted:.2f}× | {rows['native'] / seconds:.2f}×"
            yield f"| {kind} | {row} | {wanted:.2f} | {seconds:.2f} | {error} | {ratios} |"


SMALLER = [
    "rollout.group_size=16",
    "rollout.micro_batch=4",
    "evaluation.prompts=4",
    "evaluation.samples=1",
]
CORES = len(os.sched_getaffinity(0))


def cases(ranks: int) -> list[tuple[str, str]]:
    """(layout, execution); on one rank layouts are the same."""
    found = [("shared-prompt", name) for name in ("recompute", "retain", "reweight")]
    return found if ranks == 1 else [*found, ("conventional", "recompute")]


def link(ranks: World) -> float:
    """Bytes that a rank sends in a second of an all-reduce as large as the run's gradient; the median of 20."""
    if ranks.size == 1:
        return Machine.link  # nothing is sent
    tensor, times = torch.zeros(2**19), []
    for _ in range(20):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(tensor)
        times.append(time.perf_counter() - start)
    message = Message(operation="all_reduce", count=1, size=tensor.nbytes, among=ranks.size, span=ranks.size)
    return message.sent / (statistics.median(times) - LATENCY)


def took(run: Path) -> tuple[float, float]:
    """(process CPU, wall-clock) seconds of an update on rank 0."""
    lines = [line for line in Log(run / "metrics.jsonl").read() if line["kind"] == "update"]
    cpu, wall = (
        statistics.median(after[key] - before[key] for before, after in pairwise(lines)) for key in ("cpu_s", "wall_s")
    )
    return cpu, wall


def compare(ranks: World, root: Path, updates: int) -> None:
    """Run all cases of this number of ranks; to ``table`` go their rows beside what the first run of one rank predicts."""
    speed = link(ranks)
    for layout, execution in cases(ranks.size):
        changes = [*SMALLER, f"updates={updates}", f"rollout.layout={layout}", f"execution={execution}"]
        folder = root / f"{ranks.size}-{layout}-{execution}"
        session = ranks.told(lambda: opened("shapes", [*changes, f"out={folder}"], ranks.size))  # noqa: B023
        train_and_report(session, Console(quiet=True), ranks)
    if ranks.rank == 0:
        with (root / "table").open("a") as table:
            table.writelines(f"{row}\n" for row in rows(ranks.size, root, speed))


def measure(updates: int) -> str:
    """The table of all cases."""
    with tempfile.TemporaryDirectory() as folder:
        first, *others = [Path(folder) / str(number) for number in range(CORES)]
        for root in (first, *others):
            root.mkdir()
        for size in (1, 2, 4):
            beside = [start(size, compare, root, updates) for root in others[: max(1, CORES // size) - 1]]
            spawn(size, compare, first, updates)
            for started in beside:
                while not started.join():
                    pass
        return (first / "table").read_text()


def rows(ranks: int, root: Path, speed: float) -> Iterator[str]:
    first = root / "1-shared-prompt-recompute"
    cpu, wall = took(first)
    busy = cpu / wall
    if ranks == 1:
        print(f"{CORES} cores, of one of which the profile's process had {busy:.0%}", flush=True)
    else:
        print(f"{ranks} ranks: each sends {speed / 1e9:.2f} GB/s", flush=True)
    recipe = config.load((first / "config.yaml").read_text(), ranks=None)
    found, _ = predictions(recipe, Profile.of(first), Machine(ranks=ranks, per_node=ranks, link=speed))
    for layout, execution in cases(ranks):
        (row,) = (row for row in found if (row.layout.kind, row.execution) == (layout, execution))
        cpu, wall = took(root / f"{ranks}-{layout}-{execution}")
        computing = row.computing * busy
        pairs = ((computing, cpu), (computing * max(1, ranks / CORES) + row.sending, wall))
        cells = [f"{predicted:.3f} | {measured:.3f} | {measured / predicted:.2f}" for predicted, measured in pairs]
        yield f"| {ranks} | {layout} | {execution} | {' | '.join(cells)} |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("published", "measure"))
    parser.add_argument("--updates", type=int, default=5)
    chosen = parser.parse_args()
    if chosen.what == "published":
        print("\n".join(lines()))
    else:
        table = measure(chosen.updates)
        print("| ranks | layout | execution | predicted CPU s | CPU s | ratio | predicted wall s | wall s | ratio |")
        print("|---|---|---|---|---|---|---|---|---|")
        print(table, end="")
