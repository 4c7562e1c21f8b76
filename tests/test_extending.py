"""What docs/extending.md tells a reader to write, written to files and trained with; and what is said when it is wrong."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pydantic import ValidationError
from typer.testing import CliRunner

from helpers import weights
from onetake.cli.main import app
from onetake.core.records import Prompt
from onetake.core.selection import Window
from onetake.rewards import Weighted, load_rewards
from onetake.run import config
from onetake.run.recipe import Recipe
from onetake.tasks import ShapesTask
from tiny import tiny_recipe_file

PAGE = (Path(__file__).parents[1] / "docs" / "extending.md").read_text()
FILES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.S))
RECIPES = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.S)]
OWN = {
    next(iter(tree)): tree for tree in RECIPES if any(":" in value.get("kind", "") for value in tree.values())
}  # by axis


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A working directory that holds the page's modules, as `onetake` finds them there."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in FILES:
        sys.modules.pop(name.removesuffix(".py"), None)


def said(text: str) -> list[str]:
    with pytest.raises(config.RecipeError) as error:
        config.load(text)
    return str(error.value).splitlines()


def train(*arguments: str) -> None:
    done = CliRunner().invoke(app, ["train", *arguments])
    assert done.exit_code == 0, done.output


def test_the_page_shows_every_open_axis():
    assert OWN.keys() == {"selection", "task"}


@pytest.mark.parametrize("axis", OWN)
def test_a_class_of_the_page_trains_and_its_run_resumes_bit_for_bit(axis, folder):
    recipe = tiny_recipe_file(folder)
    tree = yaml.safe_load(recipe.read_text()) | OWN[axis] | {"updates": 2, "evaluation": {"prompts": 1}}
    recipe.write_text(yaml.safe_dump(tree))
    train(str(recipe), f"--set=out={folder / 'whole'}")
    train(str(recipe), f"--set=out={folder / 'halves'}", "--set=updates=1")
    train("--resume", str(folder / "halves"), "--set=updates=2")
    whole, halves = weights(folder / "whole"), weights(folder / "halves")
    assert all(torch.equal(weight, halves[name]) for name, weight in whole.items())
    written = yaml.safe_load((folder / "whole" / "config.yaml").read_text())
    assert written[axis].items() >= OWN[axis][axis].items()


@pytest.mark.usefixtures("folder")
def test_what_is_wrong_is_said_in_the_recipes_words():
    mine = "selection: {kind: my_selections:EveryOther, %s}"
    assert said(mine % "frist: 1") == ["selection.frist: is not a key of the recipe; did you mean first?"]
    assert said(mine % "first: -1") == ["selection.first: Input should be greater than or equal to 0 (got -1)"]
    assert said(mine % "first: 9") == ["selection.first: 9 of 7 events is none"]
    known = "none of 'all', 'fraction', 'window', 'single', nor package.module:Class of your own"
    assert said("selection: windo") == [f"selection: 'windo' is {known}; did you mean window?"]
    assert said("selection: {size: 2}") == [
        "selection: needs a kind: 'all', 'fraction', 'window', 'single', or package.module:Class of your own"
    ]
    assert said("selection: 3")[0].startswith(f"selection: 3 is {known}")
    assert said("selection: no_such:X") == ["selection: 'no_such:X' cannot be imported: No module named 'no_such'"]
    assert said("selection: my_selections:X") == ["selection: module 'my_selections' has no 'X'"]
    assert said("selection: my_tasks:Colours") == [
        "selection: Colours has no mask, per, problem; onetake.core.selection.Selector says what it needs"
    ]
    assert said("task: my_selections:torch")[0].endswith("is not a subclass of onetake's Config")
    with pytest.raises(
        ValidationError, match=r"ShapesTask has no mask, per, problem; onetake.core.selection.Selector says"
    ):
        Recipe(selection=ShapesTask())


@pytest.mark.parametrize("background", [None, "process"])
def test_a_reward_with_settings_scores_with_them(background, folder):
    (asked,) = [tree["task"]["reward"] for tree in RECIPES if "my_settings:Near" in str(tree)]
    for name in ("train", "held_out"):
        (folder / f"{name}.txt").write_text("a grey square\n")
    tree = {"kind": "prompts", "train": f"{folder}/train.txt", "held_out": f"{folder}/held_out.txt", "reward": asked}
    recipe = config.load(yaml.safe_dump({"task": tree | {"background": background}}))
    assert config.load(config.dump(recipe)) == recipe
    found = recipe.task.load().rewards(torch.full((2, 3, 4, 4), 0.4), [Prompt("a grey square")] * 2)
    assert found["my_settings:Near"].tolist() == pytest.approx([-0.1, -0.1])

    def problems(**keys: Any) -> list[str]:
        return recipe.task.model_copy(update={"reward": {"my_settings:Near": Weighted(**keys)}}).problems()

    assert problems(tagret=1) == ["task.reward.my_settings:Near.tagret: is not a key of it; did you mean target?"]
    assert problems(target="high")[0].startswith("task.reward.my_settings:Near.target: Input should be a valid number")
    with pytest.raises(ValueError, match=r"task.reward.jpeg: is no class of onetake's Config, and has no key quality"):
        load_rewards({"jpeg": Weighted(quality=9)})


class Longer(Window):
    """A subclass of one of ours has that one's fields, and a name of its own."""

    more: int = 1


def test_a_subclass_of_ours_is_itself():
    recipe = config.load(f"selection: {{kind: {__name__}:Longer, size: 1, more: 2}}")
    assert recipe.selection == Longer(size=1, more=2)
    assert config.load(config.dump(recipe)) == recipe
    assert yaml.safe_load(config.dump(recipe))["selection"]["kind"] == f"{__name__}:Longer"
