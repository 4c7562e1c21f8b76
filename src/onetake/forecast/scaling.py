"""What an update would take on many devices: seconds, bytes sent and memory, from a run that was measured on one.

Work and messages are counted; they are multiplied by the run's seconds and divided by stated link speeds. Nothing overlaps
and no rank waits for another. docs/plan.md says what follows from that, and how far it was checked.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from torch import Tensor, nn

from onetake.core.records import Address
from onetake.execution import EXECUTIONS
from onetake.forecast.memory import Choice, Forecast
from onetake.metrics import PHASES
from onetake.parallel import Layout, LayoutKind
from onetake.parallel.shard import blocks, buckets
from onetake.policies import Policy, trainable
from onetake.policies.adapters import adapter_parameters
from onetake.policies.blank import blank_policy
from onetake.report.run import load
from onetake.run import config
from onetake.run.recipe import Recipe

LATENCY = 1e-4  # s to begin a collective
SMALL = 10  # collectives of a few kilobytes: what the log says (32 bytes an event), digests, interruptions


@dataclass(frozen=True, kw_only=True)
class Message:
    """`count` equal collectives of an update: of a tensor of `size` bytes, among `among` of `span` neighbouring ranks."""

    operation: Literal["all_reduce", "all_gather", "reduce_scatter"]
    count: float
    size: int
    among: int
    span: int

    @property
    def sent(self) -> float:
        """Bytes that a rank sends in all of them, around a ring."""
        passes = 2 if self.operation == "all_reduce" else 1
        return self.count * passes * self.size * (self.among - 1) / self.among


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Devices in nodes; bytes per second that a device sends to another of its node, and to one of another node."""

    ranks: int
    per_node: int = 8
    link: float = 450e9
    network: float = 50e9

    def seconds(self, messages: Iterable[Message]) -> float:
        """One after the other; a ring that leaves a node is as fast as the network."""
        speed = {True: self.link, False: self.network}
        return sum(m.sent / speed[m.span <= self.per_node] + m.count * LATENCY for m in messages)


@dataclass(frozen=True, kw_only=True)
class Share:
    """What a rank does in an update (the mean rank, where events are drawn for each prompt)."""

    trajectories: int
    steps: float  # of a trajectory, while sampling; what a group's samples share counts once
    events: float  # of a trajectory
    calls: float  # of the model, while sampling
    event_calls: float  # of the model, for events alone

    @classmethod
    def of(cls, recipe: Recipe, layout: Layout) -> Share:
        """Of the first update."""
        own, total = layout.group_size // layout.width, recipe.policy.steps
        mask = recipe.selection.mask(
            groups=layout.groups,
            group_size=layout.group_size,
            steps=total,
            address=Address(seed=recipe.seed, stream="train", update=0),
        )
        events = mask.unflatten(1, (-1, layout.micro_batch)).any(2)  # (P, G/B, T)
        together = recipe.rollout.shared_start and recipe.rollout.share_prefix
        first = int(events.any(1).int().argmax(1).sum()) if together else 0  # over all groups
        rest = layout.groups * total - first
        return cls(
            trajectories=layout.groups // layout.sets * own,
            steps=(first + rest * own) / layout.sets,
            events=int(events.sum()) * layout.micro_batch / layout.ranks,
            calls=(first + rest * own / layout.micro_batch) / layout.sets,
            event_calls=int(events.sum()) / layout.ranks,
        )


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Seconds on one device: of a trajectory's step, an event's backward, a decoded and scored output, the optimizer."""

    forward: float
    backward: float
    scoring: float = 0.0
    optimizer: float = 0.0

    @classmethod
    def of(cls, folder: Path) -> Profile:
        """Medians over a run's updates but the first. Raises ValueError where a run does not tell these seconds."""
        (run,) = load([folder])
        recipe = config.load(run.config_text, ranks=None)
        if run.environment.get("ranks") != 1:
            raise ValueError(f"{folder}: seconds are taken from a run on one device, and this one was on several")
        if recipe.execution == "reweight":
            raise ValueError(
                f"{folder}: execution: reweight runs forwards and backwards in one phase, so that their seconds cannot be told "
                "apart; measure a run with execution: recompute (which needs the least memory) or retain"
            )
        own = [line for line in run.updates if line["execution"] == recipe.execution][1:]
        lines = [line for line in own if not (line["resampled_groups"] or line["skipped"])]
        if not lines:
            raise ValueError(f"{folder}: no update after its first one tells seconds; updates: 3 would do")
        took = {name: statistics.median(line[f"{name}_s"] for line in lines) for name in PHASES}
        share = Share.of(recipe, recipe.rollout.over(1))
        forward, backward = took["sampling"] / share.steps, took["backward"] / share.events
        return cls(
            forward=forward,
            backward=backward - forward * (recipe.execution == "recompute"),
            scoring=(took["decoding"] + took["reward"]) / share.trajectories,
            optimizer=took["optimizer"],
        )

    def seconds(self, share: Share, execution: str) -> float:
        """Of all that a rank computes in an update."""
        again = self.forward if execution == "recompute" else 0.0
        made = share.steps * self.forward + share.trajectories * self.scoring
        return made + share.events * (self.backward + again) + self.optimizer


def rescaled(folder: Path, overrides: list[str]) -> Recipe:
    """A run's recipe with other sizes, for other numbers of devices. Raises ValueError if its seconds would change."""
    if not (folder / "config.yaml").is_file():
        raise ValueError(
            f"--world: {folder} is not a run folder, and seconds are taken from a run on one device; make one with "
            "`onetake train RECIPE --set updates=3 --set execution=recompute --set out=RUN`, then `onetake plan RUN --world …`"
        )
    text = (folder / "config.yaml").read_text()
    old, new = config.load(text, ranks=None), config.load(text, overrides, ranks=None)
    wrong = [change for change in config.changes(old, new) if change.startswith("policy.")]
    if wrong:
        raise ValueError(f"--set: {folder} did not measure {'; '.join(wrong)}; measure a run with that")
    return new


def padded(tensor: Tensor, shards: int) -> int:
    """Elements of a tensor that FSDP2 cuts along its first dimension into equal shards."""
    return -(-len(tensor) // shards) * shards * (tensor.numel() // len(tensor))


def unit_bytes(policy: Policy, shards: int) -> list[int]:
    """Bytes of each unit that FSDP2 gathers: every block of a transformer, and what is left of it. Adapters stay whole."""
    sizes = []
    for model in _models(policy):
        left = set(model.parameters()) - adapter_parameters(model)
        for unit in [*blocks(model), model]:
            own = left & set(unit.parameters())
            left -= own
            sizes.append(sum(padded(p, shards) * p.element_size() for p in own))
    return sizes


def _models(policy: Policy) -> list[nn.Module]:
    return list(policy.module.values()) if isinstance(policy.module, nn.ModuleDict) else [policy.module]


def messages(
    policy: Policy, share: Share, layout: Layout, execution: str, *, shards: int = 1, scores: int = 1
) -> list[Message]:
    """What a rank sends in an update with `scores` rewards and without a KL."""
    ranks, parameters = layout.ranks, list(trainable(policy).values())
    size, table = parameters[0].element_size(), 2 * 8 * scores * layout.groups * layout.group_size
    among = {"among": ranks, "span": ranks}
    found = [
        Message(operation="all_reduce", count=1, size=table, **among),
        Message(operation="all_gather", count=SMALL, size=0, **among),
    ]
    if shards == 1 or any(adapter_parameters(model) for model in _models(policy)):
        elements = len(parameters) + sum(p.numel() for p in parameters)
        return [*found, Message(operation="all_reduce", count=1, size=size * elements, **among)] + (
            _gathers(policy, share, execution, shards) if shards > 1 else []
        )
    for bucket in buckets([(p, p) for p in parameters]):
        row = size * (len(bucket) + sum(padded(p, shards) // shards for p, _ in bucket))
        found.append(Message(operation="reduce_scatter", count=1, size=shards * row, among=shards, span=shards))
        if shards < ranks:
            found.append(Message(operation="all_reduce", count=1, size=row, among=ranks // shards, span=ranks))
    return found + _gathers(policy, share, execution, shards)


def _gathers(policy: Policy, share: Share, execution: str, shards: int) -> list[Message]:
    """Of each unit, for every forward and every backward."""
    count = share.calls + share.event_calls * (2 if execution == "recompute" else 1)
    return [
        Message(operation="all_gather", count=count, size=size, among=shards, span=shards)
        for size in unit_bytes(policy, shards)
    ]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """An update under one layout and execution."""

    layout: Layout
    execution: str
    computing: float  # s
    sending: float  # s
    messages: list[Message]
    peak: int | None  # bytes of a rank, where the forecast knows
    efficiency: float  # seconds of one device ÷ those of all ranks together


def predictions(recipe: Recipe, profile: Profile, machine: Machine) -> tuple[list[Prediction], list[str]]:
    """The recipe's update in every layout × execution, and why a layout is not there.

    Micro-batches are the largest up to the recipe's that divide a rank's samples of a group.
    """
    policy, found, refused = blank_policy(recipe.policy, recipe.pipeline_source, recipe.seed), [], []
    shards, scores = recipe.parallel.over(machine.ranks), len(recipe.task.load().rewards.weights)
    alone = Share.of(recipe, recipe.rollout.over(1))
    for kind in get_args(LayoutKind):
        layout = replace(recipe.rollout.over(machine.ranks), kind=kind)
        own = layout.group_size // layout.width
        layout = replace(layout, micro_batch=max(b for b in range(1, layout.micro_batch + 1) if own % b == 0))
        sharding = {"events_per": recipe.selection.per, "resample": recipe.rollout.resample}
        problems = layout.problems() or recipe.parallel.problems(layout, **sharding)
        if problems:
            refused += problems
            continue
        share, forecast = Share.of(recipe, layout), _of_a_rank(recipe, layout)
        for execution in EXECUTIONS:
            sent = messages(policy, share, layout, execution, shards=shards, scores=scores)
            computing, sending = profile.seconds(share, execution), machine.seconds(sent)
            choice = forecast.choice(execution, recipe.policy.gradient_checkpointing, layout.micro_batch)
            found.append(
                Prediction(
                    layout=layout,
                    execution=execution,
                    computing=computing,
                    sending=sending,
                    messages=sent,
                    peak=None if choice.problem else _peak(choice, policy, recipe, shards),
                    efficiency=profile.seconds(alone, execution) / machine.ranks / (computing + sending),
                )
            )
    return found, refused


def _of_a_rank(recipe: Recipe, layout: Layout) -> Forecast:
    """That of a run of a rank's share alone."""
    share = {"groups": layout.groups // layout.sets, "group_size": layout.group_size // layout.width}
    return Forecast(recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update=share)}))


def _peak(choice: Choice, policy: Policy, recipe: Recipe, shards: int) -> int:
    """Of what is sharded all is gone but a shard, and two units that are in use."""
    units, full = unit_bytes(policy, 1), recipe.policy.trainable.kind == "full"
    gone = 1 - 1 / shards
    peaks = [phase.peak - gone * (phase.trained if full else sum(units)) for phase in choice.phases]
    return int(max(peaks)) + (2 * max(units) if shards > 1 else 0)
