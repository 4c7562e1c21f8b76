"""The bank against autograd, trajectory by trajectory: equal or refused by name, whatever the model is made of."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bank_cases
from bank_cases import PARTS, Case, D, linear
from helpers import gradient_of, relative_error, roll
from onetake.core.coefficients import Coefficients
from onetake.core.objectives import Grpo, Kl
from onetake.core.transitions import Flow
from onetake.execution import EXECUTIONS
from onetake.execution.bank import Bank
from onetake.execution.measured import Listed, Regular, digit_of
from onetake.execution.rows import Place, follow
from onetake.policies import trainable
from onetake.policies.toy import ToyPolicy
from onetake.rollout.sampling import RolloutConfig

B, T = 3, 3


def outcomes(cases: int, first: int, capsys) -> dict[str, int]:
    counted = dict(bank_cases.main(cases, first))
    with capsys.disabled():
        print(f"\n{counted}")
    return counted


def test_drawn_modules(capsys):
    counted = outcomes(200, 0, capsys)
    assert counted["silent"] == 0
    assert counted["equal"] > 120
    assert counted["refused"] > 20


@pytest.mark.slow
def test_many_drawn_modules(capsys):
    counted = outcomes(2000, 1000, capsys)
    assert counted["silent"] == 0
    assert counted["equal"] > 1200


HAD = [
    "one_prelu",
    "prelu_by_channel",
    "group_norm",
    "layer_norm_of_two_dims",
    "rms_norm_of_two_dims",
    "norms_of_diffusers",
    "embedding",
    "conv1d",
    "conv3d",
    "called_twice",
    "tied",
    "tied_to_an_embedding",
    "scale_tied_to_a_bias",
    "guidance",
    "guidance_row_by_row",
    "folded",
    "folded_pictures",
    "permuted",
    "transposed",
    "experts",
    "experts_with_places",
    "sorted_rows",
    "branches_on_data",
    "branches_by_event",
    "selected_by_data",
    "in_place",
    "in_place_on_a_view",
    "checkpointed",
    "checkpointed_inside_another",
    "autocast",
    "hidden_inside",
]


@pytest.mark.parametrize("name", HAD)
def test_gradients_that_can_be_had(name):
    """Alone, for several sizes and orders."""
    assert {Case(number, (getattr(bank_cases, name),)).run() for number in range(4)} == {"equal"}


REFUSED = {
    "centred": r"in 0\.a trajectories of a micro-batch influence each other",
    "batch_norm": r"in 0\.a trajectories of a micro-batch influence each other",
    "attention_over_the_batch": r"in 0\.a trajectories",
    "weakly_mixed": r"in 0\.a trajectories",
    "mixed_in_halves": r"in 0\.a trajectories",
    "one_row_for_all": r"in 0\.a trajectories .*, or share rows",
    "positions": r"in 0\.a trajectories",
    "blended": r"in 0\.a trajectories",
    "functional": r"0\.a\.weight also got a gradient that is summed over trajectories",
    "weight_in_the_sum": r"0\.a\.bias also got",
    "called_functionally": r"0\.a\.weight, 0\.a\.bias also got",
    "shared_with_a_stranger": r"not known for 0\.b\.weight \(Part\)",
    "parameter_of_its_own": r"0\.scale \(Part\)",
    "with_its_own_forward": r"0\.a\.weight \(Doubled\), 0\.a\.bias \(Doubled\)",
    "renamed": r"0\.a\.weight \(Renamed\)",
    "spectral": r"0\.a\.bias \(ParametrizedLinear\), 0\.a\.parametrizations\.weight\.original \(ParametrizationList\)",
    "parametrized": r"\(ParametrizationList\)",
    "weight_normed": r"0\.a\.weight_g \(Linear\)",
    "multi_head": r"0\.a\.in_proj_weight \(MultiheadAttention\)",
    "circular": r"0\.a\.weight \(Conv1d with padding_mode circular\)",
    "forward_replaced": r"0\.a\.weight \(Linear whose forward has been replaced\)",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_had_is_refused_by_name(name):
    torch.manual_seed(0)
    model = nn.Sequential(getattr(bank_cases, name)(B, T)).double()
    with pytest.raises(ValueError, match=REFUSED[name]) as refusal:
        banked(model, torch.randn(B, T, D, dtype=torch.float64))
    assert "Use rollout.micro_batch: 1" in str(refusal.value)
    assert "execution: retain" in str(refusal.value)


def banked(model: nn.Module, x: torch.Tensor) -> Bank:
    bank = Bank(model, {name: p for name, p in model.named_parameters() if p.requires_grad}, len(x))
    with bank.listening():
        bank.add(-model(x).square().flatten(1).sum(1), torch.ones(len(x), dtype=x.dtype))
    return bank


def test_every_part_is_drawn():
    """So that none is forgotten by its annotation."""
    drawn = {part.__name__ for part in PARTS}
    assert {*HAD, *REFUSED} <= drawn
    assert len(drawn) > 80


# What was there before


@pytest.mark.parametrize("micro_batch", [1, 2])
@pytest.mark.parametrize("kl", [None, Kl(beta=0.1)], ids=["plain", "kl"])
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_accumulate_adds_to_the_very_gradient_that_is_there(execution, kl, micro_batch):
    config = RolloutConfig(groups=3, group_size=4, micro_batch=micro_batch)
    policy = ToyPolicy(Flow())
    wanted = gradient_of(policy, execution, kl=kl, config=config)
    held = {name: torch.ones_like(parameter) for name, parameter in trainable(policy).items()}
    for name, parameter in trainable(policy).items():
        parameter.grad = held[name]
    strategy = EXECUTIONS[execution](kl)
    rollout = roll(policy, strategy, config=config)
    assert all(torch.equal(ones, torch.ones_like(ones)) for ones in held.values())  # sampling leaves it alone
    strategy.accumulate(policy, rollout, Coefficients(Grpo(), rollout))
    for name, parameter in trainable(policy).items():
        assert parameter.grad is held[name]
        torch.testing.assert_close(parameter.grad - 1, wanted[name], rtol=1e-9, atol=1e-12)


def test_backwards_of_others_are_autograds_own():
    """Recording a forward changes no gradient of a backward that the bank does not run."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(part(B, T) for part in (bank_cases.conv1d, bank_cases.norms_of_diffusers, bank_cases.attention))
    )
    x = torch.randn(B, T, D)
    wanted = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    bank = Bank(model, dict(model.named_parameters()), B)
    with bank.listening():
        found = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_recorded_forwards_have_the_layers_bits():
    torch.manual_seed(0)
    for part in PARTS:
        if part.__annotations__["return"] == "Part" and part not in (bank_cases.dropout, bank_cases.branches_by_event):
            model = nn.Sequential(part(B, T))
            x = torch.randn(B, T, D)
            plain = model(x)
            with Bank(model, {n: p for n, p in model.named_parameters() if p.requires_grad}, B).listening():
                assert torch.equal(model(x), plain), part.__name__


def test_forwards_are_put_back():
    model = nn.Sequential(linear())
    with pytest.raises(KeyError), Bank(model, dict(model.named_parameters()), 2).listening():
        raise KeyError
    assert "forward" not in vars(model[0])


# Rows


def places(y: torch.Tensor, node: torch.Tensor) -> Place | None:
    """Of the gradient of `node` under log-probs `y`, read off the graph."""
    return follow(y, lambda found: 0 if found is node.grad_fn else None).places[node.grad_fn]


def test_places_are_read_off_the_graph():
    x = torch.randn(2, 3, 4, requires_grad=True)
    y = x * 2
    read = {
        "as it is": (y.flatten(1).sum(1), Place(12, 0)),
        "twice": ((torch.cat([y, y])[2:]).flatten(1).sum(1), Place(12, 0)),
        "seen as rows": (y.view(6, 4).mm(torch.ones(4, 1)).view(2, 3).sum(1), Place(12, 0)),
        "tokens mixed": (y.transpose(1, 2).softmax(2).flatten(1).sum(1), Place(12, 0)),
        "rows exchanged": (torch.cat([y[1:], y[:1]]).flatten(1).sum(1), Place(12, 12)),
        "one by one": (torch.stack([row.sum() for row in y.unbind(0)]), Place(12, 0)),
        "trajectories mixed": ((y - y.mean(0)).flatten(1).sum(1), None),
        "by index": (y[torch.tensor([1, 0])].flatten(1).sum(1), None),
        "rolled": (y.roll(1, 0).flatten(1).sum(1), None),
        "sorted": (y.sort(0)[0].flatten(1).sum(1), None),
    }
    assert {name: places(log_prob, y) for name, (log_prob, _) in read.items()} == {
        name: place for name, (_, place) in read.items()
    }


def test_only_graphs_that_do_not_tell_cost_a_further_backward(monkeypatch):
    backwards = []
    gradients = Bank._gradients
    monkeypatch.setattr(Bank, "_gradients", lambda *args: backwards.append(1) or gradients(*args))
    counts = {}
    for name in (
        "heads_in_the_batch",
        "guidance",
        "folded",
        "checkpointed",
        "lora",
        "attention",
        "permuted",
        "experts",
    ):
        backwards.clear()
        banked(nn.Sequential(getattr(bank_cases, name)(B, T)).double(), torch.randn(B, T, D, dtype=torch.float64))
        counts[name] = len(backwards)
    once = dict.fromkeys(("heads_in_the_batch", "guidance", "folded", "checkpointed", "lora"), 1)
    assert counts == once | dict.fromkeys(("attention", "permuted", "experts"), 2)


def test_rows_that_follow_two_trajectories_have_no_digit():
    one, other = torch.randn(2, 4, dtype=torch.float64)
    plain = torch.stack([one, other, one + other, torch.zeros(4, dtype=torch.float64)])
    scaled = torch.stack([one, 32 * other, one + 32 * other, torch.zeros(4, dtype=torch.float64)])
    assert digit_of(plain[[0, 1, 3]], scaled[[0, 1, 3]]).tolist() == [0, 1, -1]
    assert digit_of(plain, scaled) is None
    assert digit_of(torch.zeros(1, 4), torch.ones(1, 4)) is None  # they cancelled
    assert digit_of(torch.full((1, 4), torch.nan), torch.full((1, 4), torch.nan)) is None


def test_grouped_rows_are_each_trajectorys():
    rows = torch.arange(12.0).view(12, 1)
    owners = torch.arange(12) // 2 % 3
    assert torch.equal(Regular(3, 2).grouped(rows), Listed(3, owners).grouped(rows))
    owners[3:] = -1
    assert Listed(3, owners).grouped(rows)[..., 0].tolist() == [[0, 1], [2, 0], [0, 0]]


def test_many_trajectories_are_told_apart_by_two_digits():
    torch.manual_seed(0)
    model, b = nn.Sequential(bank_cases.permuted(20, T)).double(), 20
    x, factor = torch.randn(b, T, D, dtype=torch.float64), torch.randn(b, dtype=torch.float64)
    banked(model, x).pay_out(factor, direct=1.0)
    wanted = torch.autograd.grad(-(model(x).square().flatten(1).sum(1) * factor).sum(), list(model.parameters()))
    found = {str(n): p.grad for n, p in enumerate(model.parameters())}
    assert relative_error(found, {str(n): g for n, g in enumerate(wanted)}) < 1e-12
