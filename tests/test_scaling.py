"""`onetake plan --world`: what is counted is exact (against ranks in test_parallel and test_shard), what is timed is arithmetic."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import scaling as ablation
from onetake.cli.main import app
from onetake.forecast.scaling import LATENCY, SMALL, Machine, Message, Profile, Share, messages
from onetake.metrics import Log
from onetake.run.recipe import Recipe
from tiny import tiny_recipe_file

NAMES = {"all_reduce": "allreduce_", "all_gather": "_allgather_base_", "reduce_scatter": "reduce_scatter_tensor"}


def predicted(
    policy, sizes: dict, execution: str, ranks: int, *, steps: int, scores: int, shards: int = 1
) -> list[tuple[str, int]]:
    """(operation, bytes) of all collectives but the small ones, sorted, as `ranks.Collectives` counts them."""
    recipe = Recipe.model_validate({"policy": {"steps": steps}, "selection": "all", "rollout": sizes})
    layout = recipe.rollout.over(ranks)
    sent = messages(policy, Share.of(recipe, layout), layout, execution, shards=shards, scores=scores)
    return sorted((NAMES[m.operation], m.size) for m in sent for _ in range(round(m.count)) if m.size)


def test_a_share_is_what_a_rank_is_dealt():
    """Groups of four that share their first two of six steps; three events; on two ranks."""
    sizes = {"groups": 2, "group_size": 4, "micro_batch": 2, "shared_start": True}
    window = {"kind": "window", "place": "fixed", "start": 2, "size": 3}
    recipe = Recipe.model_validate({"policy": {"steps": 6}, "selection": window, "rollout": sizes})
    assert Share.of(recipe, recipe.rollout.over(1)) == Share(
        trajectories=8, steps=2 * (2 + 4 * 4), events=24, calls=2 * (2 + 4 * 2), event_calls=12
    )
    assert Share.of(recipe, recipe.rollout.over(2)) == Share(
        trajectories=4, steps=2 * (2 + 2 * 4), events=12, calls=2 * (2 + 4), event_calls=6
    )
    conventional = recipe.rollout.model_copy(update={"layout": "conventional"})
    assert Share.of(recipe, conventional.over(2)).steps == 2 + 4 * 4  # what a group shares is computed on one rank


def test_seconds_on_the_wire():
    ring = Message(operation="all_reduce", count=2, size=800, among=4, span=4)
    inside, between = (
        Machine(ranks=4, per_node=4, link=100, network=10),
        Machine(ranks=4, per_node=2, link=100, network=10),
    )
    assert ring.sent == 2 * 2 * 800 * 3 / 4
    assert inside.seconds([ring]) == pytest.approx(24 + 2 * LATENCY)
    assert between.seconds([ring]) == pytest.approx(240 + 2 * LATENCY)


def test_executions_cost_what_they_run():
    """A backward of two forwards: native to lean 4 : 3, without optimizer and reward (methods' cost model)."""
    profile = Profile(forward=1.0, backward=2.0)
    share = Share(trajectories=1, steps=10, events=10, calls=10, event_calls=10)
    assert [profile.seconds(share, name) for name in ("recompute", "retain", "reweight")] == [40, 30, 30]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("measured")
    changes = {"execution": "retain", "updates": 4, "evaluation": {"prompts": 1, "samples": 1}}
    recipe = tiny_recipe_file(root, **changes)
    result = CliRunner().invoke(app, ["train", str(recipe), "--set", f"out={root / 'run'}"])
    assert result.exit_code == 0, result.output
    return root / "run"


def plan(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)])
    return result.exit_code, result.output


def test_a_profile_is_the_runs_medians(run):
    lines = [line for line in Log(run / "metrics.jsonl").read() if line["kind"] == "update"][1:]
    profile = Profile.of(run)
    assert profile.forward == statistics.median(line["sampling_s"] for line in lines) / (8 * 3)
    assert profile.backward == statistics.median(line["backward_s"] for line in lines) / (8 * 2)


def test_a_plan_lists_every_layout_and_execution(run):
    code, told = plan(run, "--world", "4", "--gpus-per-node", "2", "--memory", "1GiB", "--set", "rollout.groups=4")
    assert code == 0, told
    rows = [line.split() for line in told.splitlines() if line.strip().startswith(("shared-prompt", "conventional"))]
    assert [row[:3] for row in rows] == [
        [layout, execution, size]
        for layout, size in (("shared-prompt", "1"), ("conventional", "4"))
        for execution in ("recompute", "retain", "reweight")
    ]
    assert all(row[9:] == ["fits"] for row in rows)
    profile, share = Profile.of(run), Share(trajectories=4, steps=12, events=8, calls=12, event_calls=8)
    computing, sending = profile.seconds(share, "retain"), float(rows[1][4])
    assert rows[1][3] == f"{computing:.4g}"
    assert rows[1][6] == str(SMALL + 2)
    assert sending == pytest.approx((SMALL + 2) * LATENCY, rel=0.01)  # few bytes
    everything = profile.seconds(Share(trajectories=16, steps=48, events=32, calls=12, event_calls=8), "retain")
    assert float(rows[1][8].rstrip("%")) == pytest.approx(100 * everything / 4 / (computing + sending), abs=0.1)
    peaks = {tuple(row[:2]): float(row[7]) for row in rows}
    assert peaks["shared-prompt", "recompute"] < peaks["shared-prompt", "retain"]


def test_a_layout_that_does_not_divide_says_what_would(run):
    code, told = plan(run, "--world", "3")
    assert code == 0, told
    for problem in (
        "rollout.group_size: 4 samples cannot be divided evenly over 3 ranks (rollout.layout: shared-prompt)",
        "rollout.groups: 2 prompts cannot be dealt evenly to 3 ranks (rollout.layout: conventional)",
    ):
        assert problem in " ".join(told.split())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--set", "policy.steps=9"], "did not measure policy.steps: 3 → 9"),
        (["--link", "fast"], "--link: 'fast' is not a size"),
    ],
)
def test_what_was_not_measured_is_refused(run, options, text):
    code, told = plan(run, "--world", "4", *options)
    assert (code, text in told) == (2, True), told


def test_devices_without_a_number_of_them_are_refused():
    code, told = plan("shapes", "--link", "25GB/s")
    assert (code, "--link describes the devices of --world" in told) == (2, True), told


def test_a_recipe_alone_has_no_seconds():
    code, told = plan("shapes", "--world", "4")
    assert (code, "--world: shapes is not a run folder" in told) == (2, True), told


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"execution": "reweight"}, "their seconds cannot be told apart"),
        ({"ranks": 2}, "this one was on several"),
        ({"updates": 1}, "no update after its first one"),
    ],
)
def test_runs_that_tell_no_seconds_are_refused(run, tmp_path, change, text):
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    tree = yaml.safe_load((run / "config.yaml").read_text())
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree | {k: v for k, v in change.items() if k != "ranks"}))
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:2] if "updates" in change else lines))
    (tmp_path / "environment.json").write_text(f'{{"ranks": {change.get("ranks", 1)}}}')
    with pytest.raises(ValueError, match=text):
        Profile.of(tmp_path)


def test_the_published_ablation():
    """Predicted ÷ published (docs/plan.md). Retain of a full fine-tune is missed: it took 1.38 times what is predicted."""
    errors = {
        (kind, row): seconds / ablation.PUBLISHED[kind][row] - 1
        for kind, rows in ablation.predicted().items()
        for row, seconds in rows.items()
        if (kind, row) not in ablation.FITTED
    }
    assert len(errors) == 7
    missed = errors.pop(("full", "retain"))
    assert missed == pytest.approx(-0.276, abs=0.001)
    assert all(-0.07 < error < 0.02 for error in errors.values())
