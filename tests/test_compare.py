"""Actions against recomputing: what is compared is everything that trains."""

from __future__ import annotations

import warnings

import torch
from peft import LoraConfig, get_peft_model

from models import decoder, tokens
from onetake.activations.compare import compare
from onetake.activations.recovery import Recovery

IDS = tokens()


def test_a_lora_that_never_moved_is_compared_whole():
    """Its B is zero, where A has no gradient: whatever was kept for A would pass."""
    adapters = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    with warnings.catch_warnings():  # PEFT reads a switch that transformers renames
        warnings.simplefilter("ignore", FutureWarning)
        model = get_peft_model(decoder(dropout=0.2), adapters).train()
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    assert not any(weight.any() for name, weight in weights.items() if "lora_B" in name)
    reached = []

    def run() -> None:
        model(IDS, labels=IDS).loss.backward()
        reached.append([name for name, p in weights.items() if p.grad is not None and p.grad.any()])

    rows = compare(Recovery(model, memory="0%"), run)
    assert [(row.action, row.relative_l2, row.replays) for row in rows[:5]] == [(a, 0, 4 * (a == "R")) for a in "RPAEH"]
    assert all(row.action == "L" and 0 < row.relative_l2 < 0.1 for row in rows[5:])
    assert all(names == list(weights) for names in reached)
    assert all(torch.equal(weight, before[name]) and weight.grad is None for name, weight in weights.items())


def test_a_model_that_does_not_run_has_no_rows():
    """As one of two transformers, where the events need the other."""
    assert compare(Recovery(decoder(), memory="0%"), lambda: None) == []
