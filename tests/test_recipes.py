"""Every recipe that comes with the package trains the shipped base for one rollout, whatever execution is exact for it."""

from __future__ import annotations

import pytest

from onetake import config
from onetake.metrics import Log
from onetake.train import Watcher, train

SMALL = [
    "rollout.groups=2",
    "rollout.group_size=2",
    "rollout.micro_batch=2",
    "evaluation.prompts=1",
    "evaluation.samples=2",
]


@pytest.mark.parametrize("name", config.recipe_names())
def test_recipe_trains(name, tmp_path):
    updates = config.load(config.recipe_text(name)).updates_per_rollout
    recipe = config.load(config.recipe_text(name), [*SMALL, f"updates={updates}"])
    train(recipe, tmp_path, config.dump(recipe), Watcher(say=lambda text: None))
    lines = [line for line in Log(tmp_path / "metrics.jsonl").read() if line["kind"] == "update"]
    assert [line["execution"] for line in lines] == ["retain", "recompute"][:updates]
    assert all(line["ratio_mean"] == 1 for line in lines[:1])
    assert all(line["step_norm"] > 0 or line["skipped"] for line in lines)


def test_extends_merges_groups_and_replaces_choices():
    text = "extends: shapes\nselection: {size: 2}\npolicy: {kernel: dance, steps: 6}\nobjective: {kind: flow-dppo}\n"
    base, recipe = config.load(config.recipe_text("shapes")), config.load(text)
    assert recipe.selection == base.selection.model_copy(update={"size": 2})
    assert (recipe.policy.kernel.kind, recipe.policy.kernel.noise, recipe.policy.steps) == ("dance", 0.3, 6)
    assert recipe.policy.trainable == base.policy.trainable
    assert recipe.objective.kind == "flow-dppo"
    assert config.load(config.dump(recipe)) == recipe


def test_extends_of_an_unknown_recipe_names_the_nearest():
    with pytest.raises(ValueError, match=r"there is no recipe 'shapess'; did you mean shapes\?"):
        config.load("extends: shapess")
