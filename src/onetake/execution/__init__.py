"""Executions: *when* ∇ℓ is materialised. Every one yields the same gradient, Σ ω ∇ℓ, in `p.grad`."""

from onetake.execution.base import Execution
from onetake.execution.recompute import Recompute
from onetake.execution.retain import Retain
from onetake.execution.reweight import Reweight

EXECUTIONS: dict[str, type[Recompute | Retain | Reweight]] = {
    "recompute": Recompute,
    "retain": Retain,
    "reweight": Reweight,
}

__all__ = ["EXECUTIONS", "Execution", "Recompute", "Retain", "Reweight"]
