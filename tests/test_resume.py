"""A run that is killed, damaged or stopped ends with the weights of an uninterrupted one, bit for bit."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from helpers import weights
from onetake.metrics import Log
from onetake.policies.diffusion import DiffusionPolicy
from onetake.policies.loading import load_pipeline
from onetake.rollout.evaluation import evaluate
from onetake.run import config
from onetake.run.checkpoint import CheckpointConfig, Checkpoints
from onetake.run.session import continued, opened
from onetake.run.train import Watcher, train
from tiny import tiny_recipe_file

TIMES = (
    "wall_s",
    "cpu_s",
    "peak_rss_mib",
    "sampling_s",
    "decoding_s",
    "reward_s",
    "backward_s",
    "optimizer_s",
    "evaluation_s",
    "ranks",  # seconds and memory of each
)


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory) -> Path:
    return tiny_recipe_file(
        tmp_path_factory.mktemp("recipe"),
        optimizer={"learning_rate": 0.05, "warmup": 3},
        evaluation={"every": 3, "samples": 2},
        checkpoint={"every": 1, "keep": 2},
        updates=6,
    )


def run(recipe_file: Path, folder: Path, *overrides: str, watch: Watcher | None = None):
    session = opened(str(recipe_file), [f"out={folder}", *overrides])
    return train(session.recipe, folder, config.dump(session.recipe), watch or Watcher(say=lambda text: None))


def resume(folder: Path, *overrides: str, say=lambda text: None):
    session = continued(folder, list(overrides))
    return train(session.recipe, folder, config.dump(session.recipe), Watcher(say=say))


def untimed(folder: Path) -> list[dict]:
    return [{k: v for k, v in line.items() if k not in TIMES} for line in Log(folder / "metrics.jsonl").read()]


def assert_same_run(one: Path, other: Path) -> None:
    a, b = weights(one), weights(other)
    assert all(torch.equal(a[name], b[name]) for name in a | b)
    assert untimed(one) == untimed(other)


@pytest.fixture(scope="module")
def whole(recipe_file, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(recipe_file, folder)
    return folder


class Stop(Exception):
    pass


@pytest.mark.parametrize("after", range(7))
def test_resumed_at_every_update_equals_uninterrupted(recipe_file, whole, tmp_path, after):
    def stop(columns: dict) -> None:
        if columns["update"] > after:
            raise Stop

    folder = tmp_path / "run"
    if after < 6:
        with pytest.raises(Stop):
            run(recipe_file, folder, watch=Watcher(say=lambda text: None, update=stop))
    else:
        run(recipe_file, folder)
    resume(folder)
    assert_same_run(whole, folder)


def test_with_ema_resumed_equals_uninterrupted_and_evaluations_use_the_average(recipe_file, whole, tmp_path):
    average = ("ema={decay: 0.5, every: 2}",)
    run(recipe_file, tmp_path / "whole", *average)
    run(recipe_file, tmp_path / "halves", *average, "updates=3")
    resume(tmp_path / "halves", "updates=6")
    ours, halves, without = weights(tmp_path / "whole"), weights(tmp_path / "halves"), weights(whole)
    assert len(ours) == 2 * len(without)
    assert all(torch.equal(ours[name], value) for name, value in without.items())  # training is untouched
    assert any(not torch.equal(value, ours[name.replace("weights/", "ema/")]) for name, value in without.items())
    assert all(torch.equal(ours[name], halves[name]) for name in ours | halves)

    recipe, session = (
        config.load(recipe_file.read_text()),
        Checkpoints(tmp_path / "whole" / "checkpoints", CheckpointConfig()),
    )
    pipe = load_pipeline(recipe.pipeline_source, recipe.policy)
    recipe.policy.trainable.attach(pipe, recipe.seed)
    recipe.policy.trainable.load(pipe, session.latest(print).evaluated)
    policy = DiffusionPolicy(pipe, recipe.policy)
    again = evaluate(policy, recipe.task.load(), recipe.evaluation, seed=recipe.seed)
    logged = [line for line in Log(tmp_path / "whole" / "metrics.jsonl").read() if line["kind"] == "evaluation"][-1]
    assert float(again.scores.mean()) == logged["score_mean"]


def test_growing_updates_continues_the_same_run(recipe_file, whole, tmp_path):
    folder = tmp_path / "run"
    run(recipe_file, folder, "updates=3")
    resume(folder, "updates=6")
    a, b = weights(whole), weights(folder)
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_resuming_with_another_recipe_is_refused_and_changes_nothing(whole):
    before = (whole / "config.yaml").read_text()
    with pytest.raises(ValueError, match=r"optimizer\.learning_rate: 0\.05 → 0\.1\nseed: 0 → 3"):
        continued(whole, ["optimizer.learning_rate=0.1", "seed=3"])
    assert (whole / "config.yaml").read_text() == before


@pytest.mark.parametrize("damage", ["truncate", "remove"])
def test_damaged_checkpoint_falls_back_and_says_so(recipe_file, whole, tmp_path, damage):
    folder, said = tmp_path / "run", []
    run(recipe_file, folder, "updates=4", "checkpoint.keep=4")
    file = folder / "checkpoints" / "update-000004" / "optimizer.safetensors"
    if damage == "truncate":
        file.write_bytes(file.read_bytes()[:100])
    else:
        file.unlink()
    resume(folder, "updates=6", say=said.append)
    assert any("update-000004 is damaged" in line and "falling back" in line for line in said)
    a, b = weights(whole), weights(folder)
    assert all(torch.equal(a[name], b[name]) for name in a)


def start(recipe_file: Path, folder: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "onetake", "train", str(recipe_file), "--set", f"out={folder}"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)


def wait_for_update(folder: Path, update: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if any(line["kind"] == "update" and line["update"] >= update for line in Log(folder / "metrics.jsonl").read()):
            return
        time.sleep(0.005)
    raise AssertionError(f"update {update} did not come")


def test_sigkill_then_resume_equals_uninterrupted(recipe_file, whole, tmp_path):
    folder, randomness = tmp_path / "run", random.Random(0)
    process = start(recipe_file, folder)
    wait_for_update(folder, 2)
    time.sleep(randomness.uniform(0, 0.2))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    resume(folder)
    assert_same_run(whole, folder)


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(10))
def test_sigkill_at_random_moments(recipe_file, whole, tmp_path, attempt):
    folder, randomness = tmp_path / "run", random.Random(attempt)
    process = start(recipe_file, folder)
    wait_for_update(folder, 1)
    time.sleep(randomness.uniform(0, 2))
    process.kill()
    process.communicate()
    resume(folder)
    assert_same_run(whole, folder)


def test_interrupt_saves_and_says_how_to_continue(recipe_file, whole, tmp_path):
    folder = tmp_path / "run"
    process = start(recipe_file, folder)
    wait_for_update(folder, 2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    if "stopped" in out:  # it may have been on its last update already
        assert f"onetake train --resume {folder}" in out.replace("\n", "")
    state = json.loads((sorted((folder / "checkpoints").glob("update-*"))[-1] / "state.json").read_text())
    assert state["state"]["update"] >= 2
    resume(folder)
    assert_same_run(whole, folder)


def test_curves_of_the_three_executions_coincide(recipe_file, whole, tmp_path):
    """`whole` ran under retain: recompute gives its weights and curves bit for bit, reweight up to rounding."""
    for execution in ("recompute", "reweight"):
        run(recipe_file, tmp_path / execution, f"execution={execution}")
    reference, native, banked = (
        weights(whole),
        weights(tmp_path / "recompute"),
        weights(tmp_path / "reweight"),
    )
    assert all(torch.equal(native[name], reference[name]) for name in reference)
    assert all(torch.allclose(banked[name], reference[name], rtol=1e-2, atol=1e-3) for name in reference)
    columns = ("score_mean", "score_spread", "grad_norm")
    curves = {
        name: [line[c] for line in Log(folder / "metrics.jsonl").read() if line["kind"] == "update" for c in columns]
        for name, folder in (
            ("retain", whole),
            ("recompute", tmp_path / "recompute"),
            ("reweight", tmp_path / "reweight"),
        )
    }
    assert curves["recompute"] == curves["retain"]
    assert curves["reweight"] == pytest.approx(curves["retain"], rel=1e-3)
