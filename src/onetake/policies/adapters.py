"""What is trained: LoRA through peft, or every weight of the transformer. Saved so that plain diffusers loads it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from diffusers import DiffusionPipeline
from diffusers.loaders import PeftAdapterMixin
from diffusers.loaders.lora_base import LoraBaseMixin
from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from pydantic import Field
from safetensors.torch import load_file
from torch import nn

from onetake.core.noise import generator
from onetake.core.records import NAMED, Config
from onetake.parallel import ALONE, World
from onetake.parallel.shard import FSDPModule, load_whole_state, whole_state
from onetake.policies.families import Family, family_of, transformers_of, unused_parameters

LORA_FILE = "pytorch_lora_weights.safetensors"


class Lora(Config):
    """Low-rank adapters in float32 on a frozen base of any dtype. Starts as the identity (B = 0)."""

    kind: Literal["lora"] = "lora"
    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32, gt=0)
    targets: list[str] | None = None
    """Suffixes of linear layer names; None takes the family's."""

    def attach(self, pipe: DiffusionPipeline, seed: int) -> None:
        """Add an adapter to each transformer and make its parameters, only, trainable, in float32.

        Raises ValueError if no target is found.
        """
        for model in transformers_of(pipe).values():
            if not isinstance(model, PeftAdapterMixin):
                raise ValueError(
                    f"policy.trainable: lora needs a transformer that takes adapters, and diffusers' {type(model).__name__} does "
                    "not; use trainable: full"
                )
            layers = self._layers(model, family_of(pipe))
            model.requires_grad_(False)
            config = LoraConfig(
                r=self.rank,
                lora_alpha=self.alpha,
                target_modules=layers,
                init_lora_weights="gaussian",
                lora_dropout=0.0,
            )
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(generator(seed, "lora").initial_seed())
                model.add_adapter(config)
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.float()

    def _layers(self, model: nn.Module, family: Family) -> list[str]:
        """Names of the linear layers that end in a target, without those whose output nothing uses."""
        targets = self.targets or family.lora_targets
        unused = unused_parameters(model, family)
        linear = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
        found = {t: [name for name in linear if f".{name}".endswith(f".{t}")] for t in targets}
        missing = [t for t in targets if not found[t]]
        if self.targets and missing:
            raise ValueError(f"policy.trainable.targets: no layer of {type(model).__name__} ends in {missing}")
        layers = [name for t in targets for name in found[t] if not unused.fullmatch(f"{name}.weight")]
        if not layers:
            raise ValueError(
                f"policy.trainable.targets: name the linear layers LoRA attaches to; none are known for {type(model).__name__}"
            )
        return sorted(set(layers))

    def save(self, pipe: DiffusionPipeline, folder: Path, world: World = ALONE) -> None:
        """Write a folder for ``pipeline.load_lora_weights(folder)``; a second transformer has one of its own in it.

        The transformer of a pipeline without that method has ``load_lora_adapter(folder, prefix=None, weight_name=LORA_FILE)``.
        """
        world.once(partial(self._save, pipe, folder))

    def _save(self, pipe: DiffusionPipeline, folder: Path) -> None:
        for name, model in transformers_of(pipe).items():
            if not isinstance(pipe, LoraBaseMixin):
                model.save_lora_adapter(_lora_folder(folder, name))
                continue
            type(pipe).save_lora_weights(
                _lora_folder(folder, name),
                transformer_lora_layers=get_peft_model_state_dict(model),
                transformer_lora_adapter_metadata=model.peft_config["default"].to_dict(),
            )

    def load(self, pipe: DiffusionPipeline, folder: Path) -> None:
        """Read back what `save` wrote into the attached adapters."""
        for name, model in transformers_of(pipe).items():
            state = load_file(_lora_folder(folder, name) / LORA_FILE)
            stripped = {key.removeprefix("transformer."): value for key, value in state.items()}
            outcome = set_peft_model_state_dict(model, stripped)
            assert not outcome.unexpected_keys, outcome.unexpected_keys


def _lora_folder(folder: Path, component: str) -> Path:
    """diffusers reads a second transformer's adapter from a file of its own, with the first one's names in it."""
    return folder if component == "transformer" else folder / component


class Full(Config):
    """Every parameter of the transformers that an output depends on, in float32."""

    kind: Literal["full"] = "full"

    def attach(self, pipe: DiffusionPipeline, seed: int) -> None:
        for model in transformers_of(pipe).values():
            unused = unused_parameters(model, family_of(pipe))
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(not unused.fullmatch(name))

    def save(self, pipe: DiffusionPipeline, folder: Path, world: World = ALONE) -> None:
        """Write ``folder/transformer`` for the transformer class's ``from_pretrained``."""
        for name, model in transformers_of(pipe).items():
            world.once(partial(_whole(model).save_pretrained, folder / name))

    def load(self, pipe: DiffusionPipeline, folder: Path) -> None:
        for name, model in transformers_of(pipe).items():
            load_whole_state(model, _stock_class(model).from_pretrained(folder / name).state_dict())


def _stock_class(model: nn.Module) -> Any:
    """The model's own class: sharding puts a class of its own over it, whose name no checkpoint should hold."""
    return type(model).__bases__[-1] if isinstance(model, FSDPModule) else type(model)


def _whole(model: nn.Module) -> nn.Module:
    """The model, or an unsharded twin of it; on ranks other than 0 the twin is empty. Ranks call it together."""
    if not isinstance(model, FSDPModule):
        return model
    state = whole_state(model)
    with torch.device("meta"):
        twin = _stock_class(model).from_config(model.config)
    twin.load_state_dict(state, strict=False, assign=True)
    return twin


Trainable = Annotated[Lora | Full, Field(discriminator="kind"), NAMED]


def adapter_parameters(module: nn.Module) -> set[nn.Parameter]:
    """The trainable parameters of LoRA layers; empty where there are none."""
    layers = [layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)]
    return {p for layer in layers for p in layer.parameters() if p.requires_grad}


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
    for name, model in transformers_of(pipe).items():
        lora = _lora_folder(folder, name)
        if (lora / LORA_FILE).is_file() and not isinstance(pipe, LoraBaseMixin):
            model.load_lora_adapter(lora, prefix=None, weight_name=LORA_FILE)
        elif (lora / LORA_FILE).is_file():
            pipe.load_lora_weights(lora, **({} if name == "transformer" else {f"load_into_{name}": True}))
        elif (folder / name).is_dir():
            setattr(pipe, name, type(model).from_pretrained(folder / name))
        else:
            raise ValueError(
                f"{folder} holds neither {LORA_FILE} nor transformer/: it is not a checkpoint's weights folder"
            )
