"""The recipe: everything a run depends on, as one strict, immutable tree. Each part lives beside the code it configures."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import Field

from onetake.core.advantages import Advantages
from onetake.core.objectives import Grpo, Kl, ObjectiveConfig
from onetake.core.records import Config
from onetake.core.selection import All, Selection
from onetake.memory import parse_budget
from onetake.parallel import ParallelConfig
from onetake.policies.loading import PolicyConfig
from onetake.rollout.evaluation import EvaluationConfig
from onetake.rollout.recheck import default_interval
from onetake.rollout.sampling import RolloutConfig
from onetake.run.checkpoint import CheckpointConfig
from onetake.run.ema import EmaConfig
from onetake.run.optimizer import OptimizerConfig
from onetake.tasks import BASES, ShapesTask, TaskConfig


class Recipe(Config):
    """A run. `problems` says, before any model loads, everything that could not work."""

    task: TaskConfig = ShapesTask()
    policy: PolicyConfig = PolicyConfig()
    selection: Selection = All()
    objective: ObjectiveConfig = Grpo()
    kl: Kl = Kl()
    advantages: Advantages = Advantages()
    execution: Literal["recompute", "retain", "reweight"] = "retain"
    activations: str | None = Field(
        default=None,
        description="memory to save activations in, the rest is recomputed: auto (80% of what is free), 50%, a peak of 40GiB, "
        "or 1.10x the peak of gradient checkpointing; without it policy.gradient_checkpointing decides",
    )
    rollout: RolloutConfig = RolloutConfig()
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    ema: EmaConfig | None = None
    updates: int = Field(default=100, ge=1, description="optimizer steps of the run")
    updates_per_rollout: int = Field(default=1, ge=1, description="the first by `execution`, further ones by recompute")
    recheck: int | None = Field(
        default=None,
        ge=1,
        description="rollouts between two comparisons of a micro-batch's gradient with the native one, under retain and reweight; "
        "None: as many as make it 1% of the time",
    )
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    seed: int = Field(default=0, ge=0)
    device: str = Field(default="auto", description="auto takes cuda when there is one, else cpu")
    out: Path | None = Field(default=None, description="run folder; by default the next free runs/<recipe>-NNN")

    @property
    def pipeline_source(self) -> str:
        """What diffusers loads: a folder, or the name of a repository on the Hugging Face hub."""
        return str(BASES.get(self.policy.pipeline, self.policy.pipeline))

    @property
    def penalty(self) -> Kl | None:
        """The KL to the reference, if there is one."""
        return self.kl if self.kl.beta > 0 else None

    @property
    def rollouts(self) -> int:
        return self.updates // self.updates_per_rollout

    def recheck_every(self, ranks: int) -> int:
        """Rollouts between two comparisons of gradients."""
        size = self.rollout
        return self.recheck or default_interval(size.groups * size.group_size // (size.micro_batch * ranks))

    def problems(self, ranks: int = 1) -> list[str]:
        """All reasons why the run could not work on `ranks` processes, in the recipe's words; empty if there are none."""
        found = [*self.task.problems(), *self.policy.problems(), *self.rollout.problems(ranks)]
        layout, per = self.rollout.over(ranks), self.selection.per
        found += self.parallel.problems(layout, events_per=per, resample=self.rollout.resample)
        checked = [
            self.selection.problem(self.policy.steps),
            self.objective.problem(self.policy.kernel),
            self.advantages.problem(self.rollout.group_size),
            self.kl.problem(),
        ]
        found += [problem for problem in checked if problem]
        source = self.pipeline_source
        on_the_hub = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", source) and not Path(source).exists()
        if not on_the_hub and not (Path(source) / "model_index.json").is_file():
            found.append(
                f"policy.pipeline: {self.policy.pipeline!r} is neither a built-in base ({', '.join(BASES)}) nor a diffusers "
                "folder (one with a model_index.json), nor written like a hub repository (owner/name)"
            )
        if ranks > 1 and self.device.startswith("cuda:"):
            found.append(
                f"device: {self.device} puts all {ranks} ranks on one GPU; with device: cuda (or auto) each takes its own"
            )
        if self.policy.compile is not None and self.execution == "reweight" and self.rollout.micro_batch > 1:
            found.append(
                f"execution: reweight with rollout.micro_batch: {self.rollout.micro_batch} tells trajectories apart inside linear "
                "layers, which policy.compile replaces; use rollout.micro_batch: 1, execution: retain, or leave policy.compile out"
            )
        found += self._activation_problems()
        if self.updates % self.updates_per_rollout:
            lower = self.rollouts * self.updates_per_rollout
            found.append(
                f"updates: {self.updates} is not a multiple of updates_per_rollout: {self.updates_per_rollout}, so the last "
                f"rollout would be dropped half-used; {lower or ''} {'or ' if lower else ''}"
                f"{lower + self.updates_per_rollout} works".replace("  ", " ")
            )
        return found

    def _activation_problems(self) -> list[str]:
        if self.activations is None:
            return []
        found = []
        try:
            parse_budget(self.activations)
        except ValueError as error:
            found.append(str(error).replace("memory:", "activations:", 1))
        if self.execution == "retain":
            found.append(
                "activations: execution: retain holds the graphs of all events until the advantages are known, and a plan gives "
                "the memory to one; use execution: reweight or recompute, or leave activations out"
            )
        if not self.policy.gradient_checkpointing:
            found.append(
                "activations: fills memory with what checkpointing would recompute; set policy.gradient_checkpointing: true"
            )
        if self.policy.compile is not None:
            found.append(
                "activations: blocks that policy.compile compiles cannot be recorded; leave one of the two out"
            )
        if self.parallel.shard != 1:
            found.append(
                "activations: with parallel.shard all ranks would have to recompute the same blocks, and each measures for "
                "itself; leave one of the two out"
            )
        return found
