"""Addressed randomness, and what is chosen with it: prompts, events, advantages and the coefficients of the objective."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from helpers import PROMPTS, roll
from onetake.core.coefficients import Coefficients
from onetake.core.noise import choice, prompt_indices, start_generators, transition_noise
from onetake.core.objectives import Grpo
from onetake.core.records import Address, MicroBatch, Prompt
from onetake.core.selection import All, Fraction, Single, Window
from onetake.core.transitions import Flash, Flow, gain
from onetake.execution import Recompute
from onetake.policies.toy import ToyPolicy
from onetake.rollout.sampling import RolloutConfig, deal

proved = settings(derandomize=True, deadline=None, max_examples=60)
HERE = Address(seed=1, stream="train", update=4)
LIKE = torch.empty(1, 3, 2, dtype=torch.float64)


def micro_batch(samples=(0, 1, 2, 3), address=HERE, **changes) -> MicroBatch:
    batch = MicroBatch(
        address=address,
        group=2,
        prompt_index=7,
        prompt=Prompt("text"),
        samples=samples,
        stochastic=torch.ones(len(samples), 5, dtype=torch.bool),
        weight=torch.ones(5, dtype=torch.float64),
    )
    return replace(batch, **changes)


def starts(batch: MicroBatch) -> torch.Tensor:
    return torch.stack([torch.randn(6, generator=random) for random in start_generators(batch)])


# Noise


MOVES = {
    "seed": {"address": replace(HERE, seed=2)},
    "stream": {"address": replace(HERE, stream="evaluation")},
    "update": {"address": replace(HERE, update=5)},
    "prompt index": {"prompt_index": 8},
    "group": {"group": 3},
    "sample": {"samples": (4, 5, 6, 7)},
}


def test_equal_addresses_draw_equal_noise():
    one, other = (
        micro_batch(),
        micro_batch(address=Address(seed=1, stream="train", update=4), prompt=Prompt("other text")),
    )
    torch.manual_seed(123)  # the global generator has no say
    first = transition_noise(one, 2, LIKE), starts(one)
    torch.manual_seed(321)
    assert torch.equal(transition_noise(other, 2, LIKE), first[0])
    assert torch.equal(starts(other), first[1])


@pytest.mark.parametrize("move", MOVES)
def test_every_coordinate_changes_every_draw(move):
    here, there = micro_batch(), micro_batch(**MOVES[move])
    assert (transition_noise(here, 2, LIKE) != transition_noise(there, 2, LIKE)).all()
    assert (starts(here) != starts(there)).all()


def test_events_samples_and_the_start_draw_apart():
    batch = micro_batch()
    draws = [transition_noise(batch, k, LIKE).flatten(1) for k in range(5)] + [starts(batch).double()]
    flat = torch.cat(draws)
    assert len(flat.unique(dim=0)) == len(flat) == 24


def test_choices_differ_by_update_purpose_and_place_only():
    later = replace(HERE, update=5)
    addresses = [(HERE, "fraction", 1), (HERE, "window", 1), (HERE, "fraction", 2), (later, "fraction", 1)]
    first, again = ([torch.rand((), generator=choice(*a)).item() for a in addresses] for _ in range(2))
    assert first == again
    assert len(set(first)) == 4


@proved
@given(cut=st.lists(st.integers(0, 11), unique=True, min_size=1), shared=st.booleans())
def test_the_composition_of_a_micro_batch_is_irrelevant(cut, shared):
    """Any samples, in any order, draw what they draw in the whole group."""
    whole, part = (micro_batch(tuple(samples), shared_start=shared) for samples in (range(12), cut))
    assert torch.equal(transition_noise(part, 1, LIKE), transition_noise(whole, 1, LIKE)[cut])
    assert torch.equal(starts(part), starts(whole)[cut])


def test_shared_start():
    """One initial noise for the group, whichever samples a micro-batch holds; the events still differ."""
    batch = micro_batch(shared_start=True)
    assert (starts(batch) == starts(micro_batch((9,), shared_start=True))).all()
    assert (starts(batch) == starts(micro_batch())[0]).all()
    assert (starts(batch) != starts(replace(batch, group=3))).all()
    assert len(transition_noise(batch, 0, LIKE).flatten(1).unique(dim=0)) == 4


def test_noise_is_standard_normal_in_the_dtype_asked_for():
    noise = transition_noise(micro_batch(tuple(range(40))), 0, torch.empty(1, 1000))
    assert noise.dtype == torch.float32
    assert abs(noise.mean()) < 4 / 200
    assert abs(noise.std() - 1) < 4 / (200 * 2**0.5)


# Prompts and groups


@proved
@given(groups=st.integers(1, 7), available=st.integers(1, 12), seed=st.integers(0, 3))
def test_every_prompt_once_per_epoch(groups, available, seed):
    updates = -(-3 * available // groups)  # at least three epochs
    drawn = [index for update in range(updates) for index in prompt_indices(seed, update, groups, available)]
    epochs = [drawn[i : i + available] for i in range(0, 3 * available, available)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(available))] * 3


def test_prompts_are_new_each_update_and_epochs_are_shuffled():
    updates = [prompt_indices(0, update, 4, 40) for update in range(30)]
    assert all(set(one).isdisjoint(two) for one, two in pairwise(updates[:10]))
    epochs = [[index for update in updates[i : i + 10] for index in update] for i in (0, 10, 20)]
    assert epochs[0] != epochs[1] != epochs[2] != list(range(40))
    assert prompt_indices(1, 0, 4, 40) != updates[0] == prompt_indices(0, 0, 4, 40)


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_dealing_is_exact(size):
    """P prompts × G trajectories, each once, whatever the micro-batch."""
    config = RolloutConfig(groups=2, group_size=6, micro_batch=size, shared_start=True)
    policy, selection = ToyPolicy(Flow()), Fraction(fraction=0.5)
    batches = deal(config, PROMPTS, policy, selection, Grpo(), HERE)
    assert [(b.group, s) for b in batches for s in b.samples] == [(g, s) for g in range(2) for s in range(6)]
    assert all(len(b.samples) == size and b.shared_start and b.address == HERE for b in batches)
    chosen = prompt_indices(1, 4, 2, len(PROMPTS))
    assert {(b.group, b.prompt_index, b.prompt) for b in batches} == {(g, i, PROMPTS[i]) for g, i in enumerate(chosen)}
    masks = selection.mask(groups=2, group_size=6, steps=5, address=HERE)
    assert torch.equal(torch.cat([b.stochastic for b in batches]), masks.flatten(0, 1))


def test_groups_of_equal_text_stay_apart():
    """Also where one prompt serves two groups of an update: other noise, other advantages."""
    config = RolloutConfig(groups=3, group_size=2, micro_batch=2)
    for prompts in ([Prompt("same")] * 3, [Prompt("same")]):
        batches = deal(config, prompts, ToyPolicy(Flow()), All(), Grpo(), HERE)
        assert [(b.group, b.prompt.text, b.samples) for b in batches] == [(g, "same", (0, 1)) for g in range(3)]
        assert len(torch.cat([starts(b) for b in batches]).unique(dim=0)) == 6


# Selections


def events(selection, steps: int = 8, groups: int = 4, group_size: int = 3, update: int = 0) -> torch.Tensor:
    """The mask of an update, after the checks that hold for any selection."""
    assert selection.problem(steps) is None
    size = {"groups": groups, "group_size": group_size, "steps": steps}
    mask = selection.mask(**size, address=replace(HERE, update=update))
    assert mask.shape == (groups, group_size, steps)
    assert mask.any(-1).all()
    assert not mask[..., -1].any()
    assert torch.equal(mask, selection.mask(**size, address=Address(seed=1, stream="train", update=update)))
    return mask


def test_all_is_every_event_but_the_last():
    assert events(All())[..., :-1].all()


@proved
@given(steps=st.integers(2, 60), percent=st.integers(1, 100), per=st.sampled_from(["sample", "update"]))
@example(steps=51, percent=58, per="sample")  # 50 · 0.58 is 28.999… in floats
def test_fraction_takes_its_share_exactly(steps, percent, per):
    selection, count = Fraction(fraction=percent / 100, per=per), (steps - 1) * percent // 100
    if count == 0:
        assert "use at least" in selection.problem(steps)
    else:
        assert (events(selection, steps).sum(-1) == count).all()


def test_fraction_of_a_sample_and_of_an_update():
    own, shared = (events(Fraction(fraction=0.5, per=per), 20, update=3) for per in ("sample", "update"))
    assert len(own.flatten(0, 1).unique(dim=0)) > 6
    assert len(shared.flatten(0, 1).unique(dim=0)) == 1
    assert not torch.equal(shared, events(Fraction(fraction=0.5, per="update"), 20, update=4))


@pytest.mark.parametrize(("until", "places"), [(None, range(6)), (4, range(3)), (2, range(1))])
def test_window_covers_its_range(until, places):
    seen = set()
    for update in range(60):
        mask = events(Window(size=2, until=until), update=update)
        assert (mask == mask[0, 0]).all()
        first, second = mask[0, 0].nonzero().flatten().tolist()
        assert second == first + 1
        seen.add(first)
    assert seen == set(places)


def test_window_in_place():
    window = Window(size=3, start=4, place="fixed")
    for update in range(5):
        assert events(window, update=update)[0, 0].nonzero().flatten().tolist() == [4, 5, 6]


def test_window_slides_and_starts_over():
    """MixGRPO: one event further every `interval` updates, back to the start after the last place."""
    window = Window(size=4, place="sliding", interval=25)
    firsts = [int(events(window, 8, update=update)[0, 0].nonzero()[0]) for update in range(0, 150, 25)]
    assert firsts == [0, 1, 2, 3, 0, 1]  # 7 trainable events hold 4 places
    assert window.first(8, Address(seed=0, stream="train", update=24)) == 0


def places(window: Window, updates: int, steps: int = 8) -> list[int]:
    return [window.first(steps, Address(seed=9, stream="train", update=update)) for update in range(updates)]


def test_window_strides_and_stays():
    strided = Window(size=2, place="sliding", start=1, until=6, stride=2, interval=1)
    assert places(strided, 5) == [1, 3, 1, 3, 1]  # windows 1-2, 3-4; 5-6 would leave the range
    assert places(strided.model_copy(update={"roll_back": False}), 5) == [1, 3, 3, 3, 3]


def test_progressive_window_spends_less_on_later_places():
    """MixGRPO's decaying strategy: interval·exp(−decay·(place − decay_from)), at least one update."""
    window = Window(size=4, place="sliding", interval=8, decay=math.log(2), decay_from=1)
    assert places(window, 24) == [0] * 8 + [1] * 8 + [2] * 4 + [3] * 2 + [0] * 2


@pytest.mark.parametrize(("groups", "until"), [(1, 8), (2, 8), (4, 8), (8, 8), (16, 8), (3, 9), (5, None)])
def test_single_is_stratified(groups, until):
    """One event per group, shared by the whole group; every stratum of the range holds equally many groups."""
    size, orders = until or 10, set()
    for update in range(20):
        mask = events(Single(until=until), 20, groups, update=update)
        assert (mask.sum(-1) == 1).all()
        assert (mask == mask[:, :1]).all()
        chosen, strata = mask[:, 0].int().argmax(1), min(groups, size)
        assert (chosen * strata // size).bincount(minlength=strata).tolist() == [groups // strata] * strata
        orders.add(tuple(chosen.tolist()))
    assert len(orders) > 5


def test_single_is_uniform_in_the_long_run():
    counts = sum(events(Single(), 20, groups=3, update=update)[:, 0].sum(0) for update in range(1000))
    assert counts[10:].sum() == 0
    expected = 300
    assert ((counts[:10] - expected).abs() < 4 * expected**0.5).all()


WINDOW = "selection: a window of size {} from event {} needs {} events but {} can be trained"
IMPOSSIBLE = [
    (All(), 1, "policy.steps: 1 leaves no event to train (the last step never is); use 2 or more"),
    (Fraction(fraction=0.1), 8, "selection.fraction: 0.1 of 7 events is none; use at least 0.143"),
    (Fraction(fraction=0.3), 4, "selection.fraction: 0.3 of 3 events is none; use at least 0.334"),
    (Window(size=4, start=4), 8, f"{WINDOW.format(4, 4, 8, 7)} (policy.steps: 8, the last step never is)"),
    (Window(size=3, until=2), 8, f"{WINDOW.format(3, 0, 3, 2)} (selection.until: 2)"),
    (Single(until=8), 8, "selection.until: 8 exceeds the 7 trainable events of policy.steps: 8"),
]


@pytest.mark.parametrize(("selection", "steps", "text"), IMPOSSIBLE)
def test_impossible_selections_say_why(selection, steps, text):
    assert selection.problem(steps) == text


def test_the_way_out_works():
    for steps in range(2, 200):
        least = float(Fraction(fraction=1e-9).problem(steps).rsplit(" ", 1)[1])
        assert Fraction(fraction=least).problem(steps) is None
    assert Single(until=7).problem(8) is Single().problem(2) is Window(size=4, start=3).problem(8) is None


# Objective


@pytest.mark.parametrize("event_weights", ["uniform", "rectified"])
@pytest.mark.parametrize("scale", ["per_dim", "exact"])
def test_omega_at_ratio_one(scale, event_weights):
    """ω = −A·s·w/count in the rows of the event, 0 elsewhere."""
    objective = Grpo(scale=scale, event_weights=event_weights)
    rollout = roll(ToyPolicy(Flash()), Recompute(), selection=Fraction(fraction=0.5), objective=objective)
    coefficients, count = Coefficients(objective, rollout), 3 * 4 * 2
    assert rollout.event_count == count
    for batch, transitions in zip(rollout.batches, rollout.transitions, strict=True):
        for old in transitions:
            weight = float(batch.weight[old.index]) * (1 / 4 if scale == "per_dim" else 1)
            wanted = -rollout.advantage(batch) * old.rows * weight / count
            torch.testing.assert_close(coefficients.omega(batch, old, old), wanted, rtol=1e-12, atol=0)
    still = {"ratio_mean": 1, "ratio_min": 1, "ratio_max": 1, "clip_fraction": 0, "approx_kl": 0, "log_prob_shift": 0}
    each = {f"event_{name}": [value] * 4 for name, value in still.items()}
    assert coefficients.statistics() == still | each | {"loss": coefficients.loss, "events": [0, 1, 2, 3]}


# (advantage, ratio) → whether the gradient survives, with clip_low 0.1 and clip_high 0.3
CLIPS = [(1, 1.29, True), (1, 1.31, False), (1, 0.5, True), (-1, 0.91, True), (-1, 0.89, False), (-1, 2.0, True)]


@pytest.mark.parametrize(("advantage", "ratio", "trained"), CLIPS)
def test_clip_removes_only_what_went_far_enough(advantage, ratio, trained):
    """A gradient is dropped where it would push the ratio further out, and nowhere else."""
    objective = Grpo(scale="exact", clip_low=0.1, clip_high=0.3)
    rollout = roll(ToyPolicy(Flow()), Recompute(), selection=Window(size=1, place="fixed"), objective=objective)
    rollout.advantages = torch.full_like(rollout.advantages, float(advantage))
    batch, old = rollout.batches[0], rollout.transitions[0][0]
    coefficients = Coefficients(objective, rollout)
    moved = replace(old, log_prob=old.log_prob + torch.tensor(ratio, dtype=torch.float64).log())
    omega = coefficients.omega(batch, old, moved)
    torch.testing.assert_close(omega, torch.full_like(omega, -advantage * ratio / 12 if trained else 0.0))
    found = coefficients.statistics()
    assert found["clip_fraction"] == 1 - trained
    assert found["ratio_mean"] == pytest.approx(ratio)
    assert found["approx_kl"] == pytest.approx(ratio - 1 - float(torch.tensor(ratio, dtype=torch.float64).log()))
    surviving = ratio if trained else 1 + 0.3 if advantage > 0 else 1 - 0.1
    assert found["loss"] == pytest.approx(-advantage * surviving * 2 / 12)


@pytest.mark.parametrize("selection", [All(), Fraction(fraction=0.6), Window(size=2), Single()])
def test_rectified_weights(selection):
    """Proportional to 1/λ, with mean 1 over the events the update trains."""
    policy, size = ToyPolicy(Flash(), steps=8), {"groups": 5, "group_size": 2, "steps": 8}
    mask = selection.mask(**size, address=HERE)
    weights = Grpo(event_weights="rectified").weights(policy.kernel, policy.sigmas, mask)
    trained = mask.flatten(0, 1).any(0).nonzero().flatten().tolist()
    assert (mask * weights).sum() / mask.sum() == pytest.approx(1, rel=1e-12)
    products = [float(weights[k]) * gain(policy.kernel, policy.sigmas, k) for k in trained]
    assert products == pytest.approx([products[0]] * len(trained), rel=1e-12)
    assert Grpo().weights(policy.kernel, policy.sigmas, mask).tolist() == [1] * 8
