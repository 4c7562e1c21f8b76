"""Recipes: strict, every error at once in the user's spelling, and the same after a round trip."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from onetake.core.records import Prompt
from onetake.core.selection import Window
from onetake.core.transitions import Cps, Dance, Flow
from onetake.rewards import load_reward
from onetake.run import config
from onetake.run.config import RecipeError
from onetake.run.ema import EmaConfig
from onetake.run.recipe import Recipe
from onetake.tasks import shapes_reward


@pytest.fixture
def pipeline(tmp_path) -> str:
    """``--set`` value of a folder that is enough of a pipeline to pass the checks made before loading."""
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "model_index.json").write_text("{}")
    return f"policy.pipeline={tmp_path / 'base'}"


def errors(text: str, overrides: list[str] | None = None) -> list[str]:
    with pytest.raises(RecipeError) as raised:
        config.load(text, overrides)
    return str(raised.value).splitlines()


# Keys and values

UNKNOWN = {
    "polcy: {}": "polcy: is not a key of the recipe; did you mean policy?",
    "policy: {step: 4}": "policy.step: is not a key of the recipe; did you mean steps?",
    "policy: {kernel: {kind: cps, nois: 1}}": "policy.kernel.nois: is not a key of the recipe; did you mean noise?",
    "policy: {kernel: {kind: flash, noise: 1}}": "policy.kernel.noise: is not a key of the recipe; known are kind",
    "policy: {trainable: {kind: lora, rnk: 1}}": "policy.trainable.rnk: is not a key of the recipe; did you mean rank?",
    "selection: {kind: window, sise: 2}": "selection.sise: is not a key of the recipe; did you mean size?",
    "task: {kind: shapes, famly: count}": "task.famly: is not a key of the recipe; did you mean family?",
    "objective: {clip_hi: 1}": "objective.clip_hi: is not a key of the recipe; did you mean clip_high?",
    "checkpoint: {zzz: 1}": "checkpoint.zzz: is not a key of the recipe; known are every, keep",
}


@pytest.mark.parametrize("text", UNKNOWN)
def test_unknown_key_names_the_nearest(text, pipeline):
    assert errors(text, [pipeline]) == [UNKNOWN[text]]


VALUES = {
    "policy: {kernel: flwo}": "policy.kernel: 'flwo' is none of 'flow', 'dance', 'flash', 'cps'",
    "policy: {kernel: {noise: 1}}": "policy.kernel: needs a kind (write policy.kernel: NAME, or policy.kernel.kind=NAME)",
    "policy: {kernel: {kind: flow, noise: 0}}": "policy.kernel.noise: Input should be greater than 0 (got 0)",
    "policy: {trainable: {kind: lora, targets: [a, 1]}}": (
        "policy.trainable.targets.1: Input should be a valid string (got 1)"
    ),
    "execution: retian": "execution: Input should be 'recompute', 'retain' or 'reweight' (got 'retian')",
    "policy: 3": "policy: Input should be a valid dictionary or instance of PolicyConfig (got 3)",
    "1: 2": "1: Keys should be strings (got 1)",
}


@pytest.mark.parametrize("text", VALUES)
def test_wrong_value_says_where_and_what(text, pipeline):
    overrides = [] if text == "policy: 3" else [pipeline]
    assert errors(text, overrides) == [VALUES[text]]


@pytest.mark.parametrize("text", ["- a", "0", "false", "[]", "text"])
def test_a_recipe_is_a_mapping(text):
    assert errors(text) == ["the recipe must be a mapping of keys to values"]


def test_an_empty_recipe_is_all_defaults(pipeline):
    assert config.load("", [pipeline]) == config.load("# nothing\n", [pipeline])


def test_broken_yaml_is_one_error():
    assert errors("updates: [")[0] == "the recipe is not YAML: while parsing a flow node"


def test_all_errors_at_once(pipeline):
    """Wrong keys, wrong values and wrong ``--set``s in one message."""
    text = "updates: 0\nsed: 3\nrollout: {groups: 0, groupsize: 3}\nselection: {kind: window, sise: 2, start: x}\n"
    overrides = [pipeline, "seed", "policy.stps=3", "execution=[", "objective.clip_low=-1"]
    assert sorted(errors(text, overrides)) == [
        "--set execution=[: the value is not YAML (while parsing a flow node expected the node content, but found "
        "'<stream end>' in \"<unicode string>\", line 1, column 2: [ ^)",
        "--set seed: write key=value",
        "objective.clip_low: Input should be greater than 0 (got -1)",
        "policy.stps: is not a key of the recipe; did you mean steps?",
        "rollout.groups: Input should be greater than or equal to 1 (got 0)",
        "rollout.groupsize: is not a key of the recipe; did you mean group_size?",
        "sed: is not a key of the recipe; did you mean seed?",
        "selection.sise: is not a key of the recipe; did you mean size?",
        "selection.start: Input should be a valid integer, unable to parse string as an integer (got 'x')",
        "updates: Input should be greater than or equal to 1 (got 0)",
    ]


# --set


def test_set_reaches_any_depth(pipeline):
    """Also into a choice that the recipe writes by its name alone, or has none of."""
    text = "policy: {kernel: dance}\nselection: window\n"
    overrides = [pipeline, "policy.kernel.noise=0.4", "selection.size=3", "seed = 7", "policy.call.clip_skip=2"]
    recipe = config.load(text, overrides)
    assert recipe.policy.kernel == Dance(noise=0.4)
    assert recipe.selection == Window(size=3)
    assert (recipe.seed, recipe.policy.call) == (7, {"clip_skip": 2})
    assert config.load(f"{text}\nema: null", [*overrides, "ema.decay=0.5"]).ema == EmaConfig(decay=0.5)
    assert config.load(text, [*overrides, "policy.kernel=cps"]).policy.kernel == Cps()
    assert config.load(text, [*overrides, "policy.kernel={kind: flow, noise: 1}"]).policy.kernel == Flow(noise=1.0)


SETS = {
    "policy.steps": "--set policy.steps: write key=value",
    "=3": "--set =3: write key=value",
    "policy.kernel.nois=1": "policy.kernel.nois: is not a key of the recipe; did you mean noise?",
    "polcy.steps=3": "polcy: is not a key of the recipe; did you mean policy?",
    "updates.x=3": "--set updates.x=3: updates holds a value, not a group of keys",
    "policy.guidance=high": (
        "policy.guidance: Input should be a valid number, unable to parse string as a number (got 'high')"
    ),
    "policy.kernel.kind=flwo": "policy.kernel: 'flwo' is none of 'flow', 'dance', 'flash', 'cps'",
}


@pytest.mark.parametrize("override", SETS)
def test_set_is_checked_like_the_recipe(override, pipeline):
    assert errors("policy: {kernel: flow}\nupdates: 3", [pipeline, override]) == [SETS[override]]


# Round trip

RICH = """
task: {kind: prompts, train: prompts.txt, held_out: prompts.txt, reward: jpeg, success_at: -1.5}
policy:
  kernel: {kind: cps, noise: 0.35}
  call: {max_sequence_length: 12, nested: {height: [1, 2]}}
  negative_prompt: "σ: ‘none’ # not a comment"
  trainable: {kind: lora, targets: [to_q, to_out.0]}
selection: {kind: window, start: 1, until: 5}
objective: {clip_low: .inf, clip_high: 1e-5, event_weights: rectified}
advantages: {clamp: null}
optimizer: {learning_rate: 3e-10, max_grad_norm: null}
out: somewhere/else
"""


DIFFUSION = [name for name in config.recipe_names() if not name.startswith("sums")]  # tests/test_language.py has those


def recipes() -> dict[str, str]:
    """All that come with the package, and small ones that reach every kind of choice and of value."""
    shipped = {name: config.recipe_text(name) for name in DIFFUSION}
    kinds = {"selection": ["fraction", "single", "all"], "execution": ["recompute", "reweight"]}
    small = {f"{key}: {kind}": f"{key}: {kind}" for key, all_kinds in kinds.items() for kind in all_kinds}
    return shipped | small | {"full": "policy: {trainable: full, kernel: flash}", "rich": RICH}


PUBLISHED = ("sd3.5-m", "flux.1-dev", "wan2.1", "qwen-image")  # these leave prompts to the user


@pytest.mark.parametrize("name", recipes())
def test_dump_reads_back_equal(name, pipeline, tmp_path):
    (tmp_path / "prompts.txt").write_text("a\n")
    text = recipes()[name].replace("prompts.txt", str(tmp_path / "prompts.txt"))
    files = [f"task.{key}={tmp_path / 'prompts.txt'}" for key in ("train", "held_out") if name.startswith(PUBLISHED)]
    recipe = config.load(text, [pipeline, *files])
    again = config.load(config.dump(recipe))
    assert again == recipe
    assert config.dump(again) == config.dump(recipe)
    assert config.changes(recipe, again) == []


@pytest.mark.parametrize("name", DIFFUSION)
def test_shipped_recipes_load(name, pipeline, tmp_path):
    """Their first line says what they are (`onetake recipes` shows it), and there are prompts for every group."""
    text = config.recipe_text(name)
    assert text.startswith("# ")
    if name.startswith(PUBLISHED):
        with pytest.raises(
            RecipeError,
            match=r"task.train: there is no file prompts/train.txt\ntask.held_out: there is no file prompts/test.txt",
        ):
            config.load(text)
        return
    recipe = config.load(text, [pipeline])
    task = recipe.task.load()
    assert set(task.train).isdisjoint(task.held_out)
    assert min(len(task.train), len(task.held_out)) >= recipe.rollout.groups


def test_the_shapes_recipes():
    assert {"shapes", "shapes-quick"} <= set(config.recipe_names())


def test_a_recipe_cannot_be_changed(pipeline):
    recipe = config.load("", [pipeline])
    with pytest.raises(ValidationError, match="frozen"):
        recipe.updates = 3
    with pytest.raises(ValidationError, match="frozen"):
        recipe.policy.kernel.noise = 0.1


def test_unknown_recipes(tmp_path):
    with pytest.raises(RecipeError, match=r"no recipe 'shpes'; did you mean shapes\?; `onetake recipes` lists them"):
        config.recipe_text("shpes")
    with pytest.raises(RecipeError, match="there is no recipe file"):
        config.recipe_text(str(tmp_path / "shapes.yaml"))


# What changed


def test_changes(pipeline):
    old = config.load("updates: 4\npolicy: {kernel: {kind: flow, noise: 0.7}}", [pipeline])

    def changed(*overrides: str) -> list[str]:
        return config.changes(old, config.load(config.dump(old), list(overrides)))

    assert changed() == changed("updates=8", "out=elsewhere") == []
    assert changed("updates=3") == ["updates: 4 → 3 (may grow, not shrink)"]
    assert changed("seed=1", "policy.kernel.noise=0.5") == ["policy.kernel.noise: 0.7 → 0.5", "seed: 0 → 1"]
    assert changed("policy.kernel=flash") == ["policy.kernel.kind: flow → flash", "policy.kernel.noise: 0.7 → None"]
    assert changed("policy.call.clip_skip=1")[-1] == "policy.call.clip_skip: None → 1"


# What could not work


def test_problems_are_told_together(tmp_path):
    text = """
    task: {kind: prompts, train: TMP/none.txt, held_out: TMP/empty.txt, reward: jpg}
    policy: {pipeline: TMP, dtype: bfloat16, trainable: full, steps: 8, call: {latents: 1, prompt: x, clip_skip: 1}}
    rollout: {group_size: 1, micro_batch: 4}
    selection: {kind: single, until: 8}
    updates: 5
    updates_per_rollout: 3
    """
    (tmp_path / "empty.txt").write_text("\n  \n")
    assert errors(text.replace("TMP", str(tmp_path))) == [
        f"task.train: there is no file {tmp_path}/none.txt",
        f"task.held_out: {tmp_path}/empty.txt holds no prompt (one a line)",
        "task.reward: 'jpg' is not a reward; built in are jpeg, pickscore and clip:MODEL, and your own is written module:function, "
        "or http://… on a server",
        "policy.call.latents: is set by onetake itself; remove it",
        "policy.call.prompt: is set by onetake itself; remove it",
        "policy.trainable: full trains float32 weights, but policy.dtype: bfloat16 would round them; "
        "use trainable: lora (float32 adapters on a bfloat16 base) or dtype: float32",
        "rollout.group_size: 1 gives no advantage (each sample is its own mean); use 2 or more",
        "rollout.micro_batch: 4 does not divide group_size: 1, so samples would be dropped; sizes that work: 1",
        "selection.until: 8 exceeds the 7 trainable events of policy.steps: 8",
        f"policy.pipeline: '{tmp_path}' is neither a built-in base (shapes, motion) nor a diffusers folder "
        "(one with a model_index.json), nor written like a hub repository (owner/name)",
        "updates: 5 is not a multiple of updates_per_rollout: 3, so the last rollout would be dropped half-used; "
        "3 or 6 works",
    ]


@pytest.mark.parametrize(
    ("overrides", "ending"),
    [
        (["updates=2", "updates_per_rollout=3"], "half-used; 3 works"),
        (["rollout.group_size=12", "rollout.micro_batch=8"], "sizes that work: 1, 2, 3, 4, 6, 12"),
    ],
)
def test_the_way_out_works(overrides, ending, pipeline):
    (problem,) = errors("", [pipeline, *overrides])
    assert problem.endswith(ending)


def test_prompts_are_lines(tmp_path, pipeline):
    (tmp_path / "p.txt").write_text("a cat\n\n  two dogs \r\n")
    where = f"train: {tmp_path}/p.txt, held_out: {tmp_path}/p.txt"
    recipe: Recipe = config.load(f"task: {{kind: prompts, {where}, reward: 'onetake.tasks:shapes_reward'}}", [pipeline])
    task = recipe.task.load()
    assert task.train == task.held_out == [Prompt("a cat"), Prompt("two dogs")]
    assert list(task.rewards.functions.values()) == [shapes_reward]
    assert list(task.rewards.weights.values()) == [1.0]


REWARDS = {
    "jpg": r"'jpg' is not a reward; built in are jpeg, pickscore and clip:MODEL, and your own is written module:function, or",
    ":size": r"':size' is not a reward; built in are",
    "json:": r"'json:' is not a reward; built in are",
    "no_such_module:size": r"cannot be imported: No module named 'no_such_module'",
    "json:no_such_function": r"module 'json' has no 'no_such_function'",
    "json:__name__": r"'json:__name__' is not a function: 'json'",
}


@pytest.mark.parametrize("name", REWARDS)
def test_rewards_that_cannot_be_loaded(name):
    with pytest.raises(ValueError, match=f"^task.reward: .*{REWARDS[name]}"):
        load_reward(name)


def test_pipeline_source(pipeline):
    """A built-in base by its name, anything else by its path."""
    recipe = config.load("", [pipeline])
    assert recipe.pipeline_source == pipeline.partition("=")[2]
    assert Path(Recipe().pipeline_source).parts[-3:] == ("tasks", "shapes", "base")


def test_the_recipe_of_a_sharded_run_is_read_on_any_number_of_processes():
    sharded = config.load(config.recipe_text("shapes"), ["parallel.shard=2", "rollout.micro_batch=12"], ranks=2)
    with pytest.raises(config.RecipeError, match=r"parallel\.shard: 2 does not divide 1 rank"):
        config.load(config.dump(sharded))
    assert config.load(config.dump(sharded), ranks=None) == sharded
