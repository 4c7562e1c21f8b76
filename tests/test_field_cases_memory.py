"""The field's cases about language models and activation memory, 13 to 22; the number is the case's.

15, 17, 18, 19, 20 and 22 stand, under their numbers, where their subject is tested: test_capture, test_attach, test_recovery.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from models import decoder, equal, gradients, planned, tokens
from onetake.activations.plan import MIB, Action
from onetake.activations.recovery import Recovery

IDS = tokens()
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


def loss_of(model: nn.Module, ids: Tensor = IDS) -> Callable[[], Tensor]:
    return lambda: model(ids, labels=ids).loss


def in_step(recovery: Recovery, model: nn.Module, ids: Tensor = IDS) -> dict[str, Tensor]:
    with recovery.step():
        return gradients(model, loss_of(model, ids))


def test_13_a_long_completion_is_recomputed_until_its_own_shape_is_measured():
    """What was decided for short micro-batches is not applied to one that needs more; short ones then go on as before."""
    model, long = decoder(), tokens(2, 60)
    plain = gradients(model, loss_of(model, long))
    recovery = Recovery(model, memory="100%")
    in_step(recovery, model)
    in_step(recovery, model)
    assert Action.RECOMPUTE not in {unit.executed for unit in recovery.units}
    assert equal(in_step(recovery, model, long), plain)
    assert {unit.executed for unit in recovery.units} == {Action.RECOMPUTE}
    assert recovery.report()["replays"] == 4
    in_step(recovery, model)
    assert recovery.report()["replays"] == 0


@pytest.mark.parametrize("built", ["by the user", "by the trainer"])
def test_14_adapters_on_a_frozen_model_are_trained(built):
    """The first unit's input needs no gradient; adapters may be there when recovery attaches, or come later."""
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)

    def adapted(model: Any) -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(5)
            return get_peft_model(model, config).train()

    plain_model = adapted(decoder())
    plain = gradients(plain_model, loss_of(plain_model))
    if built == "by the user":
        model = adapted(decoder())
        recovery = Recovery(model, memory="100%")
    else:
        base = decoder()
        recovery = Recovery(base, memory="100%")
        model = adapted(base)
    for _ in range(2):  # measured, then planned
        assert equal(in_step(recovery, model), plain)
    assert all("lora" in name for name in plain if name != "loss")


@pytest.mark.parametrize("actions", ["HHHH", "EEEE", "RRRR"])
def test_16_hooks_of_modules_inside_units_count_in_backward(actions):
    """One that changes its module's output: recomputing without it would give other gradients, or none."""
    model = decoder()
    for layer in model.model.layers:
        layer.mlp.down_proj.register_forward_hook(lambda module, given, out: out.sin())
    plain = gradients(model, loss_of(model))
    planned(model, actions)
    assert equal(gradients(model, loss_of(model)), plain)


def test_16_a_foreign_checkpointing_function_is_refused_not_replaced():
    model = decoder()
    model._set_gradient_checkpointing(True, lambda function, *args: function(*args))
    with pytest.raises(ValueError, match="which recovery would have to replace"):
        Recovery(model, memory=0)


def test_21_the_report_sets_the_peak_foretold_beside_the_one_measured():
    """By each rank of its own process, every step that has a plan."""
    model = decoder()
    recovery = Recovery(model, memory="100%")
    in_step(recovery, model)
    assert "predicted_peak_mib" not in recovery.report()  # the first step measures
    in_step(recovery, model)
    report, plan = recovery.report(), recovery.plan
    assert plan is not None
    assert report["predicted_peak_mib"] * MIB == recovery.profile.buckets[0].peak + plan.bytes
    assert report["peak_mib"] == pytest.approx(report["predicted_peak_mib"], rel=0.05)
