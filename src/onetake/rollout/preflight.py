"""Before the first update: is what will be trained what was sampled, and is its gradient the native one, tensor by tensor?

Mean log-probs hide errors (a velocity off by 0.05 can move ℓ/D by 1e-5), so samples, velocities and log-probs are compared
element by element, on unchanged weights, for every event that the first update selects. Norms hide them too: gradients are
compared entry by entry (`compare_gradients`).

The gradient that is compared has coefficients of its own, powers of two times the events' weights. Multiplying by those rounds
nothing, so that an execution which multiplies them in after a bfloat16 backward agrees with one which did before as if all
were float32. And adapters that start at zero are woken for the check: beside B = 0 any gradient of A would do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from onetake.core.coefficients import Coefficients
from onetake.core.noise import generator
from onetake.core.objectives import Kl, Objective
from onetake.core.records import Entry, MicroBatch, Rollout, Transition
from onetake.execution.base import Execution
from onetake.execution.recompute import Recompute
from onetake.parallel.shard import DTensor
from onetake.policies import Policy, leaves, trainable
from onetake.rollout.compare_gradients import Verdict, judge_all, relative_error
from onetake.rollout.native import Native, by_rows, set_aside
from onetake.rollout.sampling import sample

DRAWS = 8
"""Repetitions of each event's gradient that measure its rounding where one makes a gradient look wrong."""
FIRST = "the first micro-batch"
WOKEN = 1e-3
"""Standard deviation of what all-zero trainable matrices hold during the check."""


class PreflightError(ValueError):
    """The run would train something else than what it sampled; the message names the cause."""


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """What the check found, for the log and the report."""

    way: str  # how events are re-scored
    events: list[int]
    dims: int  # D of one trajectory
    gradient_error: float  # relative L2 distance of the execution's gradient to the native one
    closest: Verdict | None  # of all tensors, on the gradient that came closest to what rounding cannot do
    silent: list[str]  # trainable tensors whose gradient is zero: nothing will train them
    unreached: list[str]  # of several models that share the noise levels, those that no event of this update runs


def preflight(policy: Policy, execution: Execution, objective: Objective, batches: list[MicroBatch]) -> Preflight:
    """Check the policy and the execution on the micro-batches of an update; weights and p.grad are left as they were.

    Raises PreflightError naming the cause: another velocity, latent or log_prob at re-scoring, a trainable tensor without a
    finite gradient, or one whose gradient under the execution is not the native one.
    """
    chosen = [replace(batch, first=0) for batch in _covering(batches)]
    own = execution.kl
    with set_aside(leaves(policy)), _awake(policy):
        execution.kl = _beside(own, chosen)
        try:
            rollout = sample(policy, execution, chosen)
            policy.way = _choose_way(policy, rollout)
            _check_shared_prefix(policy, rollout, batches)
            rollout.advantages = _alternating(rollout)
            coefficients = _PowersOfTwo(objective, rollout)
            execution.accumulate(policy, rollout, coefficients)
            unreached = unreached_models(policy)
            found = taken_gradients(policy, FIRST, without=unreached)
            verdicts = _verdicts(policy, execution, rollout, coefficients, found)
        finally:
            execution.kl = own
    return Preflight(
        way=policy.way,
        events=sorted({k for batch in chosen for k in batch.events}),
        dims=rollout.transitions[0][0].dims,
        gradient_error=relative_error(verdicts),
        closest=verdicts[0] if verdicts else None,
        silent=[name for name, gradient in found.items() if not gradient.any()],
        unreached=unreached,
    )


def _verdicts(
    policy: Policy, execution: Execution, rollout: Rollout, coefficients: Coefficients, found: dict[str, Tensor]
) -> list[Verdict]:
    """On all events of the rollout; none on recomputing, which is what the others are held against."""
    if isinstance(execution, Recompute):
        return []

    def native(draws: int) -> Native:
        made = Native(policy, execution, rollout, coefficients, draws)
        for batch, transitions in zip(rollout.batches, rollout.transitions, strict=True):
            for old in transitions:
                made.add(batch, old, [by_rows(batch, draw) for draw in range(draws)])
        return made

    return held_against(native, found, FIRST, execution)


def held_against(
    recomputed: Callable[[int], Native], found: dict[str, Tensor], where: str, execution: Execution
) -> list[Verdict]:
    """The verdicts on `found`, worst first, by `recomputed`, which repeats each event as often as its argument says.

    Once is enough as a rule; but what few roundings say is luck, and nothing is refused before `DRAWS` have said it. Raises
    PreflightError if one is not rounding.
    """
    native = recomputed(1)
    if _wrong(native, found):
        native = recomputed(DRAWS)
    missing = sorted(found.keys() ^ native.gradients.keys())
    if missing:
        which = "the execution" if missing[0] in native.gradients else "recomputing"
        raise PreflightError(
            f"{which} gives no gradient to {missing[0]} on {where}, and the other does; {_advice(execution)}"
        )
    verdicts = judge_all(found, native.gradients, native.rounding)
    wrong = [verdict for verdict in verdicts if verdict.excess > 1]
    if wrong:
        raise PreflightError(
            f"the execution's gradient is not the native one on {where}, in {len(wrong)} of {len(verdicts)} tensors. The worst is "
            f"{wrong[0]}. {_advice(execution)}"
        )
    return verdicts


def _wrong(native: Native, found: dict[str, Tensor]) -> bool:
    if found.keys() != native.gradients.keys():
        return True
    return judge_all(found, native.gradients, native.rounding)[0].excess > 1


def _advice(execution: Execution) -> str:
    if execution.late:
        return (
            "The pipeline mixes the rows of a micro-batch in a way reweight cannot follow, or runs a layer in a way its bank does "
            "not see. Use rollout.micro_batch: 1 or execution: retain"
        )
    return (
        "The graph kept while sampling is not the one that recomputing builds: routing, state or weights changed in between. Use "
        "execution: recompute if that is meant"
    )


class _PowersOfTwo(Coefficients):
    """ω = advantage · weight, where the advantages are powers of two: to multiply by them is exact in every dtype."""

    def omega(self, batch: MicroBatch, old: Transition, new: Transition) -> Tensor:
        return self._rollout.advantage(batch).to(old.log_prob) * float(batch.weight[old.index]) * old.rows


class _Beside(Kl):
    """A KL to a reference one std beside the true one: before the first update the true one's gradient is zero."""

    def of(self, event: Transition, sampled: Transition) -> Tensor:
        assert sampled.reference_mean is not None, "measured at sampling"
        return super().of(event, replace(sampled, reference_mean=sampled.reference_mean + sampled.std))


def _beside(kl: Kl | None, chosen: list[MicroBatch]) -> Kl | None:
    """In place of a direct term, one whose gradient is as large as the log-probs' whatever β and D are."""
    if kl is None or kl.as_reward:
        return kl
    return _Beside(beta=float(sum(int(batch.stochastic.sum()) for batch in chosen)), scale="exact")


@contextmanager
def _awake(policy: Policy) -> Iterator[None]:
    """Inside, trainable matrices that are all zero, as a new adapter's B, hold small numbers; afterwards they are zero again."""
    asleep = {
        name: p for name, p in trainable(policy).items() if p.dim() > 1 and not isinstance(p, DTensor) and not p.any()
    }
    with torch.no_grad():
        for name, parameter in asleep.items():
            drawn = torch.randn(parameter.shape, generator=generator("woken", name))
            parameter.copy_(WOKEN * drawn)
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter in asleep.values():
                parameter.zero_()


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
    """(P, G) advantages 1, −1, 2, −2, …, 16, −16, 1, …: a gradient given to the wrong row shows."""
    groups = 1 + max(batch.group for batch in rollout.batches)
    size = 1 + max(s for batch in rollout.batches for s in batch.samples)
    samples = torch.arange(size)
    return (2.0 ** (samples // 2 % 5) * torch.where(samples % 2 == 0, 1.0, -1.0)).double().expand(groups, size)


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


def unreached_models(policy: Policy) -> list[str]:
    """Names of the policy's models, if it has several, that got no gradient at all: their noise levels were not selected."""
    if not isinstance(policy.module, nn.ModuleDict):
        return []
    reached = {name.partition(".")[0] for name, leaf in leaves(policy).items() if leaf.grad is not None}
    silent = [name for name in policy.module if name not in reached]
    return silent if len(silent) < len(policy.module) else []


def taken_gradients(policy: Policy, where: str, *, without: list[str]) -> dict[str, Tensor]:
    """The gradients in p.grad, which is cleared; `without` some of several models.

    Raises PreflightError where one is missing or not finite.
    """
    gradients = {}
    left_out = tuple(f"{name}." for name in without)
    for name, parameter in leaves(policy).items():
        if name.startswith(left_out):
            continue
        if parameter.grad is None:
            raise PreflightError(
                f"the loss does not depend on the trainable tensor {name}: nothing would train it. Leave it out of "
                "policy.trainable.targets, or check that its layer is used and that checkpointing is non-reentrant"
            )
        if not parameter.grad.isfinite().all():
            raise PreflightError(f"the gradient of {name} is not finite on {where}; check policy.dtype and the base")
        gradients[name], parameter.grad = parameter.grad, None
    return gradients
