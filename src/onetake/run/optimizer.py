"""AdamW with a linear warm-up and clipping by the global norm."""

from __future__ import annotations

import math
import statistics

import torch
from pydantic import Field
from torch import Tensor, nn

from onetake.core.records import Config
from onetake.parallel.shard import placed, total_norm


class OptimizerConfig(Config):
    """``max_grad_norm`` clips the global norm; None leaves gradients alone."""

    learning_rate: float = Field(default=3e-4, gt=0)
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = Field(default=0.0, ge=0)
    eps: float = Field(default=1e-8, gt=0)
    warmup: int = Field(default=0, ge=0, description="updates over which the learning rate rises linearly from 0")
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    abnormal: float | None = Field(
        default=20.0,
        gt=1,
        description="skip an update whose gradient norm is this many times the median of the last 20",
    )


_NORMS = "recent gradient norms"
RECENT = 20  # gradient norms that say what is normal; half of them must be there before an update can be abnormal
NOISE = torch.finfo(torch.float32).eps
"""Of the recent norms' median: a gradient below it is what rounding leaves of summands that cancel. Adam's step does not shrink
with the gradient, so one of noise would be as long as any other, along old momentum."""


class Optimizer:
    """One `step` per update. The learning rate is a function of the update's number, so there is no schedule state."""

    def __init__(self, config: OptimizerConfig, parameters: dict[str, nn.Parameter]) -> None:
        self._config = config
        self._parameters = parameters
        self._norms: list[float] = []
        self._adam = torch.optim.AdamW(
            parameters.values(),
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
        )

    def learning_rate(self, update: int) -> float:
        """For the update that follows `update` earlier ones."""
        warmed = min(1.0, (update + 1) / self._config.warmup) if self._config.warmup else 1.0
        return self._config.learning_rate * warmed

    def step(self, update: int) -> dict[str, float]:
        """Clip, step, and clear the gradients; one that is abnormal, zero or mere rounding is cleared without a step.

        Raises ValueError if the gradient is not finite; nothing is changed then.
        """
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        norm = total_norm(gradients)
        if not math.isfinite(norm):
            raise ValueError(
                f"update {update + 1}: the gradient's norm is {norm}; nothing was changed, the last checkpoint stands"
            )
        if self._noise(norm) or self._abnormal(norm):
            return {**self.skip(), "grad_norm": norm}
        limit = self._config.max_grad_norm
        if limit is not None:
            torch.nn.utils.clip_grads_with_norm_(self._parameters.values(), limit, torch.tensor(norm))
        before = [p.detach().clone() for p in self._parameters.values()]
        rate = self._adam.param_groups[0]["lr"] = self.learning_rate(update)
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        moved = total_norm([p.detach() - old for p, old in zip(self._parameters.values(), before, strict=True)])
        clipped = norm if limit is None else min(norm, limit)
        return {
            "skipped": 0,
            "grad_norm": norm,
            "grad_norm_clipped": clipped,
            "step_norm": moved,
            "learning_rate": rate,
        }

    def skip(self) -> dict[str, float]:
        """Clear the gradients and leave weights and moments as they are."""
        self._adam.zero_grad(set_to_none=True)
        return {"skipped": 1, "grad_norm": 0.0, "grad_norm_clipped": 0.0, "step_norm": 0.0, "learning_rate": 0.0}

    def why_skipped(self, norm: float) -> str:
        """What `step` found wrong with a gradient of this norm."""
        if norm == 0:
            return "its gradient is zero in every trainable tensor"
        if self._noise(norm):
            usual = statistics.median(self._norms)
            return f"its gradient norm {norm:.3g} is rounding beside the median of the last ones, {usual:.3g}"
        return (
            f"its gradient norm {norm:.3g} is more than {self._config.abnormal:g} times the median of the last ones "
            "(optimizer.abnormal)"
        )

    def _noise(self, norm: float) -> bool:
        """Whether `norm` is zero, or rounding beside the recent ones. It does not count among them: no level to get used to."""
        return norm <= NOISE * (statistics.median(self._norms) if self._norms else 0.0)

    def _abnormal(self, norm: float) -> bool:
        """Whether `norm` is far above the recent ones. It counts among them either way, so that a new level is accepted."""
        recent, self._norms = self._norms, [*self._norms, norm][-RECENT:]
        limit = self._config.abnormal
        return limit is not None and len(recent) >= RECENT // 2 and norm > limit * statistics.median(recent)

    def state(self) -> dict[str, Tensor]:
        """Adam's moments and step counts, by parameter name, and the recent gradient norms."""
        moments = {
            f"{name}.{key}": value
            for name, parameter in self._parameters.items()
            for key, value in self._adam.state[parameter].items()
        }
        return {_NORMS: torch.tensor(self._norms, dtype=torch.float64), **moments}

    def load(self, state: dict[str, Tensor]) -> None:
        """Restore what `state` gave; a moment may be whole where the parameter is now sharded."""
        self._norms = state[_NORMS].tolist()
        for name, parameter in self._parameters.items():
            restored = {
                key.removeprefix(f"{name}."): value for key, value in state.items() if key.startswith(f"{name}.")
            }
            self._adam.state[parameter] = {
                key: value if key == "step" else placed(value, parameter) for key, value in restored.items()
            }
