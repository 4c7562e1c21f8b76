"""A tiny, randomly initialised Stable Diffusion 3 pipeline made of the real classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

WORDS = ["first", "second", "third"]


def clip_tokenizer() -> CLIPTokenizer:
    vocab = {"<|startoftext|>": 0, "<|endoftext|>": 1, **{f"{w}</w>": i + 2 for i, w in enumerate(WORDS)}}
    vocab |= {c: len(vocab) + i for i, c in enumerate("abcdefghijklmnopqrstuvwxyz")}
    return CLIPTokenizer(vocab=vocab, merges=[], model_max_length=8)


def t5_tokenizer() -> T5TokenizerFast:
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *[(f"▁{w}", -1.0) for w in WORDS]]
    return T5TokenizerFast(vocab=pieces, extra_ids=0)


def tiny_sd3(seed: int = 0, dtype: torch.dtype = torch.float32, **transformer) -> StableDiffusion3Pipeline:
    """4×4 latents of 4 channels, two joint blocks of width 16; output layers are random, not zero as in training."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        clip = CLIPTextConfig(
            vocab_size=40,
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=8,
            projection_dim=8,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=1,
        )
        t5 = T5Config(vocab_size=16, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
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
        modules = {
            "transformer": SD3Transformer2DModel(**(config | transformer)),
            "vae": AutoencoderKL(
                block_out_channels=(8, 8),
                down_block_types=("DownEncoderBlock2D",) * 2,
                up_block_types=("UpDecoderBlock2D",) * 2,
                latent_channels=4,
                norm_num_groups=4,
                layers_per_block=1,
                shift_factor=0.1,
                scaling_factor=1.5,
            ),
            "text_encoder": CLIPTextModelWithProjection(clip),
            "text_encoder_2": CLIPTextModelWithProjection(clip),
            "text_encoder_3": T5EncoderModel(t5),
        }
        pipe = StableDiffusion3Pipeline(
            **{name: module.to(dtype).eval() for name, module in modules.items()},
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            tokenizer=clip_tokenizer(),
            tokenizer_2=clip_tokenizer(),
            tokenizer_3=t5_tokenizer(),
        )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def tiny_recipe(root: Path, **changes: Any) -> str:
    """A recipe for the tiny pipeline and its task, saved under `root`; `changes` replace groups of keys."""
    task, pipeline = tiny_task(root)
    tree = {
        "task": task,
        "policy": {
            "pipeline": pipeline,
            "steps": 3,
            "call": {"max_sequence_length": 8},
            "trainable": {"kind": "lora", "rank": 2},
        },
        "rollout": {"groups": 2, "group_size": 4, "micro_batch": 4},
    }
    return yaml.safe_dump(tree | changes)


def tiny_task(root: Path) -> tuple[dict[str, str], str]:
    """Save the pipeline and three prompts under `root`; the recipe's ``task``, and its ``policy.pipeline``."""
    tiny_sd3().save_pretrained(root / "base")
    (root / "prompts.txt").write_text("\n".join(WORDS))
    prompts = str(root / "prompts.txt")
    return {"kind": "prompts", "train": prompts, "held_out": prompts, "reward": "jpeg"}, str(root / "base")
