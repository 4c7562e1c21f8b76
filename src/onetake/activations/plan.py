"""What may be done with the state a unit saves for its backward, what that costs, and the choice as a table. No torch here.

A unit is a block whose complete saved state shares one fate (HiLoRe, arXiv 2609.33570, section 3). Bytes are those kept
between forward and backward beyond what R keeps (the unit's inputs); seconds are those saved against R per forward and
backward; risk is the squared relative gradient error that loss of precision may add: squares of different units add.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

MIB = 2**20


class Action(StrEnum):
    """H, L and R are HiLoRe's; E, A and P are ours. Only L changes a gradient."""

    STORE = "H"  # everything backward reads, as it is
    ELEMENTWISE = "E"  # the least from which the rest follows without a matrix product, bit for bit
    COMPRESS = "L"  # as E, with the tensors wider than the residual stream in FP8
    ATTENTION = "A"  # attention's result: as E, but matrix products run again, too
    PRUNE = "P"  # nothing, as R, but only what backward reads runs again: under LoRA not the last product
    RECOMPUTE = "R"  # nothing: the unit runs again, under its random state, when backward reaches it


EXACT = tuple(action for action in Action if action != Action.COMPRESS)


@dataclass(frozen=True, kw_only=True)
class Option:
    """One way to treat one unit. Raises ValueError for a negative cost."""

    action: Action
    bytes: int = 0
    seconds: float = 0.0
    risk: float = 0.0

    def __post_init__(self) -> None:
        if self.bytes < 0 or self.risk < 0:
            raise ValueError(f"action {self.action}: bytes {self.bytes} and risk {self.risk} must not be negative")


RECOMPUTE = Option(action=Action.RECOMPUTE)


@dataclass(frozen=True, kw_only=True)
class UnitOptions:
    """What may be chosen for the unit `name`; R is always possible and need not be listed."""

    name: str
    options: tuple[Option, ...]

    @property
    def all(self) -> tuple[Option, ...]:
        return (RECOMPUTE, *(option for option in self.options if option.action != Action.RECOMPUTE))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One option per unit, in the order the units run, and the budgets it was chosen under."""

    units: tuple[UnitOptions, ...]
    chosen: tuple[Option, ...]
    memory: int  # bytes
    risk_budget: float
    joint: Mapping[str, float] = field(default_factory=dict[str, float])
    """Seconds that a unit's action saved while the others followed the plan, where that was measured (`joint`)."""

    @property
    def actions(self) -> tuple[Action, ...]:
        return tuple(option.action for option in self.chosen)

    @property
    def by_unit(self) -> dict[str, Action]:
        return {unit.name: option.action for unit, option in zip(self.units, self.chosen, strict=True)}

    @property
    def bytes(self) -> int:
        return sum(option.bytes for option in self.chosen)

    @property
    def seconds(self) -> float:
        return sum(option.seconds for option in self.chosen)

    @property
    def risk(self) -> float:
        return sum(option.risk for option in self.chosen)

    def reason(self, unit: int) -> str:
        """Why the unit has no faster option, with the number that decides."""
        chosen = self.chosen[unit]
        faster = [option for option in self.units[unit].all if option.seconds > chosen.seconds]
        if not faster:
            return "saves most" if chosen.action != Action.RECOMPUTE else "nothing saves time"
        best = max(faster, key=lambda option: option.seconds)
        more, left = best.bytes - chosen.bytes, self.memory - self.bytes
        if more > left:
            return f"{best.action} needs {more / MIB:.1f} MiB more, {left / MIB:.1f} MiB left"
        if best.risk - chosen.risk > self.risk_budget - self.risk:
            return f"{best.action} adds risk {best.risk - chosen.risk:.1e}, {self.risk_budget - self.risk:.1e} left"
        return f"{best.action} saves no more than its ties"

    def table(self) -> str:
        """Unit, action, MiB kept, milliseconds saved alone and, if measured, together, reason; one unit a line, and the totals."""
        width = max([len(unit.name) for unit in self.units] + [len("total")])
        lines = [f"{'unit':<{width}}  action      MiB  ms saved  {'together  ' if self.joint else ''}reason"]
        for index, (unit, option) in enumerate(zip(self.units, self.chosen, strict=True)):
            numbers = f"{option.bytes / MIB:8.1f}  {option.seconds * 1e3:8.1f}"
            if self.joint:
                numbers += f"  {self.joint[unit.name] * 1e3:8.1f}" if unit.name in self.joint else 10 * " "
            lines.append(f"{unit.name:<{width}}  {option.action:<6}{numbers}  {self.reason(index)}")
        total = f"{self.bytes / MIB:8.1f}  {self.seconds * 1e3:8.1f}"
        if self.joint:
            total += f"  {sum(self.joint.values()) * 1e3:8.1f}"
        risk = f", risk {self.risk:.1e} of {self.risk_budget:.1e}" if self.risk else ""
        lines.append(f"{'total':<{width}}  {'':<6}{total}  of {self.memory / MIB:.1f} MiB{risk}")
        return "\n".join(lines)
