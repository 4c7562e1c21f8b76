"""`activations` in a diffusion recipe: the run of gradient checkpointing, bit for bit, with less recomputed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from helpers import gradient_of, move
from models import plant_wrong_replays
from onetake.activations.measure import Probe
from onetake.activations.plan import EXACT, Action, Option
from onetake.activations.recoveries import Recoveries
from onetake.cli.main import app
from onetake.metrics import Log
from onetake.policies.adapters import Lora
from onetake.policies.diffusion import DiffusionPolicy
from onetake.policies.loading import PolicyConfig
from onetake.rollout.sampling import RolloutConfig
from onetake.run import config
from onetake.run.session import opened
from onetake.run.train import Watcher, train
from onetake.run.verify import measured_plans, verify_actions
from tiny import tiny_recipe_file
from tiny_families import CASES, tiny

CHECKPOINTING = "policy.gradient_checkpointing=true"


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory) -> Path:
    sizes = {"optimizer": {"learning_rate": 0.05}, "evaluation": {"samples": 2}, "updates": 3}
    return tiny_recipe_file(tmp_path_factory.mktemp("recipe"), **sizes)


def trained(recipe_file: Path, folder: Path, *overrides: str) -> tuple[dict[str, torch.Tensor], list[dict]]:
    """Final weights, and the log's updates."""
    session = opened(str(recipe_file), [f"out={folder}", CHECKPOINTING, *overrides])
    train(session.recipe, folder, config.dump(session.recipe), Watcher(say=lambda text: None))
    last = sorted((folder / "checkpoints").glob("update-*"))[-1]
    updates = [line for line in Log(folder / "metrics.jsonl").read() if line["kind"] == "update"]
    return load_file(last / "weights" / "pytorch_lora_weights.safetensors"), updates


@pytest.fixture
def storing_pays(monkeypatch):
    """Times of blocks as small as these are noise."""
    measured = Probe.options

    def options(self: Probe) -> dict[str, list[Option]]:
        named = measured(self)
        return {name: [replace(o, seconds=o.bytes * 1e-9) for o in of] for name, of in named.items()}

    monkeypatch.setattr(Probe, "options", options)


@pytest.mark.parametrize("execution", ["reweight", "recompute"])
def test_run_has_the_bits_of_checkpointing_and_replays_nothing_that_fits(
    recipe_file, tmp_path, storing_pays, execution
):
    plain, _ = trained(recipe_file, tmp_path / "plain", f"execution={execution}")
    ours, updates = trained(recipe_file, tmp_path / "ours", f"execution={execution}", "activations=90%")
    assert all(torch.equal(plain[name], ours[name]) for name in plain | ours)
    first, *later = (line["recovery"] for line in updates)
    events, units = 2 * 2, first["units_R"]  # two micro-batches of two events; the first pass recomputes all units
    assert first["replays"] == events * units
    for told in later:
        assert told["replays"] == told["units_R"] == 0 < told["kept_mib"]


def test_nothing_is_said_of_activations_in_a_run_without_them(recipe_file, tmp_path):
    _, updates = trained(recipe_file, tmp_path / "plain")
    assert all("recovery" not in line for line in updates)


@pytest.mark.parametrize("execution", ["reweight", "recompute"])
@pytest.mark.parametrize("name", ["wan-2.2", "flux-true-cfg"])
def test_two_transformers_or_two_forwards_in_one_event(storing_pays, name, execution):
    """Each transformer of Wan 2.2 has a plan; of two forwards before one backward the second is recomputed."""
    case = CASES[name]
    settings = PolicyConfig(steps=4, guidance=1.0, call=case.call, trainable=Lora(rank=2), gradient_checkpointing=True)
    policy = DiffusionPolicy.around(tiny(name), settings, seed=0)
    move(policy)
    update = {"config": RolloutConfig(groups=1, group_size=2, micro_batch=2)}
    plain = gradient_of(policy, execution, **update)
    recoveries = Recoveries(policy.module, "90%")
    for _ in range(2):
        before = [sum(unit.replays for unit in recovery.units) for recovery in recoveries.each.values()]
        with recoveries.step():
            ours = gradient_of(policy, execution, **update)
        assert all(torch.equal(plain[n], ours[n]) for n in plain)
    after = [sum(unit.replays for unit in recovery.units) for recovery in recoveries.each.values()]
    replayed = [b - a for a, b in zip(before, after, strict=True)]
    if name == "wan-2.2":
        assert replayed == [0, 0]
        assert [key for key in recoveries.told if key.endswith("replays")] == [
            "transformer/replays",
            "transformer_2/replays",
        ]
    else:
        (recovery,) = recoveries.each.values()
        assert replayed == [3 * len(recovery.units)]  # three events


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["execution=retain"], "holds the graphs of all events"),
        (["policy.gradient_checkpointing=false"], "set policy.gradient_checkpointing: true"),
        (["activations=lots"], 'activations: "lots" is not understood'),
        (["policy.compile={}"], "policy.compile"),
        (["parallel.shard=all"], "parallel.shard"),
    ],
)
def test_refused_before_anything_loads(recipe_file, tmp_path, overrides, told):
    good = [f"out={tmp_path / 'run'}", CHECKPOINTING, "execution=reweight", "activations=auto"]
    with pytest.raises(ValueError, match=told):
        opened(str(recipe_file), good + overrides)
    assert not (tmp_path / "run").exists()


def test_plan_and_verify_name_every_unit(recipe_file, storing_pays):
    changes = [CHECKPOINTING, "execution=reweight", "activations=90%"]
    recipe = config.load(recipe_file.read_text(), changes)
    policy = DiffusionPolicy.from_config(recipe.policy, recipe.pipeline_source, recipe.seed)
    move(policy)
    task = recipe.task.load()
    (plan,) = measured_plans(recipe, policy, task).values()
    units = [unit.name for unit in plan.units]
    assert units == ["transformer_blocks.0", "transformer_blocks.1"]
    assert plan.actions == (Action.STORE, Action.STORE)
    assert not plan.joint

    policy = DiffusionPolicy.from_config(recipe.policy, recipe.pipeline_source, recipe.seed)
    move(policy)
    rows = verify_actions(recipe, policy, task)
    exact, lossy = rows[: len(EXACT)], rows[len(EXACT) :]
    assert "".join(row.action for row in exact) == "RPAEH"
    assert [row.relative_l2 for row in exact] == [0] * len(EXACT)
    assert [row.replays for row in exact] == [4, 0, 0, 0, 0]  # two events, two units
    kept = [row.kept_mib for row in exact]
    assert kept[:2] == [0, 0]
    assert kept == sorted(kept)
    assert len(set(kept)) == len(EXACT) - 1
    assert [row.units for row in lossy] == units
    assert all(0 < row.relative_l2 < 0.1 and row.replays == 2 for row in lossy)

    (plan,) = measured_plans(recipe, policy, task, together=True).values()
    assert list(plan.joint) == units


def test_verify_fails_where_an_exact_action_changes_a_bit(recipe_file, monkeypatch):
    changes = [f"--set={change}" for change in (CHECKPOINTING, "activations=90%")]
    good = CliRunner().invoke(app, ["verify", str(recipe_file), *changes])
    assert (good.exit_code, good.stdout.count("bit-equal"), "Failed" in good.stderr) == (0, 5, False)
    plant_wrong_replays(monkeypatch)
    bad = CliRunner().invoke(app, ["verify", str(recipe_file), *changes])
    assert (bad.exit_code, bad.stdout.count("bit-equal")) == (1, 2)
    assert "Failed P, A, E must give R's gradient bit for bit" in bad.stderr
