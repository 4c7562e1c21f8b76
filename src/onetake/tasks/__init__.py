"""Tasks: prompts to train on, prompts held out, and the reward that scores what was made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from onetake.records import NAMED, Config
from onetake.rewards import Reward, load_reward
from onetake.tasks.shapes import captions
from onetake.tasks.shapes.verify import Verdict, verify

BASES = {"shapes": Path(__file__).parent / "shapes" / "base"}
"""Built-in base models, by the name that ``policy.pipeline`` takes."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """`verdict`, where a task has one, says for a score which of the prompt's constraints an image meets."""

    train: list[str]
    held_out: list[str]
    reward: Reward
    success_at: float | None = None
    verdict: Callable[[Tensor, str], Verdict] | None = None


class ShapesTask(Config):
    """The built-in task: coloured shapes, their captions, and an exact verifier (see `tasks.shapes`)."""

    kind: Literal["shapes"] = "shapes"
    family: Literal["relation", "count", "single", "mixed"] = "relation"

    def problems(self) -> list[str]:
        return []

    def load(self) -> Task:
        families = captions.FAMILIES if self.family == "mixed" else (self.family,)
        train, held_out = (
            [text for family in families for text in captions.prompts(family, split)] for split in ("train", "held_out")
        )
        return Task(train=train, held_out=held_out, reward=shapes_reward, success_at=1.0, verdict=_shapes_verdict)


class PromptsTask(Config):
    """Prompts from text files, one a line, and a reward by name (see `rewards`)."""

    kind: Literal["prompts"] = "prompts"
    train: Path
    held_out: Path
    reward: str
    success_at: float | None = Field(default=None, description="an image whose reward reaches this counts as a success")

    def problems(self) -> list[str]:
        found = []
        for name, path in (("train", self.train), ("held_out", self.held_out)):
            if not path.is_file():
                found.append(f"task.{name}: there is no file {path}")
            elif not _lines(path):
                found.append(f"task.{name}: {path} holds no prompt (one a line)")
        try:
            load_reward(self.reward)
        except ValueError as error:
            found.append(str(error))
        return found

    def load(self) -> Task:
        return Task(
            train=_lines(self.train),
            held_out=_lines(self.held_out),
            reward=load_reward(self.reward),
            success_at=self.success_at,
        )


TaskConfig = Annotated[ShapesTask | PromptsTask, Field(discriminator="kind"), NAMED]


def shapes_reward(images: Tensor, prompts: list[str]) -> Tensor:
    """(B,) share of the caption's constraints that each image (B, 3, H, W) in [0, 1] meets; 1 is all of them."""
    return torch.tensor([_shapes_verdict(image, prompt).score for image, prompt in zip(images, prompts, strict=True)])


def _shapes_verdict(image: Tensor, prompt: str) -> Verdict:
    pixels = (image.float().clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy()
    return verify(pixels, prompt)


def _lines(path: Path) -> list[str]:
    return [line.strip() for line in path.read_text().splitlines() if line.strip()]
