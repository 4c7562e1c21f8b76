"""`onetake plan`: what is predicted without weights is what a run with weights then uses, byte for byte."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from diffusers import AutoencoderKL
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from typer.testing import CliRunner

from onetake import config
from onetake.cli import app
from onetake.coefficients import Coefficients
from onetake.ema import Ema
from onetake.execution import EXECUTIONS
from onetake.execution.sampling import deal, sample
from onetake.forecast import Forecast, Phase
from onetake.memory import LiveBytes, parse_bytes, storage_bytes
from onetake.optimizer import Optimizer
from onetake.policies import trainable
from onetake.policies.blank import blank_policy
from onetake.policies.diffusion import DiffusionPolicy
from onetake.recipe import Recipe
from onetake.records import Address, Rollout
from tiny import WORDS
from tiny_families import CASES, tiny

BUILT_IN = {"selection": "all", "rollout": {"groups": 2, "group_size": 4, "micro_batch": 2, "shared_start": False}}
SMALL = BUILT_IN | {"evaluation": {"samples": 2, "prompts": 2}, "ema": {}}
LORA, FULL = {"kind": "lora", "rank": 2}, "full"


def tiny_recipe(name: str, root: Path, **changes) -> str:
    """Of a case's pipeline, with three events of four steps; its folder is ``root/base``."""
    case = CASES[name]
    tiny(name).save_pretrained(root / "base")
    (root / "prompts.txt").write_text("\n".join(WORDS))
    prompts = str(root / "prompts.txt")
    policy = {"pipeline": str(root / "base"), "steps": 4, "guidance": case.guidance, "call": case.call}
    tree = SMALL | {
        "task": {"kind": "prompts", "train": prompts, "held_out": prompts, "reward": "jpeg"},
        "policy": policy | {"trainable": LORA},
    }
    for key, value in changes.items():
        tree[key] = tree[key] | value if key in tree and isinstance(value, dict) else value
    return yaml.safe_dump(tree)


def loaded(recipe: Recipe) -> DiffusionPolicy:
    """With weights."""
    return DiffusionPolicy.from_config(
        recipe.policy, recipe.pipeline_source, recipe.seed, with_reference=recipe.penalty is not None
    )


def lose_weights(root: Path) -> None:
    for file in root.rglob("*.safetensors"):
        file.unlink()


class Measured:
    """An update of the whole recipe, with weights: bytes in use, counted operation by operation, and graphs by autograd's hooks."""

    def __init__(self, recipe: Recipe, policy: DiffusionPolicy, execution: str) -> None:
        task, parameters = recipe.task.load(), trainable(policy)
        weights = [t for model in policy.models for t in (*model.parameters(), *model.buffers())]
        self.frozen = storage_bytes(weights) - storage_bytes(parameters.values())
        strategy = EXECUTIONS[execution](recipe.penalty)
        saved: list[Tensor] = []
        with LiveBytes(weights) as memory:
            optimizer = Optimizer(recipe.optimizer, parameters)
            ema = Ema(recipe.ema, parameters) if recipe.ema else None
            for parameter in parameters.values():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step(0)
            self.trained = storage_bytes(parameters.values()) + memory.now
            address = Address(seed=recipe.seed, stream="train", update=0)
            batches = deal(recipe.rollout, task.train, policy, recipe.selection, recipe.objective, address)
            for batch in batches:  # embeds the prompts
                policy.rollout(batch, lambda transition: None, grad=False)
            start = memory.now
            memory.restart()
            with saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
                rollout = sample(policy, strategy, batches)
            self.kept, self.sampling = memory.now - start, memory.peak - start
            if execution == "retain":
                parts = [t for event in rollout.transitions for t in event]
                tensors = [*saved, *rollout.outputs, *(t for part in parts for t in vars(part).values())]
                known = {t.untyped_storage()._cdata for t in (*weights, *tree_leaves(policy._embeds)) if isinstance(t, Tensor)}
                tensors = [t for t in tensors if isinstance(t, Tensor) and t.untyped_storage()._cdata not in known]
                self.graphs = storage_bytes(tensors)
                del parts, tensors
            saved.clear()
            rollout.advantages = torch.tensor([1.0, -1.0]).repeat(len(batches)).view(recipe.rollout.groups, -1).double()
            memory.restart()
            strategy.accumulate(policy, rollout, Coefficients(recipe.objective, rollout))
            self.backward = memory.peak - start
            memory.restart()
            optimizer.step(0)
            self.stepping = memory.peak - start
        del ema


POLICIES = {
    "sd3-lora": ("sd3", {"policy": {"trainable": LORA}}),
    "sd3-full-1": ("sd3", {"policy": {"trainable": FULL}, "rollout": {"micro_batch": 1}}),
    "sd3-bfloat16-kl": ("sd3", {"policy": {"trainable": LORA, "dtype": "bfloat16"}, "kl": {"beta": 0.1}}),
    "wan": ("wan-2.1", {"policy": {"trainable": LORA}}),
    "built-in-full": (None, {"policy": {"trainable": FULL}}),
}


@pytest.fixture(scope="module", params=POLICIES)
def prepared(request, tmp_path_factory) -> tuple[Recipe, DiffusionPolicy, Forecast]:
    """The policy with weights, and the forecast once there are none any more."""
    name, changes = POLICIES[request.param]
    root = tmp_path_factory.mktemp("forecast")
    if name is None:
        recipe = config.load(
            yaml.safe_dump({"extends": "shapes"} | SMALL | changes | {"policy": changes["policy"] | {"steps": 4}})
        )
    else:
        recipe = config.load(tiny_recipe(name, root, **changes))
    policy = loaded(recipe)
    lose_weights(root)
    return recipe, policy, Forecast(recipe)


def beyond(phase: Phase) -> int:
    """What a phase needs besides weights, state and prompts."""
    return phase.kept + phase.transient


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_bytes(prepared, execution):
    """Weights, state and what is kept exactly; peaks but for statistics of a few numbers an event."""
    recipe, policy, forecast = prepared
    measured = Measured(recipe, policy, execution)
    print("NUM", execution, {k: v for k, v in vars(measured).items()})
    choice = forecast.choice(execution, False, recipe.rollout.micro_batch)
    assert choice.problem is None
    phases = {phase.name: phase for phase in choice.phases}
    print("NUM", {n: (p.kept, beyond(p)) for n, p in phases.items()})
    reward = phases["reward"]
    assert (reward.frozen, reward.trained, reward.kept) == (measured.frozen, measured.trained, measured.kept)
    assert measured.sampling == max(beyond(phases["sampling"]), beyond(phases["decoding"]))
    assert measured.backward == pytest.approx(beyond(phases["backward"]), rel=0.01)
    if execution == "retain":
        assert measured.kept == measured.graphs
