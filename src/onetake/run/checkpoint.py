"""Atomic checkpoints: written aside, flushed to disk, renamed. A checkpoint either is there whole or is not there."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import Field
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from onetake.core.records import Config
from onetake.parallel import ALONE, World
from onetake.parallel.shard import DTensor, load_shards, save_shards


class CheckpointConfig(Config):
    """Besides the last `keep`, the checkpoint with the best held-out score is kept."""

    every: int = Field(default=20, ge=1, description="updates between checkpoints; the last update always has one")
    keep: int = Field(default=2, ge=1)


@dataclass(frozen=True, kw_only=True)
class State:
    """The counters of a run after an update."""

    update: int
    wall_s: float
    cpu_s: float
    calls: int
    forwards: int
    saved_forwards: int
    held_out: float | None  # success rate, or mean score, of the evaluation at this update, if there was one
    kl_beta: float = 0.0  # of the KL to the reference, which a target may move


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint on disk: ``weights/`` is what plain diffusers or peft loads."""

    folder: Path
    state: State

    @property
    def weights(self) -> Path:
        return self.folder / "weights"

    @property
    def ema(self) -> Path:
        """The averaged weights, if the run keeps an average."""
        return self.folder / "ema"

    @property
    def evaluated(self) -> Path:
        """The weights that evaluations use."""
        return self.ema if self.ema.is_dir() else self.weights

    def optimizer(self, parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
        """What the optimizer of `parameters` saved; what was sharded then is sharded as they are now."""
        whole, shards = load_file(self.folder / "optimizer.safetensors"), self.folder / "optimizer"
        return whole | (load_shards(shards, parameters) if shards.is_dir() else {})


class Checkpoints:
    """The checkpoints of one run, in ``<run>/checkpoints/update-NNNNNN``."""

    def __init__(self, root: Path, config: CheckpointConfig) -> None:
        self._root = root
        self._config = config

    def save(
        self,
        state: State,
        save_weights: Callable[[Path], None],
        optimizer: dict[str, Tensor],
        recipe: str,
        world: World = ALONE,
    ) -> Checkpoint:
        """Write the checkpoint of `state`, then drop those no longer kept. `save_weights` gets the new folder.

        Ranks call it together: rank 0 writes, and each its shards of what `optimizer` holds sharded.
        """
        aside = world.told(lambda: self._aside(state))
        save_weights(aside)
        shards: dict[str, Tensor] = {name: tensor for name, tensor in optimizer.items() if isinstance(tensor, DTensor)}
        if shards:
            save_shards(shards, aside / "optimizer")
        whole = {name: tensor.contiguous() for name, tensor in optimizer.items() if name not in shards}
        world.once(lambda: self._complete(aside, state, whole, recipe))
        return Checkpoint(folder=self._final(state), state=state)

    def _final(self, state: State) -> Path:
        return self._root / f"update-{state.update:06d}"

    def _aside(self, state: State) -> Path:
        """An empty folder that no one takes for a checkpoint yet."""
        final = self._final(state)
        aside = self._root / f".{final.name}.partial"
        for leftover in (aside, final):
            shutil.rmtree(leftover, ignore_errors=True)
        (aside / "weights").mkdir(parents=True)
        return aside

    def _complete(self, aside: Path, state: State, optimizer: dict[str, Tensor], recipe: str) -> None:
        final = self._final(state)
        save_file(optimizer, aside / "optimizer.safetensors")
        (aside / "config.yaml").write_text(recipe)
        digests = {str(p.relative_to(aside)): _digest(p) for p in sorted(aside.rglob("*")) if p.is_file()}
        content = {"state": asdict(state), "files": digests}
        (aside / "state.json").write_text(json.dumps({**content, "sha256": _content_digest(content)}, indent=1))
        for path in [*aside.rglob("*"), aside]:
            _flush(path)
        aside.rename(final)
        _flush(self._root)
        self._prune()

    def latest(self, say: Callable[[str], None]) -> Checkpoint | None:
        """The newest whole checkpoint. Damaged ones are passed over, and `say` is told which and why."""
        return next(self._whole(say), None)

    def best(self) -> Checkpoint | None:
        """The checkpoint with the best held-out score among those kept."""
        return _best(self._whole())

    def _whole(self, say: Callable[[str], None] = lambda text: None) -> Iterator[Checkpoint]:
        """From the newest on."""
        for folder in reversed(self._folders()):
            try:
                yield read(folder)
            except ValueError as error:
                say(f"{error}; falling back to the checkpoint before it")

    def _folders(self) -> list[Path]:
        return sorted(p for p in self._root.glob("update-*") if p.is_dir())

    def _prune(self) -> None:
        """Damaged checkpoints go too: they must not count among those kept."""
        whole = list(self._whole())
        kept = {c.folder for c in [*whole[: self._config.keep], _best(whole)] if c is not None}
        for folder in self._folders():
            if folder not in kept:
                shutil.rmtree(folder)


def _best(checkpoints: Iterable[Checkpoint]) -> Checkpoint | None:
    scored = [c for c in checkpoints if c.state.held_out is not None]
    return max(scored, key=lambda c: (c.state.held_out, c.state.update), default=None)


def read(folder: Path) -> Checkpoint:
    """Open a checkpoint. Raises ValueError saying what is missing or damaged; every file's digest is checked."""
    try:
        content = json.loads((folder / "state.json").read_text())
    except (FileNotFoundError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{folder} is not a whole checkpoint (state.json: {error})") from error
    if content.pop("sha256", None) != _content_digest(content):
        raise ValueError(f"checkpoint {folder} is damaged: state.json is not what was written")
    for name, digest in content["files"].items():
        path = folder / name
        if not path.is_file():
            raise ValueError(f"checkpoint {folder} is damaged: {name} is missing")
        if _digest(path) != digest:
            raise ValueError(f"checkpoint {folder} is damaged: {name} is not what was written")
    return Checkpoint(folder=folder, state=State(**content["state"]))


def _content_digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """fsync a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
