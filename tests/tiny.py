"""A tiny, randomly initialised Stable Diffusion 3 pipeline made of the real classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml
from diffusers import (
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from transformers import CLIPTextModelWithProjection

from tiny_parts import WORDS, clip, image_vae, t5


def tiny_sd3(seed: int = 0, dtype: torch.dtype = torch.float32, **transformer) -> StableDiffusion3Pipeline:
    """4×4 latents of 4 channels, two joint blocks of width 16; output layers are random, not zero as in training."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = {
            "sample_size": 4,
            "patch_size": 1,
            "in_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 2,
            "joint_attention_dim": 16,
            "caption_projection_dim": 16,
            "pooled_projection_dim": 16,
            "out_channels": 4,
            "pos_embed_max_size": 8,
            "qk_norm": "rms_norm",
        }
        pipe = StableDiffusion3Pipeline(
            transformer=SD3Transformer2DModel(**(config | transformer)),
            vae=image_vae(),
            **clip(kind=CLIPTextModelWithProjection),
            **clip("text_encoder_2", kind=CLIPTextModelWithProjection),
            **t5("text_encoder_3"),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        )
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            part.to(dtype).eval()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def tiny_recipe(root: Path, pipe: DiffusionPipeline | None = None, **changes: Any) -> str:
    """A recipe for the tiny pipeline, or `pipe`, and its task, saved under `root`; `changes` are laid over its groups of keys."""
    task, pipeline = tiny_task(root, pipe)
    tree: dict[str, Any] = {
        "task": task,
        "policy": {
            "pipeline": pipeline,
            "steps": 3,
            "call": {"max_sequence_length": 8},
            "trainable": {"kind": "lora", "rank": 2},
        },
        "rollout": {"groups": 2, "group_size": 4, "micro_batch": 4},
    }
    for key, value in changes.items():
        tree[key] = tree[key] | value if key in tree else value
    return yaml.safe_dump(tree)


def tiny_recipe_file(root: Path, **changes: Any) -> Path:
    """The same as a file under `root`."""
    file = root / "recipe.yaml"
    file.write_text(tiny_recipe(root, **changes))
    return file


def tiny_task(root: Path, pipe: DiffusionPipeline | None = None) -> tuple[dict[str, str], str]:
    """Save the pipeline and three prompts under `root`; the recipe's ``task``, and its ``policy.pipeline``."""
    (pipe or tiny_sd3()).save_pretrained(root / "base")
    (root / "prompts.txt").write_text("\n".join(WORDS))
    prompts = str(root / "prompts.txt")
    return {"kind": "prompts", "train": prompts, "held_out": prompts, "reward": "jpeg"}, str(root / "base")
