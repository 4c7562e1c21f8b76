"""What each action costs, measured: bytes from one forward's hooks, seconds from paired runs of one unit at a time.

A unit is measured where it is called, with the inputs it is called with, on its own: forward and backward under every action
in turn, several times; unless its forward changes more than its result (`state`): such a unit runs once, and is stored. Units of
one kind (same class, shapes and trainable parameters) share the figures of the first few. Bytes are exact; seconds are those of
the fastest time each, since all that disturbs a measurement makes it slower.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from onetake.activations.capture import Capture
from onetake.activations.plan import Action, Option, UnitOptions
from onetake.activations.units import CaptureError, Templates, Unit

log = logging.getLogger(__name__)

Shape = tuple[int, int]
"""Rows and tokens per row of a unit's first tensor."""


@dataclass(kw_only=True)
class Bucket:
    """Measured on one shape: the peak of recomputing every unit, and options by unit, in the order units run.

    `used` is what was in use before, bytes; 0 if that is not known.
    """

    shape: Shape
    peak: int = 0
    used: int = 0
    options: dict[str, list[Option]] = field(default_factory=dict)

    def units(self, actions: Iterable[Action]) -> list[UnitOptions]:
        allowed = set(actions)
        return [
            UnitOptions(name=name, options=tuple(option for option in options if option.action in allowed))
            for name, options in self.options.items()
        ]


@dataclass(kw_only=True)
class Profile:
    """Everything measured of a model on a machine; kept as JSON."""

    fingerprint: dict[str, str]
    buckets: list[Bucket] = field(default_factory=list)
    sensitivity: dict[str, float] = field(default_factory=dict)
    """κ by unit, if it was calibrated."""

    def bucket(self, shape: Shape) -> Bucket | None:
        """The smallest measured shape that covers `shape`: bytes are then bounds, and seconds proportional."""
        covering = [
            b for b in self.buckets if b.shape[0] * b.shape[1] >= shape[0] * shape[1] and b.shape[1] >= shape[1]
        ]
        return min(covering, key=lambda b: b.shape[0] * b.shape[1], default=None)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def load(cls, path: Path, fingerprint: dict[str, str]) -> Profile:
        """Raises ValueError if it was measured on anything else than what `fingerprint` says."""
        told = json.loads(path.read_text())
        measured = told["fingerprint"]
        stale = [f"{k}: {measured.get(k)!r}, now {now!r}" for k, now in fingerprint.items() if measured.get(k) != now]
        if stale:
            raise ValueError(
                f"profile: {path} is stale ({'; '.join(stale)}); delete it, and the next update measures anew"
            )
        buckets = [
            Bucket(
                shape=(bucket["shape"][0], bucket["shape"][1]),
                peak=bucket["peak"],
                used=bucket.get("used", 0),
                options={
                    name: [Option(**option | {"action": Action(option["action"])}) for option in options]
                    for name, options in bucket["options"].items()
                },
            )
            for bucket in told["buckets"]
        ]
        return cls(fingerprint=measured, buckets=buckets, sensitivity=told.get("sensitivity", {}))


def fingerprint(model: nn.Module, units: list[Unit]) -> dict[str, str]:
    """What a profile depends on."""
    weights = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in model.named_parameters()]
    device = next(model.parameters()).device
    machine = (
        torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    )
    return {
        "weights": hashlib.sha256(repr(weights).encode()).hexdigest()[:16],
        "units": f"{len(units)} {type(units[0].module).__name__}",
        "device": f"{device.type} {machine}",
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


Measured = dict[Action, tuple[float, int]]
"""Least seconds of a unit's forward and backward, and bytes kept."""


class Probe:
    """Measures units as they are called. Give it to a `Capture` as its probe for one forward."""

    def __init__(self, actions: Iterable[Action], templates: Templates, *, rounds: int = 5, per_kind: int = 2) -> None:
        self.templates = templates
        self.actions = [action for action in actions if action != Action.RECOMPUTE]
        self.rounds = rounds
        self.per_kind = per_kind
        self.shape: Shape | None = None
        self._seen: dict[str, Any] = {}  # unit → kind
        self._stored: set[str] = set()  # units that must not run again
        self._found: dict[Any, list[Measured]] = {}

    def __call__(self, unit: Unit, kind: Any, function: Callable[..., Any] | None, args: tuple[Any, ...]) -> None:
        self.shape = self.shape or shape_of(next(a for a in args if isinstance(a, Tensor)))
        self._seen[unit.name] = kind
        if function is None:
            self._stored.add(unit.name)
            return
        found = self._found.setdefault(kind, [])
        if len(found) < self.per_kind:
            found.append(self._measured(unit, function, args))

    def options(self) -> dict[str, list[Option]]:
        """By unit: the most bytes of its kind, and its kind's seconds; nothing for units that are stored in any case."""
        merged = {kind: self._merged(found) for kind, found in self._found.items()}
        return {name: [] if name in self._stored else merged[kind] for name, kind in self._seen.items()}

    def _measured(self, unit: Unit, function: Callable[..., Any], args: tuple[Any, ...]) -> Measured:
        """Raises CaptureError if the unit makes other values when it runs again."""
        trial = partial(_trial, self.templates, unit, function, args)
        bytes_ = {Action.RECOMPUTE: trial(Action.RECOMPUTE)[1]}
        for action in self.actions:
            try:
                bytes_[action] = trial(action)[1]  # and records a template
            except CaptureError as error:
                log.warning("%s is not offered for %s: %s", action, unit.name, error)
        times = [{action: trial(action)[0] for action in bytes_} for _ in range(self.rounds)]
        return {action: (min(time[action] for time in times), bytes_[action]) for action in bytes_}

    def _merged(self, found: list[Measured]) -> list[Option]:
        """What all of them allow."""

        def fastest(action: Action) -> float:
            return min(measured[action][0] for measured in found)

        slow = fastest(Action.RECOMPUTE)
        return [
            Option(action=a, bytes=max(measured[a][1] for measured in found), seconds=slow - fastest(a))
            for a in self.actions
            if all(a in measured for measured in found)
        ]


def shape_of(tensor: Tensor) -> Shape:
    """(rows, tokens per row) of a (…, tokens, width) tensor."""
    return tensor.shape[:-2].numel(), tensor.shape[-2]


def _trial(
    templates: Templates, unit: Unit, function: Callable[..., Any], args: tuple[Any, ...], action: Action
) -> tuple[float, int]:
    """Seconds of one forward and backward of the unit alone, and the bytes it kept. Leaves gradients and randomness alone."""
    leaves = [a.detach().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a for a in args]
    wanted = [p for p in unit.module.parameters() if p.requires_grad]
    wanted += [a for a in leaves if isinstance(a, Tensor) and a.requires_grad]
    capture, alone = Capture(lambda *_: action, templates), Unit(name=unit.name, module=unit.module, changes="")
    with torch.random.fork_rng():
        device = next(a.device for a in args if isinstance(a, Tensor))
        started = now(device)
        out = capture.run(alone, checkpoint, function, *leaves)
        outs = [
            o for o in (out if isinstance(out, tuple | list) else [out]) if isinstance(o, Tensor) and o.requires_grad
        ]
        torch.autograd.grad(outs, wanted, [torch.ones_like(o) for o in outs], allow_unused=True)
        return now(device) - started, alone.captured


def now(device: torch.device) -> float:
    """Seconds: of this process on CPU, of the clock on an accelerator, once it is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time()
