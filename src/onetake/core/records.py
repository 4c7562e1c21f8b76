"""What flows between the layers, and the shape legend of the whole package.

N trajectories, G group size (trajectories of one prompt), B trajectories of one micro-batch, P groups of an update,
T denoising steps, K selected events, D latent dimensions. A suffix such as ``x_ND`` spells a shape in dense maths.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict
from torch import Tensor


class Config(BaseModel):
    """A strategy object that is its own configuration: immutable, strict, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def _name_to_kind(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


NAMED = BeforeValidator(_name_to_kind)
"""Lets a choice be written by its name alone: ``execution: retain`` means ``execution: {kind: retain}``."""


def nearest(word: str, known: list[str]) -> str:
    """The end of a message about an unknown `word`: which known one may have been meant, or all of them."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; known are {', '.join(known)}" if known else ""


@dataclass(frozen=True)
class Prompt:
    """What one group is asked for. Pictures are files, opened when the prompt is sampled, so that no data set fills the memory."""

    text: str
    images: tuple[Path, ...] = ()
    negative: str | None = None  # in place of policy.negative_prompt
    metadata: dict[str, Any] = field(default_factory=dict[str, Any], compare=False)  # for the reward alone


@dataclass(frozen=True, kw_only=True)
class Address:
    """Names a piece of randomness by content, so that its value depends on nothing else (see `noise`)."""

    seed: int
    stream: str  # "train" or "evaluation": the two never share noise
    update: int


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """B trajectories of one group, sampled by one call of the policy.

    Groups are identified by their index in the update, never by their text: equal prompts stay separate groups.
    """

    address: Address
    group: int  # index of the group in the update
    prompt_index: int  # index of the prompt in the task's list
    prompt: Prompt
    samples: tuple[int, ...]  # (B,) indices inside the group
    stochastic: Tensor  # (B, T) bool: which transitions are drawn (and trained); the others are ODE steps
    weight: Tensor  # (T,) float64: known factor of each event's gradient (1, or Flash-GRPO's rectification)
    shared_start: bool = False  # all samples of the group start from the same noise
    first: int = 0  # before this step nothing of the group is stochastic, and its samples are one
    last: int | None = None  # after this event nothing of the group is stochastic

    def alone(self) -> MicroBatch:
        """Its first trajectory by itself: what a group that shares its start computes for all."""
        return replace(self, samples=self.samples[:1], stochastic=self.stochastic[:1])

    @property
    def events(self) -> list[int]:
        """Indices of events that are stochastic for at least one row."""
        return [k for k in range(self.stochastic.shape[1]) if self.stochastic[:, k].any()]


@dataclass(frozen=True, kw_only=True)
class Transition:
    """Event k of a micro-batch: x_k → x_{k+1} ~ N(mean, std²), scored under the current weights.

    ``log_prob`` (B,) is in nats, summed over dims in float64, and 0 in rows where the event is not stochastic.
    It carries a graph when the model ran with gradients. ``sample`` and ``action`` are exactly what the model saw and
    what the next step will see, in their storage dtype. ``velocity`` is what the model answered, without graph.
    """

    index: int
    rows: Tensor  # (B,) bool
    sample: Tensor  # x_k (B, ...)
    action: Tensor  # x_{k+1} (B, ...)
    velocity: Tensor  # (B, ...)
    mean: Tensor  # (B, ...) float32 or wider; carries a graph as log_prob does
    log_prob: Tensor  # (B,)
    std: float
    reference_mean: Tensor | None = None  # (B, ...) of the frozen reference, where a KL to it is asked for
    overwritten: int = 0  # latent dimensions that the pipeline overwrites after every event; mean = action there

    @property
    def dims(self) -> int:
        """D, the number of latent dimensions of one trajectory that are acted upon."""
        return self.action[0].numel() - self.overwritten

    def kl(self, other_mean: Tensor) -> Tensor:
        """(B,) float64 KL divergence ‖μ − μ'‖²/(2S²) in nats to the same event of a policy with mean μ' (no graph)."""
        shift = (self.mean - other_mean.detach()) / self.std
        return torch.where(self.rows, 0.5 * shift.square().flatten(1).sum(1, dtype=torch.float64), 0)

    def detached(self) -> Transition:
        return replace(self, mean=self.mean.detach(), log_prob=self.log_prob.detach())


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Where a call that does not start from noise begins: before event `index`, at x_index (B, ...)."""

    index: int
    sample: Tensor


@dataclass(kw_only=True)
class Rollout:
    """The trajectories of one update, micro-batch by micro-batch; rewards and advantages arrive after sampling."""

    batches: list[MicroBatch]
    transitions: list[list[Transition]]  # per micro-batch, events ascending, without graphs
    outputs: list[Tensor]  # per micro-batch, what the reward sees (B, ...)
    kept: list[Any]  # per micro-batch, what the execution holds until the advantages arrive; it alone knows what
    trained: list[int]  # per micro-batch, rows of forward calls that ran with gradients while sampling
    version: int  # of the policy that sampled it
    dealt: list[MicroBatch]  # every micro-batch of the update, whichever rank sampled it
    parts: list[dict[str, Tensor]] = field(
        default_factory=list[dict[str, Tensor]]
    )  # per scored micro-batch, reward name → (B,)
    scores: dict[str, Tensor] = field(default_factory=dict[str, Tensor])  # reward name → (P, G), of all ranks
    rewards: Tensor | None = None  # (P, G) weighted sum of the scores
    kl: Tensor | None = (
        None  # (P, G) mean over a trajectory's events of the scaled KL to the reference, where asked for
    )
    advantages: Tensor | None = None  # (P, G)

    @property
    def event_count(self) -> int:
        """Events of all trajectories of the update, on all ranks: the normaliser of every objective."""
        return sum(int(batch.stochastic.sum()) for batch in self.dealt)

    def take_kept(self) -> list[Any]:
        """What the execution kept, once: the rollout forgets it, so that each gradient is paid out a single time."""
        kept, self.kept = self.kept, []
        assert len(kept) == len(self.batches), "accumulated twice, or not sampled under this execution"
        return kept

    def parted(self, number: int) -> tuple[Rollout, Rollout]:
        """Micro-batch `number`, and all others; what was kept goes with them, and this rollout forgets it as in `take_kept`."""
        kept = self.take_kept()

        def only(column: list[Any], chosen: bool) -> list[Any]:
            return [value for i, value in enumerate(column) if (i == number) == chosen]

        one, others = (
            replace(
                self,
                batches=only(self.batches, chosen),
                transitions=only(self.transitions, chosen),
                outputs=only(self.outputs, chosen),
                kept=only(kept, chosen),
                trained=only(self.trained, chosen),
                parts=only(self.parts, chosen),
            )
            for chosen in (True, False)
        )
        return one, others

    def drop(self, groups: set[int]) -> None:
        """Forget the trajectories of `groups`, and free what is kept of them."""
        stay = [i for i, batch in enumerate(self.batches) if batch.group not in groups]
        for column in self._columns():
            column[:] = [column[i] for i in stay if i < len(column)]  # parts are shorter until all is scored
        self.dealt = [batch for batch in self.dealt if batch.group not in groups]

    def add(self, other: Rollout) -> None:
        """Take in the trajectories of `other`, sampled by the same version of the policy."""
        assert other.version == self.version, "one rollout, one version of the policy"
        for mine, theirs in zip(self._columns(), other._columns(), strict=True):
            mine += theirs
        self.dealt = self.dealt + other.dealt

    def _columns(self) -> list[list[Any]]:
        return [self.batches, self.transitions, self.outputs, self.kept, self.trained, self.parts]

    def table(self, values: list[Tensor]) -> Tensor:
        """(P, G) float64 from one (B,) tensor per micro-batch, by group and sample index; NaN where another rank sampled."""
        groups = 1 + max(batch.group for batch in self.dealt)
        size = 1 + max(sample for batch in self.dealt for sample in batch.samples)
        table = torch.full((groups, size), torch.nan, dtype=torch.float64)
        for batch, value in zip(self.batches, values, strict=True):
            table[batch.group, list(batch.samples)] = value.double().cpu()
        return table

    def advantage(self, batch: MicroBatch) -> Tensor:
        """(B,) advantages of one micro-batch."""
        assert self.advantages is not None, "advantages are set after the reward"
        return self.advantages[batch.group, list(batch.samples)]
