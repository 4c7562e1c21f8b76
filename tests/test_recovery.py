"""The door: measured once, planned, executed as planned; budgets, profiles and refusals."""

from __future__ import annotations

import ctypes
import json
import logging
from pathlib import Path

import pytest
import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from models import decoder, equal, gradients, planned, replan, tokens, transformer
from onetake.activations import joint
from onetake.activations.measure import Bucket, Probe, Profile, fingerprint
from onetake.activations.plan import MIB, Action, Option
from onetake.activations.recovery import Recovery
from onetake.memory import PeakMemory, peak_rss_mib
from ranks import grown, on_ranks, sharded_decoder

H, E, R = Action.STORE, Action.ELEMENTWISE, Action.RECOMPUTE
IDS = tokens()


def written(path: Path, model, *, shape=(2, 17), peak=0) -> Path:
    """A profile in which H saves 2 ms for 10 bytes and E 1 ms for 4."""
    probe = Recovery(model, memory=0)
    probe.detach()
    options = [Option(action=H, bytes=10, seconds=0.002), Option(action=E, bytes=4, seconds=0.001)]
    bucket = Bucket(shape=shape, peak=peak, options={unit.name: options for unit in probe.units})
    Profile(fingerprint=fingerprint(model, probe.units), buckets=[bucket]).save(path)
    return path


def test_first_step_measures_later_ones_follow_the_plan_with_the_same_bits(tmp_path, caplog):
    model = decoder(dtype=torch.bfloat16, dropout=0.2)

    def loss():
        return model(IDS, labels=IDS).loss

    plain = gradients(model, loss)
    recovery = Recovery(model, memory="100%", profile=tmp_path / "profile.json")
    with caplog.at_level(logging.INFO), recovery.step():
        assert equal(gradients(model, loss), plain)  # measuring disturbs neither gradients nor dropout
    assert (recovery.report()["units_R"], recovery.report()["replays"]) == (4, 4)
    assert "model.layers.3" in caplog.text
    with recovery.step():
        assert equal(gradients(model, loss), plain)
    report, plan = recovery.report(), recovery.plan
    assert plan is not None
    assert [unit.executed for unit in recovery.units] == list(plan.actions)
    assert R not in plan.actions
    assert report["kept_mib"] * MIB == plan.bytes == sum(unit.captured for unit in recovery.units)
    assert report["replays"] == 0 < report["saved_ms"]
    assert report["predicted_peak_mib"] * MIB == recovery.profile.buckets[0].peak + plan.bytes

    recovery.detach()
    again = Recovery(model, memory="100%", profile=tmp_path / "profile.json")
    with again.step():
        loss().backward()
    assert again.plan is not None  # at once: the profile was kept
    assert again.plan.actions == plan.actions


@pytest.mark.parametrize(
    ("memory", "actions"),
    [(1039, "EHHH"), (1040, "HHHH"), (1016, "EEEE"), (1015, "RREH"), (1000, "RRRR"), ("1.020x", "RRHH")],
)
def test_20_budgets_are_filled_and_kept(tmp_path, memory, actions):
    """4 units, peak 1000; among equals most R, and late units stored, since their state is freed before early ones replay."""
    model = decoder()
    plain = gradients(model, lambda: model(IDS, labels=IDS).loss)
    recovery = Recovery(model, memory=memory, profile=written(tmp_path / "p.json", model, peak=1000))
    with recovery.step():
        assert equal(gradients(model, lambda: model(IDS, labels=IDS).loss), plain)
    executed = "".join(unit.executed for unit in recovery.units)
    assert recovery.plan is not None
    assert sorted(executed) == sorted(actions)
    assert executed.startswith("R" * actions.count("R"))
    assert recovery.plan.bytes <= recovery.memory(1000, 0)
    assert recovery.report()["replays"] == actions.count("R")


def test_a_budget_below_the_checkpointing_peak_says_by_how_much(tmp_path):
    model = decoder()
    Recovery(model, memory="1MiB", profile=written(tmp_path / "p.json", model, peak=4 * MIB))
    with pytest.raises(ValueError, match=r"3\.0 MiB below the peak of recomputing every unit; raise it by that much"):
        model(IDS)


@pytest.mark.parametrize("memory", ["1.1", "10 gigs", "x", "-5%"])
def test_memory_is_spelled_one_of_four_ways(memory):
    with pytest.raises(ValueError, match=r'write a size such as 40GiB, "1\.10x"'):
        Recovery(decoder(), memory=memory)


def test_smaller_shapes_use_the_plan_larger_ones_are_measured(tmp_path, caplog):
    model = decoder()
    recovery = Recovery(model, memory=1040, profile=written(tmp_path / "p.json", model, shape=(2, 17), peak=1000))
    model(tokens(2, 9))
    assert [unit.executed for unit in recovery.units] == [H] * 4
    for length in (18, 19):
        model(tokens(2, length))
        assert [unit.executed for unit in recovery.units] == [R] * 4
    assert caplog.messages == ["a forward of unmeasured shape outside of step() is recomputed (R)"]
    recovery.memory = lambda peak, free: 10**9
    with recovery.step():
        model(tokens(2, 18)).logits.sum().backward()
    assert [bucket.shape for bucket in recovery.profile.buckets] == [(2, 17), (2, 18)]
    model(tokens(2, 18))
    assert recovery.plan is recovery.plans[2, 18]


def test_a_second_forward_in_one_step_does_not_spend_the_memory_again(tmp_path, caplog):
    model = decoder()
    recovery = Recovery(model, memory=1040, profile=written(tmp_path / "p.json", model, peak=1000))
    with recovery.step():
        first = model(IDS).logits.sum()
        assert [unit.executed for unit in recovery.units] == [H] * 4
        second = model(IDS).logits.sum()
        assert [unit.executed for unit in recovery.units] == [R] * 4
        (first + second).backward()
    assert "the memory is given to the first" in caplog.text
    assert recovery.report()["replays"] == 4


def test_units_that_do_not_run_take_no_part():
    """As of a vision tower on text alone: a forward may start at any unit."""
    model = decoder()
    recovery = Recovery(model, memory="100%")
    model.model.layers = model.model.layers[1:]
    for _ in range(2):
        with recovery.step():
            model(IDS, labels=IDS).loss.backward()
    assert [unit.forwards for unit in recovery.units] == [0, 2, 2, 2]
    assert recovery.plan is not None
    assert list(recovery.plan.by_unit.items()) == [(unit.name, unit.executed) for unit in recovery.units[1:]]


def test_stale_profiles_are_refused(tmp_path):
    model = decoder()
    path = written(tmp_path / "p.json", model)
    told = json.loads(path.read_text())
    told["fingerprint"]["torch"] = "1.0"
    path.write_text(json.dumps(told))
    with pytest.raises(
        ValueError, match=r"p\.json is stale \(torch: '1\.0', now '.*'\); delete it, and the next update"
    ):
        Recovery(model, memory=0, profile=path)
    with pytest.raises(ValueError, match=r"is stale \(weights: "):
        Recovery(decoder(dtype=torch.bfloat16), memory=0, profile=written(path, decoder()))


def test_what_came_into_use_since_the_measurement_is_foretold_and_leaves_less_to_plan_with(tmp_path):
    """As gradients and an optimizer's state do; beside the peak 64 MiB are many times what these units could keep.

    In a process of its own: what other tests freed would come and go in resident memory meanwhile.
    """
    ((told, refused),) = on_ranks(1, tmp_path / "ranks", grown)
    assert told[0][0] < 1 < 63 < told[1][0] < 65
    for growth, foretold, peak in told:
        assert peak == pytest.approx(foretold, abs=16), growth
    assert "below the peak of recomputing every unit" in refused


def test_steps_that_capture_nothing_are_refused():
    model = decoder()
    recovery = Recovery(model, memory=0)
    model.eval()
    with (
        pytest.raises(RuntimeError, match=r"no unit ran with gradients inside the step.*call model\.train\(\)"),
        recovery.step(),
    ):
        model(IDS, labels=IDS).loss.backward()


def test_18_units_that_never_get_a_gradient_are_refused():
    model = decoder()
    model.model.layers[2].register_forward_hook(lambda module, args, out: out.detach())
    recovery = Recovery(model, memory="100%")
    with (
        pytest.raises(RuntimeError, match=r"model\.layers\.0: none of its 9 trainable tensors got a gradient"),
        recovery.step(),
    ):
        model(IDS, labels=IDS).loss.backward()


def test_measured_bytes_are_those_captured_and_one_kind_shares_them():
    """SD3's last block differs from the others: two kinds."""
    model, arguments = transformer("SD3", torch.bfloat16)
    attachment = planned(model, "RRR")
    probe = Probe([H, E, R], attachment.capture.known.templates, rounds=1)
    attachment.capture.probe = probe
    model(**arguments)
    attachment.capture.probe = None
    found = probe.options()
    assert found["transformer_blocks.0"] == found["transformer_blocks.1"]
    assert found["transformer_blocks.0"] != found["transformer_blocks.2"]
    assert probe.shape == (2, 16)
    for actions, place in (("HHH", 0), ("EEE", 1)):
        replan(attachment, actions)
        model(**arguments)
        assert [unit.captured for unit in attachment.units] == [options[place].bytes for options in found.values()]


def test_peak_memory_sees_what_was_freed_again():
    """Free memory that earlier tests left in the heap would serve without a sign: it is given back."""
    peak, give_back = PeakMemory(torch.device("cpu")), ctypes.CDLL(None).malloc_trim
    give_back(0)
    peak.restart()
    before = peak.bytes
    torch.ones(64 * MIB // 4)
    assert 60 * MIB < peak.bytes - before < 70 * MIB
    free = peak.free
    give_back(0)
    peak.restart()
    assert peak.bytes - before < 5 * MIB
    assert free > 0


def test_the_peak_so_far_outlives_restarts():
    peak = PeakMemory(torch.device("cpu"))
    torch.ones(64 * MIB // 4)
    highest = peak_rss_mib()
    for _ in range(2):
        assert peak.restart()
        assert peak_rss_mib() == highest > peak.bytes / MIB + 50


def test_sharded_weights_on_two_ranks_have_the_same_bits_whatever_each_rank_plans(tmp_path):
    """FSDP2. A replay gathers nothing, so ranks may differ; what is kept holds no gathered weight."""
    first, second = on_ranks(2, tmp_path / "ranks", sharded_decoder)
    for dtype in ("torch.float32", "torch.bfloat16"):
        for plans in (("HERE", "HERE"), ("HERE", "RHER"), ("RRRR", "HHHH")):
            key = f"{dtype} {plans}"
            assert (first[key], second[key]) == ((True, plans[0].count("R")), (True, plans[1].count("R")))
        sharded, whole = first[f"{dtype} bytes"]
        # Older transformers (5.14) checkpoint `__call__`, FSDP's hooks included, of which E keeps two copies of hidden states.
        inside = "__call__" in vars(GradientCheckpointingLayer)
        copies = 2 * 17 * 32 * (4 if dtype == "torch.float32" else 2) if inside else 0
        assert sharded == [kept + copies * (action == "E") for kept, action in zip(whole, "HERE", strict=True)]
        assert "before fully_shard" in first[f"{dtype} unmeasured"]


def test_an_action_that_saves_nothing_beside_the_others_is_given_up(tmp_path, monkeypatch):
    """Time is told by a clock of our own: under it, storing the second unit costs what it was to save."""
    clock = {"now": 0.0}
    monkeypatch.setattr(joint, "now", lambda device: clock["now"])
    model = decoder()
    profile = written(tmp_path / "profile.json", model)
    recovery = Recovery(model, memory=1 << 40, profile=profile)

    def run():
        model(IDS, labels=IDS).loss.backward()
        clock["now"] += sum(0.002 for unit in recovery.units if unit.executed == R)
        clock["now"] += 0.003 * (recovery.units[1].executed == H)

    with pytest.raises(ValueError, match="take a step of it first"):
        joint.leave_one_out(Recovery(decoder(), memory="10%"), lambda: None)
    plan = joint.leave_one_out(recovery, run)
    assert [round(saved, 4) for saved in plan.joint.values()] == [0.002, -0.001, 0.002, 0.002]
    assert plan.actions == (H, E, H, H)
    assert "together" in plan.table()
    assert all(p.grad is None for p in model.parameters())
    assert recovery.plan is not None
    with recovery.step():
        run()
    assert recovery.plan.actions == (H, E, H, H)
    recovery.detach()
    again = Recovery(model, memory=1 << 40, profile=profile)
    with again.step():
        run()
    assert again.plan is not None
    assert again.plan.actions == (H, E, H, H)
