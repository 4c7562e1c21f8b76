"""What a run will need in memory, before anything loads: its own code on a policy without weights, counted tensor by tensor.

Two events of one micro-batch are sampled, decoded and backpropagated, then an optimizer step and an evaluation's call are
taken, by the code that trains. The other events and micro-batches are like them: what one keeps until the update is counted
as often as it occurs.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from onetake.core.coefficients import Coefficients
from onetake.core.records import Address, MicroBatch, Prompt, Transition
from onetake.execution import EXECUTIONS, Execution
from onetake.execution.bank import Bank
from onetake.memory import LiveBytes, storage_bytes
from onetake.policies import Observer, Policy, trainable
from onetake.policies.blank import NEEDS_DATA, NumbersAsOne, blank_policy
from onetake.policies.prompts import KEPT
from onetake.rollout.evaluation import chosen_prompts
from onetake.rollout.sampling import sample
from onetake.run.ema import Ema
from onetake.run.optimizer import Optimizer
from onetake.run.recipe import Recipe

EVENTS = 2
"""Events that are run; the second finds what the first one kept, and its gradient."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Bytes in use at the moment of a phase when most are."""

    name: str
    frozen: int
    """Weights that nothing trains, buffers, and a reference's copy."""
    trained: int
    """Weights that are trained, the optimizer's state, and an average of the weights."""
    prompts: int = 0
    """Embeddings of all prompts that the run will have met."""
    kept: int = 0
    """What stays until the update: graphs or banks, latents, outputs."""
    transient: int = 0
    """The most beyond that, gradients included."""

    @property
    def peak(self) -> int:
        return self.frozen + self.trained + self.prompts + self.kept + self.transient


@dataclass(frozen=True, kw_only=True)
class Choice:
    """An execution with or without gradient checkpointing, and what it needs."""

    execution: str
    checkpointing: bool
    micro_batch: int
    extra_forwards: int = 0
    """Forwards per trajectory beyond the T of sampling."""
    phases: tuple[Phase, ...] = ()
    problem: str | None = None
    """Why it cannot be had (there are no phases then), or why the phases are not all there are."""

    @property
    def peak(self) -> Phase:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: phase.peak)

    def fits(self, memory: int) -> bool:
        """Whether all its phases are known, and none needs more than `memory` bytes."""
        return self.problem is None and self.peak.peak <= memory


class Forecast:
    """What a recipe's run needs under each choice. Nothing with weights is opened."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    def own(self, micro_batch: int | None = None) -> Choice:
        """The recipe's own, or with another micro-batch. Raises ValueError if the recipe cannot be trained."""
        recipe = self._recipe
        size = micro_batch or recipe.rollout.micro_batch
        choice = self.choice(recipe.execution, recipe.policy.gradient_checkpointing, size)
        if choice.problem and not choice.phases:
            raise ValueError(choice.problem)
        return choice

    def others(self) -> list[Choice]:
        """Every other execution, with and without gradient checkpointing, with the recipe's micro-batch."""
        recipe = self._recipe
        own = recipe.execution, recipe.policy.gradient_checkpointing
        every = [(execution, checkpointing) for checkpointing in (own[1], not own[1]) for execution in EXECUTIONS]
        return [self.choice(*pair, recipe.rollout.micro_batch) for pair in every if pair != own]

    def largest(self, memory: int) -> Choice | None:
        """The recipe's own with the largest micro-batch that fits in `memory` bytes; None if none does."""
        size = self._recipe.rollout.group_size
        sizes = [n for n in range(1, size + 1) if size % n == 0]
        fitting = bisect.bisect_left(sizes, True, key=lambda n: not self.own(n).fits(memory))  # peaks grow with n
        return self.own(sizes[fitting - 1]) if fitting else None

    @cache  # noqa: B019  (one forecast a process)
    def choice(self, execution: str, checkpointing: bool, micro_batch: int) -> Choice:
        """A choice that is refused, or not known to its end, says so in its `problem`."""
        blank = Choice(execution=execution, checkpointing=checkpointing, micro_batch=micro_batch)
        try:
            run = self._run(checkpointing)
            phases = run.phases(EXECUTIONS[execution](self._recipe.penalty), micro_batch)
        except ValueError as error:
            return replace(blank, problem=str(error))
        except NEEDS_DATA as error:
            name = type(self._run(checkpointing).policy.pipe).__name__
            problem = f"{name} asks for the values of tensors ({error}), which nothing has before it is loaded"
            return replace(blank, phases=self._run(checkpointing).loading, problem=problem)
        again = (execution == "recompute") + checkpointing
        return replace(blank, extra_forwards=again * run.events(micro_batch), phases=phases)

    @cache  # noqa: B019
    def _run(self, checkpointing: bool) -> _DryRun:
        policy = self._recipe.policy.model_copy(update={"gradient_checkpointing": checkpointing})
        return _DryRun(self._recipe.model_copy(update={"policy": policy}))


def verdict(forecast: Forecast, choices: list[Choice], memory: int) -> str:
    """Whether the recipe's own choice, the first of `choices`, fits in `memory` bytes, and up to which micro-batch.

    Raises ValueError, naming what would fit, if it does not.
    """
    own, largest = choices[0], forecast.largest(memory)
    named = f"execution: {own.execution} with policy.gradient_checkpointing: {str(own.checkpointing).lower()}"
    if own.problem:
        return f"whether {named} fits in {_gib(memory)} is not known: {own.problem}"
    if own.fits(memory):
        assert largest is not None
        return (
            f"{named} fits in {_gib(memory)}; the largest rollout.micro_batch that does is {largest.micro_batch} "
            f"({_gib(largest.peak.peak)})"
        )
    fitting = [
        f"execution: {choice.execution} with policy.gradient_checkpointing: {str(choice.checkpointing).lower()} "
        f"({_gib(choice.peak.peak)})"
        for choice in choices[1:]
        if choice.fits(memory)
    ]
    if largest is not None:
        fitting.append(f"rollout.micro_batch: {largest.micro_batch} ({_gib(largest.peak.peak)})")
    nothing = f"nothing at this micro-batch; the weights alone take {_gib(own.phases[0].peak)}"
    raise ValueError(
        f"memory: {named} and rollout.micro_batch: {own.micro_batch} needs {_gib(own.peak.peak)} in phase {own.peak.name}, more "
        f"than {_gib(memory)}. What fits: {'; '.join(fitting) or nothing}"
    )


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"


class _DryRun:
    """A policy without weights in the middle of training, and an update of it."""

    def __init__(self, recipe: Recipe) -> None:
        """Raises ValueError if the policy cannot be trained."""
        self.recipe = recipe
        self.policy = policy = blank_policy(
            recipe.policy, recipe.pipeline_source, recipe.seed, with_reference=recipe.penalty is not None
        )
        self.parameters = list(trainable(policy).values())
        tensors = [tensor for model in policy.models for tensor in (*model.parameters(), *model.buffers())]
        self.weights = storage_bytes(self.parameters)
        self.frozen = storage_bytes(tensors) - self.weights
        self.memory = LiveBytes(tensors)
        with self.memory:
            self.optimizer = Optimizer(recipe.optimizer, trainable(policy))
            self.ema = Ema(recipe.ema, trainable(policy)) if recipe.ema is not None else None
            for parameter in self.parameters:
                parameter.grad = torch.empty_like(parameter)
            self._step()
        self.trained = self.weights + self.memory.now

    def _step(self) -> None:
        with NumbersAsOne():
            self.optimizer.step(0)

    @property
    def loading(self) -> tuple[Phase, ...]:
        """What needs no call of the pipeline to be known: weights, and with them what the optimizer keeps."""
        return (
            Phase(name="loading", frozen=self.frozen, trained=self.weights),
            Phase(name="optimizer's state", frozen=self.frozen, trained=self.trained),
        )

    def events(self, micro_batch: int) -> int:
        """K of the micro-batch that has most."""
        size = self.recipe.rollout
        masks = self.recipe.selection.mask(
            groups=size.groups,
            group_size=size.group_size,
            steps=len(self.policy.sigmas) - 1,
            address=self._address,
        )
        return int(masks.unflatten(1, (-1, micro_batch)).any(2).sum(-1).max())

    @cached_property
    def prompts(self) -> tuple[Prompt, int, int]:
        """The longest one, the most that embedding it takes, and what the cache of all that a run embeds keeps."""
        recipe, task = self.recipe, self.recipe.task.load()
        longest = max(task.train, key=lambda prompt: len(prompt.text))
        count = min(len(task.train), recipe.rollouts * recipe.rollout.groups)
        count = min(count + len(chosen_prompts(recipe.evaluation, task.held_out)), KEPT)
        with self.memory:
            before = self.memory.now
            self.memory.restart()
            self.policy.condition(longest, 1)
        return longest, self.memory.peak - before, count * (self.memory.now - before)

    @cached_property
    def evaluation(self) -> int:
        """The most that one of its calls needs."""
        batch = self._batch(self.recipe.evaluation.samples, [False] * (EVENTS + 1))
        before = self.memory.now
        with self.memory, self.policy.idling():
            self.memory.restart()
            self.policy.rollout(batch, lambda transition: None, grad=False)
        return self.memory.peak - before

    @property
    def _address(self) -> Address:
        return Address(seed=self.recipe.seed, stream="train", update=0)

    def _batch(self, samples: int, stochastic: list[bool]) -> MicroBatch:
        return MicroBatch(
            address=self._address,
            group=0,
            prompt_index=0,
            prompt=self.prompts[0],
            samples=tuple(range(samples)),
            stochastic=torch.tensor(stochastic).repeat(samples, 1),
            weight=torch.ones(len(stochastic), dtype=torch.float64),
        )

    def phases(self, execution: Execution, micro_batch: int) -> tuple[Phase, ...]:
        """Raises ValueError if the execution refuses the policy, and what `NEEDS_DATA` names."""
        memory, size = self.memory, self.recipe.rollout
        further = self.events(micro_batch) - EVENTS
        _, encoding, _ = self.prompts
        evaluation = self.evaluation
        per_group = size.group_size // micro_batch
        batches = size.groups * per_group
        with memory:
            batch = self._batch(micro_batch, [True] * EVENTS + [False])
            start = memory.now
            with self.policy.idling():
                memory.restart()
                watched = _Watched(execution, memory)
                rollout = sample(self.policy, watched, [batch])
            decoding, sampled = memory.peak, memory.now
            transition = _own_bytes(rollout.transitions[0][-1])
            (bank,) = rollout.kept
            if isinstance(bank, Bank) and further > 0:
                bank.repeat(watched.waiting, further)
                one = memory.now - start + further * transition
            else:
                one = sampled - start + further * (watched.alive[1] - watched.alive[0])
            kept = memory.now
            memory.restart()
            execution.accumulate(self.policy, rollout, cast(Coefficients, _Unweighted()))
            backward, left = (
                memory.peak,
                memory.now - storage_bytes(p.grad for p in self.parameters if p.grad is not None),
            )
            memory.restart()
            self._step()
            stepping = memory.peak
        earlier = batches * one - (sampled - start)  # kept of what is not run here
        rest = batches * (left - start + further * transition)
        phase = partial(self._phase, start)
        return (
            self.loading[0],
            phase("prompt encoding", start + encoding, start, more=(batches - per_group) * one),
            phase("sampling", watched.peak, watched.alive[-1], more=earlier),
            phase("decoding", decoding, sampled, more=earlier),
            phase("reward", start, start, more=batches * one),
            phase("backward", backward, kept, more=batches * one - (kept - start)),
            phase("optimizer", stepping, left, more=rest - (left - start)),
            phase("evaluation", start + evaluation, start, more=rest),
        )

    def _phase(self, start: int, name: str, peak: int, kept: int, *, more: int) -> Phase:
        """`peak` and `kept` are bytes counted here, `start` of them before the update; `more` is what is not run here."""
        return Phase(
            name=name,
            frozen=self.frozen,
            trained=self.trained,
            prompts=self.prompts[2],
            kept=kept - start + more,
            transient=peak - kept,
        )


class _Watched:
    """An execution, and what was alive and at most alive while the events of a micro-batch were sampled under it."""

    def __init__(self, execution: Execution, memory: LiveBytes) -> None:
        self._execution, self._memory = execution, memory
        self.kl, self.grad, self.late, self.accumulate = (
            execution.kl,
            execution.grad,
            execution.late,
            execution.accumulate,
        )
        self.alive: list[int] = []
        """After each event."""
        self._peaks: list[int] = [0]
        """During each event, and in the model's calls after the last."""
        self.waiting: Any = {}  # what the first event left in a bank uncollapsed

    @property
    def peak(self) -> int:
        """Of all events as if each found what the last one finds."""
        return max(self._peaks[0] + self.alive[-1] - self.alive[0], *self._peaks[1:])

    @contextmanager
    def observing(self, policy: Policy, batch: MicroBatch) -> Iterator[tuple[Observer, Any]]:
        models = list(policy.module.values()) if isinstance(policy.module, nn.ModuleDict) else [policy.module]
        handles = [model.register_forward_hook(lambda *_: self._note()) for model in models]
        try:
            with self._execution.observing(policy, batch) as (observe, kept):

                def observed(transition: Transition) -> None:
                    observe(transition)
                    if isinstance(kept, Bank) and not self.alive:
                        self.waiting = kept.waiting
                    self._note()
                    self.alive.append(self._memory.now)
                    self._peaks.append(0)

                yield observed, kept
        finally:
            for handle in handles:
                handle.remove()

    def _note(self) -> None:
        self._peaks[-1] = max(self._peaks[-1], self._memory.peak)
        self._memory.restart()


class _Unweighted:
    """Coefficients that are the events' known weights: how much memory a gradient takes does not depend on the rest."""

    def scored(self, old: Transition, new: Transition) -> Tensor:
        return new.log_prob

    def omega(self, batch: MicroBatch, old: Transition, new: Transition) -> Tensor:
        return old.rows * float(batch.weight[old.index])


def _own_bytes(event: Transition) -> int:
    """What a rollout keeps of an event; its sample is the event's before."""
    tensors = (event.action, event.velocity, event.mean, event.log_prob, event.reference_mean)
    return storage_bytes(tensor for tensor in tensors if tensor is not None)
