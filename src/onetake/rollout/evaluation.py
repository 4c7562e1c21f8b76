"""Held-out evaluation: deterministic ODE sampling, fresh noise that training never sees, the same noise every time."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from onetake.core.records import Address, Config, MicroBatch, Prompt
from onetake.parallel import ALONE, World
from onetake.policies import Policy
from onetake.tasks import Task


class EvaluationConfig(Config):
    """Before the first update, every `every` updates, and after the last."""

    every: int = Field(default=20, ge=1)
    prompts: int = Field(
        default=56, ge=1, description="held-out prompts, evenly spaced over the list; fewer if there are fewer"
    )
    steps: int | None = Field(default=None, ge=1, description="denoising steps; None takes policy.steps")
    samples: int = Field(default=4, ge=1, description="images of each prompt; diversity needs 2")


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Row i of every evaluation of a run is the same prompt and noise."""

    prompts: list[str]
    samples: list[int]
    images: Tensor  # (n, [frames,] 3, H, W) in [0, 1]
    scores: Tensor  # (n,)
    rewards: dict[str, float]  # mean of each reward by name
    success_at: float | None
    seconds: float

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The evaluation's columns of the log."""
        n = len(self.scores)
        columns: dict[str, Any] = {
            "n": n,
            "rewards": self.rewards,
            "score_mean": float(self.scores.mean()),
            "evaluation_s": self.seconds,
        }
        if self.success_at is not None:
            rate = float((self.scores >= self.success_at).double().mean())
            columns |= {"success_rate": rate, "stderr": (rate * (1 - rate) / n) ** 0.5}
        per_prompt = max(self.samples) + 1
        if per_prompt > 1:
            columns["diversity"] = diversity(self.images.unflatten(0, (-1, per_prompt)))
        return columns


def diversity(images: Tensor) -> float:
    """Mean over prompts of the mean pairwise RMS pixel difference; images (prompts, samples, [frames,] 3, H, W) in [0, 1]."""
    flat = images.flatten(2).double()
    pairs = torch.triu_indices(flat.shape[1], flat.shape[1], 1)
    differences = flat[:, pairs[0]] - flat[:, pairs[1]]
    return float(differences.square().mean(2).sqrt().mean())


def chosen_prompts(config: EvaluationConfig, held_out: list[Prompt]) -> list[int]:
    """Indices of the evaluated prompts, evenly spaced so that every kind of prompt is there."""
    count = min(config.prompts, len(held_out))
    return [i * len(held_out) // count for i in range(count)]


def evaluate(
    policy: Policy, task: Task, config: EvaluationConfig, *, seed: int, world: World = ALONE
) -> Evaluation | None:
    """Sample and score, each rank its share of the prompts; the result is rank 0's, None elsewhere.

    A prompt's samples stay together, so that they are what one process makes. The policy's counters are restored:
    evaluation is not part of the training bill.
    """
    start = time.perf_counter()
    calls, forwards = policy.calls, policy.forwards
    address = Address(seed=seed, stream="evaluation", update=0)
    steps = config.steps or len(policy.sigmas) - 1
    chosen = chosen_prompts(config, task.held_out)
    made: dict[int, tuple[Tensor, dict[str, Tensor]]] = {}
    for turn in range(-(-len(chosen) // world.size)):
        place = turn * world.size + world.rank
        index = chosen[min(place, len(chosen) - 1)]  # ranks that share weights must run the model equally often
        batch = MicroBatch(
            address=address,
            group=0,
            prompt_index=index,
            prompt=task.held_out[index],
            samples=tuple(range(config.samples)),
            stochastic=torch.zeros(config.samples, steps, dtype=torch.bool),
            weight=torch.ones(steps, dtype=torch.float64),
        )
        images = policy.rollout(batch, lambda transition: None, grad=False).float().cpu()
        if place < len(chosen):
            made[place] = images, task.rewards(images, [batch.prompt] * config.samples)
    policy.calls, policy.forwards = calls, forwards
    everyone = {place: result for share in world.gathered(made) for place, result in share.items()}
    if not everyone:
        return None
    parts = [everyone[place][1] for place in range(len(chosen))]
    return Evaluation(
        prompts=[task.held_out[index].text for index in chosen for _ in range(config.samples)],
        samples=list(range(config.samples)) * len(parts),
        images=torch.cat([everyone[place][0] for place in range(len(chosen))]),
        scores=torch.cat([task.rewards.total(part) for part in parts]),
        rewards={name: float(torch.cat([part[name] for part in parts]).double().mean()) for name in parts[0]},
        success_at=task.success_at,
        seconds=time.perf_counter() - start,
    )


def save(evaluation: Evaluation, task: Task, folder: Path, update: int) -> None:
    """``update-NNNNNN.npz`` (images uint8 (n, [frames,] H, W, 3), scores) and ``.json`` (prompt, sample, score, verdict)."""
    folder.mkdir(exist_ok=True)
    pixels = (evaluation.images.clamp(0, 1) * 255).round().byte().movedim(-3, -1).numpy()
    np.savez_compressed(folder / f"update-{update:06d}.npz", images=pixels, scores=evaluation.scores.numpy())
    rows = [
        {
            "prompt": prompt,
            "sample": evaluation.samples[i],
            "score": float(evaluation.scores[i]),
            "verdict": task.verdict(evaluation.images[i], prompt).constraints if task.verdict else {},
        }
        for i, prompt in enumerate(evaluation.prompts)
    ]
    (folder / f"update-{update:06d}.json").write_text(json.dumps(rows))
