"""Small builders shared by tests: an update of the toy policy, and gradients by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from onetake.core.advantages import Advantages
from onetake.core.coefficients import Coefficients
from onetake.core.noise import generator
from onetake.core.objectives import Grpo
from onetake.core.records import Address, Prompt, Rollout
from onetake.core.selection import All
from onetake.execution import EXECUTIONS
from onetake.policies import Policy, trainable
from onetake.rollout.sampling import RolloutConfig, deal, sample
from onetake.run.checkpoint import read

PROMPTS = [Prompt(text) for text in ("first", "second", "third")]


def fake_rewards(rollout: Rollout, groups: int, group_size: int) -> None:
    """Random rewards with one dead group when there are three."""
    rewards = torch.rand(groups, group_size, generator=generator("rewards"), dtype=torch.float64)
    if groups > 2:
        rewards[2] = 0.5
    rollout.rewards = rewards
    rollout.advantages = Advantages()(rewards)


def roll(
    policy: Policy, execution, *, selection=None, objective=None, config=None, update: int = 0, prompts=PROMPTS
) -> Rollout:
    config = config or RolloutConfig(groups=3, group_size=4, micro_batch=2)
    batches = deal(
        config, prompts, policy, selection or All(), objective or Grpo(), Address(seed=1, stream="train", update=update)
    )
    rollout = sample(policy, execution, batches)
    fake_rewards(rollout, config.groups, config.group_size)
    return rollout


def move(policy: Policy, size: float = 0.03) -> None:
    """Away from the weights it started with."""
    with torch.no_grad():
        for name, parameter in trainable(policy).items():
            noise = torch.randn(parameter.shape, generator=generator("moved", name), dtype=torch.float64)
            parameter += (size * noise).to(parameter)


def gradient_of(policy: Policy, execution: str, *, objective=None, kl=None, **kwargs) -> dict[str, torch.Tensor]:
    """The gradient of one update under a named execution."""
    objective = objective or Grpo()
    strategy = EXECUTIONS[execution](kl)
    policy.module.zero_grad(set_to_none=True)
    rollout = roll(policy, strategy, objective=objective, **kwargs)
    strategy.accumulate(policy, rollout, Coefficients(objective, rollout))
    return {name: p.grad.clone() for name, p in trainable(policy).items()}


def weights(folder: Path, update: int | None = None) -> dict[str, torch.Tensor]:
    """Of a run's last checkpoint, or that after `update`, whose digests are checked: the trained weights, and their averages."""
    number = "*" if update is None else f"{update:06d}"
    checkpoint = read(max((folder / "checkpoints").glob(f"update-{number}")))
    return {
        f"{kind}/{name}": tensor
        for kind in ("weights", "ema")
        for path in (checkpoint.folder / kind).rglob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


def assert_close(lines: list[dict], wanted: list[dict]) -> None:
    """Of a log: every value of the wanted lines, numbers up to rounding."""
    for line, wanted_line in zip(lines, wanted, strict=True):
        for key, value in wanted_line.items():
            assert line[key] == (value if isinstance(value, str) else pytest.approx(value, rel=1e-3, abs=1e-5)), key


def relative_error(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """‖one − other‖ / ‖other‖ over all tensors."""
    difference = sum((one[n] - other[n]).double().square().sum() for n in other)
    return float((difference / sum(other[n].double().square().sum() for n in other)).sqrt())
