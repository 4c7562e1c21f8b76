"""Faults planted into one tensor of what an execution accumulates, and the runs that they are planted into.

A fault is a function of the tensor's gradient and of the `Parts` it is made of, whose value is the wrong gradient. It knows nothing
of how executions work inside: parts are recomputed by plain autograd.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from helpers import PROMPTS, move
from onetake.core.coefficients import Coefficients
from onetake.core.objectives import Grpo, Kl
from onetake.core.records import Address, MicroBatch, Rollout
from onetake.core.selection import All
from onetake.core.transitions import Flow
from onetake.execution import EXECUTIONS, Execution
from onetake.policies import Policy, leaves
from onetake.policies.adapters import Full, Lora
from onetake.policies.diffusion import DiffusionPolicy
from onetake.policies.loading import PolicyConfig
from onetake.policies.toy import ToyPolicy
from onetake.rollout.sampling import RolloutConfig, deal
from tiny_families import CASES, tiny

TRAINABLE = {"lora": Lora(rank=4), "full": Full()}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A run: a policy, what is trained, in which dtype, and how its gradient is made."""

    case: str  # "toy", or a tiny pipeline of the real classes
    trainable: str = "lora"
    dtype: str = "float32"
    execution: str = "reweight"
    micro_batch: int = 2
    kl: bool = False
    guidance: float = 1.0

    def __str__(self) -> str:
        kl, guided = ", KL" if self.kl else "", f", guidance {self.guidance:g}" if self.guidance != 1 else ""
        trained = "float64" if self.case == "toy" else f"{self.trainable}, {self.dtype}"
        return f"{self.case} ({trained}), {self.execution}, micro-batch {self.micro_batch}{kl}{guided}"

    @property
    def strategy(self) -> Execution:
        return EXECUTIONS[self.execution](Kl(beta=0.04) if self.kl else None)

    def policy(self, *, moved: bool) -> Policy:
        """As before the first update, or `moved` by some."""
        if self.case == "toy":
            policy: Policy = ToyPolicy(Flow())
        else:
            folder = _saved(self.case)
            config = PolicyConfig(
                pipeline=folder,
                steps=4,
                dtype=self.dtype,
                guidance=self.guidance,
                call=CASES[self.case].call,
                trainable=TRAINABLE[self.trainable],
            )
            policy = DiffusionPolicy.from_config(config, folder, seed=0, with_reference=self.kl)
        if moved:
            move(policy, 0.02)
        return policy

    def batches(self, policy: Policy, update: int = 0) -> list[MicroBatch]:
        size = RolloutConfig(groups=2, group_size=4, micro_batch=self.micro_batch)
        return deal(size, PROMPTS, policy, All(), Grpo(), Address(seed=0, stream="train", update=update))


@cache
def _saved(case: str) -> str:
    """The case's pipeline as a folder, for as long as the process lives."""
    _FOLDERS.append(tempfile.TemporaryDirectory())
    tiny(case).save_pretrained(_FOLDERS[-1].name)
    return _FOLDERS[-1].name


_FOLDERS: list[tempfile.TemporaryDirectory] = []


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What the gradient of one tensor is made of."""

    policy: Policy
    execution: Execution
    rollout: Rollout
    coefficients: Coefficients
    leaf: nn.Parameter
    earlier: Tensor | None  # the tensor's gradient of another update

    def of(self, batch: int, event: int, factor: Tensor | None = None, *, term: str = "scored") -> Tensor:
        """That of an event, each row's times its factor: of its log_prob, or of its KL (`term`)."""
        dealt, old = self.rollout.batches[batch], self.rollout.transitions[batch][event]
        new = self.policy.score(dealt, old)
        if term == "kl":
            assert self.execution.kl is not None
            output, cotangent = (
                self.execution.kl.of(new, old),
                self.execution.kl.cotangent(old) / self.rollout.event_count,
            )
        else:
            output = self.coefficients.scored(old, new)
            cotangent = self.coefficients.omega(dealt, old, old.detached())
        factor = torch.ones_like(cotangent) if factor is None else factor.to(cotangent)
        (gradient,) = torch.autograd.grad(output, self.leaf, cotangent * factor, allow_unused=True)
        return torch.zeros_like(self.leaf) if gradient is None else gradient

    def row(self, batch: int, row: int) -> Tensor:
        """That of one trajectory."""
        samples = len(self.rollout.batches[batch].samples)
        events = range(len(self.rollout.transitions[batch]))
        return sum((self.of(batch, k, torch.eye(samples)[row]) for k in events), torch.zeros_like(self.leaf))

    def advantage(self, batch: int, row: int) -> float:
        return float(self.rollout.advantage(self.rollout.batches[batch])[row])


Fault = Callable[[Tensor, Parts], Tensor]


def factor(number: float) -> Fault:
    return lambda gradient, parts: number * gradient


def middle(gradient: Tensor) -> int:
    """The row (first dimension) of middle norm among those that are not zero."""
    norms = gradient.reshape(len(gradient), -1).double().norm(dim=1)
    order = norms.argsort()
    return int(order[(norms == 0).sum() + (norms > 0).sum() // 2])


def on_a_row(number: float) -> Fault:
    def wrong(gradient: Tensor, parts: Parts) -> Tensor:
        gradient = gradient.clone()
        gradient[middle(gradient)] *= number
        return gradient

    return wrong


def on_an_entry(number: float) -> Fault:
    def wrong(gradient: Tensor, parts: Parts) -> Tensor:
        flat = gradient.flatten().clone()
        flat[middle(flat)] *= number
        return flat.view_as(gradient)

    return wrong


def rows_exchanged(gradient: Tensor, parts: Parts) -> Tensor:
    """Two output channels."""
    order = gradient.reshape(len(gradient), -1).double().norm(dim=1).argsort()
    gradient = gradient.clone()
    gradient[order[-2:]] = gradient[order[-2:].flip(0)]
    return gradient


def columns_rolled(gradient: Tensor, parts: Parts) -> Tensor:
    return gradient.roll(1, -1)


def stale(gradient: Tensor, parts: Parts) -> Tensor:
    assert parts.earlier is not None
    return parts.earlier


def left_over(gradient: Tensor, parts: Parts) -> Tensor:
    """An earlier gradient was not cleared."""
    assert parts.earlier is not None
    return gradient + parts.earlier


def without_an_event(gradient: Tensor, parts: Parts) -> Tensor:
    return gradient - parts.of(0, 1)


def an_event_twice(gradient: Tensor, parts: Parts) -> Tensor:
    return gradient + parts.of(0, 0)


def an_event_misweighed(gradient: Tensor, parts: Parts) -> Tensor:
    """By a hundredth."""
    return gradient + 0.01 * parts.of(0, 1)


def without_a_trajectory(gradient: Tensor, parts: Parts) -> Tensor:
    return gradient - parts.row(0, 0)


def a_trajectorys_sign(gradient: Tensor, parts: Parts) -> Tensor:
    return gradient - 2 * parts.row(0, 0)


def trajectories_exchanged(gradient: Tensor, parts: Parts) -> Tensor:
    """Two rows of a micro-batch have each other's advantage."""
    one, other = parts.advantage(0, 0), parts.advantage(0, 1)
    return gradient + (other / one - 1) * parts.row(0, 0) + (one / other - 1) * parts.row(0, 1)


def in_bfloat16(gradient: Tensor, parts: Parts) -> Tensor:
    """Rounded on the way."""
    return gradient.bfloat16().to(gradient.dtype)


def without_the_kl(gradient: Tensor, parts: Parts) -> Tensor:
    return gradient - parts.of(0, 0, term="kl")


ANYWHERE: dict[str, Fault] = {
    "× 1.01": factor(1.01),
    "× 0.99": factor(0.99),
    "× −1": factor(-1.0),
    "× 2": factor(2.0),
    "missing": factor(0.0),
    "an entry × −1": on_an_entry(-1.0),
    "an entry × 1.01": on_an_entry(1.01),
    "a row × 1.01": on_a_row(1.01),
    "a row × −1": on_a_row(-1.0),
    "stale": stale,
    "another left over": left_over,
    "an event missing": without_an_event,
    "an event twice": an_event_twice,
    "an event × 1.01": an_event_misweighed,
    "a trajectory missing": without_a_trajectory,
    "a trajectory × −1": a_trajectorys_sign,
    "rows exchanged": rows_exchanged,
    "columns rolled": columns_rolled,
    "rounded to bfloat16": in_bfloat16,
}
IN_MICRO_BATCHES: dict[str, Fault] = {"trajectories exchanged": trajectories_exchanged}
WITH_KL: dict[str, Fault] = {"an event's KL missing": without_the_kl}


def faults(setting: Setting) -> dict[str, Fault]:
    """Those that are faults in such a run."""
    more = IN_MICRO_BATCHES if setting.micro_batch > 1 else {}
    return ANYWHERE | more | (WITH_KL if setting.kl else {})


class Faulty:
    """An execution whose gradient is wrong in one tensor."""

    def __init__(self, right: Execution, tensor: str, fault: Fault, earlier: Tensor | None = None) -> None:
        self._right, self._tensor, self._fault, self._earlier = right, tensor, fault, earlier
        self.grad, self.late = right.grad, right.late
        self.changed = 0.0  # the fault's size relative to the gradient

    @property
    def kl(self) -> Kl | None:
        return self._right.kl

    @kl.setter
    def kl(self, kl: Kl | None) -> None:
        self._right.kl = kl

    def observing(self, policy: Policy, batch: MicroBatch) -> AbstractContextManager[tuple[Any, Any]]:
        return self._right.observing(policy, batch)

    def accumulate(self, policy: Policy, rollout: Rollout, coefficients: Coefficients) -> None:
        self._right.accumulate(policy, rollout, coefficients)
        if not rollout.batches or self.changed:
            return
        leaf = leaves(policy)[self._tensor]
        assert leaf.grad is not None
        parts = Parts(
            policy=policy,
            execution=self._right,
            rollout=rollout,
            coefficients=coefficients,
            leaf=leaf,
            earlier=self._earlier,
        )
        wrong = self._fault(leaf.grad, parts)
        self.changed = float((wrong - leaf.grad).double().norm() / leaf.grad.double().norm())
        leaf.grad = wrong.to(leaf.dtype)


def targets(gradients: dict[str, Tensor]) -> dict[str, str]:
    """Of the tensors with a gradient, by what they are: the smallest and largest, a bias, a scale, a LoRA A and B, the weakest."""
    alive = {name: gradient for name, gradient in gradients.items() if gradient.any()}
    by_size = sorted(alive, key=lambda name: alive[name].numel())
    by_norm = sorted(alive, key=lambda name: float(alive[name].double().norm()))
    found = {"smallest": by_size[0], "largest": by_size[-1], "weakest": by_norm[0], "strongest": by_norm[-1]}
    kinds = {
        "bias": lambda name: name.endswith("bias"),
        "scale": lambda name: "norm" in name and name.endswith("weight") and alive[name].dim() == 1,
        "LoRA A": lambda name: "lora_A" in name,
        "LoRA B": lambda name: "lora_B" in name,
        "matrix": lambda name: alive[name].dim() > 1 and "lora" not in name,
    }
    for kind, is_one in kinds.items():
        ones = [name for name in alive if is_one(name)]
        if ones:
            found[kind] = ones[len(ones) // 2]
    return found
