"""Every family's stock pipeline, tiny and of the real classes, from prompt to rollout to update to plain diffusers and back."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from PIL import Image, ImageOps
from torch.distributions import Normal
from transformers import Qwen2VLProcessor

from faults import FAULTS
from helpers import gradient_of, move, relative_error
from onetake.core.noise import start_generators
from onetake.core.objectives import Grpo
from onetake.core.records import Address, MicroBatch, Prompt
from onetake.core.selection import All, Window
from onetake.execution import Recompute, Retain
from onetake.policies import trainable
from onetake.policies.adapters import Full, Lora, apply_weights
from onetake.policies.diffusion import DiffusionPolicy
from onetake.policies.families import family_of
from onetake.policies.loading import PolicyConfig, load_pipeline
from onetake.rollout.preflight import PreflightError, preflight
from onetake.rollout.sampling import RolloutConfig, deal, sample
from onetake.tasks import PromptsTask
from tiny import WORDS
from tiny_families import CASES, Case, tiny

pytestmark = [  # what the libraries themselves warn about
    pytest.mark.filterwarnings("ignore:.*FluxPosEmbed:FutureWarning"),  # diffusers' Chroma uses its old place
    pytest.mark.filterwarnings("ignore:.*__array__:DeprecationWarning"),  # diffusers' DPM-Solver under NumPy 2
    pytest.mark.filterwarnings("ignore:.*CPU [aA]utocast:UserWarning"),  # diffusers' Mochi asks for it in float32
]

STEPS = 4
SIZE = RolloutConfig(groups=1, group_size=2, micro_batch=2)
ADDRESS = Address(seed=0, stream="train", update=0)
TRAINABLE = {"lora": Lora(rank=2), "full": Full()}


@dataclass
class Base:
    """A case, saved as a diffusers folder."""

    case: Case
    folder: Path

    @property
    def prompts(self) -> list[Prompt]:
        """Each with the case's pictures."""
        return [Prompt(text, self.images) for text in WORDS]

    @property
    def images(self) -> tuple[Path, ...]:
        return tuple(self.folder / f"{i}.png" for i in range(len(self.case.pictures)))

    def batches(self, policy: DiffusionPolicy) -> list[MicroBatch]:
        return deal(SIZE, self.prompts, policy, All(), Grpo(), ADDRESS)

    def gradient(self, policy: DiffusionPolicy, execution: str) -> dict[str, torch.Tensor]:
        return gradient_of(policy, execution, config=SIZE, prompts=self.prompts)

    def ode_batch(self, policy: DiffusionPolicy) -> MicroBatch:
        batch = self.batches(policy)[0]
        batch.stochastic[:] = False
        return batch

    def ode(self, policy: DiffusionPolicy) -> torch.Tensor:
        """Two samples of the first prompt drawn without events."""
        return policy.rollout(self.ode_batch(policy), pytest.fail, grad=False)

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


@pytest.fixture(scope="module", autouse=True)
def small_pictures():
    """Qwen-Image-Edit makes a megapixel of every picture; here 32 × 32. Its processor knows videos too, which need torchvision."""
    whole = Qwen2VLProcessor.__init__

    def without_videos(self, image_processor=None, tokenizer=None, chat_template=None, **kwargs):
        whole(self, image_processor, tokenizer, chat_template=chat_template)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Qwen2VLProcessor, "__init__", without_videos)
        patch.setattr(pipeline_qwenimage_edit, "calculate_dimensions", lambda area, ratio: (32, 32, None))
        patch.setattr(pipeline_qwenimage_edit_plus, "calculate_dimensions", lambda area, ratio: (32, 32))
        yield


STAND_FOR_OTHERS = {
    "sd3": "all embeddings from one call, re-scored by tail",
    "flux-true-cfg": "the negative prompt embedded apart, beside a distilled guidance",
    "qwen-image-edit-plus": "several pictures, a single prompt a call, text that feeds nothing",
    "chroma": "no gradient checkpointing",
    "sana": "DPM-Solver's grid, arguments of the call",
    "flux2-klein": "latents in another layout, LoRA targets of its own",
    "wan-2.2": "two transformers, UniPC's grid",
    "wan-2.2-5b-i2v": "latents that are overwritten",
    "hunyuan-video-i2v": "a picture for each output",
    "ltx-condition, half": "a picture that may be left out",
    "ltx-2": "audio beside the video",
}
"""The cases that run by default, one for each thing in which families differ; ``-m families`` runs the others."""


def marks(name: str) -> list[pytest.MarkDecorator]:
    if CASES[name].slow:
        return [pytest.mark.slow]
    return [] if name in STAND_FOR_OTHERS else [pytest.mark.families]


@pytest.fixture(scope="module", params=[pytest.param(name, marks=marks(name), id=name) for name in CASES])
def base(request, tmp_path_factory) -> Base:
    return saved(request.param, tmp_path_factory.mktemp("base"))


def saved(name: str, folder: Path) -> Base:
    """The case's pipeline and pictures as files."""
    case = CASES[name]
    for library in case.needs:
        pytest.importorskip(library)
    tiny(name).save_pretrained(folder)
    base = Base(case=case, folder=folder)
    for picture, path in zip(case.pictures, base.images, strict=True):
        picture.save(path)
    return base


@pytest.fixture(scope="module")
def policy(base) -> Iterator[DiffusionPolicy]:
    """For tests that leave weights alone."""
    policy = base.policy()
    before = {name: p.detach().clone() for name, p in trainable(policy).items()}
    yield policy
    assert all(torch.equal(p, before[name]) for name, p in trainable(policy).items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rescored_events_are_the_sampled_ones(base, dtype):
    """Equal latent, equal velocity, ratio exactly 1, by every way that the family claims; adapters stay float32."""
    policy = base.policy(dtype=dtype)
    assert all(p.dtype == torch.float32 for p in trainable(policy).values())
    assert policy.ways[0] == base.case.way
    rollout = sample(policy, Recompute(), base.batches(policy))
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
    native, retain, reweight = (base.gradient(policy, name) for name in ("recompute", "retain", "reweight"))
    assert all(gradient.isfinite().all() for gradient in native.values())
    assert sum(float(gradient.norm()) for gradient in native.values()) > 0
    assert relative_error(retain, native) <= 1e-6
    assert relative_error(reweight, native) <= base.case.reweight


def test_gradient_checkpointing_changes_nothing(base, policy):
    if family_of(policy.pipe).no_checkpointing is not None:
        with pytest.raises(ValueError, match="gradient_checkpointing: true would train another model"):
            base.policy(gradient_checkpointing=True)
        return
    plain = base.gradient(policy, "retain")
    checkpointed = base.gradient(base.policy(gradient_checkpointing=True), "retain")
    assert relative_error(checkpointed, plain) < 1e-6


def test_guidance_changes_pixels(base, policy):
    other = base.policy(guidance=base.case.guidance + 1)
    assert not torch.equal(base.ode(policy), base.ode(other))


@pytest.mark.parametrize("kind", TRAINABLE)
def test_trained_weights_in_plain_diffusers(base, kind, tmp_path):
    """An update, saved; then the plain pipeline from the prompt's text reproduces the policy's output bit for bit.

    So steps without events are the stock pipeline's, and embeddings made beforehand are those it makes of the text.
    """
    policy = base.policy(trainable=TRAINABLE[kind], moved=kind == "lora")
    untrained = base.ode(policy)
    gradient = base.gradient(policy, "recompute")
    with torch.no_grad():
        for name, parameter in trainable(policy).items():
            parameter += 0.05 * torch.nn.functional.normalize(gradient[name].flatten(), dim=0).view_as(parameter)
    trained = base.ode(policy)
    assert not torch.equal(trained, untrained)
    TRAINABLE[kind].save(policy.pipe, tmp_path)

    plain = base.plain()
    apply_weights(plain, tmp_path)
    batch = base.ode_batch(policy)
    assert torch.equal(from_text(plain, base.case, batch), trained)

    again = base.policy(trainable=TRAINABLE[kind], moved=False)
    TRAINABLE[kind].load(again.pipe, tmp_path)
    assert torch.equal(base.ode(again), trained)
    assert torch.equal(again.draw(batch.prompt, start_generators(batch)), trained)


def from_text(pipe: DiffusionPipeline, case: Case, batch: MicroBatch) -> torch.Tensor:
    """Two samples of one prompt by the pipeline's own public call."""
    family, text = family_of(pipe), batch.prompt.text
    accepted, pictures = inspect.signature(pipe.__call__).parameters, [Image.open(path) for path in batch.prompt.images]
    copies = next(name for name in accepted if name in ("num_images_per_prompt", "num_videos_per_prompt"))
    rows = {"prompt": [text] * 2} if case.no_copies else {"prompt": text, copies: 2}
    guidance = {} if family.guidance is None else {family.guidance: case.guidance}
    call = guidance | dict(family.call) | case.call
    guided = family.guidance is None or call.get(family.negative, 1) > 1
    if guided and "negative_prompt" in accepted:
        rows["negative_prompt"] = [""] * 2 if case.no_copies else ""
    rows |= family.image(pictures, 2 if case.no_copies else 1)
    return pipe(
        generator=start_generators(batch),
        num_inference_steps=STEPS,
        output_type="pt",
        return_dict=False,
        **(call | rows),
    )[0]


@pytest.mark.parametrize(("plant", "cause"), FAULTS)
def test_preflight_names_planted_faults(base, policy, plant, cause, monkeypatch):
    plant(policy, monkeypatch)
    with pytest.raises(PreflightError, match=cause):
        preflight(policy, Retain(), Grpo(), base.batches(policy))


def test_a_model_whose_noise_levels_are_not_selected_is_told(tmp_path):
    base = saved("wan-2.2", tmp_path)
    policy = base.policy(moved=False)
    early = Window(size=1, start=0, place="fixed")
    found = preflight(policy, Retain(), Grpo(), deal(SIZE, base.prompts, policy, early, Grpo(), ADDRESS))
    assert found.unreached == ["transformer_2"]
    assert preflight(policy, Retain(), Grpo(), base.batches(policy)).unreached == []


def test_overwritten_frames_are_no_actions(tmp_path):
    """Wan 2.2 5B puts the picture over the first latent frame: log_prob, D and the KL leave it out."""
    base = saved("wan-2.2-5b-i2v", tmp_path)
    policy = base.policy(moved=False)
    old = sample(policy, Recompute(), base.batches(policy)).transitions[0][0]
    frame = old.action[0, :, 0].numel()
    assert old.dims == old.action[0].numel() - frame
    move(policy)
    new = policy.score(base.batches(policy)[0], old)
    assert torch.equal(new.mean[:, :, 0], old.action[:, :, 0])
    expected = Normal(new.mean[:, :, 1:].double(), new.std).log_prob(old.action[:, :, 1:].double()).flatten(1).sum(1)
    torch.testing.assert_close(new.log_prob, expected, rtol=1e-6, atol=0)
    assert (new.kl(old.mean) > 0).all()


def test_every_prompt_has_its_pictures(base, policy):
    """From a file: other pictures make another rollout of the same words and noise, and each is what the public call makes.

    A text-only pipeline refuses them, others refuse a prompt without.
    """
    if not base.case.pictures:
        if family_of(policy.pipe).pictures != (0, 0):
            return  # it may bring one: another case does
        picture = base.folder / "picture.png"
        with pytest.raises(
            ValueError, match=f"{type(policy.pipe).__name__} takes no picture for a prompt, and 'x' brings 1"
        ):
            policy.check([Prompt("x", (picture,))])
        return
    lines = []
    for picture, path in zip(base.case.pictures, base.images, strict=True):
        ImageOps.invert(picture).save(path.with_suffix(".inverted.png"))
    for suffix in (".png", ".inverted.png"):
        lines.append({"prompt": "first", "image": [path.with_suffix(suffix).name for path in base.images]})
    file = base.folder / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    task = PromptsTask(train=file, held_out=file, reward="jpeg")
    assert task.problems() == []
    prompts = task.load().train
    policy.check(prompts)
    (batch,), outputs = base.batches(policy), []
    for prompt in prompts:
        rollout = sample(policy, Recompute(), [replace(batch, prompt=prompt)])
        outputs += rollout.outputs
        (old, *_), (asked,) = rollout.transitions[0], rollout.batches
        assert torch.equal(policy.score(asked, old).log_prob, old.log_prob)
        drawn = policy.draw(prompt, start_generators(batch))
        assert torch.equal(drawn, from_text(policy.pipe, base.case, asked))
    assert not torch.equal(*outputs)
    if family_of(policy.pipe).pictures[0]:
        with pytest.raises(ValueError, match=r"takes one .*picture.* for a prompt, and 'x' brings none"):
            policy.check([Prompt("x")])


def test_the_negative_prompt_beside_a_black_picture(tmp_path):
    """HunyuanVideo shows its text encoder a black picture with it, which the stock call does for a single prompt only."""
    base = saved("hunyuan-video-i2v", tmp_path)
    call = base.case.call | {"true_cfg_scale": 2.0}
    policy = base.policy(call=call)
    (old, *_), batch = sample(policy, Recompute(), base.batches(policy)).transitions[0], base.batches(policy)[0]
    assert torch.equal(policy.score(batch, old).log_prob, old.log_prob)
    case = replace(base.case, call=call)
    with pytest.raises(ValueError, match="Image features and image tokens do not match"):
        from_text(policy.pipe, case, batch)
    generator, (picture,) = start_generators(batch)[:1], case.pictures
    alone = policy.pipe(
        prompt="third",
        negative_prompt="",
        image=[picture],
        generator=generator,
        num_inference_steps=STEPS,
        guidance_scale=case.guidance,
        output_type="pt",
        return_dict=False,
        **call,
    )[0]
    drawn = policy.draw(replace(batch.prompt, text="third"), start_generators(batch)[:1])
    assert torch.equal(drawn, alone)
