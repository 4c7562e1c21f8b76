"""Does it learn? The built-in task over seeds, for LoRA and full fine-tuning, under each execution.

    python benchmarks/learning.py [--recipes LoRA full] [--seeds 3] [--executions retain reweight] [--jobs 2] [--out runs/learning]

Every run is `onetake train` with a shipped recipe (LoRA is `shapes`, full `shapes-full`; `--recipes motion` runs that one) in a
process of its own with one thread; `--jobs` of them at a time. Prints one row a run, held-out strict success before → after (the
last weights, never the best in between), and the means as a Markdown table, and until which update the executions' training
curves are equal number for number. A run that is there already is continued where it stopped.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from onetake.metrics import PHASES, Log

RECIPES = {"LoRA": "shapes", "full": "shapes-full"}


def train(folder: Path, recipe: str, changes: list[str]) -> list[dict]:
    """The log of a run in a process of its own with one thread, continued if it is there already."""
    start = ["--resume", str(folder)] if folder.exists() else [recipe, f"--set=out={folder}"]
    command = [sys.executable, "-m", "onetake", "train", *start, *(f"--set={change}" for change in changes)]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    return Log(folder / "metrics.jsonl").read()


def run(out: Path, recipe: str, execution: str, seed: int, overrides: list[str]) -> list[dict]:
    changes = [f"execution={execution}", f"seed={seed}", *overrides]
    return train(out / f"{recipe}-{execution}-{seed}", recipe, changes)


def summary(lines: list[dict]) -> dict[str, float]:
    evaluations = [line for line in lines if line["kind"] == "evaluation"]
    before, after = evaluations[0], evaluations[-1]
    updates = [line for line in lines if line["kind"] == "update"]
    return {
        "before": before["success_rate"],
        "after": after["success_rate"],
        "stderr": after["stderr"],
        "score before": before["score_mean"],
        "score after": after["score_mean"],
        "diversity before": before["diversity"],
        "diversity after": after["diversity"],
        "n": after["n"],
        "update_s": statistics.median(sum(line[f"{phase}_s"] for phase in PHASES) for line in updates),
        "wall_s": after["wall_s"],
        "forwards": after["forwards"],
    }


def together(runs: list[list[dict]]) -> str:
    """How long the runs have the same training rewards, and how far their gradient norms are apart until then."""
    first, *others = ([line for line in lines if line["kind"] == "update"] for lines in runs)
    apart, furthest = len(first), 0.0
    for other in others:
        for number, (a, b) in enumerate(zip(first, other, strict=True)):
            if a["score_mean"] != b["score_mean"]:
                apart = min(apart, number)
                break
            furthest = max(furthest, abs(a["grad_norm"] / b["grad_norm"] - 1))
    until = "to the end" if apart == len(first) else f"up to update {apart}"
    return f"equal training rewards {until}, gradient norms until then within {furthest:.0e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--executions", nargs="+", default=["retain", "reweight"])
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/learning"))
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    arguments = parser.parse_args()
    cells = list(itertools.product(arguments.recipes, arguments.executions))
    with ThreadPoolExecutor(arguments.jobs) as pool:
        jobs = {
            (cell, seed): pool.submit(
                run, arguments.out, RECIPES.get(cell[0], cell[0]), cell[1], seed, arguments.overrides
            )
            for cell in cells
            for seed in range(arguments.seeds)
        }
        print("| trained | execution | seed | success before | after | gain | score | diversity | s per update |")
        print("|---|---|---|---|---|---|---|---|---|")
        gains: dict[tuple[str, str], list[float]] = {}
        for ((recipe, execution), seed), job in jobs.items():
            s = summary(job.result())
            gains.setdefault((recipe, execution), []).append(s["after"] - s["before"])
            print(
                f"| {recipe} | {execution} | {seed} | {s['before']:.3f} | {s['after']:.3f} ± {s['stderr']:.3f} "
                f"| {s['after'] - s['before']:+.3f} | {s['score before']:.3f} → {s['score after']:.3f} "
                f"| {s['diversity before']:.3f} → {s['diversity after']:.3f} | {s['update_s']:.2f} |",
                flush=True,
            )
    if len(arguments.executions) > 1:
        for recipe, seed in itertools.product(arguments.recipes, range(arguments.seeds)):
            runs = [jobs[((recipe, execution), seed)].result() for execution in arguments.executions]
            print(f"{recipe}, seed {seed}: {together(runs)}")
    for (recipe, execution), values in gains.items():
        print(
            f"{recipe}, {execution}: gain mean {statistics.mean(values):+.3f}, smallest {min(values):+.3f}, n = {s['n']}"
        )


if __name__ == "__main__":
    main()
