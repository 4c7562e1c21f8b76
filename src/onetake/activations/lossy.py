"""When loss of precision is acceptable, decided by the coefficients of the current update (HiLoRe, arXiv 2609.33570, section 3).

The coefficients ω = ∂L/∂ℓ are known as soon as backward has passed the loss, before it reaches any unit, whatever the loss
is: a hook on the log-probs reads them. A micro-batch's exposure is E = Σ|ω|; what bypasses the log-probs (an entropy bonus)
is watched beside them. A unit u under L then adds about κ_u · E to the gradient's error, κ_u from `calibrate`.

Where this departs from the paper: risk is relative to the gradient's norm, because exposure scales with the loss and relative
error does not; and it is counted in squares, because errors of different units and micro-batches are independent and add in
quadrature (``form="linear"`` adds the errors themselves, as the paper does, and so accepts less). Both sides carry the same
loss scale, so a GradScaler cancels; averaging over W ranks only makes the bound safer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from onetake.activations.capture import Unit
from onetake.activations.plan import RECOMPUTE, Action, Option, Plan, UnitOptions
from onetake.activations.solve import solve


class Lossy:
    """A budget for the relative error of an update's gradient, spent on units under L.

    `target` is the root-mean-square relative error allowed; an update consists of `micro_batches` equal parts. `sensitivity` is
    κ by unit; units without one are never compressed, and neither is anything before the first gradient's norm is known.
    """

    def __init__(
        self,
        target: float,
        *,
        micro_batches: int = 1,
        sensitivity: dict[str, float] | None = None,
        form: Literal["squares", "linear"] = "squares",
    ) -> None:
        if not 0 < target < 1:
            raise ValueError(
                f"lossy.target: {target} is the relative error allowed in an update's gradient; use e.g. 0.015"
            )
        self._power = 2 if form == "squares" else 1
        self.budget = target**self._power / micro_batches
        self.sensitivity = sensitivity or {}
        self.exposure = 0.0  # of the current or latest micro-batch
        self.norm: float | None = None  # of the latest complete update's gradient
        self.spent = 0.0  # risk accepted in the latest micro-batch
        self._partial: float | None = None  # norm of what the current update has accumulated

    def begin(self, parameters: Iterable[Tensor]) -> None:
        """Before a micro-batch: if gradients were cleared, the update before it is complete."""
        if self._partial and all(p.grad is None or not p.grad.any() for p in parameters):  # 0 after dead groups only
            self.norm, self._partial = self._partial, None
        self.exposure, self.spent = 0.0, 0.0

    def end(self, parameters: Iterable[Tensor]) -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        self._partial = norm(gradients)

    def offered(self, units: list[UnitOptions], exposure: float) -> list[UnitOptions]:
        """The units with L's risk filled in for this exposure, and without L where that is unknown."""
        return [replace(unit, options=tuple(self._with_risk(unit.name, unit.options, exposure))) for unit in units]

    def _with_risk(self, name: str, options: Iterable[Option], exposure: float) -> list[Option]:
        known = name in self.sensitivity and self.norm is not None
        risk = self.risk(name, exposure) if known else 0.0
        lossy = [replace(o, risk=risk) for o in options if o.action == Action.COMPRESS and known]
        return [*(o for o in options if o.action != Action.COMPRESS), *lossy]

    def risk(self, name: str, exposure: float) -> float:
        """Relative error that L on this unit is expected to add to the update's gradient; its square, unless `form` is linear."""
        return (self.sensitivity[name] * exposure / self.norm) ** self._power if self.norm else math.inf

    @property
    def error(self) -> float:
        """Relative error accepted in the latest micro-batch."""
        return self.spent ** (1 / self._power)

    def watch(self, tensors: Iterable[Tensor | None], decide: Callable[[], None]) -> int:
        """Add |∂L/∂·| of each to the exposure during backward, and then `decide`. The number of hooks set."""

        def note(gradient: Tensor) -> None:
            self.exposure += float(gradient.abs().sum(dtype=torch.float32))
            decide()

        wanted = [tensor for tensor in tensors if tensor is not None and tensor.requires_grad]
        for tensor in wanted:
            tensor.register_hook(note)
        return len(wanted)

    def decide(self, units: list[Unit], plan: Plan) -> None:
        """Accept or drop what the units hold as L, under the exposure so far. Later calls can only drop more of it.

        Of several that do not all fit, those are kept that save most.
        """
        options = {unit.name: option for unit, option in zip(plan.units, plan.chosen, strict=True)}
        held = [(unit, options[unit.name]) for unit in units if unit.executed == Action.COMPRESS]
        if not held:
            return
        offers = [
            UnitOptions(name=u.name, options=(replace(option, bytes=0, risk=self.risk(u.name, self.exposure)),))
            for u, option in held
        ]
        accepted = solve(offers, memory=0, risk=self.budget)
        self.spent = accepted.risk
        for (unit, _), choice in zip(held, accepted.chosen, strict=True):
            if choice is RECOMPUTE:
                unit.drop()
            else:
                unit.accept()


def norm(gradients: Iterable[Tensor]) -> float:
    """Of all of them together, in float32 or wider."""
    return float(sum(g.detach().double().square().sum() for g in gradients)) ** 0.5
