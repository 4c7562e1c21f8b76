"""Every family's stock pipeline, tiny and of the real classes, from prompt to rollout to update to plain diffusers and back."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from torch.distributions import Normal

from faults import FAULTS
from helpers import gradient_of, move, relative_error
from onetake.execution import Recompute, Retain
from onetake.execution.preflight import PreflightError, preflight
from onetake.execution.sampling import RolloutConfig, deal, sample
from onetake.noise import start_generators
from onetake.objectives import Grpo
from onetake.policies import trainable
from onetake.policies.adapters import Full, Lora, apply_weights
from onetake.policies.diffusion import DiffusionPolicy, PolicyConfig, load_pipeline
from onetake.policies.families import family_of
from onetake.records import Address, MicroBatch
from onetake.selection import All, Window
from onetake.transitions import Flow
from tiny_families import CASES, Case, tiny

pytestmark = [  # what the libraries themselves warn about
    pytest.mark.filterwarnings("ignore:.*FluxPosEmbed:FutureWarning"),  # diffusers' Chroma uses its old place
    pytest.mark.filterwarnings("ignore:.*__array__:DeprecationWarning"),  # diffusers' DPM-Solver under NumPy 2
    pytest.mark.filterwarnings("ignore:.*CPU [aA]utocast:UserWarning"),  # diffusers' Mochi asks for it in float32
]

STEPS = 4
PROMPTS = ["first", "second", "third"]
SIZE = RolloutConfig(groups=1, group_size=2, micro_batch=2)
TRAINABLE = {"lora": Lora(rank=2), "full": Full()}


@dataclass
class Base:
    """A case, saved as a diffusers folder."""

    case: Case
    folder: Path

    def policy(self, *, moved: bool = True, **changes) -> DiffusionPolicy:
        settings = {"guidance": self.case.guidance, "call": self.case.call, "trainable": TRAINABLE["lora"]} | changes
        config = PolicyConfig(pipeline=str(self.folder), steps=STEPS, **settings)
        policy = DiffusionPolicy.from_config(config, str(self.folder), seed=0)
        if moved:  # a fresh adapter is the identity, which would hide errors
            move(policy)
        return policy

    def plain(self) -> DiffusionPipeline:
        """The pipeline as anyone loads it, with Euler steps on its own scheduler's grid."""
        pipe = load_pipeline(str(self.folder), PolicyConfig())
        if not isinstance(pipe.scheduler, FlowMatchEulerDiscreteScheduler):
            pipe.scheduler = SameGrid(pipe.scheduler)
        pipe.vae.requires_grad_(False)  # torch picks another convolution kernel for weights that could train
        if family_of(pipe).decode_one_by_one:
            pipe.vae.enable_slicing()
        if family_of(pipe).guidance is None:
            pipe.guider = pipe.guider.new(guidance_scale=self.case.guidance)
        return pipe


class SameGrid(FlowMatchEulerDiscreteScheduler):
    """Euler on the levels of another scheduler, written without the code under test."""

    def __init__(self, shipped) -> None:
        super().__init__(num_train_timesteps=shipped.config.num_train_timesteps)
        self.shipped = shipped

    def set_timesteps(self, num_inference_steps=None, device=None):
        super().set_timesteps(num_inference_steps, device)
        self.shipped.set_timesteps(num_inference_steps, device=device)
        self.sigmas, self.timesteps = self.shipped.sigmas.clone(), self.shipped.timesteps.float()


def marks(case: Case) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow] if case.slow else []


@pytest.fixture(scope="module", params=[pytest.param(n, marks=marks(c), id=n) for n, c in CASES.items()])
def base(request, tmp_path_factory) -> Base:
    case = CASES[request.param]
    for library in case.needs:
        pytest.importorskip(library)
    folder = tmp_path_factory.mktemp("base")
    tiny(request.param).save_pretrained(folder)
    return Base(case=case, folder=folder)


@pytest.fixture(scope="module")
def policy(base) -> Iterator[DiffusionPolicy]:
    """For tests that leave weights alone."""
    policy = base.policy()
    before = {name: p.detach().clone() for name, p in trainable(policy).items()}
    yield policy
    assert all(torch.equal(p, before[name]) for name, p in trainable(policy).items())


def batches_of(policy: DiffusionPolicy) -> list[MicroBatch]:
    return deal(SIZE, PROMPTS, policy, All(), Grpo(), Address(seed=0, stream="train", update=0))


def ode(policy: DiffusionPolicy) -> torch.Tensor:
    """Two samples of the first prompt drawn without events."""
    batch = ode_batch(policy)
    return policy.rollout(batch, pytest.fail, grad=False)


def ode_batch(policy: DiffusionPolicy) -> MicroBatch:
    batch = batches_of(policy)[0]
    batch.stochastic[:] = False
    return batch


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rescored_events_are_the_sampled_ones(base, dtype):
    """Equal latent, equal velocity, ratio exactly 1, by every way that the family claims; adapters stay float32."""
    policy = base.policy(dtype=dtype)
    assert all(p.dtype == torch.float32 for p in trainable(policy).values())
    assert policy.ways[0] == base.case.way
    rollout = sample(policy, Recompute(), batches_of(policy))
    assert [old.index for old in rollout.transitions[0]] == list(range(STEPS - 1))
    for way in policy.ways:
        policy.way = way
        for old in rollout.transitions[0]:
            new = policy.score(rollout.batches[0], old)
            assert torch.equal(new.sample, old.sample)
            assert torch.equal(new.velocity, old.velocity)
            assert torch.equal(new.log_prob.detach(), old.log_prob)
            assert new.log_prob.requires_grad


def test_executions_agree(base, policy):
    native, retain, reweight = (gradient_of(policy, name, config=SIZE) for name in ("recompute", "retain", "reweight"))
    assert all(gradient.isfinite().all() for gradient in native.values())
    assert sum(float(gradient.norm()) for gradient in native.values()) > 0
    assert relative_error(retain, native) <= 1e-6
    assert relative_error(reweight, native) <= base.case.reweight


def test_gradient_checkpointing_changes_nothing(base, policy):
    if family_of(policy.pipe).no_checkpointing is not None:
        with pytest.raises(ValueError, match="gradient_checkpointing: true would train another model"):
            base.policy(gradient_checkpointing=True)
        return
    plain = gradient_of(policy, "retain", config=SIZE)
    checkpointed = gradient_of(base.policy(gradient_checkpointing=True), "retain", config=SIZE)
    assert relative_error(checkpointed, plain) < 1e-6


def test_guidance_changes_pixels(base, policy):
    other = base.policy(guidance=base.case.guidance + 1)
    assert not torch.equal(ode(policy), ode(other))


@pytest.mark.parametrize("kind", TRAINABLE)
def test_trained_weights_in_plain_diffusers(base, kind, tmp_path):
    """An update, saved; then the plain pipeline from the prompt's text reproduces the policy's output bit for bit.

    So steps without events are the stock pipeline's, and embeddings made beforehand are those it makes of the text.
    """
    policy = base.policy(trainable=TRAINABLE[kind], moved=kind == "lora")
    untrained = ode(policy)
    gradient = gradient_of(policy, "recompute", config=SIZE)
    with torch.no_grad():
        for name, parameter in trainable(policy).items():
            parameter += 0.05 * torch.nn.functional.normalize(gradient[name].flatten(), dim=0).view_as(parameter)
    trained = ode(policy)
    assert not torch.equal(trained, untrained)
    TRAINABLE[kind].save(policy.pipe, tmp_path)

    plain = base.plain()
    apply_weights(plain, tmp_path)
    assert torch.equal(from_text(plain, policy, base.case), trained)

    again = base.policy(trainable=TRAINABLE[kind], moved=False)
    TRAINABLE[kind].load(again.pipe, tmp_path)
    assert torch.equal(ode(again), trained)
    batch = ode_batch(again)
    assert torch.equal(again.draw(batch.prompt, start_generators(batch)), trained)


def from_text(pipe: DiffusionPipeline, policy: DiffusionPolicy, case: Case) -> torch.Tensor:
    """Two samples of one prompt by the pipeline's own public call."""
    family, batch = family_of(pipe), ode_batch(policy)
    accepted = inspect.signature(pipe.__call__).parameters
    copies = next(name for name in accepted if name in ("num_images_per_prompt", "num_videos_per_prompt"))
    rows = {"prompt": [batch.prompt] * 2} if case.no_copies else {"prompt": batch.prompt, copies: 2}
    guidance = {} if family.guidance is None else {family.guidance: case.guidance}
    call = guidance | dict(family.call) | case.call
    guided = family.guidance is None or call.get(family.negative, 1) > 1
    if guided and "negative_prompt" in accepted:
        rows["negative_prompt"] = [""] * 2 if case.no_copies else ""
    if case.no_copies:
        rows |= {name: [call[name]] * 2 for name in family.each}
    return pipe(
        generator=start_generators(batch),
        num_inference_steps=STEPS,
        output_type="pt",
        return_dict=False,
        **(call | rows),
    )[0]


@pytest.mark.parametrize(("plant", "cause"), FAULTS)
def test_preflight_names_planted_faults(policy, plant, cause, monkeypatch):
    plant(policy, monkeypatch)
    with pytest.raises(PreflightError, match=cause):
        preflight(policy, Retain(), Grpo(), batches_of(policy))


def test_a_model_whose_noise_levels_are_not_selected_is_told():
    pipe = tiny("wan-2.2")
    Lora(rank=2).attach(pipe, 0)
    policy = DiffusionPolicy(pipe, kernel=Flow(), steps=STEPS, call=CASES["wan-2.2"].call)
    early = Window(size=1, start=0, place="fixed")
    address = Address(seed=0, stream="train", update=0)
    found = preflight(policy, Retain(), Grpo(), deal(SIZE, PROMPTS, policy, early, Grpo(), address))
    assert found.unreached == ["transformer_2"]
    assert preflight(policy, Retain(), Grpo(), batches_of(policy)).unreached == []


def test_overwritten_frames_are_no_actions():
    """Wan 2.2 5B puts the picture over the first latent frame: log_prob, D and the KL leave it out."""
    pytest.importorskip("ftfy")
    pipe = tiny("wan-2.2-5b-i2v")
    Lora(rank=2).attach(pipe, 0)
    policy = DiffusionPolicy(pipe, kernel=Flow(), steps=STEPS, call=CASES["wan-2.2-5b-i2v"].call)
    old = sample(policy, Recompute(), batches_of(policy)).transitions[0][0]
    frame = old.action[0, :, 0].numel()
    assert old.dims == old.action[0].numel() - frame
    move(policy)
    new = policy.score(batches_of(policy)[0], old)
    assert torch.equal(new.mean[:, :, 0], old.action[:, :, 0])
    expected = Normal(new.mean[:, :, 1:], new.std).log_prob(old.action[:, :, 1:]).flatten(1).sum(1)
    torch.testing.assert_close(new.log_prob, expected)
    assert (new.kl(old.mean) > 0).all()
