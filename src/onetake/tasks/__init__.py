"""Tasks: prompts to train on, prompts held out, and the reward that scores what was made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Literal, Protocol

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from onetake.core.axes import Axis
from onetake.core.records import Config, Prompt
from onetake.rewards import Background, Rewards, Weights, load_rewards
from onetake.tasks.motion.captions import prompts as motion_prompts
from onetake.tasks.motion.verify import verify as verify_clip
from onetake.tasks.prompts import read
from onetake.tasks.shapes import captions
from onetake.tasks.shapes.verify import Verdict
from onetake.tasks.shapes.verify import verify as verify_picture

BASES = {name: Path(__file__).parent / name / "base" for name in ("shapes", "motion")}
"""Built-in base models, by the name that ``policy.pipeline`` takes."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """`verdict`, where a task has one, says for a score which of the prompt's constraints an image meets."""

    train: list[Prompt]
    held_out: list[Prompt]
    rewards: Rewards
    success_at: float | None = None
    verdict: Callable[[Tensor, str], Verdict] | None = None


class TaskSource(Protocol):
    """What every task of a recipe has."""

    def problems(self) -> list[str]:
        """All reasons why it could not be loaded, in the recipe's words; empty if there are none."""
        ...

    def load(self) -> Task: ...


class ShapesTask(Config):
    """The built-in task: coloured shapes, their captions, and an exact verifier (see `tasks.shapes`).

    Its reward is the share of a caption's constraints that an image meets. ``{objects: 1, relation: 1}`` gives the objects'
    constraints and the relation a reward each.
    """

    kind: Literal["shapes"] = "shapes"
    family: Literal["relation", "count", "single", "mixed"] = "relation"
    reward: dict[Literal["constraints", "objects", "relation"], float] = Field(default={"constraints": 1.0})

    def problems(self) -> list[str]:
        if "relation" in self.reward and self.family != "relation":
            return [f"task.reward: relation needs captions with a relation, but task.family is {self.family}"]
        return [] if self.reward else ["task.reward: {} scores nothing; known are constraints, objects, relation"]

    def load(self) -> Task:
        families = captions.FAMILIES if self.family == "mixed" else (self.family,)
        train, held_out = (
            [Prompt(text) for family in families for text in captions.prompts(family, split)]
            for split in ("train", "held_out")
        )
        rewards = Rewards(
            functions={name: _SHAPES_REWARDS[name] for name in self.reward},
            weights=dict(self.reward.items()),
        )
        full = sum(self.reward.values(), start=0.0)
        return Task(train=train, held_out=held_out, rewards=rewards, success_at=full, verdict=_shapes_verdict)


class MotionTask(Config):
    """The built-in video task: one shape that moves, and an exact verifier by tracking (see `tasks.motion`).

    Its reward is the share of a caption's constraints that a clip meets.
    """

    kind: Literal["motion"] = "motion"

    def problems(self) -> list[str]:
        return []

    def load(self) -> Task:
        return Task(
            train=[Prompt(text) for text in motion_prompts("train")],
            held_out=[Prompt(text) for text in motion_prompts("held_out")],
            rewards=Rewards(functions={"constraints": motion_reward}, weights={"constraints": 1.0}),
            success_at=1.0,
            verdict=_motion_verdict,
        )


class PromptsTask(Config):
    """Prompts from files and a reward by name, or several by name and weight (see `rewards`).

    A ``.jsonl`` file holds an object a line (see `prompts.Line`), any other file a prompt's text a line.
    """

    kind: Literal["prompts"] = "prompts"
    train: Path
    held_out: Path
    reward: str | Weights
    background: Background | None = Field(
        default=None,
        description="score in a thread, or a process of its own, while the next micro-batch is sampled; servers always do",
    )
    success_at: float | None = Field(default=None, description="an image whose reward reaches this counts as a success")

    def problems(self) -> list[str]:
        found = []
        for name, path in (("train", self.train), ("held_out", self.held_out)):
            if not path.is_file():
                found.append(f"task.{name}: there is no file {path}")
                continue
            prompts, wrong = read(path)
            if not (prompts or wrong):
                found.append(f"task.{name}: {path} holds no prompt (one a line)")
            found += [f"task.{name}: {problem}" for problem in wrong]
        try:
            load_rewards(self.reward)
        except ValueError as error:
            found.append(str(error))
        return found

    def load(self) -> Task:
        return Task(
            train=read(self.train)[0],
            held_out=read(self.held_out)[0],
            rewards=load_rewards(self.reward, background=self.background),
            success_at=self.success_at,
        )


TaskConfig = Annotated[TaskSource, Axis((ShapesTask, MotionTask, PromptsTask))]


def shapes_reward(images: Tensor, prompts: list[str]) -> Tensor:
    """(B,) share of the caption's constraints that each image (B, 3, H, W) in [0, 1] meets; 1 is all of them."""
    return torch.tensor([_shapes_verdict(image, prompt).score for image, prompt in zip(images, prompts, strict=True)])


def _part_reward(images: Tensor, prompts: list[str], *, relation: bool) -> Tensor:
    """(B,) share that each image meets of the constraints that are, or are not, the caption's relation."""
    shares = []
    for image, prompt in zip(images, prompts, strict=True):
        constraints = _shapes_verdict(image, prompt).constraints
        met = [holds for name, holds in constraints.items() if (name in captions.RELATIONS) == relation]
        shares.append(sum(met) / len(met))
    return torch.tensor(shares)


_SHAPES_REWARDS = {
    "constraints": shapes_reward,
    "objects": partial(_part_reward, relation=False),
    "relation": partial(_part_reward, relation=True),
}


def motion_reward(clips: Tensor, prompts: list[str]) -> Tensor:
    """(B,) share of the caption's constraints that each clip (B, frames, 3, H, W) in [0, 1] meets; 1 is all of them."""
    return torch.tensor([_motion_verdict(clip, prompt).score for clip, prompt in zip(clips, prompts, strict=True)])


def _shapes_verdict(image: Tensor, prompt: str) -> Verdict:
    return _judged(verify_picture, *_pixels(image), prompt)


def _motion_verdict(clip: Tensor, prompt: str) -> Verdict:
    return _judged(verify_clip, *_pixels(clip), prompt)


def _pixels(image: Tensor) -> tuple[bytes, tuple[int, ...]]:
    """The bytes of uint8 ([frames,] H, W, 3), and that shape."""
    pixels = (image.float().clamp(0, 1) * 255).round().byte().movedim(-3, -1).cpu().numpy()
    return pixels.tobytes(), pixels.shape


@lru_cache(maxsize=1024)
def _judged(
    verify: Callable[[np.ndarray, str], Verdict], pixels: bytes, shape: tuple[int, ...], prompt: str
) -> Verdict:
    """Rewards that look at different constraints, and the evaluation's record, share one look at the picture."""
    return verify(np.frombuffer(pixels, np.uint8).reshape(shape), prompt)
