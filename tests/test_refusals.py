"""Pipelines that cannot be trained are refused by name with the reason; unknown ones work if the pre-flight check passes."""

from __future__ import annotations

import diffusers
import pytest
import torch
from diffusers import (
    AdaptiveProjectedGuidance,
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    FirstBlockCacheConfig,
    FlowMatchHeunDiscreteScheduler,
    StableDiffusion3Img2ImgPipeline,
    StableDiffusion3Pipeline,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
)

from family_lines import lines_per_family
from onetake.core.objectives import Grpo
from onetake.core.records import Address, MicroBatch, Prompt
from onetake.core.selection import All
from onetake.execution import Retain
from onetake.policies.adapters import Lora
from onetake.policies.diffusion import DiffusionPolicy
from onetake.policies.families import FAMILIES, REFUSED, family_of, refuse
from onetake.policies.loading import PolicyConfig
from onetake.policies.scheduler import RolloutScheduler
from onetake.rollout.preflight import preflight
from onetake.rollout.sampling import RolloutConfig, deal
from tiny import tiny_sd3
from tiny_families import tiny

CALL = {"max_sequence_length": 8}


def policy_on(pipe, **call) -> DiffusionPolicy:
    return DiffusionPolicy(pipe, PolicyConfig(steps=4, call=CALL | call))


def batches_of(policy: DiffusionPolicy) -> list[MicroBatch]:
    size = RolloutConfig(groups=1, group_size=2, micro_batch=2)
    return deal(size, [Prompt("first")], policy, All(), Grpo(), Address(seed=0, stream="train", update=0))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("CogVideoXPipeline", "the kernels are those of flow matching"),
        ("CogVideoXImageToVideoPipeline", "the kernels are those of flow matching"),
        ("Cosmos2TextToImagePipeline", "its noise levels reach 80"),
        ("CosmosTextToWorldPipeline", "its noise levels reach 80"),
        ("Flux2KleinKVPipeline", "keys and values of the first step"),
        ("HiDreamImagePipeline", "routed experts run without gradients"),
    ],
)
def test_refused_by_name(name, reason):
    kind = getattr(diffusers, name)  # the class exists under this name; its models are not needed to refuse it
    with pytest.raises(ValueError, match=f"policy.pipeline: {name} cannot be trained: .*{reason}"):
        refuse(kind.__new__(kind), FAMILIES["FluxPipeline"], {})


def test_every_refused_name_begins_a_pipeline_and_every_row_is_one():
    for beginning in REFUSED:
        assert any(name.startswith(beginning) and name.endswith("Pipeline") for name in dir(diffusers)), beginning
    assert all(hasattr(diffusers, name) for name in FAMILIES)


def test_no_family_costs_more_than_forty_lines():
    lines = lines_per_family()
    assert lines.keys() == FAMILIES.keys()
    assert 0 < min(lines.values()) <= max(lines.values()) <= 40


class Unheard(StableDiffusion3Pipeline):
    """A pipeline that the table does not know."""


def test_a_pipeline_without_a_row_works_with_inferred_defaults():
    stock = tiny_sd3()
    pipe = Unheard(**stock.components)
    pipe.set_progress_bar_config(disable=True)
    Lora(rank=2).attach(pipe, 0)
    policy = policy_on(pipe)
    assert policy.ways == ("fast_forward",)  # nothing is known that would make the tail of the schedule safe
    assert preflight(policy, Retain(), Grpo(), batches_of(policy)).gradient_error == 0


def test_whether_an_unknown_pipeline_takes_a_picture_is_in_its_call():
    kinds = (StableDiffusion3Pipeline, StableDiffusion3Img2ImgPipeline, WanImageToVideoPipeline)
    unknown = [type("Unknown", (kind,), {}) for kind in kinds]
    assert [family_of(kind.__new__(kind)).pictures for kind in unknown] == [(0, 0), (0, 1), (1, 1)]


class WithoutGuidance(Unheard):
    def __call__(self, prompt, num_inference_steps, output_type, return_dict, latents):
        """Samples nothing."""


def test_what_a_pipeline_lacks_is_named():
    with pytest.raises(ValueError, match="WithoutGuidance has no argument generator, guidance_scale, which sampling"):
        policy_on(WithoutGuidance(**tiny_sd3().components))
    stock = tiny_sd3()
    stock.transformer = None
    with pytest.raises(ValueError, match="has no component named transformer, the only kind that is trained"):
        policy_on(stock)


def test_lora_on_a_transformer_without_adapters_is_refused():
    stock = tiny_sd3()
    stock.transformer = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="diffusers' Linear does not; use trainable: full"):
        Lora().attach(stock, 0)


def test_call_arguments_that_the_pipeline_does_not_take_are_named():
    with pytest.raises(
        ValueError, match=r"policy\.call: StableDiffusion3Pipeline takes no argument true_cfg; it takes"
    ):
        policy_on(tiny_sd3(), true_cfg=2.0)
    with pytest.raises(ValueError, match=r"policy\.call\.true_cfg_scale: is what policy\.guidance sets for QwenImage"):
        DiffusionPolicy(tiny("qwen-image"), PolicyConfig(steps=4, call={"true_cfg_scale": 2.0}))


def test_a_cache_is_refused():
    pipe = tiny("flux")
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.1))
    with pytest.raises(ValueError, match=r"transformer has a cache on, .* call disable_cache\(\)"):
        DiffusionPolicy(pipe, PolicyConfig(steps=4))


def test_momentum_is_refused():
    pipe = tiny("hunyuan-video-1.5")
    pipe.guider = AdaptiveProjectedGuidance(adaptive_projected_guidance_momentum=-0.5)
    with pytest.raises(ValueError, match="the guider of HunyuanVideo15Pipeline has momentum"):
        DiffusionPolicy(pipe, PolicyConfig(steps=4))


def test_noise_levels_above_one_are_refused():
    policy = policy_on(tiny_sd3(), sigmas=[80.0, 10.0, 1.0, 0.1])
    with pytest.raises(ValueError, match=r"its noise levels start at 1\.\d+; flow matching has them in \[0, 1\]"):
        policy.sigmas  # noqa: B018  it is computed by a call


@pytest.mark.parametrize(
    ("scheduler", "reason"),
    [
        (DDIMScheduler(), "DDIMScheduler, which is not a flow-matching scheduler onetake can replace"),
        (FlowMatchHeunDiscreteScheduler(), "FlowMatchHeunDiscreteScheduler, which is not"),
        (UniPCMultistepScheduler(), "its UniPCMultistepScheduler has use_flow_sigmas: False"),
        (DPMSolverMultistepScheduler(use_flow_sigmas=True), "and prediction_type: epsilon"),
    ],
)
def test_schedulers_that_are_not_flow_matching_are_refused(scheduler, reason):
    with pytest.raises(ValueError, match=reason):
        RolloutScheduler.replacing(scheduler)


@pytest.mark.parametrize("steps", [3, 10, 50])
def test_unipc_lends_its_grid(steps):
    shipped = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    ours = RolloutScheduler.replacing(shipped)
    for replacement in (ours, RolloutScheduler.replacing(ours)):  # of a policy on a pipeline that had one before
        replacement.set_timesteps(steps)
        shipped.set_timesteps(steps)
        assert torch.equal(replacement.sigmas, shipped.sigmas)
        assert torch.equal(replacement.timesteps, shipped.timesteps.float())


def test_euler_on_the_lent_grid_is_unipc_of_first_order():
    shipped = UniPCMultistepScheduler(
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=3.0,
        solver_order=1,
        disable_corrector=list(range(10)),
    )
    ours = RolloutScheduler.replacing(shipped)
    for scheduler in (ours, shipped):
        scheduler.set_timesteps(10)
    x = y = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64).float()
    for t, s in zip(ours.timesteps, shipped.timesteps, strict=True):
        x = ours.step(torch.sin(3 * x), t, x, return_dict=False)[0]
        y = shipped.step(torch.sin(3 * y), s, y, return_dict=False)[0]
    torch.testing.assert_close(x, y, rtol=0, atol=1e-5)
