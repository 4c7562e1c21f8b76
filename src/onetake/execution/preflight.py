"""Before the first update: is what will be trained what was sampled, and does the gradient reach every trainable tensor?

Mean log-probs hide errors (a velocity off by 0.05 can move ℓ/D by 1e-5), so samples, velocities and log-probs are compared
element by element, on unchanged weights, for every event that the first update selects.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from onetake.coefficients import Coefficients
from onetake.execution.base import Execution
from onetake.execution.recompute import Recompute
from onetake.execution.sampling import sample
from onetake.objectives import Objective
from onetake.policies import Policy, leaves
from onetake.records import Entry, MicroBatch, Rollout, Transition

GRADIENT_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Relative L2 that rounding may put between executions, by the coarsest dtype the model computes in. A gradient given to the
wrong row is off by about 1; LeanGRPO reports 2 % for reweight in bfloat16, and 3 % between two native runs."""


DRIFT = 1e-6
"""Largest |ℓ − ℓ_old| per dimension on unchanged weights; published clip ranges begin at 2e-6, storing a latent in bfloat16 after
it was scored moves ℓ by 6e-6 and more."""


class PreflightError(ValueError):
    """The run would train something else than what it sampled; the message names the cause."""


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """What the check found, for the log and the report."""

    way: str  # how events are re-scored
    events: list[int]
    dims: int  # D of one trajectory
    gradient_error: float  # relative L2 distance of the execution's gradient to the native one
    unreached: list[str]  # of several models that share the noise levels, those that no event of this update runs


def preflight(policy: Policy, execution: Execution, objective: Objective, batches: list[MicroBatch]) -> Preflight:
    """Check the policy and the execution on the micro-batches of an update, and leave no gradient behind.

    Raises PreflightError naming the cause: another velocity, latent or log_prob at re-scoring, a trainable tensor without a
    finite gradient, or an execution whose gradient is not the native one.
    """
    chosen = [replace(batch, first=0) for batch in _covering(batches)]
    rollout = sample(policy, execution, chosen)
    policy.way = _choose_way(policy, rollout)
    _check_shared_prefix(policy, rollout, batches)
    rollout.advantages = _alternating(rollout)
    execution.accumulate(policy, rollout, Coefficients(objective, rollout))
    unreached = _unreached(policy)
    found = _taken_gradients(policy)
    if isinstance(execution, Recompute):
        error = 0.0
    else:
        Recompute(execution.kl).accumulate(policy, rollout, Coefficients(objective, rollout))
        error = _relative_error(found, _taken_gradients(policy))
        coarsest = max((p.dtype for p in policy.module.parameters()), key=lambda dtype: torch.finfo(dtype).eps)
        if error > GRADIENT_TOLERANCE[coarsest]:
            raise PreflightError(
                f"the execution's gradient differs from the native one by {error:.2e} (relative L2) on the first micro-batch; "
                "the pipeline mixes the rows of a micro-batch in a way reweight cannot follow. Use rollout.micro_batch: 1 or "
                "execution: retain"
            )
    events = sorted({k for batch in chosen for k in batch.events})
    dims = rollout.transitions[0][0].dims
    return Preflight(way=policy.way, events=events, dims=dims, gradient_error=error, unreached=unreached)


def recheck(policy: Policy, rollout: Rollout, number: int) -> float:
    """Re-score one micro-batch's event again in the middle of a run; largest |ℓ − ℓ_old|, nats. `number` turns through them.

    Raises PreflightError, as `drifted` does.
    """
    batch = rollout.batches[number % len(rollout.batches)]
    transitions = rollout.transitions[number % len(rollout.batches)]
    old = transitions[number // len(rollout.batches) % len(transitions)]
    shift = (policy.score(batch, old).log_prob.detach() - old.log_prob).abs().max()
    return drifted(float(shift), old.dims)


def drifted(shift: float, dims: int) -> float:
    """`shift` back. Raises PreflightError if a log_prob moved by more than `DRIFT` per dimension on unchanged weights."""
    if shift > DRIFT * dims:
        raise PreflightError(
            f"log_prob moved by {shift:.3g} nats ({shift / dims:.1e} per dimension) between sampling and re-scoring on unchanged "
            f"weights; more than {DRIFT:g} per dimension is the size of published clip ranges. Dropout that came on, a latent "
            "stored in another dtype, or a kernel that is not deterministic does this; the last checkpoint stands"
        )
    return shift


def _covering(batches: list[MicroBatch]) -> list[MicroBatch]:
    """The first micro-batches that together hold every selected event."""
    seen: set[int] = set()
    chosen = []
    for batch in batches:
        if not seen.issuperset(batch.events):
            seen.update(batch.events)
            chosen.append(batch)
    return chosen


def _alternating(rollout: Rollout) -> Tensor:
    """(P, G) advantages ±1, +2, −2, …: different for neighbours, so that a gradient given to the wrong row shows."""
    groups = 1 + max(batch.group for batch in rollout.batches)
    size = 1 + max(s for batch in rollout.batches for s in batch.samples)
    samples = torch.arange(size)
    return ((samples // 2 + 1) * torch.where(samples % 2 == 0, 1.0, -1.0)).double().expand(groups, size)


def _choose_way(policy: Policy, rollout: Rollout) -> str:
    """The first of the policy's ways to re-score under which every event is what was sampled."""
    causes = []
    for way in policy.ways:
        policy.way = way
        cause = _first_difference(policy, rollout)
        if cause is None:
            return way
        causes.append(f"{way}: {cause}")
    raise PreflightError("re-scoring does not reproduce what was sampled, on unchanged weights. " + "; ".join(causes))


def _first_difference(policy: Policy, rollout: Rollout) -> str | None:
    for batch, transitions in zip(rollout.batches, rollout.transitions, strict=True):
        for old in transitions:
            cause = _difference(old, policy.score(batch, old).detached())
            if cause is not None:
                return f"event {old.index} of group {batch.group} ({batch.prompt.text!r}): {cause}"
    return None


def _check_shared_prefix(policy: Policy, rollout: Rollout, batches: list[MicroBatch]) -> None:
    """A rollout that begins where a group's samples part must be the whole one's continuation. One micro-batch is tried."""
    first_of = {batch.group: batch.first for batch in batches if batch.first}
    for batch, transitions in zip(rollout.batches, rollout.transitions, strict=True):
        first = first_of.get(batch.group)
        if first is None or transitions[0].index != first:
            continue
        again: list[Transition] = []
        policy.rollout(batch, again.append, grad=False, entry=Entry(index=first, sample=transitions[0].sample))
        for old, new in zip(transitions, again, strict=True):
            cause = _difference(old, new)
            if cause is not None:
                raise PreflightError(
                    f"the steps before event {first} cannot be computed once for the group: a call that begins there differs "
                    f"at event {old.index}: {cause}. Use rollout.share_prefix: false"
                )
        return


def _difference(old: Transition, new: Transition) -> str | None:
    """What differs between a sampled event and its re-scoring, most telling first."""
    if not torch.equal(old.sample, new.sample):
        return (
            f"the model was shown another latent (largest difference {_largest(old.sample, new.sample):.2e}); the pipeline "
            "rescales or ignores `latents`, or its schedule is shifted by a step"
        )
    if not torch.equal(old.velocity, new.velocity):
        return (
            f"the model answered with another velocity (largest difference {_largest(old.velocity, new.velocity):.2e}); "
            "dropout is on, guidance depends on the step's index, or a kernel is not deterministic"
        )
    if not torch.equal(old.log_prob, new.log_prob):
        return (
            f"log_prob moved by up to {_largest(old.log_prob, new.log_prob):.2e} nats, so the ratio is not 1; the latent "
            "was stored in another dtype than it was scored in, or the noise schedule differs"
        )
    return None


def _largest(one: Tensor, other: Tensor) -> float:
    if one.shape != other.shape:
        return float("inf")
    return float((one.double() - other.double()).abs().max())


def _unreached(policy: Policy) -> list[str]:
    """Names of the policy's models, if it has several, that got no gradient at all: their noise levels were not selected."""
    if not isinstance(policy.module, nn.ModuleDict):
        return []
    reached = {name.partition(".")[0] for name, leaf in leaves(policy).items() if leaf.grad is not None}
    silent = [name for name in policy.module if name not in reached]
    return silent if len(silent) < len(policy.module) else []


def _taken_gradients(policy: Policy) -> dict[str, Tensor]:
    """The gradients in p.grad, which is cleared. Raises PreflightError where one is missing or not finite."""
    gradients = {}
    unreached = tuple(f"{name}." for name in _unreached(policy))
    for name, parameter in leaves(policy).items():
        if name.startswith(unreached):
            continue
        if parameter.grad is None:
            raise PreflightError(
                f"the loss does not depend on the trainable tensor {name}: nothing would train it. Leave it out of "
                "policy.trainable.targets, or check that its layer is used and that checkpointing is non-reentrant"
            )
        if not parameter.grad.isfinite().all():
            raise PreflightError(
                f"the gradient of {name} is not finite on the first micro-batch; check policy.dtype and the base"
            )
        gradients[name], parameter.grad = parameter.grad, None
    return gradients


def _relative_error(found: dict[str, Tensor], native: dict[str, Tensor]) -> float:
    difference = sum(float((found[n] - native[n]).double().square().sum()) for n in native) ** 0.5
    size = sum(float(native[n].double().square().sum()) for n in native) ** 0.5
    return difference / size if size else difference
