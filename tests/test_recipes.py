"""Every recipe of the package trains for one rollout: on the shipped base, or on a tiny pipeline of its model's class."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from onetake.metrics import Log
from onetake.run import config
from onetake.run.train import Watcher, train
from tiny import WORDS
from tiny_families import CASES, tiny

FAMILIES = {"sd3.5-m": "sd3", "flux.1-dev": "flux", "wan2.1": "wan-2.1", "qwen-image": "qwen-image"}
SMALL = [
    "rollout.groups=2",
    "rollout.group_size=2",
    "rollout.micro_batch=2",
    "evaluation.prompts=1",
    "evaluation.samples=2",
]
DIFFUSION = [name for name in config.recipe_names() if not name.startswith("sums")]  # tests/test_language.py has those
RECIPES = {name: next((FAMILIES[f] for f in FAMILIES if name.startswith(f)), None) for name in DIFFUSION}
BUILT_IN, REAL = ([n for n, family in RECIPES.items() if bool(family) == real] for real in (False, True))


def trained(recipe, folder: Path) -> list[dict]:
    train(recipe, folder, config.dump(recipe), Watcher(say=lambda text: None))
    return [line for line in Log(folder / "metrics.jsonl").read() if line["kind"] == "update"]


@pytest.mark.parametrize("name", BUILT_IN)
def test_recipe_trains(name, tmp_path):
    updates = config.load(config.recipe_text(name)).updates_per_rollout
    lines = trained(config.load(config.recipe_text(name), [*SMALL, f"updates={updates}"]), tmp_path)
    assert [line["execution"] for line in lines] == ["retain", "recompute"][:updates]
    assert all(line["ratio_mean"] == 1 for line in lines[:1])
    assert all(line["step_norm"] > 0 or line["skipped"] for line in lines)


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    """Family → a saved tiny pipeline of its class."""
    folders: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in folders:
            folders[family] = tmp_path_factory.mktemp(family)
            tiny(family).save_pretrained(folders[family])
        return folders[family]

    return folder


def total(outputs, prompts):
    return outputs.float().flatten(1).sum(1)


@pytest.mark.parametrize("name", REAL)
def test_published_recipe_trains_a_tiny_pipeline_of_its_class(name, tmp_path, tiny_folder):
    """All settings but sizes and prompts are the recipe's: steps, kernel, selection, guidance, scheduler, dtype, KL."""
    family, prompts = RECIPES[name], tmp_path / "prompts.txt"
    prompts.write_text("\n".join(WORDS))
    task = {"kind": "prompts", "train": str(prompts), "held_out": str(prompts), "reward": "test_recipes:total"}
    sizes = [
        f"policy.pipeline={tiny_folder(family)}",
        f"policy.call={CASES[family].call}",
        f"task={yaml.safe_dump(task)}",
    ]
    recipe = config.load(config.recipe_text(name), [*SMALL, *sizes, "updates=1", "evaluation.steps=3"])
    (tmp_path / "run").mkdir()
    (line,) = trained(recipe, tmp_path / "run")
    assert line["execution"] == "reweight"
    assert line["ratio_mean"] == 1
    assert line["step_norm"] > 0


PUBLISHED = {  # what the papers' tables say, once more
    "sd3.5-m-flow-grpo": """
        policy.steps 10, policy.guidance 4.5, policy.kernel.noise 0.7, rollout.groups 48, rollout.group_size 24,
        optimizer.learning_rate 0.0003, policy.trainable.rank 32, policy.trainable.alpha 64.0,
        objective.clip_high 0.0001, evaluation.steps 40, ema.decay 0.9, ema.every 8
    """,
    "sd3.5-m-flow-grpo-fast": """
        policy.kernel.kind cps, policy.kernel.noise 0.8, selection.size 3, policy.guidance 1.0, kl.beta 0.0,
        objective.clip_high 1e-05
    """,
    "flux.1-dev-flow-grpo": """
        policy.steps 6, policy.guidance 3.5, policy.kernel.noise 0.9, rollout.group_size 24, kl.beta 0.0,
        evaluation.steps 28
    """,
    "flux.1-dev-dance-grpo": """
        policy.steps 16, policy.kernel.noise 0.3, policy.scheduler.shift 3.0, rollout.group_size 12,
        optimizer.learning_rate 1e-05, optimizer.weight_decay 0.0001, rollout.shared_start True,
        policy.call.height 720, ema None
    """,
    "flux.1-dev-mix-grpo": """
        policy.steps 25, policy.kernel.noise 0.7, selection.size 4, selection.interval 25, rollout.group_size 12
    """,
    "wan2.1-1.3b-flow-grpo": """
        policy.steps 20, policy.call.num_frames 33, rollout.group_size 4, objective.clip_high 0.001, kl.beta 0.004,
        optimizer.learning_rate 0.0001
    """,
    "wan2.1-1.3b-dance-grpo": """
        policy.steps 20, policy.call.num_frames 1, policy.guidance 5.0, policy.kernel.noise 0.3,
        rollout.group_size 12
    """,
    "wan2.1-14b-flash-grpo": """
        policy.kernel.kind flash, policy.steps 20, evaluation.steps 50, policy.guidance 4.5, selection.until 10,
        policy.trainable.rank 16, policy.trainable.alpha 32.0, policy.call.num_frames 81, kl.beta 0.0,
        advantages.std global, objective.event_weights rectified
    """,
    "qwen-image-flow-grpo": """
        policy.steps 10, policy.guidance 4.0, policy.kernel.noise 1.2, selection.size 2, rollout.group_size 16,
        optimizer.learning_rate 0.0003, objective.clip_high 1e-05
    """,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_settings(name, tmp_path):
    (tmp_path / "prompts.txt").write_text("a cat")
    files = [f"task.{key}={tmp_path / 'prompts.txt'}" for key in ("train", "held_out")]
    tree = config.load(config.recipe_text(name), [*files, "task.reward=jpeg"]).model_dump(mode="json")
    for setting in " ".join(PUBLISHED[name].split()).split(", "):
        path, value = setting.split(" ")
        node = tree
        for key in path.split("."):
            node = node[key]
        assert str(node) == value, path


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
