"""Read run folders: metrics, recipe, environment and the pictures of the first and the last evaluation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from onetake.metrics import Log

Line = dict[str, Any]
REQUIRED = ("config.yaml", "metrics.jsonl")


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """The images of one evaluation; `images` is uint8 (n, [frames,] H, W, 3), `records` says what each one is and scored."""

    update: int
    images: np.ndarray
    records: list[dict[str, Any]]

    @property
    def rows(self) -> list[tuple[str, int]]:
        """(prompt, sample) of every image."""
        return [(record["prompt"], record["sample"]) for record in self.records]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run folder, read."""

    name: str
    config: dict[str, Any]
    config_text: str
    environment: dict[str, Any]
    updates: list[Line]
    evaluations: list[Line]
    before: Pictures | None  # of the first evaluation
    after: Pictures | None  # of the last, None when that is the first

    @property
    def last(self) -> Line:
        """The last line, which holds the totals."""
        return max(self.updates + self.evaluations, key=lambda line: (line["update"], line["wall_s"]))

    @property
    def made(self) -> str:
        """What one row of an evaluation is."""
        return "completion" if self.config.get("kind") == "language" else "image"

    @property
    def executions(self) -> dict[str, int]:
        """Updates by the execution that produced them."""
        names = [line["execution"] for line in self.updates if "execution" in line]
        return {name: names.count(name) for name in dict.fromkeys(names)}

    @property
    def peak_rss_mib(self) -> float | None:
        return max((line["peak_rss_mib"] for line in self.updates if "peak_rss_mib" in line), default=None)

    @property
    def ranks(self) -> list[Line]:
        """Of each rank the seconds of its phases, summed over the updates, and its peak memory; empty for one process."""
        lines = [line["ranks"] for line in self.updates if "ranks" in line]
        each = [[line[rank] for line in lines if rank < len(line)] for rank in range(max(map(len, lines), default=0))]
        return [
            {key: (max if key == "peak_mib" else sum)(line[key] for line in mine) for key in mine[0]} for mine in each
        ]


def load(folders: Sequence[Path]) -> list[Run]:
    """Every run, with names that differ. Raises ValueError if a folder is not a run, or if its files contradict each other."""
    return [_load(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]


def _names(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell the folders apart; one folder given twice is numbered."""
    parts = [folder.resolve().parts for folder in folders]
    depth = next((d for d in range(1, 8) if len({part[-d:] for part in parts}) == len(parts)), 1)
    names = ["/".join(part[-depth:]) for part in parts]
    if len(set(names)) == len(names):
        return names
    return [f"{name} ({i})" for i, name in enumerate(names, 1)]


def _load(folder: Path, name: str) -> Run:
    _check(folder)
    lines = [_with_rewards(line) for line in Log(folder / "metrics.jsonl").read()]
    if not lines:
        raise ValueError(f"{folder}: metrics.jsonl holds no complete line yet, so there is nothing to report")
    config_text = (folder / "config.yaml").read_text(encoding="utf-8")
    config = yaml.safe_load(config_text)
    if not isinstance(config, dict):
        raise ValueError(f"{folder}: config.yaml is not a recipe (a YAML mapping)")
    environment = folder / "environment.json"
    evaluations = [line for line in lines if line["kind"] == "evaluation"]
    before, after = _ends(folder, evaluations)
    return Run(
        name=name,
        config=config,
        config_text=config_text,
        environment=json.loads(environment.read_text(encoding="utf-8")) if environment.exists() else {},
        updates=[line for line in lines if line["kind"] == "update"],
        evaluations=evaluations,
        before=before,
        after=after,
    )


def _with_rewards(line: Line) -> Line:
    """Several rewards become columns of their own, named ``reward NAME``."""
    rewards = line.get("rewards", {})
    return line | {f"reward {name}": value for name, value in rewards.items()} if len(rewards) > 1 else line


def _check(folder: Path) -> None:
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a run: there is no such folder")
    missing = [name for name in REQUIRED if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{folder} is not a run: it has no {' and no '.join(missing)}")


def _ends(folder: Path, evaluations: list[Line]) -> tuple[Pictures | None, Pictures | None]:
    if not evaluations:
        return None, None
    first, last = evaluations[0]["update"], evaluations[-1]["update"]
    before = _pictures(folder, first)
    after = _pictures(folder, last) if last != first else None
    if before and after and before.rows != after.rows:
        raise ValueError(
            f"{folder}: the evaluations of update {first} and update {last} list different prompts or samples, "
            "so their pictures cannot stand side by side"
        )
    return before, after


def _pictures(folder: Path, update: int) -> Pictures | None:
    stem = folder / "evaluations" / f"update-{update:06d}"
    arrays, records = stem.with_suffix(".npz"), stem.with_suffix(".json")
    if not arrays.exists() or not records.exists():
        return None
    with np.load(arrays, allow_pickle=False) as file:
        images = file["images"]
    pictures = Pictures(update=update, images=images, records=json.loads(records.read_text(encoding="utf-8")))
    if len(images) != len(pictures.records):
        raise ValueError(f"{arrays} holds {len(images)} images, but {records.name} describes {len(pictures.records)}")
    return pictures
