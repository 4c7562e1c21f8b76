"""In the middle of a run: is what the execution accumulates still the gradient that recomputing gives?

Routing that changes, dropout that comes on or a kernel that is not deterministic show after the first update, if ever. So every few
rollouts one micro-batch of the update is held against plain recomputation, with the advantages that it really has. The update's
own gradient is not computed again, and stays what it would have been.
"""

from __future__ import annotations

from onetake.core.coefficients import Coefficients
from onetake.core.objectives import Objective
from onetake.core.records import Rollout
from onetake.execution.base import Execution
from onetake.policies import Policy, leaves
from onetake.rollout.compare_gradients import Verdict
from onetake.rollout.native import Native, scaled, set_aside
from onetake.rollout.preflight import PreflightError, held_against, taken_gradients, unreached_models

COST = 3.0
"""Updates that comparing every micro-batch of an update would take, at most: each selected event runs forward and backward twice
more, and nine times more where one repetition was not enough. `python benchmarks/recheck.py` measures it."""
SHARE = 0.01
"""Of a run's time that rechecking may take by default."""

UNEVEN = [1.37, 1.09, 1.19, 1.28, 1.49, 1.61, 1.77, 1.91]
"""Factors of cotangents, none near a power of two: times them, every rounding of a backward falls elsewhere."""

DRIFT = 1e-6
"""Largest |ℓ − ℓ_old| per dimension on unchanged weights; published clip ranges begin at 2e-6, storing a latent in bfloat16 after
it was scored moves ℓ by 6e-6 and more."""


def default_interval(micro_batches: int) -> int:
    """Rollouts between two checks of one of their micro-batches, such that these take `SHARE` of the time."""
    return -int(-COST // (SHARE * micro_batches))


def recheck(
    policy: Policy, execution: Execution, rollout: Rollout, coefficients: Coefficients, objective: Objective
) -> Verdict | None:
    """`execution.accumulate`, with one micro-batch's share of it compared: the first whose advantages are not all zero.

    It comes first, so that sums are rounded as they are without a check if it is the first of all. Returns the worst verdict;
    None if the rollout has nothing to train. Raises PreflightError, before p.grad has changed, naming the tensor.
    """
    number = _first_to_train(rollout, execution)
    if number is None:
        execution.accumulate(policy, rollout, coefficients)
        return None
    chosen, others = rollout.parted(number)
    (batch,), (transitions,) = chosen.batches, chosen.transitions
    where = f"a micro-batch of group {batch.group} ({batch.prompt.text!r})"
    with set_aside(leaves(policy)):
        execution.accumulate(policy, chosen, coefficients)
        found = taken_gradients(policy, where, without=unreached_models(policy))

        def native(draws: int) -> Native:
            made = Native(policy, execution, chosen, Coefficients(objective, chosen), draws)
            factors = UNEVEN[:draws] if execution.late else [2.0] * draws
            for old in transitions:
                made.add(batch, old, [scaled(batch, factor) for factor in factors])
            drifted(made.shift, old.dims)
            return made

        verdicts = held_against(native, found, where, execution)
    for name, leaf in leaves(policy).items():
        if name in found:
            leaf.grad = found[name] if leaf.grad is None else leaf.grad + found[name]
    execution.accumulate(policy, others, coefficients)
    return verdicts[0]


def drifted(shift: float, dims: int) -> float:
    """`shift` back. Raises PreflightError if a log_prob moved by more than `DRIFT` per dimension on unchanged weights."""
    if shift > DRIFT * dims:
        raise PreflightError(
            f"log_prob moved by {shift:.3g} nats ({shift / dims:.1e} per dimension) between sampling and re-scoring on unchanged "
            f"weights; more than {DRIFT:g} per dimension is the size of published clip ranges. Dropout that came on, a latent "
            "stored in another dtype, or a kernel that is not deterministic does this; the last checkpoint stands"
        )
    return shift


def _first_to_train(rollout: Rollout, execution: Execution) -> int | None:
    penalised = execution.kl is not None and not execution.kl.as_reward
    for number, batch in enumerate(rollout.batches):
        if penalised or rollout.advantage(batch).any():
            return number
    return None
