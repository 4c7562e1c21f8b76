"""What do Flash-GRPO's three mechanisms buy? A built-in task under five ways to choose and weigh the trained events.

    python benchmarks/ablation.py --set rollout.group_size=12 --set rollout.micro_batch=12 --figure docs/ablation.png
    python benchmarks/ablation.py --recipe motion --variants "all steps" "+ rectification" --points 4 --out runs/motion-ablation

Every run is `onetake train` of the recipe in a process of its own with one thread, differing in selection and event weights only.
All variants get the compute of `--updates` updates of `all steps`, counted in forwards of one row with a backward of a LoRA
update as one more (steps + trained events). Training cost is what is on top of plain sampling: trained rows, forward and
backward. Prints held-out strict success at the end, and at what part of the training cost of `all steps` a variant passes the
best that these reach on the way. A run that is there already is continued where it stopped.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import matplotlib.pyplot as plt

from learning import train
from onetake.metrics import Log

STEPS = 8
VARIANTS = {  # name → selection, event weights, trained events of a trajectory
    "all steps": ("{kind: all}", "uniform", STEPS - 1),
    "window of 2": ("{kind: window, size: 2, place: random, until: 4}", "uniform", 2),
    "single, per sample": ("{kind: single, per: sample}", "uniform", 1),
    "single, iso-temporal": ("{kind: single}", "uniform", 1),
    "+ rectification": ("{kind: single}", "rectified", 1),
}


def run(name: str, seed: int, args: argparse.Namespace) -> list[dict]:
    """The evaluations of one run."""
    selection, weights, events = VARIANTS[name]
    every = round(args.updates * (2 * STEPS - 1) / (STEPS + events) / args.points)
    settings = {
        "selection": selection,
        "objective.event_weights": weights,
        "seed": seed,
        "updates": every * args.points,
        "evaluation.every": every,
        "checkpoint.every": every,
    }
    folder = args.out / f"{name.replace(', ', '-').replace(' ', '-').strip('+-')}-{seed}"
    if len(evaluations(folder)) <= args.points:
        train(folder, args.recipe, [*args.set, *(f"{key}={value}" for key, value in settings.items())])
    return evaluations(folder)


def evaluations(folder: Path) -> list[dict]:
    return [line for line in Log(folder / "metrics.jsonl").read() if line["kind"] == "evaluation"]


def mean_curve(runs: list[list[dict]], key: str) -> list[float]:
    return [statistics.mean(line[key] for line in point) for point in zip(*runs, strict=True)]


def reached(x: list[float], y: list[float], level: float) -> float | None:
    """The x at which the curve first reaches `level`, by linear interpolation; None if it never does, or began there."""
    for (x0, y0), (x1, y1) in itertools.pairwise(zip(x, y, strict=True)):
        if y0 < level <= y1:
            return x0 + (level - y0) / (y1 - y0) * (x1 - x0)
    return None


def draw(curves: dict[str, list[list[dict]]], path: Path) -> None:
    panels = {"saved_forwards": "trained rows (thousands)", "forwards": "forwards (thousands)", "cpu_s": "CPU seconds"}
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), sharey=True, constrained_layout=True)
    for axis, (key, label) in zip(axes, panels.items(), strict=True):
        for name, runs in curves.items():
            scale = 1 if key == "cpu_s" else 1000
            x = [value / scale for value in mean_curve(runs, key)]
            axis.plot(x, mean_curve(runs, "success_rate"), marker="o", markersize=3, label=name)
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("held-out strict success")
    axes[2].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="shapes", help="a built-in task's, with 8 steps")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="NAME")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of every run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=60, help="of all steps; the others get as much compute")
    parser.add_argument("--points", type=int, default=6, help="evaluations of a run besides the first")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/ablation"))
    parser.add_argument("--figure", type=Path)
    args = parser.parse_args()
    if "all steps" not in args.variants:
        parser.error("--variants needs 'all steps', which the others are compared with")

    args.out.mkdir(parents=True, exist_ok=True)
    todo = list(itertools.product(args.variants, range(args.seeds)))
    with ThreadPoolExecutor(args.jobs) as pool:
        done = list(pool.map(lambda job: run(*job, args), todo))
    curves: dict[str, list[list[dict]]] = {name: [] for name in args.variants}
    for (name, _), lines in zip(todo, done, strict=True):
        curves[name].append(lines)

    goal = max(mean_curve(curves["all steps"], "success_rate"))
    whole = mean_curve(curves["all steps"], "saved_forwards")[-1]
    columns = (
        "trained events",
        "updates",
        "success before → best on the way → after",
        "gain, each seed",
        "trained rows",
        "forwards",
        "CPU seconds",
    )
    print(f"| {' | '.join(columns)} | passes the first row's best at |")
    print("|---" * 8 + "|")
    for name, runs in curves.items():
        success, rows = mean_curve(runs, "success_rate"), mean_curve(runs, "saved_forwards")
        gains = ", ".join(f"{lines[-1]['success_rate'] - lines[0]['success_rate']:+.3f}" for lines in runs)
        at = reached(rows, success, goal)
        told = f"{success[0]:.3f} → {max(success):.3f} → {success[-1]:.3f}"
        print(
            f"| {name} | {runs[0][-1]['update']} | {told} | {gains} | {rows[-1]:,.0f} | "
            f"{mean_curve(runs, 'forwards')[-1]:,.0f} | {mean_curve(runs, 'cpu_s')[-1]:.0f} | "
            f"{'never' if at is None else f'{at / whole:.2f} of its training cost'} |"
        )
    if args.figure:
        draw(curves, args.figure)


if __name__ == "__main__":
    main()
