"""LeanGRPO's Reweight (arXiv 2609.03528): backpropagate at once, bank one gradient per trajectory, scale it later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from onetake.core.coefficients import Coefficients
from onetake.core.objectives import Kl
from onetake.core.records import MicroBatch, Rollout, Transition
from onetake.execution.bank import Bank
from onetake.execution.base import fresh
from onetake.policies import Observer, Policy, leaves


class Reweight:
    """No second forward, one graph alive at a time, memory independent of the number of events.

    Everything but the advantage is known when an event is sampled: its weight w goes into the provisional backward, so
    the bank of trajectory i holds Σ_k w_k ∇ℓ_ik. It is exact when ω_ik = a_i·w_k, which `accumulate` checks. A KL to the
    reference does not wait for the reward: a second cotangent through the same graph banks it unscaled.
    """

    grad = True
    late = True

    def __init__(self, kl: Kl | None = None) -> None:
        self.kl = kl

    @contextmanager
    def observing(self, policy: Policy, batch: MicroBatch) -> Iterator[tuple[Observer, Bank]]:
        bank = Bank(policy.module, leaves(policy), len(batch.samples))
        direct = self.kl if self.kl is not None and not self.kl.as_reward else None

        def backpropagate(transition: Transition) -> None:
            weight = float(batch.weight[transition.index])
            cotangent = weight * transition.rows.to(transition.log_prob)
            bank.add(transition.log_prob, cotangent, retain_graph=direct is not None)
            if direct is not None:
                bank.add_direct(direct.of(transition, transition), direct.cotangent(transition))

        with bank.listening():
            yield backpropagate, bank

    def accumulate(self, policy: Policy, rollout: Rollout, coefficients: Coefficients) -> None:
        banks = fresh("reweight", policy, rollout)
        for batch, transitions, bank in zip(rollout.batches, rollout.transitions, banks, strict=True):
            bank.pay_out(_factor(batch, transitions, coefficients), direct=1 / rollout.event_count)


def _factor(batch: MicroBatch, transitions: list[Transition], coefficients: Coefficients) -> Tensor:
    """(B,) a_i with ω_ik = a_i·w_k for every event. Raises ValueError where no such factor exists."""
    omegas = [coefficients.omega(batch, old, old) / float(batch.weight[old.index]) for old in transitions]
    rows = torch.stack([old.rows for old in transitions])  # (K, B)
    per_event = torch.stack(omegas)
    factor = torch.where(rows, per_event, 0).sum(0) / rows.sum(0).clamp(min=1)
    spread = torch.where(rows, (per_event - factor).abs(), 0).amax()
    if spread > 1e-5 * factor.abs().amax().clamp(min=torch.finfo(factor.dtype).tiny):
        raise ValueError(
            "execution: reweight banks one gradient per trajectory, but this objective weighs the events of one "
            f"trajectory differently after the reward (coefficients differ by {float(spread):.2e}). "
            "Use execution: retain or execution: recompute"
        )
    return factor
