"""Classifier-free guidance in training: both halves are differentiated, each with its factor."""

from __future__ import annotations

import pytest
import torch

from helpers import PROMPTS
from onetake.core.objectives import Grpo
from onetake.core.records import Address, Transition
from onetake.core.selection import Window
from onetake.policies.adapters import Full
from onetake.policies.diffusion import DiffusionPolicy
from onetake.policies.loading import PolicyConfig
from onetake.rollout.sampling import RolloutConfig, deal
from tiny_families import CASES, tiny

SCALE = 3.0
KINDS = {  # case → how the pipeline runs guidance, and the argument that sets its strength
    "sd3": ("one call, rows doubled", {}),
    "wan-2.1": ("two calls", {}),
    "flux-true-cfg": ("two calls", {"true_cfg_scale": SCALE}),
}


def answers_of(policy: DiffusionPolicy, run) -> tuple[list[torch.Tensor], list[Transition]]:
    """The model's answers that carry a graph, and the transitions, of one run."""
    answers: list[torch.Tensor] = []
    seen: list[Transition] = []

    def keep(module, args, output):
        if torch.is_grad_enabled():
            answers.append(output[0])

    handle = policy.module.register_forward_hook(keep)
    run(seen.append)
    handle.remove()
    return answers, seen


@pytest.mark.parametrize("when", ["sampled", "re-scored"])
@pytest.mark.parametrize("name", KINDS)
def test_both_halves_get_a_gradient(name, when):
    """v = u + g(c − u): the negative half's gradient is (1 − g)/g of the positive half's."""
    way, call = KINDS[name]
    pipe = tiny(name)
    Full().attach(pipe, 0)
    config = PolicyConfig(steps=3, guidance=SCALE, call=CASES[name].call | call)
    policy = DiffusionPolicy(pipe, config, output_type="latent")
    size = RolloutConfig(groups=1, group_size=2, micro_batch=2)
    window = Window(size=1, start=1, place="fixed")
    (batch,) = deal(size, PROMPTS, policy, window, Grpo(), Address(seed=0, stream="train", update=0))
    answers, seen = answers_of(policy, lambda observe: policy.rollout(batch, observe, grad=True))
    if when == "re-scored":
        old = seen[0].detached()
        answers, seen = answers_of(policy, lambda observe: observe(policy.score(batch, old)))
    gradients = torch.autograd.grad(seen[0].log_prob.sum(), answers)
    if way == "one call, rows doubled":
        negative, positive = gradients[0].chunk(2)
    else:
        positive, negative = gradients
    assert positive.abs().max() > 0
    torch.testing.assert_close(negative, (1 - SCALE) / SCALE * positive, rtol=1e-4, atol=1e-8)


def test_embedded_guidance_is_one_call_whose_input_is_trained_with():
    pipe = tiny("flux")
    Full().attach(pipe, 0)
    config = PolicyConfig(steps=3, guidance=SCALE, call=CASES["flux"].call)
    policy = DiffusionPolicy(pipe, config, output_type="latent")
    size = RolloutConfig(groups=1, group_size=2, micro_batch=2)
    (batch,) = deal(size, PROMPTS, policy, Window(size=1), Grpo(), Address(seed=0, stream="train", update=0))
    answers, seen = answers_of(policy, lambda observe: policy.rollout(batch, observe, grad=True))
    assert [len(answer) for answer in answers] == [2]
    weight = policy.module.time_text_embed.guidance_embedder.linear_1.weight
    (gradient,) = torch.autograd.grad(seen[0].log_prob.sum(), weight)
    assert gradient.abs().max() > 0
