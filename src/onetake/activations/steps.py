"""Steps of a model whose units follow plans: measured once for every shape, planned, executed, reported.

The first step of a new shape recomputes every unit, as plain checkpointing does, and measures; from the next on, the plan
that saves most time in the memory given runs. A step may hold several forwards: each gets the memory if none before it still
waits for its backward, and else is recomputed.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor, nn

from onetake.activations.attach import Attachment
from onetake.activations.capture import Capture
from onetake.activations.lossy import Lossy
from onetake.activations.measure import Bucket, Probe, Profile, Shape, fingerprint, shape_of
from onetake.activations.plan import EXACT, MIB, Action, Plan
from onetake.activations.region import Region
from onetake.activations.solve import solve
from onetake.activations.units import CaptureError, Unit
from onetake.memory import PeakMemory, parse_budget
from onetake.parallel.shard import FSDPModule

log = logging.getLogger(__name__)

GROWN = 0.01  # of the peak: what may come into use without a new plan


class Steps:
    """Attached to the model at once. `memory` is the peak that may be reached: bytes, ``"40GiB"``, a multiple of the peak of
    recomputing every unit (``"1.10x"``), or a share of what stays free beside that peak (``"80%"``).

    `profile` names a JSON file for what was measured; it is read if it exists, and refused if it is stale.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        memory: int | str,
        profile: Path | None = None,
        actions: Iterable[Action] = EXACT,
        lossy: Lossy | None = None,
    ) -> None:
        self.memory = parse_budget(memory)
        self.lossy = lossy
        self.actions = (*actions, *([Action.COMPRESS] if lossy is not None else []))
        self.model = model
        self.attachment = Attachment(model, Capture(self._choose))
        self.attachment.capture.weigh = None if lossy is None else self._weigh
        self.units = self.attachment.units
        self.device = next(model.parameters()).device
        self.peak = PeakMemory(self.device)
        self.path = profile
        print_of = fingerprint(model, self.units)
        known = profile is not None and profile.exists()
        self.profile = (
            Profile.load(profile, print_of) if profile is not None and known else Profile(fingerprint=print_of)
        )
        if lossy is not None and not lossy.sensitivity:
            lossy.sensitivity = self.profile.sensitivity
        self.plans: dict[Shape, Plan] = {}  # by measured shape
        self.plan: Plan | None = None  # of the step's latest forward that had one; None if all were recomputed
        self._foretold, self._saved = 0, 0.0  # of the step: its peak in bytes, seconds by all of its plans
        self._actions: dict[str, Action] = {}  # of that plan, by unit
        self._index = {unit: index for index, unit in enumerate(self.units)}
        self._last = -1  # index of the unit that ran latest
        self._holding: list[weakref.ref[Region]] = []  # of forwards that had the memory, until their backward
        self._probe: Probe | None = None  # of the step in progress
        self._peak = self._replays = 0
        self._used = 0  # bytes in use when the peak was restarted
        self._forced: dict[str, Action] | None = None
        self._inside = False
        self._forwards = 0
        self.exposure: float | None = None  # of the latest step, where a trainer's log-probs were read
        self.skipped = False  # whether its backward was
        self.reached: list[nn.Parameter] | None = None  # got a gradient in the first step

    @contextmanager
    def step(self, *, strict: bool = True) -> Iterator[None]:
        """Around a forward and its backward, or several. Afterwards `report` tells what happened.

        If `strict`, raises CaptureError if no unit ran, or, the first time, if a unit's trainable parameters got no gradient.
        """
        if not self._restart_peak():
            raise CaptureError(
                "the peak of this process cannot be measured here: /proc/self/clear_refs is not writable (not Linux, or a "
                "container that forbids it). Recovery on CPU needs it; on CUDA it asks the allocator"
            )
        self._inside, self._forwards, self._last, self.plan, self._probe = True, 0, -1, None, None
        self._foretold, self._saved = 0, 0.0
        self.exposure, self.skipped = None, False
        before = [unit.replays for unit in self.units]
        if self.lossy is not None:
            self.lossy.begin(self.model.parameters())
        try:
            yield
        finally:
            self._inside, self.attachment.capture.probe = False, None
        self._replays = sum(unit.replays for unit in self.units) - sum(before)
        self._peak = self.peak.bytes
        if strict and not self._forwards:
            raise CaptureError(
                "no unit ran with gradients inside the step: checkpointing was switched off and not on again, or the model was in "
                "eval mode; call model.train(), and keep gradient checkpointing on in the trainer"
            )
        if self.lossy is not None:
            self.lossy.end(self.model.parameters())
        if strict and self.reached is None:
            self._check_gradients()
        if self._probe is not None:
            self._learn(self._probe)

    @property
    def ran(self) -> bool:
        """Whether the latest step had a forward with gradients."""
        return self._forwards > 0

    def report(self) -> dict[str, float]:
        """Of the latest step: units by action as executed, replays, MiB kept, peak predicted and measured, ms saved as planned.

        Where a trainer's log-probs were read, exposure Σ|ω| and whether the backward was skipped; with `lossy` the risk spent, the
        relative error expected of what was compressed.
        """
        told: dict[str, float] = {f"units_{a}": sum(u.executed == a for u in self.units) for a in Action}
        told |= {"replays": self._replays, "kept_mib": sum(unit.captured for unit in self.units) / MIB}
        told["peak_mib"] = self._peak / MIB
        if self.plan is not None:
            told |= {"predicted_peak_mib": self._foretold / MIB, "saved_ms": self._saved * 1e3}
        if self.exposure is not None:
            told |= {"exposure": self.exposure, "skipped": self.skipped}
        if self.lossy is not None:
            told |= {"risk": self.lossy.error}
        return told

    def watch(self, *tensors: Tensor | None) -> None:
        """Between forward and backward, for ``Lossy(by="coefficients")``: the log-probs, and what else the loss reads of the model,
        such as entropies."""
        if not self.require_lossy().watch(tensors):
            raise ValueError(
                "recovery.watch() got no tensor with a gradient; hand it the log-probs before they are detached"
            )

    def require_lossy(self) -> Lossy:
        if self.lossy is None:
            raise ValueError("this recovery is exact: log-probs are read only with lossy=Lossy(target=0.015)")
        return self.lossy

    def learn_sensitivity(self, sensitivity: dict[str, float]) -> None:
        """κ by unit, kept in the profile."""
        self.require_lossy().sensitivity = self.profile.sensitivity = sensitivity
        if self.path is not None:
            self.profile.save(self.path)

    @contextmanager
    def forced(self, actions: dict[str, Action]) -> Iterator[None]:
        """Run the units named under these actions and all others under R, whatever the plan says, and accept any loss."""
        self._forced = actions
        if self.lossy is not None:
            self.lossy.forget()
        try:
            yield
        finally:
            self._forced = None

    def _weigh(self, unit: Unit, gradient: Tensor, held: bool) -> bool:
        lossy = self.require_lossy()
        lossy.note(unit.name, gradient)
        return held and (self._forced is not None or lossy.accept(unit.name))

    def begin_loss(self) -> bool:
        """Before a loss is computed: whether that is inside a step, whose peak counts from here. What a trainer did before in its
        step, such as generating, no plan changes."""
        if self._inside:
            self._restart_peak()
        return self._inside

    def forgo(self, plan: Plan, useless: dict[str, Action]) -> Plan:
        """The plan of the same shape without these actions of these units, which are not offered again."""
        (bucket,) = (b for b in self.profile.buckets if self.plans.get(b.shape) is plan)
        for name, action in useless.items():
            bucket.options[name] = [option for option in bucket.options[name] if option.action != action]
        self._make_plan(bucket)
        if self.path is not None:
            self.profile.save(self.path)
        return self.plans[bucket.shape]

    def detach(self) -> None:
        """Give the model its own checkpointing back."""
        self.attachment.detach()

    def _choose(self, unit: Unit, tensor: Tensor) -> Action:
        if self._forced is not None:
            return self._forced.get(unit.name, Action.RECOMPUTE)
        index = self._index[unit]
        if index <= self._last or not self._forwards:  # units run in order, so this is another forward
            self._forwards += 1
            self._start(shape_of(tensor))
        self._last = index
        return self._actions.get(unit.name, Action.RECOMPUTE)

    def _start(self, shape: Shape) -> None:
        """At the first unit of a forward: the plan of its shape, or else a measurement of it."""
        capture = self.attachment.capture
        known = self.profile.bucket(shape)
        self._actions, capture.probe = {}, None
        held = [*self._holding, *(unit.region for unit in self.units if unit.region is not None)]
        self._holding = [region for region in held if region() is not None]
        if self._holding:
            capture.known.tell_once(
                "a forward with gradients while an earlier one waits for its backward is recomputed (R): the memory is given to "
                "the first"
            )
        elif known is not None:
            self._grow(known)
            if known.shape not in self.plans or self.lossy is not None:
                self._make_plan(known)
            self.plan = self.plans[known.shape]
            self._actions = self.plan.by_unit
            self._foretold = max(self._foretold, known.peak + self.plan.bytes)
            self._saved += self.plan.seconds
        elif self._inside and self._probe is None:
            if self._sharded:
                raise CaptureError(
                    f"{shape[0]} rows of {shape[1]} tokens are not in the profile, and blocks whose weights are sharded cannot be "
                    "run alone to be measured: take a step of that shape before fully_shard, with profile=…"
                )
            self._probe = capture.probe = Probe(self.actions, capture.known.templates)
        elif not self._inside:
            capture.known.tell_once("a forward of unmeasured shape outside of step() is recomputed (R)")

    def _restart_peak(self) -> bool:
        self._used = self.peak.used
        return self.peak.restart()

    def _grow(self, bucket: Bucket) -> None:
        """Add to its peak what came into use since it was measured: gradients, an optimizer's state. The plan is made anew."""
        grown = self._used - bucket.used
        if bucket.used and grown > bucket.peak * GROWN:
            bucket.peak, bucket.used = bucket.peak + grown, self._used
            self.plans.pop(bucket.shape, None)

    def _learn(self, probe: Probe) -> None:
        assert probe.shape is not None
        bucket = Bucket(shape=probe.shape, peak=self._peak, used=self._used, options=probe.options())
        self.profile.buckets.append(bucket)
        self._make_plan(bucket)
        if self.path is not None:
            self.profile.save(self.path)

    def _make_plan(self, bucket: Bucket) -> None:
        units, memory = bucket.units(self.actions), self.memory(bucket.peak, self.peak.free)
        if memory < 0:
            self._refuse_to_recompute(-memory)
        if self.lossy is None:
            plan = solve(units, memory=memory)
        else:
            plan = solve(self.lossy.offered(units), memory=memory, risk=self.lossy.budget)
        self.plans[bucket.shape] = plan
        log.log(
            logging.INFO if self.lossy is None else logging.DEBUG,
            "%d rows of %d tokens:\n%s",
            *bucket.shape,
            plan.table(),
        )

    def _refuse_to_recompute(self, missing: int) -> None:
        """Raises CaptureError if units are stored that would have to be recomputed for the memory given."""
        stored = [f"{unit.name} {unit.changes}" for unit in self.units if unit.changes]
        if stored:
            raise CaptureError(
                f"memory: the peak is {missing / MIB:.1f} MiB above what was given, and {len(stored)} blocks cannot be recomputed, "
                f"since their forward changes more than its result ({'; '.join(stored[:3])}). Give more memory, or keep such state "
                "outside of the block's forward"
            )

    @property
    def _sharded(self) -> bool:
        return any(isinstance(unit.module, FSDPModule) for unit in self.units)

    def _check_gradients(self) -> None:
        reached = [p for p in self.model.parameters() if p.grad is not None]
        if not reached and self._sharded:  # FSDP2 has them to itself until the backward that sums them
            return
        for unit in (unit for unit in self.units if unit.forwards):
            trainable = [p for p in unit.module.parameters() if p.requires_grad]
            if trainable and all(p.grad is None for p in trainable):
                raise CaptureError(
                    f"{unit.name}: none of its {len(trainable)} trainable tensors got a gradient in the first step: it would not "
                    "train. Check that the loss depends on it, and that its inputs are not detached"
                )
        self.reached = reached
