"""Builds run folders for the report's tests, as training leaves them: realistic numbers, pictures judged by the verifier."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import yaml

from onetake.metrics import Log
from onetake.tasks.shapes.captions import parse, prompts
from onetake.tasks.shapes.render import render
from onetake.tasks.shapes.verify import verify

SAMPLES = 2


def make_run(
    folder: Path,
    *,
    updates: int = 40,
    evaluate_every: int = 10,
    execution: str = "retain",
    seed: int = 0,
    gain: float = 0.45,
    success: bool = True,
    saved: int = 192,
    texts: list[str] | None = None,
) -> Path:
    """A run folder as training leaves it, with pictures that the task's own verifier judged.

    Args:
        folder: where to put it.
        updates: update lines; 0 leaves a run that has only been evaluated.
        evaluate_every: updates between evaluations; 0 leaves no evaluation at all.
        gain: how far the success rate climbs in the end.
        success: whether the task has a notion of success.
        saved: forwards that native would have spent on top, per update.
        texts: held-out prompts.
    """
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    log = Log(folder / "metrics.jsonl")
    texts = prompts("relation", "held_out")[:30] if texts is None else texts
    forwards, wall = 0, 2.0
    evaluate(log, folder, 0, forwards, wall, 0.3, success, texts)
    for update in range(1, updates + 1):
        level = 0.3 + gain * (1 - math.exp(-3 * update / max(updates, 2)))
        times = dict(
            zip(("sampling", "decoding", "reward", "backward", "optimizer"), rng.uniform(0.9, 1.1, 5), strict=True)
        )
        times = {f"{k}_s": v * t for (k, v), t in zip(times.items(), (1.4, 0.08, 0.11, 0.5, 0.02), strict=True)}
        forwards, wall = forwards + 96 * 8, wall + sum(times.values())
        spread = abs(rng.normal(0, 0.03)) if update % 2 else 0.0
        log.write(
            kind="update",
            update=update,
            wall_s=wall,
            forwards=forwards,
            saved_forwards=saved * update,
            score_mean=0.6 + 0.4 * level + rng.normal(0, 0.02),
            score_spread=0.2,
            **({"success_rate": float(np.clip(level + rng.normal(0, 0.05), 0, 1))} if success else {}),
            dead_groups=int(rng.integers(0, 3)),
            **times,
            execution=execution,
            loss=0.0,
            ratio_mean=1.0 + spread / 9,
            ratio_min=1.0 - spread,
            ratio_max=1.0 + spread,
            clip_fraction=spread,
            approx_kl=spread**2,
            grad_norm=float(rng.lognormal(-1, 0.4)),
            step_norm=float(rng.lognormal(-6, 0.1)),
            learning_rate=1e-4,
            peak_rss_mib=800.0 + min(update, 5),
        )
        if evaluate_every and update % evaluate_every == 0:
            wall += 3.0
            evaluate(log, folder, update, forwards, wall, level, success, texts)
    if not evaluate_every:
        keep = [line for line in log.read() if line["kind"] == "update"]
        log.path.write_text("".join(json.dumps(line) + "\n" for line in keep))
        shutil.rmtree(folder / "evaluations")
    recipe = {
        "task": {"kind": "shapes", "family": "relation"},
        "seed": seed,
        "updates": updates,
        "policy": {
            "pipeline": "shapes",
            "steps": 8,
            "guidance": 1.0,
            "kernel": "flow",
            "trainable": {"kind": "lora", "rank": 16},
        },
        "selection": {"kind": "window", "first": 0, "length": 2},
        "objective": "grpo",
        "execution": execution,
        "rollout": {"groups": 4, "group_size": 24, "micro_batch": 24},
        "optimizer": {"learning_rate": 0.0001, "warmup": 10},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    environment = {
        "python": "3.11.9",
        "torch": "2.13.0",
        "cpu": "x86 <two cores>",
        "threads": 1,
        "command": "onetake train",
    }
    (folder / "environment.json").write_text(json.dumps(environment))
    return folder


def evaluate(
    log: Log, folder: Path, update: int, forwards: int, wall: float, level: float, success: bool, texts: list[str]
) -> None:
    """One evaluation line with its pictures; with chance 1 − level a picture shows another prompt's scene."""
    rng = np.random.default_rng(7)
    images, records = [], []
    for text in texts:
        for sample in range(SAMPLES):
            wrong = rng.random() > level
            shown = texts[int(rng.integers(len(texts)))] if wrong else text
            image = render(parse(shown), np.random.default_rng(len(images)))
            verdict = verify(image, text)
            images.append(image)
            records.append({"prompt": text, "sample": sample, "score": verdict.score, "verdict": verdict.constraints})
    (folder / "evaluations").mkdir(exist_ok=True)
    stem = folder / "evaluations" / f"update-{update:06d}"
    scores = np.array([record["score"] for record in records])
    np.savez_compressed(stem.with_suffix(".npz"), images=np.stack(images), scores=scores)
    stem.with_suffix(".json").write_text(json.dumps(records))
    n = len(records)
    rate = sum(all(record["verdict"].values()) for record in records) / n
    log.write(
        kind="evaluation",
        update=update,
        wall_s=wall,
        forwards=forwards,
        score_mean=float(scores.mean()),
        **({"success_rate": rate, "stderr": math.sqrt(rate * (1 - rate) / n)} if success else {}),
        n=n,
        diversity=0.21 - 0.04 * level,
        evaluation_s=3.0,
    )
