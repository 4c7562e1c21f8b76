"""Blocks that do what a recovery of activations must survive, drawn at random, and whether any of it passes in silence.

    python tests/hostile.py [--draws 2000] [--seed 0]

A draw is a stack of blocks of one class and shape that do different things: branches on attributes, on data and on the step,
lists that grow, buffers, generators of their own, dropout, in-place changes, views, tied weights, nested checkpointing, hooks,
autocast, and state that nothing can see. It trains for four steps without checkpointing, and again under actions or a
plan. Then outputs, gradients, weights, buffers and random states are equal bit for bit, or something was said: an error that
names the block, or that it fell back in the log.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate.hooks import ModelHook, add_hook_to_module
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import CheckpointError, checkpoint

from onetake.activations.attach import Attachment
from onetake.activations.capture import Capture
from onetake.activations.plan import Action
from onetake.activations.recovery import Recovery
from onetake.activations.units import CaptureError

ROWS, TOKENS, WIDTH = 2, 3, 4
STEPS = 4
GLOBAL_LOG: list[float] = []


class Doubled(torch.autograd.Function):
    """x·2 whose backward reads what it saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.sin())
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (kept,) = ctx.saved_tensors
        return 2 * grad + 0 * kept


class Scaling(ModelHook):
    """An accelerate hook with a state of its own."""

    def __init__(self) -> None:
        self.calls = 0

    def post_forward(self, module: nn.Module, output: Tensor) -> Tensor:
        self.calls += 1
        return output * (1 + self.calls / 8)


class Block(nn.Module):
    """Runs its moves one after the other, each in one of two ways."""

    def __init__(self, moves: list[str], ways: list[bool], seed: int) -> None:
        super().__init__()
        self.moves, self.ways, self.step = moves, ways, 0
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.layer_norm, self.batch_norm = nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH)
        self.slope = nn.PReLU(WIDTH)
        if "spectral" in moves:
            self.bounded = spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.register_buffer("average", torch.ones(WIDTH))
        self.generator = torch.Generator().manual_seed(seed)
        self.numbers, self.counter = np.random.default_rng(seed), itertools.count(1)
        self.seen: list[Tensor] = []
        self.cache: Tensor | None = None
        self.calls = 0
        if "hook" in moves:
            calls = [0]

            def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
                calls[0] += 1
                return output * calls[0]

            self.two.register_forward_hook(hook)
        if "pre_hook" in moves:
            self.two.register_forward_pre_hook(lambda module, args: (args[0].clamp(-1, 1),))
        if "accelerate" in moves:
            add_hook_to_module(self.one, Scaling() if ways[0] else ModelHook())

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        for move, way in zip(self.moves, self.ways, strict=True):
            x = MOVES[move](self, x, text, way)
        return x


Move = Callable[[Block, Tensor, Tensor, bool], Tensor]
MOVES: dict[str, Move] = {}


def move(function: Move) -> Move:
    MOVES[function.__name__] = function
    return function


@move
def order(block: Block, x: Tensor, text: Tensor, way: bool) -> Tensor:
    """Joint attention whose streams are concatenated in an order that an attribute gives."""
    both = torch.cat([text, x] if way else [x, text], 1)
    q, k, v = block.wide(both).chunk(3, -1)
    out = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
    return x + (out[:, -TOKENS:] if way else out[:, :TOKENS])


@move
def swap(block: Block, x: Tensor, text: Tensor, way: bool) -> Tensor:
    one, two = block.one(x).sigmoid(), block.two(x).tanh()
    return one * two.exp() - two if way else two * one.exp() - one


@move
def data(block: Block, x: Tensor, text: Tensor, way: bool) -> Tensor:
    one, two = block.one(x).sin(), block.two(x).cos()
    first, second = (one, two) if bool(x.sum() > 0) == way else (two, one)
    return first * second.square() + second


@move
def by_step(block: Block, x: Tensor, text: Tensor, way: bool) -> Tensor:
    one, two = block.one(x).sin(), block.two(x).cos()
    first, second = (one, two) if (block.step % 2 == 0) == way else (two, one)
    return first.exp() * second + first


@move
def by_step_scale(block: Block, x: Tensor, text: Tensor, way: bool) -> Tensor:
    return (block.one(x) * (1 + block.step * way)).sin() * 0.5


@move
def roll(block: Block, x: Tensor, text: Tensor, way: bool) -> Tensor:
    return F.gelu(block.one(x.roll(block.step if way else int(x.sum() > 0), 1)))


@move
def grows(block: Block, x: Tensor, text: Tensor, way: bool) -> Tensor:
    block.seen.append(x.detach().mean(1) if way else x.detach().amax(1))
    return x * torch.stack(block.seen).mean(0)[:, None].cos()


@move
def stacks(block: Block, x: Tensor, text: Tensor, way: bool) -> Tensor:
    parts = []
    for layer in (block.one, block.two, block.one)[: 2 + (block.step > 1 or way)]:
        parts.append(layer(x).sin())
    return torch.stack(parts).exp().mean(0)


@move
def averages(block: Block, x: Tensor, text: Tensor, way: bool) -> Tensor:
    target = block.average if way else block.average.data
    target.mul_(0.5).add_(x.detach().mean((0, 1)), alpha=0.5)
    return (x * block.average).sin()


@move
def reassigns(block: Block, x: Tensor, text: Tensor, way: bool) -> Tensor:
    block.average = 0.5 * block.average + x.detach().mean((0, 1))
    return block.one(x * block.average)


@move
def later(block: Block, x: Tensor, text: Tensor, way: bool) -> Tensor:
    """State that begins to change after the first step."""
    if block.step > 1:
        if way:
            block.average.mul_(1.5)
        else:
            block.calls += 1
    return (block.one(x) * block.average * (1 + block.calls)).sin()


@move
def own_noise(block: Block, x: Tensor, text: Tensor, way: bool) -> Tensor:
    if way:
        return x * torch.rand(x.shape, generator=block.generator)
    return x * (torch.empty(x.shape).bernoulli_(0.5, generator=block.generator) + 0.1)


@move
def numpy_noise(block: Block, x: Tensor, text: Tensor, way: bool) -> Tensor:
    factor = block.numbers.random() if way else np.random.random()
    return block.one(x).sin() * factor


@move
def python_noise(block: Block, x: Tensor, text: Tensor, way: bool) -> Tensor:
    return block.one(x).sin() * random.random()


@move
def dropout(block: Block, x: Tensor, text: Tensor, way: bool) -> Tensor:
    x = F.dropout(block.one(x), 0.3)
    return F.scaled_dot_product_attention(x, x, x, dropout_p=0.3 * way)


@move
def dropout_by_step(block: Block, x: Tensor, text: Tensor, way: bool) -> Tensor:
    q = block.one(x)[:, None]
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.4 * (block.step % 2 == way))[:, 0]


@move
def in_place(block: Block, x: Tensor, text: Tensor, way: bool) -> Tensor:
    y = block.one(x)
    y.add_(1.0) if way else y.mul_(0.5)
    return y.sin() * y


@move
def in_place_either(block: Block, x: Tensor, text: Tensor, way: bool) -> Tensor:
    """A tensor that was added is overwritten, and another one in the next step."""
    one, two = torch.zeros(WIDTH) + 1, torch.zeros(WIDTH) + 1
    first = (block.one(x) + one + two).sin()
    (one if (block.step % 2 == 0) == way else two).add_(2)
    return (first + one).exp() + block.two(x + two).cos()


@move
def in_place_view(block: Block, x: Tensor, text: Tensor, way: bool) -> Tensor:
    y = block.wide(x).clone()
    y[..., : WIDTH * (1 + way)] *= 0.5
    return block.narrow(y.sin())


@move
def in_place_input(block: Block, x: Tensor, text: Tensor, way: bool) -> Tensor:
    text.mul_(0.9) if way else text.data.mul_(0.9)
    return x + block.one(text.mean(1, keepdim=True))


@move
def views(block: Block, x: Tensor, text: Tensor, way: bool) -> Tensor:
    y = block.wide(x).view(ROWS, TOKENS, 3, WIDTH).transpose(1, 2)
    y = y.transpose(2, 3).contiguous().transpose(2, 3) if way else y
    return (y[:, 0] * y[:, 1].sigmoid() + y.unbind(1)[2]).reshape(x.shape)


@move
def tied(block: Block, x: Tensor, text: Tensor, way: bool) -> Tensor:
    y = F.gelu(block.one(block.one(x)))
    return F.linear(y, block.one.weight.t() if way else block.one.weight)


@move
def nested(block: Block, x: Tensor, text: Tensor, way: bool) -> Tensor:
    return (
        checkpoint(lambda y: F.silu(block.one(y)) * block.two(y).exp(), x, use_reentrant=False) if way else block.one(x)
    )


@move
def counts(block: Block, x: Tensor, text: Tensor, way: bool) -> Tensor:
    block.calls += 1
    return block.one(x) * (block.calls if way else 1)


@move
def hidden_counter(block: Block, x: Tensor, text: Tensor, way: bool) -> Tensor:
    """State that cannot be reached from Python."""
    return (block.one(x) * next(block.counter)).sin()


@move
def global_list(block: Block, x: Tensor, text: Tensor, way: bool) -> Tensor:
    GLOBAL_LOG.append(float(way))
    return (block.one(x) * len(GLOBAL_LOG)).sin()


@move
def caches(block: Block, x: Tensor, text: Tensor, way: bool) -> Tensor:
    if block.cache is None or (way and block.step == 2):
        block.cache = x.detach().mean(1, keepdim=True).sin()
    return block.one(x) * block.cache.exp()


@move
def shows(block: Block, x: Tensor, text: Tensor, way: bool) -> Tensor:
    block.inner = block.wide(x)
    return block.narrow(F.silu(block.inner))


@move
def through_numpy(block: Block, x: Tensor, text: Tensor, way: bool) -> Tensor:
    scale = torch.zeros(WIDTH)
    scale.numpy()[:] = 2 + way
    return (block.one(x) * scale).sin() * scale


@move
def swaps_memory(block: Block, x: Tensor, text: Tensor, way: bool) -> Tensor:
    y = torch.ones(WIDTH) * 2
    z = (block.one(x) * y).sin()
    if way:
        y.data = torch.full((WIDTH,), 3.0)
    return z * y


@move
def turns(block: Block, x: Tensor, text: Tensor, way: bool) -> Tensor:
    y = torch.ones(WIDTH, WIDTH).tril() * 2
    if (block.step % 2 == 0) == way:
        y.t_()
    return block.one(x) @ y * 0.1


@move
def autocast(block: Block, x: Tensor, text: Tensor, way: bool) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=way):
        return F.gelu(block.narrow(block.wide(x))).to(x.dtype)


@move
def complex_numbers(block: Block, x: Tensor, text: Tensor, way: bool) -> Tensor:
    z = torch.view_as_complex(block.one(x).unflatten(-1, (-1, 2)).contiguous())
    z = z.conj() * torch.polar(torch.ones(2), torch.arange(2.0)) if way else z * z.conj()
    return torch.view_as_real(z * z.conj().sin()).flatten(-2)


@move
def routes(block: Block, x: Tensor, text: Tensor, way: bool) -> Tensor:
    rows = x.flatten(0, 1)
    to_one = rows.sum(-1) > 0
    out = torch.zeros_like(rows)
    out[to_one] = block.one(rows[to_one])
    out[~to_one] = block.two(rows[~to_one]).sin()
    return out.view_as(x)


@move
def sorts(block: Block, x: Tensor, text: Tensor, way: bool) -> Tensor:
    place = x.detach().sum(-1).argsort(1)[..., None].expand_as(x)
    return block.one(x.gather(1, place)).sin() * x.gather(1, place.flip(1) if way else place)


@move
def normalises(block: Block, x: Tensor, text: Tensor, way: bool) -> Tensor:
    return block.batch_norm(x.flatten(0, 1)).view_as(x) if way else block.layer_norm(x)


@move
def prelu(block: Block, x: Tensor, text: Tensor, way: bool) -> Tensor:
    return block.slope(block.one(x).mT).mT


@move
def stops(block: Block, x: Tensor, text: Tensor, way: bool) -> Tensor:
    with torch.no_grad():
        scale = block.two(x).sigmoid()
    return block.one(x) * (scale if way else block.two(x).detach().sin())


@move
def custom(block: Block, x: Tensor, text: Tensor, way: bool) -> Tensor:
    return Doubled.apply(block.one(x)) * 0.5  # type: ignore[no-any-return]


@move
def plain(block: Block, x: Tensor, text: Tensor, way: bool) -> Tensor:
    return x + block.narrow(F.silu(block.wide(block.layer_norm(x))))


@move
def spectral(block: Block, x: Tensor, text: Tensor, way: bool) -> Tensor:
    return block.bounded(x).sin()


MOVES |= {"hook": swap, "pre_hook": swap, "accelerate": swap}


class Host(nn.Module):
    """A stack that checkpoints in diffusers' way."""

    def __init__(self, blocks: list[Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, 1)
        self._function: Callable[..., Any] | None = None

    def enable_gradient_checkpointing(self) -> None:
        self._set_gradient_checkpointing()

    def _set_gradient_checkpointing(self, enable: bool = True, gradient_checkpointing_func: Any = checkpoint) -> None:
        self._function = gradient_checkpointing_func if enable else None

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, text) if self._function is None else self._function(block, x, text)
        return self.head(x).sum()


@dataclass(frozen=True, kw_only=True)
class Draw:
    """`how` is a letter for each block in turn, or the memory of a plan."""

    moves: tuple[str, ...]
    ways: tuple[tuple[bool, ...], ...]  # of each block
    how: str
    seed: int

    def model(self) -> Host:
        torch.manual_seed(self.seed)
        GLOBAL_LOG.clear()
        return Host([Block([*self.moves], [*ways], self.seed + i) for i, ways in enumerate(self.ways)]).train()


HOWS = ["H", "E", "A", "P", "R", "HEAPR", "RE", "PA", "1.02x", "0%", "90%"]


def drawn(random_: random.Random) -> Draw:
    moves = random_.choices([*MOVES], k=random_.randint(1, 4))
    ways = tuple(tuple(random_.random() < 0.5 for _ in moves) for _ in range(random_.randint(2, 5)))
    return Draw(moves=tuple(moves), ways=ways, how=random_.choice(HOWS), seed=random_.randrange(1 << 16))


@st.composite
def draws(draw: Any) -> Draw:
    moves = draw(st.lists(st.sampled_from([*MOVES]), min_size=1, max_size=4))
    way = st.tuples(*[st.booleans() for _ in moves])
    ways = draw(st.lists(way, min_size=2, max_size=5))
    return Draw(moves=tuple(moves), ways=tuple(ways), how=draw(st.sampled_from(HOWS)), seed=draw(st.integers(0, 99)))


def trained(model: Host, step: Callable[[Callable[[], None]], None]) -> list[dict[str, Any]]:
    """What is to be equal after each step."""
    states = []
    for number in range(STEPS):
        torch.manual_seed(number)
        random.seed(number)
        np.random.seed(number)
        x = torch.randn(ROWS, TOKENS, WIDTH).requires_grad_()
        text = torch.randn(ROWS, 2, WIDTH)
        for block in model.blocks:
            block.step = number  # type: ignore[assignment]
        state: dict[str, Any] = {}

        def run() -> None:
            loss = model(x, text)  # noqa: B023
            loss.backward()
            state["loss"] = loss.detach()  # noqa: B023

        step(run)
        state |= {"input": x.grad, "text": text.clone(), "random": torch.get_rng_state()}
        state |= {f"grad {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.sub_(0.05 * p.grad)
                    p.grad = None
        state |= {n: t.clone() for n, t in model.state_dict().items()}
        for i, block in enumerate(model.blocks):
            state[f"own {i}"] = block.generator.get_state()
            state[f"python {i}"] = (block.calls, len(block.seen), str(block.numbers.bit_generator.state))
        state["python"] = random.getstate(), np.random.get_state()[1].tobytes(), len(GLOBAL_LOG)  # type: ignore[union-attr]
        states.append(state)
    return states


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return one == other


class Listener(logging.Handler):
    """Counts what recovery says."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def verdict(draw: Draw) -> str:
    """``equal``, ``fell back`` (equal, and the log says so), ``refused: …``, or ``silent: …`` with what differs.

    ``untrainable`` where autograd itself has no gradient: what it saved was changed in place.
    """
    try:
        expected = trained(draw.model(), lambda run: run())
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return "untrainable"
    model, listener = draw.model(), Listener()
    logger = logging.getLogger("onetake")
    logger.addHandler(listener)
    try:
        if draw.how[0].isalpha():
            plan = {f"blocks.{i}": Action(draw.how[i % len(draw.how)]) for i in range(len(draw.ways))}
            attachment = Attachment(model, Capture(lambda unit, _: plan[unit.name]))
            states = trained(model, lambda run: run())
            attachment.detach()
        else:
            recovery = Recovery(model, memory=draw.how)

            def step(run: Callable[[], None]) -> None:
                with recovery.step(strict=False):
                    run()

            states = trained(model, step)
    except (CaptureError, CheckpointError) as error:
        return f"refused: {error}"
    finally:
        logger.removeHandler(listener)
    for number, (state, right) in enumerate(zip(states, expected, strict=True)):
        wrong = [name for name in right if not (name in state and same(right[name], state[name]))]
        if wrong:
            return f"silent: step {number}: {', '.join(wrong[:5])}"
    return "fell back" if listener.said else "equal"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("onetake").propagate = False
    random_, counts = random.Random(arguments.seed), Counter[str]()
    while counts.total() - counts["untrainable"] < arguments.draws:
        draw = drawn(random_)
        state = random_.getstate()
        found = verdict(draw)
        random_.setstate(state)
        kind = found.partition(":")[0]
        counts[kind] += 1
        if kind == "silent":
            print(found, draw, flush=True)
    del counts["untrainable"]
    print(f"{arguments.draws} drawn models: " + ", ".join(f"{count} {kind}" for kind, count in counts.most_common()))
    print(f"silent differences: {counts['silent']}")


if __name__ == "__main__":
    main()
