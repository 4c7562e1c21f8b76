"""Drawn modules for the bank: what layers and movements of rows a model may consist of, kind and hostile, on (B, T, D).

    python tests/bank_cases.py [--cases 2000] [--first 0]

draws that many, banks their gradients under `execution: reweight`'s bank, and compares with autograd trajectory by trajectory.
Prints how many were equal, refused by name, and silently different.
"""

from __future__ import annotations

import argparse
import random
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.normalization import FP32LayerNorm, MochiRMSNorm
from diffusers.models.normalization import RMSNorm as DiffusersRMSNorm
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.nn.utils import parametrizations, weight_norm
from torch.utils.checkpoint import checkpoint

from onetake.execution.bank import Bank

D = 4
Body = Callable[[Any, Tensor], Tensor]


class Part(nn.Module):
    """Named layers, and a function of them and the input."""

    def __init__(self, body: Body, **layers: Any) -> None:
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


Hostile = Part
"""Parts without per-trajectory gradients, or whose uses the bank cannot know; drawn less often, since one is enough to refuse."""


def linear(**settings: Any) -> nn.Linear:
    return nn.Linear(D, D, **settings)


# Layers where they usually stand


def plain(b: int, t: int) -> Part:
    return Part(lambda m, x: m.a(x), a=linear())


def without_bias(b: int, t: int) -> Part:
    return Part(lambda m, x: m.a(input=x), a=linear(bias=False))


def only_bias(b: int, t: int) -> Part:
    layer = linear()
    layer.weight.requires_grad_(False)
    return Part(lambda m, x: m.a(x), a=layer)


def frozen(b: int, t: int) -> Part:
    return Part(lambda m, x: m.b(m.a(x)), a=linear().requires_grad_(False), b=linear())


def pooled(b: int, t: int) -> Part:
    return Part(lambda m, x: x + m.a(x.mean(1))[:, None], a=linear())


def four_dims(b: int, t: int) -> Part:
    return Part(lambda m, x: m.a(torch.stack([x, 2 * x], 1)).sum(1), a=linear())


def attention(b: int, t: int) -> Part:
    def body(m: Any, x: Tensor) -> Tensor:
        q, k, v = m.qkv(x).unflatten(-1, (3, 2, D // 2)).permute(2, 0, 3, 1, 4)
        return m.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    return Part(body, qkv=nn.Linear(D, 3 * D), out=linear())


def heads_in_the_batch(b: int, t: int) -> Part:
    def body(m: Any, x: Tensor) -> Tensor:
        q, k = (part.unflatten(-1, (2, -1)).transpose(1, 2).reshape(2 * len(x), t, -1) for part in m.qk(x).chunk(2, -1))
        weights = torch.bmm(q, k.mT).softmax(-1).unflatten(0, (-1, 2)).mean(1)
        return m.out(weights @ x)

    return Part(body, qk=nn.Linear(D, 2 * D), out=linear())


def complex_rotation(b: int, t: int) -> Part:
    def body(m: Any, x: Tensor) -> Tensor:
        turned = torch.view_as_complex(m.a(x).unflatten(-1, (-1, 2)).contiguous()) * torch.exp(torch.tensor(0.3j))
        return torch.view_as_real(turned).flatten(-2).to(x.dtype)

    return Part(body, a=linear())


def modulated(b: int, t: int) -> Part:
    def body(m: Any, x: Tensor) -> Tensor:
        shift, scale = m.a(F.silu(x.mean(1))).chunk(2, -1)
        return F.layer_norm(x, (D,)) * (1 + scale[:, None]) + shift[:, None]

    return Part(body, a=nn.Linear(D, 2 * D))


def joined_tokens(b: int, t: int) -> Part:
    def body(m: Any, x: Tensor) -> Tensor:
        joined = torch.cat([m.a(x[:, :1]), m.b(x)], 1)
        return m.a(joined)[:, 1:] + joined[:, :1]

    return Part(body, a=linear(), b=linear())


def layer_norm(b: int, t: int) -> Part:
    return Part(lambda m, x: m.a(x), a=nn.LayerNorm(D))


def layer_norm_of_two_dims(b: int, t: int) -> Part:
    return Part(lambda m, x: m.a(x), a=nn.LayerNorm((t, D)))


def rms_norm(b: int, t: int) -> Part:
    return Part(lambda m, x: m.a(x), a=nn.RMSNorm(D))


def rms_norm_of_two_dims(b: int, t: int) -> Part:
    return Part(lambda m, x: m.a(x), a=nn.RMSNorm((t, D), eps=1e-3))


def norms_of_diffusers(b: int, t: int) -> Part:
    layers = {"a": FP32LayerNorm(D), "b": DiffusersRMSNorm(D, eps=1e-5, bias=True), "c": MochiRMSNorm(D, eps=1e-5)}
    return Part(lambda m, x: m.a(x) + m.b(x) + m.c(x), **layers)


def group_norm(b: int, t: int) -> Part:
    return Part(lambda m, x: m.a(x.mT).mT, a=nn.GroupNorm(2, D))


def group_norm_of_rows(b: int, t: int) -> Part:
    return Part(lambda m, x: m.a(x.flatten(0, 1)).view_as(x), a=nn.GroupNorm(2, D))


def one_prelu(b: int, t: int) -> Part:
    return Part(lambda m, x: m.a(x), a=nn.PReLU())


def prelu_by_channel(b: int, t: int) -> Part:
    return Part(lambda m, x: m.a(x), a=nn.PReLU(t))


def prelu_of_rows(b: int, t: int) -> Part:
    return Part(lambda m, x: m.a(x.flatten(0, 1)).view_as(x), a=nn.PReLU(D))


def embedding(b: int, t: int) -> Part:
    return Part(lambda m, x: x + m.a((x > 0).sum(-1)), a=nn.Embedding(D + 1, D, padding_idx=random.choice([None, 1])))


def conv1d(b: int, t: int) -> Part:
    settings = random.choice([{}, {"dilation": 2, "padding": 2}, {"groups": 2}, {"bias": False}])
    return Part(lambda m, x: m.a(x.mT).mT, a=nn.Conv1d(D, D, 3, **{"padding": 1, **settings}))


def conv2d(b: int, t: int) -> Part:
    settings = random.choice([{}, {"stride": (1, 2), "padding": (1, 2)}, {"groups": 4}])
    layer = nn.Conv2d(4, 4, 3, **{"padding": 1, **settings})
    return Part(lambda m, x: x + m.a(x[:, None, :, :].expand(-1, 4, -1, -1)).mean((1, 3))[..., None], a=layer)


def conv3d(b: int, t: int) -> Part:
    layer = nn.Conv3d(1, 2, (1, 3, 2), padding=(0, 1, 1), groups=1)
    return Part(lambda m, x: x + m.a(x[:, None, None]).mean((1, 2, 4))[..., None], a=layer)


def patches(b: int, t: int) -> Part:
    """As a diffusion transformer embeds pictures."""
    layer = nn.Conv2d(1, D, (1, 2), stride=(1, 2))
    return Part(lambda m, x: x + m.a(x[:, None]).flatten(2).mT.mean(1, keepdim=True), a=layer)


def lora(b: int, t: int) -> Part:
    part = Part(lambda m, x: m.b(F.gelu(m.a(x))), a=linear(), b=linear())
    part.requires_grad_(False)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["a", "b"], init_lora_weights=False), part)
    return part


# Layers that are used more than once, or share their weights


def called_twice(b: int, t: int) -> Part:
    return Part(lambda m, x: m.a(torch.tanh(m.a(x))), a=linear())


def tied(b: int, t: int) -> Part:
    part = Part(lambda m, x: m.b(torch.tanh(m.a(x))), a=linear(), b=linear())
    part.b.weight = part.a.weight
    return part


def tied_to_an_embedding(b: int, t: int) -> Part:
    part = Part(lambda m, x: m.b(x + m.a((x > 0).sum(-1) % D)), a=nn.Embedding(D, D), b=linear())
    part.b.weight = part.a.weight
    return part


def scale_tied_to_a_bias(b: int, t: int) -> Part:
    part = Part(lambda m, x: m.b(m.a(x)), a=nn.LayerNorm(D), b=linear())
    part.b.bias = part.a.weight
    return part


def called_without_gradients_too(b: int, t: int) -> Part:
    def body(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            gate = m.a(x).sigmoid()
        return m.a(x) * gate

    return Part(body, a=linear())


# Rows in other places


def guidance(b: int, t: int) -> Part:
    def body(m: Any, x: Tensor) -> Tensor:
        one, other = m.b(m.a(torch.cat(order(x)))).chunk(2)
        return one + 2 * (other - one)

    def order(x: Tensor) -> list[Tensor]:
        return [0.5 * x, x] if first else [x, 0.5 * x.detach()]

    first = random.random() < 0.5
    return Part(body, a=linear(), b=nn.LayerNorm(D))


def guidance_row_by_row(b: int, t: int) -> Part:
    def body(m: Any, x: Tensor) -> Tensor:
        one, other = m.a(x.repeat_interleave(2, 0)).unflatten(0, (-1, 2)).unbind(1)
        return one * other

    return Part(body, a=linear())


def folded(b: int, t: int) -> Part:
    return Part(lambda m, x: m.b(m.a(x.flatten(0, 1))).unflatten(0, (-1, t)), a=linear(), b=nn.LayerNorm(D))


def folded_pictures(b: int, t: int) -> Part:
    """Frames as rows of a convolution."""
    return Part(
        lambda m, x: m.a(x.flatten(0, 1)[:, None, None]).mean((1, 2)).view_as(x),
        a=nn.Conv2d(1, 2, (1, 3), padding=(0, 1)),
    )


def permuted(b: int, t: int) -> Part:
    order = torch.randperm(b)
    return Part(lambda m, x: m.a(x[order])[order.argsort()], a=linear())


def permuted_for_good(b: int, t: int) -> Part:
    order = torch.randperm(b)
    return Part(lambda m, x: m.b(m.a(x)[order]), a=linear(), b=linear())


def rolled(b: int, t: int) -> Part:
    return Part(lambda m, x: m.a(x.roll(1, 0)).roll(-1, 0), a=linear())


def flipped(b: int, t: int) -> Part:
    return Part(lambda m, x: m.a(x.flip(0)).flip(0), a=linear())


def transposed(b: int, t: int) -> Part:
    return Part(lambda m, x: m.a(x.transpose(0, 1)).transpose(0, 1), a=linear())


def transposed_and_folded(b: int, t: int) -> Part:
    return Part(lambda m, x: m.a(x.transpose(0, 1).reshape(-1, D)).view(t, -1, D).transpose(0, 1), a=linear())


def pictures_one_by_one(b: int, t: int) -> Part:
    return Part(lambda m, x: torch.stack([m.a(row) for row in x.unbind(0)]), a=linear())


def halves(b: int, t: int) -> Part:
    return Part(lambda m, x: torch.cat([m.a(x[:1]), m.b(x[1:])]), a=linear(), b=linear())


def every_other(b: int, t: int) -> Part:
    def body(m: Any, x: Tensor) -> Tensor:
        y = x.clone()
        y[::2] = m.a(x[::2])
        return y

    return Part(body, a=linear())


def experts(b: int, t: int) -> Part:
    def body(m: Any, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        chosen, y = m.route(tokens).argmax(-1), torch.zeros_like(tokens)
        for number, expert in enumerate((m.a, m.b)):
            rows = (chosen == number).nonzero()[:, 0]
            y = y.index_add(0, rows, expert(tokens[rows]))
        return y.view_as(x)

    return Part(body, route=nn.Linear(D, 2).requires_grad_(False), a=linear(), b=linear())


def experts_with_places(b: int, t: int) -> Part:
    """Tokens are handed to experts, and back, by one product with a matrix of zeros and ones."""

    def body(m: Any, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        order = F.one_hot(tokens.sum(-1).argsort(), len(tokens)).to(x)
        one, other = (order @ tokens).tensor_split(2)
        return (order.mT @ torch.cat([m.a(one), m.b(other)])).view_as(x)

    return Part(body, a=linear(), b=linear())


def experts_by_picture(b: int, t: int) -> Part:
    def body(m: Any, x: Tensor) -> Tensor:
        choice = x.sum((1, 2)) > 0
        y = torch.empty_like(x)
        y[choice], y[~choice] = m.a(x[choice]), m.b(x[~choice])
        return y

    return Part(body, a=linear(), b=linear())


def sorted_rows(b: int, t: int) -> Part:
    def body(m: Any, x: Tensor) -> Tensor:
        order = x.sum((1, 2)).argsort()
        return m.a(x[order])[order.argsort()]

    return Part(body, a=linear())


def gathered(b: int, t: int) -> Part:
    def body(m: Any, x: Tensor) -> Tensor:
        order = x.sum((1, 2)).argsort()[:, None, None].expand_as(x)
        return torch.zeros_like(x).scatter(0, order, m.a(x.gather(0, order)))

    return Part(body, a=linear())


def branches_on_data(b: int, t: int) -> Part:
    def body(m: Any, x: Tensor) -> Tensor:
        shift = int(x.sum() * 100) % b
        return m.a(x.roll(shift, 0)).roll(-shift, 0)

    return Part(body, a=linear())


def branches_by_event(b: int, t: int) -> Part:
    def body(m: Any, x: Tensor) -> Tensor:
        m.event += 1
        return m.a(x.flip(0)).flip(0) if m.event % 2 else m.a(x)

    return Part(body, a=linear(), event=0)


def selected_by_data(b: int, t: int) -> Part:
    """The other row is there in every event, and used in some."""

    def body(m: Any, x: Tensor) -> Tensor:
        swapped = x.sum() > 0
        return torch.where(swapped, m.a(x.roll(1, 0)).roll(-1, 0), m.b(x))

    return Part(body, a=linear(), b=linear())


def mixed_by_data(b: int, t: int) -> Part:
    def body(m: Any, x: Tensor) -> Tensor:
        y = m.a(x)
        return y + (x.sum() > 0) * y.roll(1, 0)

    return Part(body, a=linear())


def mixed_through_a_relu(b: int, t: int) -> Part:
    """In some events the relu lets nothing through."""

    def body(m: Any, x: Tensor) -> Tensor:
        y = m.a(x)
        return y + F.relu(y.roll(1, 0) - 2)

    return Part(body, a=linear())


# Trajectories that influence each other


def centred(b: int, t: int) -> Hostile:
    return Part(lambda m, x: m.b(m.a(x) - m.a(x).mean(0)), a=linear(), b=linear())


def batch_norm(b: int, t: int) -> Hostile:
    return Part(lambda m, x: m.n(m.a(x).mT).mT, a=linear(), n=nn.BatchNorm1d(D, affine=False))


def batch_norm_at_rest(b: int, t: int) -> Part:
    return Part(lambda m, x: m.n(m.a(x).mT).mT, a=linear(), n=nn.BatchNorm1d(D, affine=False).eval())


def attention_over_the_batch(b: int, t: int) -> Hostile:
    def body(m: Any, x: Tensor) -> Tensor:
        y = m.a(x).transpose(0, 1)
        return F.scaled_dot_product_attention(y, y, y).transpose(0, 1)

    return Part(body, a=linear())


def weakly_mixed(b: int, t: int) -> Hostile:
    def body(m: Any, x: Tensor) -> Tensor:
        y = m.a(x)
        return y + 1e-4 * y.roll(1, 0)

    return Part(body, a=linear())


def mixed_in_halves(b: int, t: int) -> Hostile:
    """As if the row were a third trajectory's, were cotangents multiplied by 1, 2 and 4."""

    def body(m: Any, x: Tensor) -> Tensor:
        y = m.a(x)
        return (y + 2 * y.roll(1, 0)) / 3

    return Part(body, a=linear())


def one_row_for_all(b: int, t: int) -> Hostile:
    return Part(lambda m, x: x + m.a(torch.ones(1, 1, D).to(x)), a=linear())


def one_row_for_all_expanded(b: int, t: int) -> Hostile:
    return Part(lambda m, x: x * m.b(m.a(torch.ones(D).to(x)).expand_as(x)), a=linear(), b=linear())


def positions(b: int, t: int) -> Hostile:
    return Part(lambda m, x: x + m.a(torch.arange(t)), a=nn.Embedding(t, D))


def rows_across(b: int, t: int) -> Hostile:
    """Rows of a layer that hold a part of one trajectory and a part of the next, for some sizes."""
    size = next(n for n in (8, 12, 16, 20, b * t * D) if not b * t * D % n)
    return Part(lambda m, x: m.a(x.reshape(-1, size)).view_as(x), a=nn.Linear(size, size))


def features_are_trajectories(b: int, t: int) -> Hostile:
    return Part(lambda m, x: m.a(x.reshape(t, b * D)).view_as(x), a=nn.Linear(b * D, b * D))


def scale_across(b: int, t: int) -> Hostile:
    return Part(lambda m, x: m.a(x.reshape(-1)).view_as(x), a=nn.LayerNorm(b * t * D))


def pictures_across(b: int, t: int) -> Hostile:
    return Part(lambda m, x: m.a(x.reshape(1, -1, D)).view_as(x), a=nn.Conv1d(b * t, b * t, 1, groups=b * t))


# Uses that no layer sees


def functional(b: int, t: int) -> Hostile:
    return Part(lambda m, x: F.linear(torch.tanh(m.a(x)), m.a.weight), a=linear())


def functional_alone(b: int, t: int) -> Hostile:
    return Part(lambda m, x: F.linear(x, m.a.weight, m.a.bias), a=linear())


def weight_in_the_sum(b: int, t: int) -> Hostile:
    return Part(lambda m, x: m.a(x) + m.a.bias, a=linear())


def called_functionally(b: int, t: int) -> Hostile:
    def body(m: Any, x: Tensor) -> Tensor:
        doubled = {name: 2 * parameter for name, parameter in m.a.named_parameters()}
        return torch.func.functional_call(m.a, doubled, (x,))

    return Part(body, a=linear())


def mapped(b: int, t: int) -> Hostile:
    return Part(lambda m, x: torch.func.vmap(m.a)(x), a=linear())


def shared_with_a_stranger(b: int, t: int) -> Hostile:
    part = Part(lambda m, x: m.b(m.a(x)), a=linear(), b=Part(lambda m, x: x @ m.weight))
    part.b.weight = part.a.weight
    return part


def parameter_of_its_own(b: int, t: int) -> Hostile:
    return Part(lambda m, x: m.a(x) * m.scale, a=linear(), scale=nn.Parameter(torch.ones(D)))


# Layers that only look like known ones


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, 2 * self.weight, self.bias)


class Renamed(nn.Linear):
    pass


def with_its_own_forward(b: int, t: int) -> Hostile:
    return Part(lambda m, x: m.a(x), a=Doubled(D, D))


def renamed(b: int, t: int) -> Hostile:
    return Part(lambda m, x: m.a(x), a=Renamed(D, D))


def spectral(b: int, t: int) -> Hostile:
    return Part(lambda m, x: m.a(x), a=parametrizations.spectral_norm(linear()))


def parametrized(b: int, t: int) -> Hostile:
    return Part(lambda m, x: m.a(x), a=parametrizations.weight_norm(linear()))


def weight_normed(b: int, t: int) -> Hostile:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return Part(lambda m, x: m.a(x), a=weight_norm(linear()))


def multi_head(b: int, t: int) -> Hostile:
    return Part(lambda m, x: m.a(x, x, x)[0], a=nn.MultiheadAttention(D, 2, batch_first=True))


def circular(b: int, t: int) -> Hostile:
    return Part(lambda m, x: m.a(x.mT).mT, a=nn.Conv1d(D, D, 3, padding=1, padding_mode="circular"))


def forward_replaced(b: int, t: int) -> Hostile:
    part = Part(lambda m, x: m.a(x), a=linear())
    original = part.a.forward
    part.a.forward = lambda x: original(2 * x)
    return part


def recurrent(b: int, t: int) -> Hostile:
    return Part(lambda m, x: m.a(x)[0], a=nn.GRU(D, D, batch_first=True))


def bilinear(b: int, t: int) -> Hostile:
    return Part(lambda m, x: m.a(x, x), a=nn.Bilinear(D, D, D))


# What surrounds a layer


def in_place(b: int, t: int) -> Part:
    return Part(lambda m, x: m.b(F.relu(m.a(x).mul_(2), inplace=True)), a=linear(), b=linear())


def in_place_on_a_view(b: int, t: int) -> Part:
    def body(m: Any, x: Tensor) -> Tensor:
        y = m.a(x)
        y[:, :1].add_(m.b(x[:, :1]))
        return y

    return Part(body, a=linear(), b=linear())


def dropout(b: int, t: int) -> Part:
    return Part(lambda m, x: m.d(m.a(x)), a=linear(), d=nn.Dropout(0.5))


def checkpointed(b: int, t: int) -> Part:
    return Part(
        lambda m, x: checkpoint(lambda y: m.b(F.gelu(m.a(y))), x, use_reentrant=False), a=linear(), b=nn.LayerNorm(D)
    )


def checkpointed_inside_another(b: int, t: int) -> Part:
    def outer(m: Any, x: Tensor) -> Tensor:
        return m.b(checkpoint(lambda y: torch.tanh(m.a(y)), m.b(x), use_reentrant=False))

    return Part(lambda m, x: checkpoint(lambda y: outer(m, y), x, use_reentrant=False), a=linear(), b=linear())


def hooked(b: int, t: int) -> Part:
    layer = linear()
    layer.register_forward_pre_hook(lambda m, args: (2 * args[0],))
    layer.register_forward_hook(lambda m, args, output: output.roll(1, 0) if roll else output * args[0])
    roll = random.random() < 0.3
    return Part(lambda m, x: m.a(x), a=layer)


def hooked_backward(b: int, t: int) -> Part:
    layer = linear()
    layer.register_full_backward_hook(lambda m, inputs, outputs: None)
    return Part(lambda m, x: m.a(m.b(x)), a=layer, b=linear())


class Mirror(torch.autograd.Function):
    """The batch upside down, by a function whose graph says nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.flip(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.flip(0)


class Blend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + 0.5 * x.flip(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad + 0.5 * grad.flip(0)


class Inside(torch.autograd.Function):
    """Runs a layer again in its backward, on a graph of its own, as reversible networks do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer = layer
        return layer(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            inputs = [x, *ctx.layer.parameters()]
            found = torch.autograd.grad(ctx.layer(x), inputs, grad, allow_unused=True)
        return (found[0], None, *found[1:])


def mirrored(b: int, t: int) -> Part:
    return Part(lambda m, x: Mirror.apply(m.b(Mirror.apply(m.a(x)))), a=linear(), b=linear())


def blended(b: int, t: int) -> Hostile:
    return Part(lambda m, x: Blend.apply(m.a(x)), a=linear())


def hidden_inside(b: int, t: int) -> Part:
    return Part(lambda m, x: m.b(Inside.apply(x, m.a, *m.a.parameters())), a=linear(), b=linear())


def autocast(b: int, t: int) -> Part:
    def body(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return m.b(m.a(x)).to(x.dtype)

    return Part(body, a=linear(), b=nn.LayerNorm(D))


COARSE = {autocast: 3e-2, norms_of_diffusers: 1e-5}
"""Parts that compute in less than the drawn dtype."""
PARTS = {
    value: {"Part": 4, "Hostile": 1}[value.__annotations__["return"]]
    for value in list(globals().values())
    if callable(value) and getattr(value, "__annotations__", {}).get("return") in ("Part", "Hostile")
}
"""How often each is drawn, relative to the others."""


@dataclass(frozen=True)
class Case:
    """A drawn module, micro-batch, order of backwards, and what was there before."""

    number: int
    parts: tuple[Any, ...] = ()

    def run(self) -> str:
        """``equal``, ``refused``, or what is silently different."""
        random.seed(self.number)
        torch.manual_seed(self.number)
        b, events = random.randint(2, 5), random.randint(1, 3)
        t = random.choice([2, 3, b])
        dtype = torch.float64 if random.random() < 0.8 else torch.float32
        parts = self.parts or tuple(random.choices(list(PARTS), list(PARTS.values()), k=random.randint(1, 3)))
        order = random.choice(["at once", "forward", "reverse"])
        model = nn.Sequential(*(part(b, t) for part in parts)).to(dtype)
        for parameter in model.parameters():
            parameter.data += 0.3 * torch.randn_like(parameter)
        inputs, targets = torch.randn(2, events, b, t, D, dtype=dtype)
        cotangents, factor = torch.randn(events, b, dtype=dtype), torch.randn(b, dtype=dtype)
        wanted = self._by_autograd(model, inputs, targets, cotangents * factor)
        if wanted is None:
            return "refused"  # not by us: autograd cannot, either
        held = {}
        if random.random() < 0.5:
            held = {name: torch.ones_like(p) for name, p in model.named_parameters() if p.requires_grad}
            for name, parameter in model.named_parameters():
                parameter.grad = held.get(name)
        self._begin(model)
        try:
            parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
            bank = Bank(model, parameters, b)
            with bank.listening():
                self._events(bank, model, inputs, targets, cotangents, order)
            bank.pay_out(factor, direct=1.0)
        except ValueError as error:
            return "refused" if "Use rollout.micro_batch: 1" in str(error) else str(error)
        except RuntimeError as error:
            return "refused" if "functorch" in str(error) else str(error)
        tolerance = max([COARSE.get(part, 0.0) for part in parts] + [1e-6 if dtype == torch.float64 else 2e-4])
        return self._compared(parameters, wanted, held, tolerance)

    def _begin(self, model: nn.Sequential) -> None:
        torch.manual_seed(self.number + 1)
        for module in model.modules():
            if "event" in vars(module):
                module.event = 0

    def _log_prob(self, model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
        return -(model(x) - target).square().flatten(1).sum(1)

    def _by_autograd(self, model: Any, inputs: Tensor, targets: Tensor, weights: Tensor) -> dict[str, Tensor] | None:
        """Trajectory by trajectory, each with the whole batch's forward."""
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        total = {name: torch.zeros_like(p) for name, p in named.items()}
        self._begin(model)
        for x, target, weight in zip(inputs, targets, weights, strict=True):
            log_prob = self._log_prob(model, x, target)
            if not log_prob.requires_grad:
                return None
            for i in range(len(x)):
                found = torch.autograd.grad(log_prob[i], list(named.values()), retain_graph=True, allow_unused=True)
                for name, gradient in zip(named, found, strict=True):
                    if gradient is not None:
                        total[name] += weight[i] * gradient
        return total

    def _events(self, bank: Bank, model: Any, inputs: Any, targets: Any, cotangents: Any, order: str) -> None:
        waiting = []
        for x, target, cotangent in zip(inputs, targets, cotangents, strict=True):
            waiting.append((self._log_prob(model, x, target), cotangent))
            if order == "at once":
                bank.add(*waiting.pop())
        for log_prob, cotangent in waiting[:: 1 if order == "forward" else -1]:
            bank.add(log_prob, cotangent)

    def _compared(self, parameters: Any, wanted: Any, held: Any, tolerance: float) -> str:
        largest = max(float(gradient.abs().max()) for gradient in wanted.values())
        floor = 1e-9 if tolerance <= 1e-6 else largest  # what cancels in float32 is lost in autograd, too
        for name, parameter in parameters.items():
            found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            if held:
                if parameter.grad is not held[name]:
                    return f"{name}: another .grad than the one that was there"
                found = found - 1
            error, size = (found - wanted[name]).abs().max(), wanted[name].abs().max()
            if not error <= tolerance * (size + floor + (1 if held else 0)):
                return f"{name}: {float(error):.1e} of {float(size):.1e}"
        return "equal"


def main(cases: int, first: int) -> Counter[str]:
    """Outcomes of the cases, counted; silent ones are printed with their number."""
    counted: Counter[str] = Counter(drawn=0, equal=0, refused=0, silent=0)
    for number in range(first, first + cases):
        outcome = Case(number).run()
        counted["drawn"] += 1
        counted[outcome if outcome in ("equal", "refused") else "silent"] += 1
        if outcome not in ("equal", "refused"):
            print(f"case {number}: {outcome}")
    return counted


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    told = parser.parse_args()
    print(dict(main(told.cases, told.first)))
