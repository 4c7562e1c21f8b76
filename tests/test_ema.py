"""The moving average against its closed form, and in a run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from onetake.run.ema import Ema, EmaConfig


def test_closed_form():
    """With weights w_u = u, the mean after n updates is Σ (1−d_u)·u·Π_{v>u} d_v, plus the start's share."""
    config, weight = EmaConfig(decay=0.9, every=1), nn.Parameter(torch.tensor([5.0], dtype=torch.float64))
    ema, count = Ema(config, {"weight": weight}), 40
    for update in range(1, count + 1):
        weight.data.fill_(update)
        ema.update(update)
    decays = [min((1 + u) / (10 + u), 0.9) for u in range(1, count + 1)]
    wanted, share = 0.0, 1.0
    for update in range(count, 0, -1):
        wanted += share * (1 - decays[update - 1]) * update
        share *= decays[update - 1]
    with ema.applied():
        assert weight.item() == pytest.approx(wanted + share * 5.0, rel=1e-12)
    assert weight.item() == count


def test_only_every_few_updates():
    weight = nn.Parameter(torch.zeros(1))
    ema = Ema(EmaConfig(decay=0.5, every=8), {"weight": weight})
    means = []
    for update in range(1, 25):
        weight.data.fill_(1.0)
        ema.update(update)
        with ema.applied():
            means.append(weight.item())
    changes = [u for u in range(2, 25) if means[u - 1] != means[u - 2]]
    assert changes == [8, 16, 24]
    assert means[7] == pytest.approx(0.5)  # d = min(9/18, 0.5)


def test_applied_restores_the_weights_bit_for_bit_also_after_an_error():
    weight = nn.Parameter(torch.randn(3, generator=torch.Generator().manual_seed(0)))
    ema, before = Ema(EmaConfig(), {"weight": weight}), weight.detach().clone()
    weight.data += 1
    seen = []

    def fail_inside() -> None:
        with ema.applied():
            seen.append(weight.detach().clone())
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail_inside()
    assert torch.equal(seen[0], before)
    assert torch.equal(weight, before + 1)
