"""No block changes a gradient in silence: drawn models, and the cases that once did."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from torch import nn
from torch.utils.checkpoint import checkpoint

from hostile import HOWS, MOVES, Block, Draw, Host, draws, trained, verdict
from onetake.activations.capture import Capture
from onetake.activations.plan import Action
from onetake.activations.recovery import Recovery
from onetake.activations.units import CaptureError, Unit

ODD = ((True,), (False,), (True,), (False,), (True,), (False,))
QUIET = settings(deadline=None, derandomize=True, suppress_health_check=[*HealthCheck])


@pytest.fixture(autouse=True)
def silent():
    """Drawn models make recovery say much."""
    logger = logging.getLogger("onetake")
    logger.propagate = False
    yield
    logger.propagate = True


def checked(draw: Draw) -> None:
    assert verdict(draw).partition(":")[0] in ("equal", "fell back", "refused", "untrainable"), draw


@settings(QUIET, max_examples=150)
@given(draws())
@example(Draw(moves=("order",), ways=ODD, how="1.02x", seed=0))
@example(Draw(moves=("normalises",), ways=((True,), (True,), (False,), (True,), (True,)), how="PA", seed=27978))
def test_drawn_models(draw: Draw):
    checked(draw)


@pytest.mark.slow
@settings(QUIET, max_examples=2000)
@given(draws())
def test_two_thousand_drawn_models(draw: Draw):
    checked(draw)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(
    "move", ["order", "swap", "data", "grows", "stacks", "averages", "normalises", "spectral", "own_noise"]
)
def test_what_once_was_wrong(move, how):
    """Blocks that differ by an attribute, data or a list, under a template taken for proven; and state that measuring changed."""
    assert verdict(Draw(moves=(move,), ways=ODD, how=how, seed=3)) in ("equal", "fell back")


@pytest.mark.parametrize("move", [*MOVES])
def test_every_move_alone(move):
    for how in ("HEAPR", "0%"):
        checked(Draw(moves=(move,), ways=ODD, how=how, seed=1))


def test_a_plain_stack_needs_no_fallback():
    for how in HOWS:
        draw = Draw(moves=("plain", "views", "custom", "prelu"), ways=((True,) * 4, (True,) * 4), how=how, seed=0)
        assert verdict(draw) == "equal"


def test_blocks_that_differ_have_templates_of_their_own():
    """The second kind strays once, and follows its own template from then on."""
    draw = Draw(moves=("order",), ways=ODD, how="E", seed=0)
    model = draw.model()
    from onetake.activations.attach import Attachment

    attachment = Attachment(model, Capture(lambda *_: Action.ELEMENTWISE))
    executed: list[str] = []

    def step(run: Any) -> None:
        run()
        executed.append("".join(unit.executed for unit in attachment.units))

    trained(model, step)
    assert executed == ["ERERER", "EEEEEE", "EEEEEE", "EEEEEE"]


def test_measuring_leaves_the_model_as_it_was():
    """Counters, averages, generators and lists after steps that measured are those of the same steps without."""
    moves = ("normalises", "averages", "own_noise", "grows", "counts")
    draw = Draw(moves=moves, ways=((True,) * 5, (True,) * 5), how="90%", seed=0)
    model = draw.model()
    recovery = Recovery(model, memory="90%")

    def step(run: Any) -> None:
        with recovery.step(strict=False):
            run()

    trained(model, step)
    for block in model.blocks:
        assert int(block.batch_norm.num_batches_tracked) == block.calls == len(block.seen) == 4  # type: ignore[union-attr]


def test_a_budget_that_would_need_to_run_a_stateful_block_again_is_refused():
    model = Draw(moves=("normalises",), ways=((True,), (True,)), how="", seed=0).model()
    recovery = Recovery(model, memory=1)
    with pytest.raises(CaptureError, match=r"2 blocks cannot be recomputed.*blocks\.0 writes to .*num_batches_tracked"):
        trained(model, lambda run: _inside(recovery, run))


def _inside(recovery: Recovery, run: Any) -> None:
    with recovery.step(strict=False):
        run()


def test_state_that_begins_to_change_later_is_refused_not_doubled():
    block = Block(["later"], [True], 0)
    unit, capture = Unit(name="blocks.0", module=block), Capture(lambda *_: Action.RECOMPUTE)
    x, text = torch.randn(2, 3, 4, requires_grad=True), torch.randn(2, 2, 4)
    capture.run(unit, checkpoint, block, x, text).sum().backward()
    block.step = 2
    with pytest.raises(CaptureError, match=r"writes to \.average in its forward, which it did not do at first"):
        capture.run(unit, checkpoint, block, x, text)


def test_a_replay_is_compared_by_values():
    """Nothing that can be reached from the block tells of this counter."""
    block = Block(["hidden_counter"], [True], 0)
    unit, capture = Unit(name="blocks.0", module=block), Capture(lambda *_: Action.RECOMPUTE)
    out = capture.run(unit, checkpoint, block, torch.randn(2, 3, 4, requires_grad=True), torch.randn(2, 2, 4))
    assert unit.changes == ""
    with pytest.raises(CaptureError, match=r"blocks\.0 made other values again"):
        out.sum().backward()


def test_the_host_is_what_attachments_take():
    assert isinstance(Host([Block(["plain"], [True], 0)]).blocks, nn.ModuleList)
