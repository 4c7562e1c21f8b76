"""The commands as a user types them; bad input is one clear error, exit code 2, and nothing is lost."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from diffusers import DDIMScheduler
from PIL import Image
from typer.testing import CliRunner, Result

from onetake.cli.main import app
from onetake.metrics import Log
from onetake.run.session import save_drawn
from tiny import tiny_sd3, tiny_task


def nan_reward(images, prompts):
    return torch.full((len(prompts),), float("nan"))


def short_reward(images, prompts):
    return torch.zeros(len(prompts) - 1)


def brightness(images, prompts):
    """A reward in two lines, as the docs show it."""
    return images.mean((1, 2, 3))


def failing_later(images, prompts):
    failing_later.calls += 1
    return brightness(images, prompts) * (float("inf") if failing_later.calls > 8 else 1)


failing_later.calls = 0


def flat_later(images, prompts):
    """Brightness while the first three held-out prompts and the first update's two groups are scored, then the same for all."""
    flat_later.calls += 1
    return brightness(images, prompts) if flat_later.calls <= 5 else torch.zeros(len(prompts))


flat_later.calls = 0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> tuple[dict[str, str], str]:
    return tiny_task(tmp_path_factory.mktemp("cli"))


def write_recipe(tiny: tuple[dict[str, str], str], folder: Path, **changes) -> Path:
    tree = {
        "task": tiny[0],
        "policy": {"pipeline": tiny[1], "steps": 3, "call": {"max_sequence_length": 8}},
        "rollout": {"groups": 2, "group_size": 4, "micro_batch": 4},
        "evaluation": {"every": 2, "samples": 2},
        "checkpoint": {"every": 1},
        "updates": 2,
        "out": str(folder / "run"),
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(tree | changes))
    return folder / "recipe.yaml"


def onetake(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def words(result: Result) -> str:
    return " ".join((result.stdout + result.stderr).split())


@pytest.mark.parametrize("trainable", ["lora", "full"])
def test_train_sample_report(tiny, tmp_path, trainable):
    recipe = write_recipe(tiny, tmp_path)
    trained = onetake(
        "train", recipe, "--set", f"policy.trainable={trainable}", "--set", "task.reward=test_cli:brightness"
    )
    assert trained.exit_code == 0, words(trained)
    assert "2 updates × 2 prompts × 4 images = 16 images" in words(trained)
    assert "pre-flight: events [0, 1] re-scored by tail" in words(trained)
    assert re.search(r"score -?\d\.\d{3} → -?\d\.\d{3}", words(trained))
    report = (tmp_path / "run" / "report.html").read_text()
    assert "first" in report

    lines = Log(tmp_path / "run" / "metrics.jsonl").read()
    updates = [line for line in lines if line["kind"] == "update"]
    assert [line["update"] for line in updates] == [1, 2]
    assert [line["forwards"] for line in updates] == [8 * 3, 2 * 8 * 3]  # T rows per trajectory, nothing twice
    assert [line["saved_forwards"] for line in updates] == [8 * 2, 2 * 8 * 2]  # native would add |S| rows
    assert all(line["ratio_mean"] == line["ratio_min"] == line["ratio_max"] == 1 for line in updates)
    assert all(line["step_norm"] > 0 for line in updates)

    drawn = onetake("sample", tmp_path / "run", "first", "second", "--images", "2", "--out", tmp_path / "drawn")
    assert drawn.exit_code == 0, words(drawn)
    sizes = []
    for path in sorted((tmp_path / "drawn").glob("*.png")):
        with Image.open(path) as image:
            sizes.append(image.size)
    assert sizes == [(8, 8)] * 4

    again = onetake("report", tmp_path / "run", "--out", tmp_path / "other.html")
    assert again.exit_code == 0
    assert (tmp_path / "other.html").read_text() == report


def test_two_updates_per_rollout_are_a_hybrid(tiny, tmp_path):
    recipe = write_recipe(tiny, tmp_path, updates=4, updates_per_rollout=2, optimizer={"learning_rate": 0.01})
    assert onetake("train", recipe).exit_code == 0
    updates = [line for line in Log(tmp_path / "run" / "metrics.jsonl").read() if line["kind"] == "update"]
    assert [line["execution"] for line in updates] == ["retain", "recompute"] * 2
    assert [line["forwards"] for line in updates] == [24, 40, 64, 80]
    assert updates[0]["ratio_mean"] == 1
    assert updates[1]["ratio_mean"] != 1


def test_an_update_of_dead_groups_only_is_skipped_and_said(tiny, tmp_path):
    """Equal rewards teach nothing, and Adam's momentum must not move the weights meanwhile."""
    recipe = write_recipe(tiny, tmp_path, updates=3, optimizer={"learning_rate": 0.01, "weight_decay": 0.1})
    result = onetake("train", recipe, "--set", "task.reward=test_cli:flat_later")
    assert "update 2: all groups are dead" in words(result)
    updates = [line for line in Log(tmp_path / "run" / "metrics.jsonl").read() if line["kind"] == "update"]
    assert [line["skipped"] for line in updates] == [0, 1, 1]
    assert [line["dead_groups"] for line in updates] == [0, 2, 2]
    assert updates[0]["step_norm"] > 0
    evaluations = sorted((tmp_path / "run" / "evaluations").glob("*.npz"))
    images = [np.load(path)["images"] for path in evaluations]
    assert len(images) == 3
    assert (images[0] != images[1]).any()
    assert (images[1] == images[2]).all()


def test_the_resolved_recipe_is_a_recipe(tiny, tmp_path):
    assert onetake("train", write_recipe(tiny, tmp_path)).exit_code == 0
    again = onetake("train", tmp_path / "run" / "config.yaml", "--set", f"out={tmp_path}/again")
    assert again.exit_code == 0, words(again)
    first, second = ((tmp_path / name / "config.yaml").read_text().replace(name, "") for name in ("run", "again"))
    assert first == second


def test_verify_prints_every_execution(tiny, tmp_path):
    result = onetake("verify", write_recipe(tiny, tmp_path))
    assert result.exit_code == 0, words(result)
    names = ("recompute", "retain", "reweight")
    rows = {row[0]: row for line in result.stdout.splitlines() if (row := line.split()) and row[0] in names}
    assert [rows[name][-2:] for name in names] == [["10", "40"], ["6", "24"], ["6", "24"]]
    assert float(rows["retain"][2]) == 0
    assert 0 < float(rows["reweight"][2]) < 1e-5


def test_recipes_list_show_copy(tmp_path):
    assert "shapes" in onetake("recipes").stdout
    copied = onetake("recipes", "copy", "shapes", tmp_path / "mine.yaml")
    assert copied.exit_code == 0
    assert (tmp_path / "mine.yaml").read_text().startswith("# ")
    assert "exists already" in words(onetake("recipes", "copy", "shapes", tmp_path / "mine.yaml"))


def refused(result: Result, *texts: str) -> None:
    assert result.exit_code == 2, words(result)
    assert "Traceback" not in words(result)
    for text in texts:
        assert text in words(result)


def test_all_errors_of_a_recipe_come_at_once(tiny, tmp_path):
    recipe = write_recipe(tiny, tmp_path)
    refused(
        onetake("train", recipe, "--set", "rollout.groop_size=4", "--set", "policy.stepz=3"),
        "rollout.groop_size: is not a key of the recipe; did you mean group_size?",
        "policy.stepz: is not a key of the recipe; did you mean steps?",
    )
    refused(
        onetake("train", recipe, "--set", "rollout.group_size=1", "--set", "policy.pipeline=/nowhere"),
        "rollout.group_size: 1 gives no advantage",
        "policy.pipeline: '/nowhere' is neither",
    )
    assert not (tmp_path / "run").exists()


def test_unknown_recipe_names_the_nearest():
    refused(onetake("train", "shaeps"), "there is no recipe 'shaeps'; did you mean shapes?")


def test_no_flow_matching_scheduler(tiny, tmp_path):
    pipe = tiny_sd3()
    pipe.scheduler = DDIMScheduler()
    pipe.save_pretrained(tmp_path / "ddim")
    recipe = write_recipe(tiny, tmp_path)
    refused(
        onetake("train", recipe, "--set", f"policy.pipeline={tmp_path}/ddim"),
        "DDIMScheduler, which is not a flow-matching",
    )


@pytest.mark.parametrize(
    ("reward", "text"), [("nan_reward", "returned nan for image 0"), ("short_reward", "returned shape (1,)")]
)
def test_bad_reward_stops(tiny, tmp_path, reward, text):
    refused(
        onetake("train", write_recipe(tiny, tmp_path), "--set", f"task.reward=test_cli:{reward}"),
        f"the reward test_cli:{reward} {text}",
    )


def test_reward_that_fails_later_loses_nothing(tiny, tmp_path):
    """The update stops; what was checkpointed stands, and the run can be resumed once the reward is mended."""
    failing_later.calls = 0
    recipe = write_recipe(tiny, tmp_path, updates=6, evaluation={"every": 6, "samples": 2})
    refused(
        onetake("train", recipe, "--set", "task.reward=test_cli:failing_later"),
        "the reward test_cli:failing_later returned inf",
        "the update is stopped",
    )
    done = [line["update"] for line in Log(tmp_path / "run" / "metrics.jsonl").read() if line["kind"] == "update"]
    assert done == [1, 2]
    failing_later.calls = -1000
    assert onetake("train", "--resume", tmp_path / "run").exit_code == 0


def test_unwritable_and_used_folders(tiny, tmp_path):
    recipe = write_recipe(tiny, tmp_path)
    (tmp_path / "file").write_text("")
    refused(onetake("train", recipe, "--set", f"out={tmp_path}/file/run"), "cannot write to", "--set out=…")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "thesis.txt").write_text("mine")
    refused(onetake("train", recipe, "--set", f"out={tmp_path}/used"), "is not empty")
    assert (tmp_path / "used" / "thesis.txt").read_text() == "mine"


def test_resume_and_sample_of_what_is_no_run(tmp_path):
    refused(onetake("train", "--resume", tmp_path), "not a run folder")
    refused(onetake("sample", tmp_path, "first"), "neither a run folder")
    refused(onetake("report", tmp_path), "metrics.jsonl")


def test_a_drawn_video_is_saved_with_all_its_frames(tmp_path):
    frames = [Image.new("RGB", (8, 8), (60 * n, 0, 0)) for n in range(4)]
    path = save_drawn(frames, tmp_path / "000-00-a-v1.5-clip")
    with Image.open(path) as video:
        assert (path.name, video.n_frames) == ("000-00-a-v1.5-clip.gif", 4)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [([], "the recipe has none"), (["--world", "4"], "--world measures nothing")],
)
def test_leaving_one_out_of_nothing_is_refused(arguments, told):
    result = CliRunner().invoke(app, ["plan", "shapes", "--leave-one-out", *arguments])
    assert result.exit_code == 2
    assert told in " ".join(result.output.split())
