"""What a pipeline family needs beyond the scheduler seam: one row each. New families go here.

A pipeline without a row works with the defaults (prompts passed as text, LoRA targets named in the recipe) if the
pre-flight check proves that its re-scored events equal its sampled ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Family:
    """One row: how prompts are embedded, and what LoRA attaches to when the recipe does not say."""

    embeds: tuple[str, ...]
    """Call arguments that ``encode_prompt`` returns, in its order."""
    encode: dict[str, Any]
    """Arguments that ``encode_prompt`` demands besides the prompt."""
    lora_targets: tuple[str, ...]
    """Names of the linear layers LoRA attaches to by default (suffixes, as peft matches them)."""


_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
_JOINT = (*_ATTENTION, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")

FAMILIES: dict[str, Family] = {
    "StableDiffusion3Pipeline": Family(
        embeds=(
            "prompt_embeds",
            "negative_prompt_embeds",
            "pooled_prompt_embeds",
            "negative_pooled_prompt_embeds",
        ),
        encode={"prompt_2": None, "prompt_3": None},
        lora_targets=_JOINT,
    ),
}


def embed(pipe, prompt: str, negative_prompt: str, *, guided: bool, call: dict[str, Any]) -> dict[str, Any] | None:
    """Call arguments that replace the prompt's text, one row each; None if the family's embedding is not known."""
    family = FAMILIES.get(type(pipe).__name__)
    if family is None:
        return None
    shared = {key: call[key] for key in ("max_sequence_length", "clip_skip") if key in call}
    values = pipe.encode_prompt(
        prompt=prompt,
        negative_prompt=negative_prompt,
        do_classifier_free_guidance=guided,
        **family.encode,
        **shared,
    )
    return {name: value for name, value in zip(family.embeds, values, strict=True) if isinstance(value, Tensor)}
