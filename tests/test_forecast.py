"""`onetake plan`: what is predicted without weights is what a run with weights then uses, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml
from diffusers import AutoencoderKL
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from typer.testing import CliRunner

from onetake.cli.main import app
from onetake.core.coefficients import Coefficients
from onetake.core.records import Address
from onetake.execution import EXECUTIONS
from onetake.forecast.memory import Forecast, Phase, verdict
from onetake.memory import LiveBytes, parse_bytes, storage_bytes
from onetake.policies import trainable
from onetake.policies.blank import blank_policy
from onetake.policies.diffusion import DiffusionPolicy
from onetake.rollout.sampling import deal, sample
from onetake.run import config
from onetake.run.ema import Ema
from onetake.run.optimizer import Optimizer
from onetake.run.recipe import Recipe
from tiny import tiny_recipe
from tiny_families import CASES, tiny

BUILT_IN = {"selection": "all", "rollout": {"groups": 2, "group_size": 4, "micro_batch": 2, "shared_start": False}}
SMALL = BUILT_IN | {"evaluation": {"samples": 2, "prompts": 2}, "ema": {}}


def recipe_of(name: str, root: Path, **changes) -> Recipe:
    """Of a case's pipeline, with three events of four steps; its folder is ``root/base``."""
    case = CASES[name]
    policy = {"steps": 4, "guidance": case.guidance, "call": case.call} | changes.pop("policy", {})
    return config.load(tiny_recipe(root, tiny(name), **SMALL | {"policy": policy} | changes))


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
                parameter.grad = torch.full_like(parameter, 1e-6)  # of zeros no step is taken
            optimizer.step(0)
            self.trained = storage_bytes(parameters.values()) + memory.now
            address = Address(seed=recipe.seed, stream="train", update=0)
            batches = deal(recipe.rollout, task.train, policy, recipe.selection, recipe.objective, address)
            for batch in batches:  # embeds the prompts
                policy.rollout(batch, lambda transition: None, grad=False)
            start = memory.now
            memory.restart()
            retains = execution == "retain"
            with saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t) if retains else nullcontext():
                rollout = sample(policy, strategy, batches)
            self.kept, self.sampling = memory.now - start, memory.peak - start
            if retains:
                events = [t for transitions in rollout.transitions for t in transitions]
                kept = [t for e in events for t in (e.sample, e.action, e.velocity, e.mean, e.log_prob)]
                embeds, masks = tree_leaves(policy._embeds._kept), [batch.stochastic for batch in batches]
                known = {t.untyped_storage()._cdata for t in (*weights, *embeds, *masks) if t is not None}
                tensors = (*saved, *rollout.outputs, *kept)
                self.graphs = storage_bytes(t for t in tensors if t.untyped_storage()._cdata not in known)
                del events, kept, tensors
            saved.clear()
            rollout.advantages = torch.tensor([1.0, -1.0]).repeat(len(batches)).view(recipe.rollout.groups, -1).double()
            memory.restart()
            strategy.accumulate(policy, rollout, Coefficients(recipe.objective, rollout))
            self.backward = memory.peak - start
            memory.restart()
            optimizer.step(0)
            self.stepping = memory.peak - start
        del ema


POLICIES = {"sd3": "sd3", "wan": "wan-2.1", "built-in": None}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Callable[[str], tuple[Recipe, DiffusionPolicy, Forecast]]:
    """A recipe, its policy with weights, and its forecast once no file holds weights any more."""

    @cache
    def prepare(key: str) -> tuple[Recipe, DiffusionPolicy, Forecast]:
        name = POLICIES[key]
        root = tmp_path_factory.mktemp(key)
        if name is None:
            tree = {"extends": "shapes"} | SMALL | {"policy": {"trainable": "full", "steps": 4}}
            recipe = config.load(yaml.safe_dump(tree))
        else:
            recipe = recipe_of(name, root)
        policy = loaded(recipe)
        lose_weights(root)
        return recipe, policy, Forecast(recipe)

    return prepare


def beyond(phase: Phase) -> int:
    """What a phase needs besides weights, state and prompts."""
    return phase.kept + phase.transient


def forecast_of(prepared, key: str, execution: str) -> dict[str, Phase]:
    recipe, _, forecast = prepared(key)
    choice = forecast.choice(execution, False, recipe.rollout.micro_batch)
    assert choice.problem is None
    return {phase.name: phase for phase in choice.phases}


@pytest.mark.parametrize(
    ("key", "execution"),
    [
        *(("sd3", execution) for execution in EXECUTIONS),
        ("wan", "retain"),
        ("built-in", "retain"),
        ("built-in", "reweight"),
    ],
)
def test_bytes(prepared, key, execution):
    """Weights, state, and what is kept, exactly; peaks up to what is too small to be followed, such as statistics."""
    recipe, policy, _ = prepared(key)
    phases = forecast_of(prepared, key, execution)
    measured = Measured(recipe, policy, execution)
    reward = phases["reward"]
    assert (reward.frozen, reward.trained) == (measured.frozen, measured.trained)
    repeated = (key, execution) == ("built-in", "reweight")  # its pairs wait beyond the two events that are run
    assert reward.kept == pytest.approx(measured.kept, rel=0.01 if repeated else 0)
    assert max(beyond(phases["sampling"]), beyond(phases["decoding"])) == pytest.approx(measured.sampling, rel=0.03)
    assert beyond(phases["backward"]) == pytest.approx(measured.backward, rel=0.01)
    assert beyond(phases["optimizer"]) == pytest.approx(measured.stepping, rel=0.01)
    if execution == "retain":
        assert reward.kept == measured.graphs


def test_executions_rank_as_measured(prepared):
    recipe, policy, forecast = prepared("sd3")
    measured = {name: Measured(recipe, policy, name) for name in EXECUTIONS}
    predicted = {name: forecast.choice(name, False, recipe.rollout.micro_batch).peak.peak for name in EXECUTIONS}
    assert sorted(EXECUTIONS, key=predicted.__getitem__) == sorted(
        EXECUTIONS, key=lambda name: max(measured[name].sampling, measured[name].backward)
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_have_their_real_dtypes(tmp_path, dtype):
    """Also those that stay float32 in a bfloat16 pipeline, and tied ones."""
    recipe = recipe_of("wan-2.1", tmp_path, policy={"dtype": dtype})
    policy = loaded(recipe)
    lose_weights(tmp_path)
    blank = blank_policy(recipe.policy, recipe.pipeline_source, recipe.seed)
    for real, empty in zip(policy.models, blank.models, strict=True):
        told = [
            {name: (t.shape, t.dtype, t.requires_grad) for name, t in (*m.named_parameters(), *m.named_buffers())}
            for m in (real, empty)
        ]
        assert told[0] == told[1]


def test_verdict_names_what_fits(prepared):
    recipe, _, forecast = prepared("sd3")
    own, other = forecast.own(), forecast.choice("recompute", False, recipe.rollout.micro_batch)
    assert own.execution == "retain"
    told = verdict(forecast, [own, other], own.peak.peak)
    assert f"rollout.micro_batch that does is {recipe.rollout.micro_batch}" in told or "that does is 4" in told
    with pytest.raises(
        ValueError, match=r"retain with .* needs 0\.00 GiB in phase sampling.*What fits: execution: recompute"
    ):
        verdict(forecast, [own, other], other.peak.peak)
    with pytest.raises(ValueError, match="nothing at this micro-batch"):
        verdict(forecast, [own, other], 1000)


def test_a_pipeline_that_asks_for_values_is_named(tmp_path, monkeypatch):
    """Then weights and state are known, and no number is invented for the rest."""
    decode = AutoencoderKL.decode

    def asking(vae, latents, **options):
        assert float(latents.sum()) < 1e9
        return decode(vae, latents, **options)

    monkeypatch.setattr(AutoencoderKL, "decode", asking)
    forecast = Forecast(recipe_of("sd3", tmp_path))
    own = forecast.own()
    assert [phase.name for phase in own.phases] == ["loading", "optimizer's state"]
    assert "StableDiffusion3Pipeline asks for the values of tensors (aten._local_scalar_dense" in (own.problem or "")
    assert not own.fits(2**60)


def test_the_command(tmp_path):
    rollout = {"groups": 2, "group_size": 2, "micro_batch": 2}
    (tmp_path / "recipe.yaml").write_text(config.dump(recipe_of("sd3", tmp_path, rollout=rollout)))
    lose_weights(tmp_path)
    run = CliRunner().invoke(app, ["plan", str(tmp_path / "recipe.yaml"), "--memory", "100 kB"])
    assert run.exit_code == 2, run.output
    for told in ("frozen", "backward", "reweight", "does not fit", "memory: execution: retain"):
        assert told in run.output


def test_sizes():
    assert [parse_bytes(text) for text in ("80GiB", "1.5 MB", "7B")] == [80 * 2**30, 1_500_000, 7]
    with pytest.raises(ValueError, match=r"memory: '80' is not a size; write 80GiB"):
        parse_bytes("80")


def test_a_block_counts_once_and_while_it_lives():
    with LiveBytes() as memory:
        whole = torch.ones(8)
        part = whole.view(2, 4)[0]
        assert memory.now == 32
        del whole
        assert memory.now == 32
        del part
        assert (memory.now, memory.peak) == (0, 32)
