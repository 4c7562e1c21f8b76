"""diffusers' and torch's own switches for memory and speed: what each needs, and who is refused it."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.attention import AttentionModuleMixin
from diffusers.models.attention_dispatch import AttentionBackendName
from diffusers.models.attention_processor import Attention
from pydantic import BeforeValidator, Field

from onetake.core.records import Config

COMPILED_VARIANTS = 64
"""Graphs that torch may keep for one block: with and without gradients or adapters, times every shape. Its own limit is 8."""


class Vae(Config):
    """Decode in parts, so that less is in memory at once."""

    slicing: bool = Field(default=False, description="one sample at a time: the same pixels")
    tiling: bool = Field(
        default=False, description="overlapping tiles, blended: pixels change a little near their edges"
    )

    def apply(self, vae: Any) -> None:
        """Raises ValueError if this VAE cannot."""
        asked = {"slicing": vae.enable_slicing} if self.slicing else {}
        asked |= {"tiling": vae.enable_tiling} if self.tiling else {}
        for name, enable in asked.items():
            try:
                enable()
            except NotImplementedError as error:
                raise ValueError(
                    f"policy.vae.{name}: {type(vae).__name__} has none in diffusers; leave it out"
                ) from error


class Compile(Config):
    """torch.compile of each repeated block of the trained transformers; all between the blocks stays Python."""

    backend: str = "inductor"
    dynamic: bool = Field(
        default=False, description="one graph for all lengths, where prompts keep theirs (Qwen-Image, Z-Image)"
    )

    def problem(self) -> str | None:
        known = torch.compiler.list_backends(())
        if self.backend not in known:
            return f"policy.compile.backend: torch has no {self.backend!r}; it has {', '.join(known)}"
        return None

    def apply(self, model: Any) -> None:
        """Raises ValueError if diffusers does not name the model's blocks. Compilation itself comes with the first calls."""
        names = model._repeated_blocks or model._no_split_modules or []
        blocks = [module for module in model.modules() if type(module).__name__ in names]
        if not blocks:
            raise ValueError(
                f"policy.compile: diffusers does not name the repeated blocks of {type(model).__name__}; leave it out"
            )
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, COMPILED_VARIANTS)
        # else fused kernels keep what eager rounds to bfloat16, each graph in its own way, and no ratio is exactly 1
        options = {"emulate_precision_casts": True} if self.backend == "inductor" else None
        for block in blocks:
            block.compile(backend=self.backend, dynamic=self.dynamic, fullgraph=True, options=options)


def _switch(value: Any) -> Any:
    return {True: {}, False: None}[value] if isinstance(value, bool) else value


SWITCH = BeforeValidator(_switch)
"""Lets a group of settings be turned on by ``true``, with their defaults, and off by ``false``."""


def attention_problem(name: str) -> str | None:
    """What is wrong with a name for `use_attention`, if anything is."""
    if "sage" in name:
        return f"policy.attention: {name} computes no gradients (SageAttention is for inference)"
    known = [backend.value for backend in AttentionBackendName if "sage" not in backend.value]
    if name not in known:
        return f"policy.attention: diffusers has no {name!r}; it has {', '.join(known)}"
    return None


def use_attention(model: Any, name: str) -> None:
    """Let diffusers' dispatcher run the model's attention by the backend `name`.

    Raises ValueError if the backend lacks a package, or if the model's attention does not go through the dispatcher.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, Attention | AttentionModuleMixin)]
    if not any(hasattr(layer.processor, "_attention_backend") for layer in layers):  # what diffusers itself asks
        raise ValueError(
            f"policy.attention: diffusers runs the attention of {type(model).__name__} by torch alone, so {name} would be "
            "ignored; leave it out"
        )
    try:
        model.set_attention_backend(name)
    except RuntimeError as error:
        raise ValueError(f"policy.attention: {name} cannot be used here: {error}") from error
