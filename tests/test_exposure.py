"""Backward is skipped where it could change nothing, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from onetake.activations.exposure import exposure


def scored() -> tuple[nn.Parameter, torch.Tensor, torch.Tensor]:
    """A parameter, and log-probs and entropies that depend on it."""
    weight = nn.Parameter(torch.linspace(-1, 1, 6).view(2, 3))
    return weight, weight.sin().view(2, 3), weight.cos()


def test_exposure_is_the_sum_of_absolute_coefficients():
    weight, log_probs, entropies = scored()
    loss = (log_probs * torch.tensor([[2.0], [-3.0]])).sum() - 0.5 * entropies.sum()
    assert exposure(loss, [log_probs, entropies]) == 3 * 2 + 3 * 3 + 6 * 0.5
    loss.backward()  # the graph is still there
    assert weight.grad is not None


def test_exposure_of_a_dead_group_is_exactly_zero():
    _, log_probs, entropies = scored()
    ratio = (log_probs - log_probs.detach()).exp()
    loss = -torch.minimum(ratio * torch.zeros(2, 1), ratio.clamp(0.8, 1.2) * torch.zeros(2, 1)).mean()
    assert exposure(loss, [log_probs, entropies]) == 0
    assert exposure(loss - 0.0 * entropies.mean(), [log_probs, entropies]) == 0


@pytest.mark.parametrize("hidden", [False, True], ids=["parameter", "entropies"])
def test_exposure_is_unknown_where_the_loss_reads_more_of_the_model(hidden):
    """An auxiliary loss, or a term that the trainer's subclass adds."""
    weight, log_probs, entropies = scored()
    loss = 0 * log_probs.sum() + (entropies.sum() if hidden else weight.square().sum())
    assert exposure(loss, [log_probs]) is None


def test_a_coefficient_that_is_not_finite_is_not_zero():
    _, log_probs, _ = scored()
    found = exposure((log_probs * torch.nan).sum(), [log_probs])
    assert found is not None
    assert found != 0
