"""Units: exact actions give the bits of no checkpointing, cost what they say, and leave nothing behind."""

from __future__ import annotations

import gc
import logging
from contextlib import suppress

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from models import DECODERS, TRANSFORMERS, Alive, decoder, equal, gradients, planned, replan, tokens, transformer
from onetake.activations.capture import Capture
from onetake.activations.plan import Action
from onetake.activations.units import CaptureError, Unit

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing`:FutureWarning"
)  # PEFT 0.21 asks transformers 5.24
EXACT = ["HHHH", "EEEE", "AAAA", "PPPP", "PPPP", "RRRR", "HERE", "AEHP"]
IDS = tokens()


def lora(model: nn.Module, dropout: float = 0.0, only: str | None = None) -> nn.Module:
    """On linear layers of every kind, or on those whose names match `only`."""
    targets = ["q_proj", "v_proj", "up_proj", "gate_up_proj", "down_proj"]
    with torch.random.fork_rng():
        torch.manual_seed(5)
        found = [t for t in targets if any(name.endswith(t) for name, _ in model.named_modules())]
        config = LoraConfig(r=4, target_modules=only or found, lora_dropout=dropout, init_lora_weights=False)
        return get_peft_model(model, config).train()


@pytest.mark.parametrize("kind", ["full", "lora"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", DECODERS)
def test_15_exact_actions_give_the_bits_of_no_checkpointing(family, dtype, kind):
    """With attention dropout, and LoRA's own, drawn in the forward and again in a replay."""
    model = decoder(family, dtype=dtype, dropout=0.2)
    model = lora(model, dropout=0.2) if kind == "lora" else model

    def loss():
        return model(IDS, labels=IDS).loss

    plain = gradients(model, loss)
    units = (attachment := planned(model, "RRRR")).units
    for actions in EXACT:
        replan(attachment, actions)
        before = [unit.replays for unit in units]
        assert equal(gradients(model, loss), plain), actions
        assert [unit.executed for unit in units] == list(actions)
        assert [unit.replays - b for unit, b in zip(units, before, strict=True)] == [a == "R" for a in actions]
    attachment.detach()
    assert equal(gradients(model, loss), plain)
    assert [unit.forwards for unit in units] == [len(EXACT)] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", TRANSFORMERS)
def test_exact_actions_on_diffusion_transformers(family, dtype):
    model, arguments = transformer(family, dtype)

    def loss():
        return model(**arguments)[0].float().square().sum()

    plain = gradients(model, loss)
    attachment = planned(model, "R" * len(planned_units(model)))
    for pattern in ("H", "E", "A", "P", "R", "HER", "AEHRP"):
        actions = (pattern * 4)[: len(attachment.units)]
        replan(attachment, actions)
        assert equal(gradients(model, loss), plain), actions
        assert "".join(unit.executed for unit in attachment.units) == actions
    replays = sum((pattern * 4)[: len(attachment.units)].count("R") for pattern in ("R", "HER", "AEHRP"))
    assert sum(unit.replays for unit in attachment.units) == replays


def planned_units(model: nn.Module) -> list[Unit]:
    attachment = planned(model, "R" * sum(len(c) for c in model.children() if isinstance(c, nn.ModuleList)))
    attachment.detach()
    return attachment.units


def test_autocast_is_the_forwards_in_the_replay_and_its_weight_casts_are_not_kept():
    """Backward runs outside of autocast. E recomputes the bfloat16 copies of float32 weights; H keeps them, as torch does."""
    model = decoder()

    def loss():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(IDS, labels=IDS).loss

    plain = gradients(model, loss)
    attachment = planned(model, "HERE")
    assert equal(gradients(model, loss), plain)
    layer = attachment.units[0].module
    casts = sum(2 * p.numel() for p in layer.parameters() if p.ndim == 2)
    assert attachment.units[0].captured - attachment.units[1].captured > casts


@pytest.mark.parametrize("kind", ["full", "lora"])
@pytest.mark.parametrize("actions", ["HHHH", "EEEE", "AAAA", "PPPP", "LLLL", "HERL"])
def test_22_captured_bytes_are_the_memory_really_held(actions, kind):
    """What is alive after a forward beyond what is under R, counted by watching every block of memory that torch makes.

    Under R are the few values that a replay is compared with, and of these the fewer the more is kept.
    """
    model = decoder(dtype=torch.bfloat16)
    model = lora(model) if kind == "lora" else model
    attachment = planned(model, actions)

    def alive() -> int:
        with Alive() as watch:
            loss = model(IDS, labels=IDS).loss
        held = watch.bytes
        del loss
        return held - sum(unit.sampled for unit in attachment.units)

    alive()  # the first forward of a shape records it
    held = alive()
    captured = [unit.captured for unit in attachment.units]
    replan(attachment, "RRRR")
    assert held - alive() == sum(captured)
    assert all((size == 0) == (action in "RP") for size, action in zip(captured, actions, strict=True))


def test_what_exact_actions_keep_of_a_llama_layer():
    """bf16, LoRA on nothing: bytes by arithmetic. E keeps q, k, v, attention's result and statistics, the middle of the residual
    stream, gate and up: no norm, no product, no float32 copy. A keeps attention's result and statistics."""
    model = decoder(dtype=torch.bfloat16)
    attachment = planned(model, "EEEE")
    model(IDS, labels=IDS)
    rows, width, kv, mlp, heads = IDS.numel(), 32, 16, 88, 4
    keep = rows * (width + 2 * kv + width + width + 2 * mlp) * 2 + rows * heads * 4  # log-sum-exp is float32
    assert [unit.captured for unit in attachment.units] == [keep] * 4
    replan(attachment, "AAAA")
    model(IDS, labels=IDS)
    assert [unit.captured for unit in attachment.units] == [rows * width * 2 + rows * heads * 4] * 4
    replan(attachment, "HHHH")
    model(IDS, labels=IDS)
    assert keep < 0.5 * attachment.units[0].captured


def test_no_matrix_product_runs_again_under_e():
    model = decoder(dropout=0.2)

    def backward(actions: str | None) -> int:
        if actions is not None:
            replan(attachment, actions)
        loss = model(IDS, labels=IDS).loss
        with FlopCounterMode(display=False) as count:
            loss.backward()
        return count.get_total_flops()

    plain = backward(None)
    attachment = planned(model, "EEEE")
    assert backward("EEEE") == backward("HHHH") == plain
    one, two = backward("RHEH") - plain, backward("RHRE") - plain
    assert two == 2 * one > 0
    with FlopCounterMode(display=False) as count:
        model.model.layers[0].mlp(torch.zeros(2, 17, 32))
    down = 2 * IDS.numel() * 32 * 88  # torch stops a replay before the last product, whose result nobody saved
    assert one > count.get_total_flops() - down


def test_attention_alone_does_not_run_again_under_a():
    model = decoder()
    attachment = planned(model, "AAAA")

    class Attention(TorchDispatchMode):
        forwards = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.forwards += func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
            return func(*args, **(kwargs or {}))

    def backward(actions: str) -> tuple[int, int]:
        """Attention's forwards during backward, and the FLOPs of all products then."""
        replan(attachment, actions)
        loss = model(IDS, labels=IDS).loss
        with Attention() as attention, FlopCounterMode(display=False) as count:
            loss.backward()
        by_operation = count.get_flop_counts()["Global"]  # newer versions count attention's, too
        return attention.forwards, sum(flops for op, flops in by_operation.items() if "attention" not in str(op))

    (replayed, most), (none, some), (_, least) = backward("RRRR"), backward("AAAA"), backward("EEEE")
    assert (replayed, none) == (4, 0)
    assert most == some > least
    assert backward("PPPP") == (4, most)


def test_a_pruned_replay_leaves_out_what_backward_does_not_read():
    """Under LoRA the product with the last frozen weight, whose result is only added to; a whole replay cannot stop before it."""
    model = lora(decoder())
    attachment = planned(model, "RRRR")

    def backward(actions: str) -> int:
        replan(attachment, actions)
        loss = model(IDS, labels=IDS).loss
        with FlopCounterMode(display=False) as count:
            loss.backward()
        return count.get_total_flops()

    last = 2 * IDS.numel() * 32 * 88
    assert backward("RRRR") - backward("PPPP") == 4 * last
    assert [unit.replays for unit in attachment.units] == [1] * 4


@pytest.mark.parametrize("actions", ["HHHH", "EEEE", "AAAA", "PPPP", "RRRR", "LLLL"])
def test_19_memory_returns_after_an_aborted_backward(actions):
    """By reference counting alone, without the cycle collector."""
    model = decoder()
    planned(model, actions)
    model(IDS, labels=IDS).loss.backward()
    model.zero_grad()
    gc.collect()
    gc.disable()
    try:
        with Alive() as watch:
            loss = model(IDS, labels=IDS).loss
            handle = model.model.layers[1].mlp.up_proj.weight.register_hook(lambda _: 1 / 0)
            with suppress(ZeroDivisionError):  # pytest.raises would hold the traceback, and with it the graph
                loss.backward()
            assert model.model.layers[0].mlp.up_proj.weight.grad is None  # it did stop
            handle.remove()
            model.zero_grad()
            del loss
            torch.ones(1, requires_grad=True).sum().backward()  # torch's own queue holds what it aborted until the next
        assert watch.bytes == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("actions", ["HHHH", "EEEE", "AAAA", "PPPP", "LLLL", "RRRR"])
def test_a_graph_kept_for_a_second_backward_gives_the_same_again(actions):
    model = decoder()
    planned(model, actions)
    loss = model(IDS, labels=IDS).loss
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(model.parameters()))
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("actions", ["EEEE", "AAAA", "PPPP", "LLLL"])
def test_a_backward_of_a_part_of_the_graph_spoils_nothing(actions):
    model = decoder()
    planned(model, actions)
    parameters = dict(model.named_parameters())
    loss = model(IDS, labels=IDS).loss
    whole = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True)
    for part in ("model.layers.3.mlp.down_proj.weight", "model.layers.1.self_attn.k_proj.weight"):
        torch.autograd.grad(loss, [parameters[part]], retain_graph=True)
    assert all(map(torch.equal, torch.autograd.grad(loss, list(parameters.values())), whole))


@pytest.mark.parametrize("kept", ["HHHH", "EEEE", "AAAA", "PPPP", "LLLL"])
def test_what_was_kept_can_be_dropped_before_backward(kept):
    """The late decision: memory comes back at once, and backward replays to the bit."""
    model = decoder(dropout=0.2)
    attachment = planned(model, "RRRR")
    plain = gradients(model, lambda: model(IDS, labels=IDS).loss)
    replan(attachment, kept)
    freed = []

    def loss():
        with Alive() as watch:
            value = model(IDS, labels=IDS).loss
        before, captured = watch.bytes, attachment.units[2].captured
        reference = attachment.units[2].region
        region = reference and reference()
        assert region is not None
        region.drop()
        del region
        freed.append(before - watch.bytes == captured > 0)
        return value

    gradients(model, loss)
    result = gradients(model, loss)
    assert freed[1]
    assert [unit.replays for unit in attachment.units] == [1, 1, 3, 1]
    assert kept == "LLLL" or equal(result, plain)


class Block(nn.Module):
    """Returns its inner tensor, too, and can be told to take another path."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)
        self.detour = False

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inner = self.up(x)
        wide = inner.exp() if self.detour else nn.functional.silu(inner)
        return self.down(wide).sin() + x, inner


def run(
    block: Block, action: str, x: torch.Tensor, capture: Capture | None = None
) -> tuple[tuple[torch.Tensor, torch.Tensor], Unit]:
    unit = Unit(name="blocks.0", module=block)
    return (capture or Capture(lambda *_: Action(action))).run(unit, checkpoint, block, x), unit


@pytest.mark.parametrize("action", ["H", "E", "L", "A", "P"])
@pytest.mark.parametrize("victim", ["inner", "input"])
def test_in_place_changes_are_detected(action, victim):
    """Saved-tensor hooks switch autograd's own check off. Under L `inner` is a code, under A and P made again."""
    block, x = Block(), torch.randn(3, 8)
    (out, inner), _ = run(block, action, x.requires_grad_() * 1)
    with torch.no_grad():
        (inner if victim == "inner" else block.up.weight).mul_(2)
    if action in "LAP" and victim == "inner":
        out.sum().backward()
        return
    with pytest.raises(CaptureError, match=r"blocks\.0: .* changed in place between forward and backward"):
        out.sum().backward()


def test_tensors_changed_inside_a_unit_are_never_recomputed_from():
    """`scale` is overwritten after it was added: E must not add it again."""

    class Overwriting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scale = torch.zeros(x.shape[-1]) + 2
            first = self.up(x) + scale
            scale.add_(1)
            return (first.sin() * self.up(first).exp()).cos()

    block, x = Overwriting(), torch.randn(3, 8, requires_grad=True)
    (plain,) = torch.autograd.grad(block(x).sum(), x)
    capture = Capture(lambda *_: Action.ELEMENTWISE)
    for _ in range(2):
        out = capture.run(Unit(name="b", module=block), checkpoint, block, x)
        assert torch.equal(torch.autograd.grad(out.sum(), x)[0], plain)


def test_another_dataflow_on_the_same_shapes_falls_back_to_replay_and_says_so_once(caplog):
    """The unit then has a template of its own; what strays from that, too, goes on being recomputed."""
    block, x = Block(), torch.randn(3, 8, requires_grad=True)
    capture = Capture(lambda *_: Action.ELEMENTWISE)
    run(block, "E", x, capture)[0][0].sum().backward()
    executed = []
    with caplog.at_level(logging.WARNING):
        for block.detour in (True, True, False, True, False):
            plain = torch.autograd.grad(block(x)[0].sum(), x)[0]
            (out, _), unit = run(block, "E", x, capture)
            assert torch.equal(torch.autograd.grad(out.sum(), x)[0], plain)
            assert (unit.replays, unit.captured > 0) == ((1, False) if unit.executed == "R" else (0, True))
            executed.append(str(unit.executed))
    assert executed == ["R", "E", "R", "E", "R"]
    assert [r.message.split(";")[1] for r in caplog.records] == [" such forwards are recomputed (R)"]


def test_units_with_lora_in_different_places_have_templates_of_their_own():
    """`gate_proj` and `up_proj` have one shape; what runs when differs."""
    model = lora(decoder(layers=3), only=r".*layers\.([01]\.mlp\.gate_proj|2\.mlp\.up_proj)")
    plain = gradients(model, lambda: model(IDS, labels=IDS).loss)
    attachment = planned(model, "EEE")
    for _ in range(2):
        assert equal(gradients(model, lambda: model(IDS, labels=IDS).loss), plain)
        assert [unit.executed for unit in attachment.units] == ["E"] * 3


def test_compression_changes_only_backward_and_by_little():
    model = decoder(dtype=torch.bfloat16)
    exact = gradients(model, lambda: model(IDS, labels=IDS).loss)
    attachment = planned(model, "LLLL")
    for _ in range(2):
        lossy = gradients(model, lambda: model(IDS, labels=IDS).loss)
        assert torch.equal(lossy.pop("loss"), exact["loss"])
        error = sum((lossy[n] - exact[n]).double().square().sum() for n in lossy) ** 0.5
        size = sum(exact[n].double().square().sum() for n in lossy) ** 0.5
        assert 1e-4 < float(error / size) < 0.03
    lossy_bytes = attachment.units[0].captured
    replan(attachment, "EEEE")
    model(IDS, labels=IDS)
    halved = IDS.numel() * 2 * (88 - 4)  # gate and up: 88 bytes less a row, and a scale of 4 bytes more
    assert attachment.units[0].captured - lossy_bytes == halved


def test_values_without_a_code_are_kept_exactly(caplog):
    block, x = Block(), torch.randn(3, 8)
    block.up.weight.data[0, 0] = float("inf")
    with caplog.at_level(logging.WARNING):
        (out, _), unit = run(block, "L", x.requires_grad_() * 1)
    assert unit.captured == 3 * (24 + 8) * 4  # what `up` and `down` return
    assert "not finite" in caplog.text
    del out
