"""The task `sums`: arithmetic problems of reasoning-gym and its verifier, some of them held out by a seeded hash."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from onetake.core.records import Config
from onetake.tasks.shapes.captions import in_split


@dataclass(frozen=True, kw_only=True)
class Sums:
    """Each problem is a question and its answer; no question is in both lists."""

    train: list[dict[str, str]]
    held_out: list[dict[str, str]]
    right: Callable[[str, str], bool]
    """Whether a completion, the first argument, ends in the answer, the second."""


class SumsTask(Config):
    """``chain_sum``: the last integer of a completion is its answer, and the reward is 1 if it is right, else 0."""

    kind: Literal["sums"] = "sums"
    terms: int = Field(default=2, ge=2)
    digits: int = Field(default=1, ge=1, description="of each term")
    draws: int = Field(default=1000, ge=10, description="problems drawn; each is used once, however often it comes")

    def load(self) -> Sums:
        from reasoning_gym import create_dataset  # pyright: ignore[reportMissingImports]

        sizes = {"min_terms": self.terms, "max_terms": self.terms, "min_digits": self.digits, "max_digits": self.digits}
        problems = create_dataset("chain_sum", **sizes, size=self.draws, seed=0)
        answers: dict[str, str] = {problem["question"]: problem["answer"] for problem in problems}
        train, held_out = (
            [{"question": question, "answer": answers[question]} for question in in_split(sorted(answers), split)]
            for split in ("train", "held_out")
        )

        def right(completion: str, answer: str) -> bool:
            return problems.score_answer(last_integer(completion), {"answer": answer}) == 1  # else a share of the text

        return Sums(train=train, held_out=held_out, right=right)


def last_integer(text: str) -> str | None:
    """A minus after a digit is an operator's, not the number's."""
    found: list[Any] = re.findall(r"(?<!\d)-?\d+", text)
    return found[-1] if found else None
