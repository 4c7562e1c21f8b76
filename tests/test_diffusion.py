"""The scheduler seam on a tiny Stable Diffusion 3 of the real classes: equal to the stock pipeline, exact at every event."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline

from faults import FAULTS
from helpers import gradient_of, move, relative_error, roll
from onetake.core.coefficients import Coefficients
from onetake.core.noise import start_generators
from onetake.core.objectives import Grpo, Kl
from onetake.core.records import Address, Prompt
from onetake.core.selection import All, Single, Window
from onetake.core.transitions import Cps
from onetake.execution import EXECUTIONS, Recompute, Retain, Reweight
from onetake.policies import trainable
from onetake.policies.adapters import Full, Lora, apply_weights
from onetake.policies.diffusion import DiffusionPolicy
from onetake.policies.loading import PolicyConfig
from onetake.rollout.preflight import PreflightError, preflight
from onetake.rollout.sampling import RolloutConfig, deal
from tiny import tiny_sd3

PROMPTS = [Prompt(text) for text in ("first", "second", "third")]
CALL = {"max_sequence_length": 8}
SIZE = RolloutConfig(groups=2, group_size=4, micro_batch=2)
ADAPTERS = {"lora": Lora(rank=4), "full": Full()}


def policy_on(
    adapter: str = "lora", *, pipe=None, guidance: float = 1.0, dtype=torch.float32, **call
) -> DiffusionPolicy:
    pipe = pipe or tiny_sd3(dtype=dtype)
    ADAPTERS[adapter].attach(pipe, 0)
    with torch.no_grad():  # a fresh adapter is the identity, which would hide errors
        for name, parameter in pipe.transformer.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return DiffusionPolicy(pipe, PolicyConfig(steps=4, guidance=guidance, call=CALL | call))


def batches_of(policy: DiffusionPolicy, selection=All()):  # noqa: B008  immutable
    return deal(SIZE, PROMPTS, policy, selection, Grpo(), Address(seed=0, stream="train", update=0))


def ode_batch(policy: DiffusionPolicy):
    batch = batches_of(policy)[0]
    batch.stochastic[:] = False
    return batch


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_without_events_it_is_the_stock_pipeline_bit_for_bit(guidance):
    policy = policy_on(guidance=guidance)
    batch = ode_batch(policy)
    ours = policy.rollout(batch, pytest.fail, grad=True)
    policy.pipe.scheduler = FlowMatchEulerDiscreteScheduler.from_config(policy.scheduler.config)
    theirs = policy.pipe(
        batch.prompt.text,
        num_images_per_prompt=2,
        num_inference_steps=4,
        guidance_scale=guidance,
        generator=start_generators(batch),
        output_type="pt",
        **CALL,
    ).images
    assert torch.equal(ours, theirs)


def test_guidance_changes_pixels_and_embeddings_equal_prompts():
    images = {}
    for guidance in (1.0, 3.0):
        policy = policy_on(guidance=guidance)
        images[guidance] = policy.rollout(ode_batch(policy), pytest.fail, grad=False)
        policy._family = replace(policy._family, embeds=())  # prompts stay text
        by_text = policy.rollout(ode_batch(policy), pytest.fail, grad=False)
        torch.testing.assert_close(images[guidance], by_text, rtol=0, atol=1e-5)  # encoders see two rows, not one
    assert not torch.equal(images[1.0], images[3.0])


@pytest.mark.parametrize("way", ["tail", "fast_forward"])
@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_executions_agree(adapter, guidance, way):
    policy = policy_on(adapter, guidance=guidance)
    policy.way = way
    native, retain, reweight = (gradient_of(policy, name, config=SIZE) for name in ("recompute", "retain", "reweight"))
    assert all(torch.equal(retain[name], native[name]) for name in native)
    assert relative_error(reweight, native) < 1e-5
    assert sum(float(gradient.norm()) for gradient in native.values()) > 0


@pytest.mark.parametrize("way", ["tail", "fast_forward"])
@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_executions_agree_with_a_kl(adapter, guidance, way):
    """The reference is asked in the middle of a rollout under reweight, and must not disturb it."""
    frozen = {"transformer": tiny_sd3().transformer}
    pipe = tiny_sd3()
    ADAPTERS[adapter].attach(pipe, 0)
    config = PolicyConfig(steps=4, guidance=guidance, call=CALL)
    policy = DiffusionPolicy(pipe, config, frozen=frozen if adapter == "full" else None)
    policy.way = way
    start = gradient_of(policy, "recompute", config=SIZE)
    at_reference = gradient_of(policy, "recompute", config=SIZE, kl=Kl(beta=10.0))
    assert relative_error(at_reference, start) == 0  # no shift yet, so no pull
    move(policy, 0.02)
    native, retain, reweight = (
        gradient_of(policy, name, config=SIZE, kl=Kl(beta=10.0)) for name in ("recompute", "retain", "reweight")
    )
    assert relative_error(gradient_of(policy, "recompute", config=SIZE), native) > 1e-3
    assert all(torch.equal(retain[name], native[name]) for name in native)
    assert relative_error(reweight, native) < 1e-5


@pytest.mark.parametrize("selection", [Window(size=2, start=1, place="fixed"), Single()])
def test_executions_agree_on_other_selections_and_kernels(selection):
    policy = policy_on()
    policy.kernel = Cps()
    native, retain, reweight = (
        gradient_of(policy, name, config=SIZE, selection=selection) for name in ("recompute", "retain", "reweight")
    )
    assert relative_error(retain, native) == 0
    assert relative_error(reweight, native) < 1e-5


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_gradient_checkpointing_changes_nothing(adapter):
    policy = policy_on(adapter)
    plain = {name: gradient_of(policy, name, config=SIZE) for name in EXECUTIONS}
    policy.module.enable_gradient_checkpointing()
    for name in EXECUTIONS:
        assert relative_error(gradient_of(policy, name, config=SIZE), plain[name]) < 1e-6


@pytest.mark.parametrize(("execution", "again"), [("retain", 0), ("reweight", 0), ("recompute", 1)])
@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("way", ["tail", "fast_forward"])
def test_model_calls_are_counted_exactly(execution, again, guidance, way):
    """T calls per micro-batch, and |S| more for recompute; with guidance each call has twice the rows."""
    policy, strategy = policy_on(guidance=guidance), EXECUTIONS[execution]()
    policy.way = way
    rollout = roll(policy, strategy, config=SIZE, selection=Window(size=2))
    strategy.accumulate(policy, rollout, Coefficients(Grpo(), rollout))
    assert policy.calls == 4 * (4 + again * 2)
    assert policy.forwards == policy.calls * SIZE.micro_batch * (2 if guidance > 1 else 1)


@pytest.mark.parametrize(
    ("dtype", "execution", "error"),
    [
        (torch.float32, Retain, 0),
        (torch.float32, Reweight, 1e-5),
        (torch.bfloat16, Retain, 0),
        (torch.bfloat16, Reweight, 1e-5),  # coefficients that are powers of two round nothing in any dtype
    ],
)
@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_preflight_passes_and_leaves_nothing_behind(dtype, execution, error, guidance):
    policy = policy_on(guidance=guidance, dtype=dtype)
    assert all(p.dtype == torch.float32 for p in trainable(policy).values())
    found = preflight(policy, execution(), Grpo(), batches_of(policy))
    assert found.way == "tail"
    assert found.events == [0, 1, 2]
    assert found.gradient_error <= error
    assert all(p.grad is None for p in policy.module.parameters())


def test_preflight_turns_to_fast_forward_where_guidance_depends_on_the_index():
    policy = policy_on(
        guidance=3.0, skip_guidance_layers=[0], skip_layer_guidance_start=0.2, skip_layer_guidance_stop=0.6
    )
    assert preflight(policy, Recompute(), Grpo(), batches_of(policy)).way == "fast_forward"
    native, retain = (gradient_of(policy, name, config=SIZE) for name in ("recompute", "retain"))
    assert relative_error(retain, native) == 0


def test_preflight_covers_every_event_of_single():
    policy = policy_on()
    batches = batches_of(policy, Single(until=3))
    assert preflight(policy, Retain(), Grpo(), batches).events == sorted({k for b in batches for k in b.events})


@pytest.mark.parametrize(("plant", "cause"), FAULTS)
def test_preflight_names_planted_faults(plant, cause, monkeypatch):
    policy = policy_on()
    plant(policy, monkeypatch)
    with pytest.raises(PreflightError, match=cause):
        preflight(policy, Retain(), Grpo(), batches_of(policy))


def test_rows_in_another_order_are_followed():
    """A model that takes its guidance interleaved (negative, positive, negative, …) holds a trajectory's rows elsewhere."""
    policy = policy_on(guidance=3.0)
    forward = policy.module.forward
    order = torch.tensor([0, 2, 1, 3])

    def interleaved(hidden_states, timestep, encoder_hidden_states, pooled_projections, **kwargs):
        rows = hidden_states[order], timestep[order], encoder_hidden_states[order], pooled_projections[order]
        names = ("hidden_states", "timestep", "encoder_hidden_states", "pooled_projections")
        return (forward(**dict(zip(names, rows, strict=True)), **kwargs)[0][order],)

    policy.module.forward = interleaved
    for execution in (Retain(), Reweight()):
        assert preflight(policy, execution, Grpo(), batches_of(policy)).gradient_error < 1e-5


def test_a_model_in_which_trajectories_influence_each_other_is_refused():
    policy = policy_on(guidance=3.0)
    forward = policy.module.forward
    policy.module.forward = lambda *args, **kwargs: (forward(*args, **kwargs)[0].cumsum(0),)
    with pytest.raises(ValueError, match=r"influence each other .* Use rollout\.micro_batch: 1 or execution: retain"):
        preflight(policy, Reweight(), Grpo(), batches_of(policy))


def test_preflight_names_a_tensor_that_gets_no_gradient():
    policy = policy_on()
    policy.module.register_parameter("idle", torch.nn.Parameter(torch.zeros(3)))
    with pytest.raises(PreflightError, match="trainable tensor idle"):
        preflight(policy, Retain(), Grpo(), batches_of(policy))


def test_a_pipeline_without_flow_matching_is_refused():
    pipe = tiny_sd3()
    pipe.scheduler = DDIMScheduler()
    with pytest.raises(ValueError, match=r"samples with DDIMScheduler, which is not a flow-matching scheduler"):
        DiffusionPolicy(pipe, PolicyConfig(steps=4))


def test_lora_targets_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match=r"no layer of SD3Transformer2DModel ends in \['to_quux'\]"):
        Lora(targets=["to_q", "to_quux"]).attach(tiny_sd3(), 0)


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_saved_weights_load_in_plain_diffusers_bit_for_bit(adapter, tmp_path):
    tiny_sd3().save_pretrained(tmp_path / "base")

    def loaded() -> StableDiffusion3Pipeline:
        """On some CPUs kernels differ by a weight's place in its file, and by whether it could train."""
        pipe = StableDiffusion3Pipeline.from_pretrained(tmp_path / "base")
        pipe.vae.requires_grad_(False)
        return pipe

    policy = policy_on(adapter, pipe=loaded())
    for parameter in trainable(policy).values():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2))
    batch = ode_batch(policy)
    ours = policy.rollout(batch, pytest.fail, grad=False)
    ADAPTERS[adapter].save(policy.pipe, tmp_path)

    plain = loaded()
    if adapter == "lora":
        plain.load_lora_weights(tmp_path)
    else:
        plain.transformer = type(plain.transformer).from_pretrained(tmp_path / "transformer")
    call = {"num_inference_steps": 4, "guidance_scale": 1.0, "output_type": "pt", **CALL}
    theirs = plain(batch.prompt.text, num_images_per_prompt=2, generator=start_generators(batch), **call).images
    assert torch.equal(ours, theirs)

    again = loaded()
    apply_weights(again, tmp_path)
    assert torch.equal(
        again(batch.prompt.text, num_images_per_prompt=2, generator=start_generators(batch), **call).images, ours
    )

    fresh = tiny_sd3()
    ADAPTERS[adapter].attach(fresh, 0)
    ADAPTERS[adapter].load(fresh, tmp_path)
    restored = dict(fresh.transformer.named_parameters())
    assert all(torch.equal(restored[name], parameter) for name, parameter in trainable(policy).items())


def test_adapter_is_a_function_of_the_seed():
    def weights(seed: int) -> torch.Tensor:
        pipe = tiny_sd3()
        Lora(rank=4).attach(pipe, seed)
        return torch.cat([p.flatten() for n, p in pipe.transformer.named_parameters() if "lora_A" in n])

    torch.manual_seed(123)
    state = torch.get_rng_state()
    one = weights(0)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(7)
    assert torch.equal(one, weights(0))
    assert not torch.equal(one, weights(1))
