"""What is trained: LoRA through peft, or every weight of the transformer. Saved so that plain diffusers loads it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import torch
from diffusers import DiffusionPipeline
from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from pydantic import Field
from safetensors.torch import load_file
from torch import nn

from onetake.noise import generator
from onetake.policies.families import FAMILIES
from onetake.records import NAMED, Config

LORA_FILE = "pytorch_lora_weights.safetensors"


class Lora(Config):
    """Low-rank adapters in float32 on a frozen base of any dtype. Starts as the identity (B = 0)."""

    kind: Literal["lora"] = "lora"
    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32, gt=0)
    targets: list[str] | None = None
    """Suffixes of linear layer names; None takes the family's."""

    def attach(self, pipe: DiffusionPipeline, seed: int) -> None:
        """Add the adapter and make its parameters, only, trainable. Raises ValueError if no target is known or found."""
        name = type(pipe).__name__
        targets = self.targets or (list(FAMILIES[name].lora_targets) if name in FAMILIES else None)
        if targets is None:
            raise ValueError(
                f"policy.trainable.targets: name the linear layers LoRA attaches to; none are known for {name}"
            )
        missing = [
            t for t in targets if not any(f".{n}".endswith(f".{t}") for n, _ in pipe.transformer.named_modules())
        ]
        if missing:
            raise ValueError(
                f"policy.trainable.targets: no layer of {type(pipe.transformer).__name__} ends in {missing}"
            )
        pipe.transformer.requires_grad_(False)
        config = LoraConfig(
            r=self.rank, lora_alpha=self.alpha, target_modules=targets, init_lora_weights="gaussian", lora_dropout=0.0
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(generator(seed, "lora").initial_seed())
            pipe.transformer.add_adapter(config)
        for parameter in pipe.transformer.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()

    def save(self, pipe: DiffusionPipeline, folder: Path) -> None:
        """Write a folder for ``pipeline.load_lora_weights(folder)``."""
        type(pipe).save_lora_weights(
            folder,
            transformer_lora_layers=get_peft_model_state_dict(pipe.transformer),
            transformer_lora_adapter_metadata=pipe.transformer.peft_config["default"].to_dict(),
        )

    def load(self, pipe: DiffusionPipeline, folder: Path) -> None:
        """Read back what `save` wrote into the attached adapter."""
        state = load_file(folder / LORA_FILE)
        stripped = {key.removeprefix("transformer."): value for key, value in state.items()}
        outcome = set_peft_model_state_dict(pipe.transformer, stripped)
        assert not outcome.unexpected_keys, outcome.unexpected_keys


class Full(Config):
    """Every parameter of the transformer, in float32."""

    kind: Literal["full"] = "full"

    def attach(self, pipe: DiffusionPipeline, seed: int) -> None:
        pipe.transformer.requires_grad_(True)

    def save(self, pipe: DiffusionPipeline, folder: Path) -> None:
        """Write ``folder/transformer`` for the transformer class's ``from_pretrained``."""
        pipe.transformer.save_pretrained(folder / "transformer")

    def load(self, pipe: DiffusionPipeline, folder: Path) -> None:
        pipe.transformer.load_state_dict(type(pipe.transformer).from_pretrained(folder / "transformer").state_dict())


Trainable = Annotated[Lora | Full, Field(discriminator="kind"), NAMED]


@contextmanager
def adapters_off(module: nn.Module) -> Iterator[None]:
    """Inside, LoRA layers answer as their base layers do. Raises ValueError if there are none to switch off."""
    layers = [layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)]
    if not layers:
        raise ValueError("there is no adapter to switch off: the reference of full fine-tuning is a frozen copy")
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def apply_weights(pipe: DiffusionPipeline, folder: Path) -> None:
    """Put a checkpoint's weights on a plain pipeline, whichever of the two kinds it holds.

    Raises ValueError if the folder holds neither.
    """
    if (folder / LORA_FILE).is_file():
        pipe.load_lora_weights(folder)
    elif (folder / "transformer").is_dir():
        pipe.transformer = type(pipe.transformer).from_pretrained(folder / "transformer")
    else:
        raise ValueError(
            f"{folder} holds neither {LORA_FILE} nor transformer/: it is not a checkpoint's weights folder"
        )
