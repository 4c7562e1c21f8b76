"""When loss of precision is acceptable, decided in the current update's own backward.

A unit u under L adds about κ_u · s to the gradient's error, κ_u from `calibrate`, s a signal that is known before backward
reads what u compressed. HiLoRe (arXiv 2609.33570, section 3) takes the exposure E = Σ|ω|, ω = ∂L/∂ℓ, for all units alike: a
hook on the log-probs reads it (``by="coefficients"``). Groups' coefficients have both signs, though, and most of what they say
cancels in gradient and error, not in E. So by default s is what is left of it at u: the length of the gradient that arrives
at the unit's output, summed over its tokens, ‖Σ_t ∂L/∂h_t‖. It needs no log-probs.

Where this departs from the paper, too: risk is relative to the gradient's norm, because signals scale with the loss and
relative error does not; and it is counted in squares, because errors of different units and micro-batches are independent and
add in quadrature (``form="linear"`` adds the errors themselves, as the paper does, and so accepts less). Both sides carry the
same loss scale, so a GradScaler cancels; averaging over W ranks only makes the bound safer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from onetake.activations.plan import Action, Option, UnitOptions
from onetake.activations.units import CaptureError


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
        by: Literal["gradient", "coefficients"] = "gradient",
    ) -> None:
        if not 0 < target < 1:
            raise ValueError(
                f"lossy.target: {target} is the relative error allowed in an update's gradient; use e.g. 0.015"
            )
        self._power = 2 if form == "squares" else 1
        self.by = by
        self.budget = target**self._power / micro_batches
        self.sensitivity = sensitivity or {}
        self.signals: dict[str, float] = {}  # of the current or latest micro-batch, by unit that backward has reached
        self.expected: dict[str, float] = {}  # signals of the latest micro-batch that had a gradient
        self.exposure: float | None = None  # of the current or latest micro-batch, if its log-probs were watched
        self.norms: list[float] = []  # of the gradients of the two latest complete updates
        self.spent = 0.0  # risk accepted in the latest micro-batch
        self._partial: float | None = None  # norm of what the current update has accumulated

    def begin(self, parameters: Iterable[Tensor]) -> None:
        """Before a micro-batch: if gradients were cleared, the update before it is complete."""
        if self._partial and all(p.grad is None or not p.grad.any() for p in parameters):  # 0 after dead groups only
            self.norms, self._partial = [*self.norms[-1:], self._partial], None
        self.forget()

    def forget(self) -> None:
        """What was seen of the latest micro-batch."""
        self.signals, self.exposure, self.spent = {}, None, 0.0

    def end(self, parameters: Iterable[Tensor]) -> None:
        self._partial = norm(p.grad for p in parameters if p.grad is not None)
        if any(self.signals.values()):  # a dead micro-batch says nothing of the next
            self.expected = self.signals

    def offered(self, units: list[UnitOptions]) -> list[UnitOptions]:
        """The units with the risk of L that is expected filled in, and without L where it is unknown."""
        return [replace(unit, options=tuple(self._with_risk(unit.name, unit.options))) for unit in units]

    def _with_risk(self, name: str, options: Iterable[Option]) -> list[Option]:
        known = name in self.sensitivity and name in self.expected and bool(self.norms)
        risk = self.risk(name, self.expected[name]) if known else 0.0
        lossy = [replace(o, risk=risk) for o in options if o.action == Action.COMPRESS and known]
        return [*(o for o in options if o.action != Action.COMPRESS), *lossy]

    def risk(self, name: str, signal: float) -> float:
        """Relative error that L on this unit is expected to add to the update's gradient; its square, unless `form` is linear.

        The update's own norm is not known yet. The smaller of the two before stands for it: where it turns out smaller still, the
        error is larger than foretold; after the latest alone it would do so every other time.
        """
        return (self.sensitivity[name] * signal / min(self.norms)) ** self._power if self.norms else math.inf

    @property
    def error(self) -> float:
        """Relative error accepted in the latest micro-batch."""
        return self.spent ** (1 / self._power)

    def watch(self, tensors: Iterable[Tensor | None]) -> int:
        """Add |∂L/∂·| of each to the exposure during backward. The number of hooks set."""

        def note(gradient: Tensor) -> None:
            self.exposure = (self.exposure or 0.0) + float(gradient.abs().sum(dtype=torch.float32))

        wanted = [tensor for tensor in tensors if tensor is not None and tensor.requires_grad]
        for tensor in wanted:
            tensor.register_hook(note)
        return len(wanted)

    def note(self, name: str, gradient: Tensor) -> None:
        """The gradient (…, tokens, width) that arrives at the output of the unit `name`."""
        if self.by == "gradient":
            self.signals[name] = float(gradient.flatten(0, -2).sum(0, dtype=torch.float32).norm())
        elif self.exposure is not None:
            self.signals[name] = self.exposure

    def accept(self, name: str) -> bool:
        """Whether what this unit compressed may be used; its risk is then spent. Backward asks for the latest units first.

        Raises CaptureError if its signal should come from log-probs that nobody watched.
        """
        if name not in self.signals:
            raise CaptureError(
                f"{name} was compressed, but backward reached it before anybody read the coefficients that decide whether that may "
                "be: hand the log-probs to recovery.watch() between forward and backward, or leave `by` at 'gradient'"
            )
        risk = self.risk(name, self.signals[name])
        accepted = self.spent + risk <= self.budget
        self.spent += risk if accepted else 0.0
        return accepted


def norm(gradients: Iterable[Tensor]) -> float:
    """Of all of them together, in float32 or wider."""
    return float(sum(g.detach().double().square().sum() for g in gradients)) ** 0.5
