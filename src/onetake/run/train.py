"""The training loop: sample, score, weigh, accumulate, step."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onetake.activations.recoveries import Recoveries
from onetake.allocator import keep_freed_memory
from onetake.core.advantages import dead_groups
from onetake.core.coefficients import Coefficients
from onetake.core.records import Address, MicroBatch, Rollout
from onetake.execution import EXECUTIONS, Execution, Recompute
from onetake.memory import peak_mib, peak_rss_mib
from onetake.metrics import Elapsed, Log, Stopwatch
from onetake.parallel import ALONE, World
from onetake.policies import leaves, trainable
from onetake.policies.diffusion import DiffusionPolicy
from onetake.rollout import evaluation
from onetake.rollout.evaluation import Evaluation, evaluate
from onetake.rollout.preflight import Preflight, preflight
from onetake.rollout.recheck import drifted, recheck
from onetake.rollout.sampling import deal, redeal, sample, score
from onetake.run.checkpoint import Checkpoint, Checkpoints, State
from onetake.run.ema import Ema
from onetake.run.optimizer import Optimizer
from onetake.run.recipe import Recipe
from onetake.tasks import Task


@dataclass(kw_only=True)
class Watcher:
    """What a caller may want to see while a run goes on; by default nothing."""

    say: Callable[[str], None] = print
    preflight: Callable[[Preflight], None] = lambda result: None
    update: Callable[[dict], None] = lambda columns: None
    evaluation: Callable[[int, Evaluation], None] = lambda update, result: None


@dataclass(kw_only=True)
class Outcome:
    """How a run ended."""

    folder: Path
    before: dict[str, float] | None  # the log's line of the evaluation before training
    after: dict[str, float] | None  # and of the one after the last update
    stopped: bool  # by Ctrl-C; the last checkpoint is at the last finished update
    best: Checkpoint | None


def train(
    recipe: Recipe, folder: Path, recipe_text: str, watch: Watcher | None = None, world: World = ALONE
) -> Outcome:
    """Train `recipe` in run folder `folder`, from its latest checkpoint if it has one.

    `recipe_text` is the resolved recipe, written beside every checkpoint. Raises ValueError with the cause if the run
    cannot be right: a pre-flight difference, a reward that is not finite, a gradient that is not finite, weights that
    differ between ranks.
    """
    run = Run(recipe, folder, recipe_text, watch or Watcher(), world)
    with _interruptible() as interrupted:
        run.start()
        while run.update < recipe.updates and not run.anywhere(interrupted):
            run.one_rollout()
        if run.update > run.saved:
            run.checkpoint(None)
    return world.told(lambda: run.outcome(stopped=run.update < recipe.updates))


@dataclass(frozen=True)
class Spent:
    """What all ranks spent on training, as `metrics` defines it."""

    calls: int = 0
    forwards: int = 0
    saved_forwards: int = 0

    def plus(self, counts: Tensor) -> Spent:
        calls, forwards, saved = counts.long().tolist()
        return Spent(self.calls + calls, self.forwards + forwards, self.saved_forwards + saved)

    def columns(self) -> dict[str, int]:
        return {"forwards": self.forwards, "saved_forwards": self.saved_forwards}


@dataclass
class Run:
    """A run in progress: the parts it is made of, and its counters."""

    recipe: Recipe
    folder: Path
    recipe_text: str
    watch: Watcher
    world: World
    update: int = 0
    saved: int = -1
    saved_forwards: int = 0  # by this rank, in this session

    def __post_init__(self) -> None:
        recipe = self.recipe
        keep_freed_memory()
        self.task: Task = recipe.task.load()
        self.policy = DiffusionPolicy.from_config(
            recipe.policy, recipe.pipeline_source, recipe.seed, with_reference=recipe.penalty is not None
        )
        self.policy.check(self.task.train + self.task.held_out)
        self.device = device = device_of(recipe)
        mesh = recipe.parallel.mesh(self.world.size, device)
        if mesh is not None:
            self.policy.shard(mesh)
        self.policy.to(device)
        self.recoveries = Recoveries(self.policy.module, recipe.activations)
        self.execution: Execution = EXECUTIONS[recipe.execution](recipe.penalty)
        self.parameters = trainable(self.policy)
        self.optimizer = Optimizer(recipe.optimizer, self.parameters)
        self.ema = Ema(recipe.ema, self.parameters) if recipe.ema is not None else None
        self.log = Log(self.folder / "metrics.jsonl")
        self.checkpoints = Checkpoints(self.folder / "checkpoints", recipe.checkpoint)
        self.layout = recipe.rollout.over(self.world.size)
        self.earlier = Spent()  # in the sessions before this one
        self.spent = Spent()
        self.elapsed = Elapsed()

    def start(self) -> None:
        """Check the policy, then continue from the latest checkpoint or evaluate the untrained policy."""
        first = self.layout.share(self.micro_batches(0), self.world.rank)
        with self.recoveries.recomputing():
            check = preflight(self.policy, self.execution, self.recipe.objective, first)
        self.policy.calls = self.policy.forwards = 0
        self.watch.preflight(check)
        found = self.world.told(lambda: self.checkpoints.latest(self.watch.say))
        self.elapsed = Elapsed()
        self.world.once(lambda: self.log.rewind(-1 if found is None else found.state.update))
        if found is None:
            self.evaluate()
        else:
            self.resume(found)

    def resume(self, checkpoint: Checkpoint) -> None:
        state = checkpoint.state
        if self.ema is not None:
            self.recipe.policy.trainable.load(self.policy.pipe, checkpoint.ema)
            self.ema.take()
        self.recipe.policy.trainable.load(self.policy.pipe, checkpoint.weights)
        self.optimizer.load(checkpoint.optimizer(self.parameters))
        self.update = self.saved = self.policy.version = state.update
        self.earlier = self.spent = Spent(state.calls, state.forwards, state.saved_forwards)
        if self.execution.kl is not None:
            self.execution.kl = self.execution.kl.model_copy(update={"beta": state.kl_beta})
        self.elapsed = Elapsed(state.wall_s, state.cpu_s)

    def micro_batches(self, rollout: int) -> list[MicroBatch]:
        recipe = self.recipe
        address = Address(seed=recipe.seed, stream="train", update=rollout)
        return deal(recipe.rollout, self.task.train, self.policy, recipe.selection, recipe.objective, address)

    def one_rollout(self) -> None:
        """Sample and score once; update once by the recipe's execution, and again by recompute if it asks for more."""
        clock, resampled = Stopwatch(), 0
        number = self.update // self.recipe.updates_per_rollout
        rollout = self.sample(self.micro_batches(number), clock)
        self.score(rollout, clock)
        for attempt in range(1, self.recipe.rollout.resample + 1):
            dead = self.dead(rollout)
            if not dead:
                break
            again = redeal(rollout.dealt, dead, self.task.train, attempt)
            rollout.drop(dead)
            rollout.add(self.sample(again, clock))
            self.score(rollout, clock)
            resampled += len(dead)
        self.saved_forwards += sum(rollout.trained)  # while sampling: no second forward
        columns = {**self._reward_columns(rollout), "resampled_groups": resampled}
        for repetition in range(self.recipe.updates_per_rollout):
            first = repetition == 0
            self.one_update(rollout, self.execution if first else Recompute(self.execution.kl), clock, columns)
            clock = Stopwatch()
        if self.execution.kl is not None:
            self.execution.kl = self.execution.kl.controlled(columns["kl"])
        due = self.update == self.recipe.updates
        evaluated = due or self._passed(self.recipe.evaluation.every)
        held_out = self.evaluate() if evaluated else None
        if evaluated or self._passed(self.recipe.checkpoint.every):
            self.checkpoint(held_out)

    def anywhere(self, interrupted: list[int]) -> bool:
        """Whether any rank was interrupted; a signal may reach one a rollout earlier than another."""
        return bool(self.world.rows(torch.tensor([len(interrupted)])).any())

    def sample(self, dealt: list[MicroBatch], clock: Stopwatch) -> Rollout:
        """This rank's share of the micro-batches."""
        with self.phase(clock, "sampling"):
            decoding = self.policy.decode_seconds
            share = self.layout.share(dealt, self.world.rank)
            self.policy.embed(batch.prompt for batch in share)
            with self.recoveries.step():
                rollout = sample(self.policy, self.execution, share, dealt, self.task.rewards)
            decoding = self.policy.decode_seconds - decoding
        clock.seconds["sampling"] -= decoding
        clock.seconds["decoding"] += decoding
        return rollout

    def score(self, rollout: Rollout, clock: Stopwatch) -> None:
        with self.phase(clock, "reward"):
            score(rollout, self.task.rewards, self.recipe.advantages, self.execution.kl, self.world)

    @contextmanager
    def phase(self, clock: Stopwatch, name: str) -> Iterator[None]:
        """Time a phase, and say which one it was if the memory ran out."""
        try:
            with clock.phase(name):
                yield
        except (torch.OutOfMemoryError, MemoryError) as error:
            recipe, size = self.recipe, self.recipe.rollout.micro_batch
            raise ValueError(
                f"out of memory in phase {name} of update {self.update + 1} (execution: {recipe.execution}, "
                f"rollout.micro_batch: {size}). What needs less: a smaller rollout.micro_batch, execution: reweight, "
                f"policy.gradient_checkpointing: true; the last checkpoint stands. ({error})"
            ) from error

    @property
    def rechecks(self) -> bool:
        """Whether the gradient of the next update is one of those that are compared with recomputing."""
        number = self.update // self.recipe.updates_per_rollout
        return self.execution.grad and number > 0 and number % self.recipe.recheck_every(self.world.size) == 0

    @property
    def penalised(self) -> bool:
        """Whether there is something to train without any advantage: a KL beside the objective."""
        return self.execution.kl is not None and not self.execution.kl.as_reward

    def dead(self, rollout: Rollout) -> set[int]:
        """Groups whose advantages are all zero."""
        assert rollout.advantages is not None
        return set(dead_groups(rollout.advantages).nonzero().flatten().tolist())

    def one_update(self, rollout: Rollout, execution: Execution, clock: Stopwatch, sampled: dict[str, Any]) -> None:
        assert rollout.advantages is not None
        coefficients = Coefficients(self.recipe.objective, rollout)
        with self.phase(clock, "backward"):
            if execution is self.execution and self.rechecks:
                with self.recoveries.recomputing():
                    recheck(self.policy, execution, rollout, coefficients, self.recipe.objective)
            else:
                with self.recoveries.step():
                    execution.accumulate(self.policy, rollout, coefficients)
            self.world.sum_gradients(self.parameters.values(), leaves(self.policy).values())
        coefficients.share(self.world.rows)
        if self.policy.version == rollout.version:
            drifted(coefficients.shift, rollout.transitions[0][0].dims)
        with self.phase(clock, "optimizer"):
            live = bool(rollout.advantages.any()) or self.penalised
            stepped = self.optimizer.step(self.update) if live else self.optimizer.skip()
        self.update += 1
        self.policy.version += 1
        self.world.check_equal(self.parameters.values(), f"update {self.update}")
        if self.ema is not None:
            self.ema.update(self.update)
        counts = [self.policy.calls, self.policy.forwards, self.saved_forwards]
        took = {"peak_mib": round(peak_mib(self.device), 1), **clock.columns()}
        ranks = self.world.rows(torch.tensor([[*counts, *took.values()]], dtype=torch.float64))
        self.spent = self.earlier.plus(ranks[:, : len(counts)].sum(0))
        columns = {
            "kind": "update",
            "update": self.update,
            **self.elapsed.columns(),
            **self.spent.columns(),
            "execution": next(name for name, kind in EXECUTIONS.items() if isinstance(execution, kind)),
            **sampled,
            **clock.columns(),
            **coefficients.statistics(),
            **stepped,
            **({"recovery": self.recoveries.told} if self.recoveries.told else {}),
            "peak_rss_mib": peak_rss_mib(),
        }
        if self.world.size > 1:
            columns["ranks"] = [dict(zip(took, row, strict=True)) for row in ranks[:, len(counts) :].tolist()]
        self.world.once(lambda: self.log.write(**columns))
        self.watch.update(columns)
        if not live:
            self.watch.say(f"update {self.update}: all groups are dead (equal rewards), so nothing was trained")
        elif stepped["skipped"]:
            self.watch.say(f"update {self.update}: skipped, {self.optimizer.why_skipped(stepped['grad_norm'])}")

    def evaluate(self) -> Evaluation | None:
        """By all ranks, for rank 0."""
        with self.ema.applied() if self.ema is not None else nullcontext():
            result = evaluate(self.policy, self.task, self.recipe.evaluation, seed=self.recipe.seed, world=self.world)
        if result is not None:
            self.record(result)
        return result

    def record(self, result: Evaluation) -> None:
        columns = {"kind": "evaluation", "update": self.update, **self.elapsed.columns(), **self.spent.columns()}
        self.log.write(**columns, **result.summary)
        evaluation.save(result, self.task, self.folder / "evaluations", self.update)
        self.watch.evaluation(self.update, result)

    def checkpoint(self, held_out: Evaluation | None) -> None:
        summary = held_out.summary if held_out is not None else {}
        state = State(
            update=self.update,
            **self.elapsed.columns(),
            calls=self.spent.calls,
            forwards=self.spent.forwards,
            saved_forwards=self.spent.saved_forwards,
            kl_beta=self.execution.kl.beta if self.execution.kl is not None else 0.0,
            held_out=summary.get("success_rate", summary.get("score_mean")),
        )
        self.checkpoints.save(state, self.save_weights, self.optimizer.state(), self.recipe_text, self.world)
        self.saved = self.update

    def save_weights(self, folder: Path) -> None:
        """Into ``weights/``, and their average into ``ema/``."""
        self.recipe.policy.trainable.save(self.policy.pipe, folder / "weights", self.world)
        if self.ema is not None:
            with self.ema.applied():
                self.recipe.policy.trainable.save(self.policy.pipe, folder / "ema", self.world)

    def outcome(self, *, stopped: bool) -> Outcome:
        evaluations = {line["update"]: line for line in self.log.read() if line["kind"] == "evaluation"}
        return Outcome(
            folder=self.folder,
            before=evaluations.get(0),
            after=evaluations.get(self.recipe.updates),
            stopped=stopped,
            best=self.checkpoints.best(),
        )

    def _passed(self, every: int) -> bool:
        """Whether the updates on the latest rollout reached or crossed a multiple of `every`."""
        return self.update // every > (self.update - self.recipe.updates_per_rollout) // every

    def _reward_columns(self, rollout: Rollout) -> dict[str, Any]:
        rewards = rollout.rewards
        assert rewards is not None
        dead = self.dead(rollout)
        differing = {int(group) for scores in rollout.scores.values() for group in (~dead_groups(scores)).nonzero()}
        columns: dict[str, Any] = {
            "score_mean": float(rewards.mean()),
            "score_spread": float(rewards.std(1, correction=0).mean()),
            "rewards": {name: float(scores.mean()) for name, scores in rollout.scores.items()},
            "dead_groups": len(dead),
            "dead_by_rounding": len(dead & differing),
        }
        if self.execution.kl is not None:
            assert rollout.kl is not None
            columns |= {"kl": float(rollout.kl.mean()), "kl_beta": self.execution.kl.beta}
        if self.task.success_at is not None:
            columns["success_rate"] = float((rewards >= self.task.success_at).double().mean())
        return columns


def device_of(recipe: Recipe) -> torch.device:
    if recipe.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(recipe.device)


@contextmanager
def _interruptible() -> Iterator[list[int]]:
    """Collects the first Ctrl-C, so that the update in progress ends and is saved; a second one interrupts at once."""
    received: list[int] = []

    def note(number: int, frame: object) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, previous)
