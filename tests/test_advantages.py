"""Rewards become advantages: closed forms, several rewards, dead groups."""

from __future__ import annotations

import pytest
import torch

from onetake.core.advantages import ROUNDINGS, Advantages, dead_groups

REWARDS = torch.tensor([[0.0, 1.0, 1.0, 0.5], [0.1, 0.1, 0.1, 0.1], [2.0, 0.0, 0.0, 0.0]], dtype=torch.float64)


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("std", ["group", "global", "none"])
def test_advantages_in_closed_form(std, unbiased):
    found = Advantages(std=std, unbiased=unbiased, eps=0.01, clamp=None)(REWARDS.float())
    assert found.dtype == torch.float64
    rewards = REWARDS.float().double()
    everything = rewards.std(correction=int(unbiased))
    for group, row in zip(found, rewards, strict=True):
        spread = {"group": row.std(correction=int(unbiased)) + 0.01, "global": everything + 0.01, "none": 1.0}[std]
        torch.testing.assert_close(group, (row - row.mean()) / spread, rtol=1e-12, atol=1e-12)


def test_advantages_are_clamped_both_ways():
    row = torch.tensor([[1.0] + [0.0] * 99, [0.0] + [1.0] * 99])
    wide, narrow = (Advantages(clamp=clamp)(row) for clamp in (None, 5.0))
    assert wide[:, 0].tolist() == pytest.approx([99**0.5, -(99**0.5)], rel=1e-2)
    assert narrow[:, 0].tolist() == [5, -5]
    assert torch.equal(narrow[:, 1:], wide[:, 1:])


@pytest.mark.parametrize("std", ["group", "global", "none"])
def test_a_dead_group_is_exactly_zero(std):
    """Rounding puts the mean of three 0.1s beside 0.1; divided by its own spread, that would be an advantage of −1."""
    rewards = torch.tensor([[0.1, 0.1, 0.1], [0.0, 0.5, 1.0]], dtype=torch.float64)
    assert (rewards[0] - rewards[0].mean()).abs().min() > 0
    found = Advantages(std=std, eps=0.0)(rewards)
    assert found[0].tolist() == [0, 0, 0]
    assert found[1, 2] > 0
    assert dead_groups(rewards).tolist() == [True, False]


def test_largest_group_std():
    rewards = torch.tensor([[0.0, 2.0], [0.0, 8.0]])
    wanted = torch.tensor([[-1.0, 1.0], [-4.0, 4.0]], dtype=torch.float64) / 4
    assert torch.equal(Advantages(std="max_group", eps=0)(rewards), wanted)


def test_best_and_worst_only():
    """The advantage is the whole group's; the middle is left out."""
    rewards = torch.tensor([[0.3, 0.9, 0.1, 0.5, 0.7, 0.2]])
    found, whole = Advantages(best_of=2)(rewards), Advantages()(rewards)
    trained = [1, 2, 4, 5]
    assert found[0].nonzero().flatten().tolist() == trained
    assert torch.equal(found[0, trained], whole[0, trained])
    assert Advantages(best_of=3).problem(6) is None
    assert "use 3 or less" in Advantages(best_of=4).problem(6)


def test_one_trajectory_has_no_advantage():
    with pytest.raises(ValueError, match=r"rollout.group_size: 1 gives no advantage .* use 2 or more"):
        Advantages()(torch.zeros(3, 1))


# Several rewards

EASY = torch.tensor([[0.0, 10.0, 0.0, 10.0], [10.0, 0.0, 0.0, 10.0]], dtype=torch.float64)
HARD = torch.tensor([[0.0, 0.0, 0.1, 0.1], [0.0, 0.1, 0.0, 0.1]], dtype=torch.float64)


def test_a_weighted_sum_is_one_reward():
    weights = torch.tensor([0.5, 2.0])
    found = Advantages()(torch.stack([EASY, HARD]), weights)
    assert torch.equal(found, Advantages()(0.5 * EASY + 2.0 * HARD))


@pytest.mark.parametrize("std", ["group", "global", "max_group"])
def test_normalize_then_sum_in_closed_form(std):
    """GDPO: an advantage for each reward, their weighted sum, divided by its std over the update."""
    one = Advantages(std=std, clamp=None)
    total = 0.5 * one(EASY) + 2.0 * one(HARD)
    several = one.model_copy(update={"aggregation": "normalize_then_sum"})
    found = several(torch.stack([EASY, HARD]), torch.tensor([0.5, 2.0]))
    torch.testing.assert_close(found, total / (total.std(correction=0) + 1e-4), rtol=1e-12, atol=1e-12)


def test_a_hard_reward_counts_as_much_as_an_easy_one():
    """Samples 1 and 2 of group 0 have one success each; the sum sees only the reward with the larger spread."""
    rewards, weights = torch.stack([EASY, HARD]), torch.ones(2)
    summed, apart = Advantages()(rewards, weights)[0], Advantages(aggregation="normalize_then_sum")(rewards, weights)[0]
    assert summed[2] < -0.9
    assert summed[1] > 0.9
    assert apart[1] == pytest.approx(0, abs=1e-2)
    assert apart[2] == pytest.approx(0, abs=1e-2)
    assert apart[3] > 1
    assert apart[0] < -1


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_a_group_without_spread_in_any_reward_is_zero(aggregation):
    rewards = torch.tensor([[[0.1, 0.1, 0.1], [0.0, 0.5, 1.0]], [[0.7, 0.7, 0.7], [1.0, 0.0, 0.2]]])
    found = Advantages(aggregation=aggregation, eps=0.0)(rewards, torch.tensor([1.0, 0.3]))
    assert found[0].tolist() == [0, 0, 0]
    assert dead_groups(found).tolist() == [True, False]


# Rounding

MODES = ["group", "global", "max_group", "none"]
AGGREGATIONS = ["sum_then_normalize", "normalize_then_sum"]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("std", MODES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [1e-3, 0.3, 17.0])
def test_one_rounding_step_is_no_spread(size, dtype, std, aggregation):
    """A group one step apart is dead, with eps 0 too; one that is four steps apart at its largest score is alive."""
    score = torch.tensor(size, dtype=dtype)
    close, apart = torch.nextafter(score, score + 1), score * (1 + 4 * torch.finfo(dtype).eps)
    rewards = torch.stack([torch.stack([score, close, score]), torch.stack([score, apart, score])])
    assert not dead_groups(rewards).any()
    found = Advantages(std=std, eps=0.0, aggregation=aggregation)(rewards)
    assert found[0].tolist() == [0, 0, 0]
    assert found[1, 1] > 0
    assert found.isfinite().all()
    alone = Advantages(std=std, eps=0.0, aggregation=aggregation)(rewards[:1])
    assert alone.tolist() == [[0, 0, 0]]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("std", MODES)
def test_sums_that_differ_by_rounding_are_equal(std, aggregation):
    """0.1 + 0.2 is one step beside 0.3: as a reward of Python floats, and as a sum of rewards."""
    assert 0.1 + 0.2 != 0.3
    advantages = Advantages(std=std, eps=0.0, aggregation=aggregation)
    assert not advantages(torch.tensor([[0.1 + 0.2, 0.3, 0.3]], dtype=torch.float64)).any()
    if aggregation == "sum_then_normalize":
        parts = torch.tensor([[[0.1, 0.3, 0.0]], [[0.2, 0.0, 0.3]]], dtype=torch.float64)
        assert not advantages(parts, torch.ones(2)).any()
        assert advantages(parts, torch.tensor([1.0, 1.0 + 1e-12], dtype=torch.float64)).any()


@pytest.mark.parametrize("std", MODES)
def test_a_sum_is_known_as_well_as_its_summands(std):
    """A bfloat16 reward one step apart stays dead beside a float64 one without spread, whatever the weights."""
    coarse = torch.tensor([[1.0, 1.0078125, 1.0]])
    rewards, steps = torch.stack([coarse, torch.full((1, 3), 5.0)]).double(), torch.tensor([2.0**-7, 2.0**-52])
    for aggregation in AGGREGATIONS:
        advantages = Advantages(std=std, eps=0.0, aggregation=aggregation)
        for weights in (torch.tensor([1.0, 0.5]), torch.tensor([-3.0, 1.0])):
            assert not advantages(rewards, weights, steps).any()
            assert advantages(rewards, weights, steps[1].expand(2)).any()


def test_normalised_rewards_that_cancel_leave_rounding_not_advantages():
    """Reward 1 is 0.3 minus three times reward 0: the two advantages cancel to rounding, which eps 0 would blow up to 1."""
    one = torch.tensor([[0.1, 0.2, 0.4, 0.15], [0.3, 0.1, 0.7, 0.2]], dtype=torch.float64)
    rewards = torch.stack([one, 0.3 - 3 * one])
    found = Advantages(eps=0.0, aggregation="normalize_then_sum")(rewards, torch.ones(2))
    assert not found.any()


def test_best_of_leaves_dead_groups_dead():
    rewards = torch.tensor([[0.3, 0.1 + 0.2, 0.3, 0.3], [0.0, 1.0, 2.0, 3.0]], dtype=torch.float64)
    found = Advantages(best_of=1, eps=0.0)(rewards)
    assert found[0].tolist() == [0] * 4
    assert found[1].nonzero().flatten().tolist() == [0, 3]


def test_whole_numbers_are_exact():
    """Counts far above what float32 tells apart."""
    assert Advantages(eps=0.0)(torch.tensor([[2**40, 2**40 + 1]])).tolist() == [[-1, 1]]
    assert ROUNDINGS == 2
