"""Text encoders, tokenizers and autoencoders in tiny configurations of the real classes, shared by the tiny pipelines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL, AutoencoderKLQwenImage, AutoencoderKLWan, DiffusionPipeline
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import (
    CLIPImageProcessorPil,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    CLIPVisionConfig,
    Gemma2Config,
    Gemma2Model,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
    Qwen2VLProcessor,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
    UMT5Config,
    UMT5EncoderModel,
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A tiny pipeline, how it is called, and what is expected of it."""

    build: Callable[..., DiffusionPipeline]
    call: dict[str, Any] = field(default_factory=dict)
    guidance: float = 3.0
    way: str = "tail"
    needs: tuple[str, ...] = ()
    """Libraries without which the pipeline cannot run."""
    reweight: float = 1e-5
    """Relative error of reweight's gradient that float32 rounding may cause."""
    no_copies: bool = False
    """The stock pipeline fails on several outputs for one prompt."""
    slow: bool = False
    pictures: tuple[Image.Image, ...] = ()
    """What a prompt brings."""


CASES: dict[str, Case] = {}
WORDS = ["first", "second", "third"]
"""Prompts, and all that the text encoders know."""


def case(name: str, **expected: Any) -> Callable[[Callable[..., DiffusionPipeline]], Callable[..., DiffusionPipeline]]:
    """Registers a builder; one builder may stand for several cases."""

    def register(build: Callable[..., DiffusionPipeline]) -> Callable[..., DiffusionPipeline]:
        CASES[name] = Case(build=build, **expected)
        return build

    return register


def tiny(name: str, **size: int) -> DiffusionPipeline:
    """The pipeline of a case: the same weights at every call. `size` is the builder's, where it takes one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipe = CASES[name].build(**size)
        for component in pipe.components.values():
            if isinstance(component, torch.nn.Module):
                wake(component)
    pipe.set_progress_bar_config(disable=True)
    return pipe


PICTURE = Image.fromarray(np.arange(8 * 8 * 3, dtype=np.uint8).reshape(8, 8, 3))
OTHER_PICTURE = Image.fromarray(255 - np.asarray(PICTURE))
LARGER_PICTURE = PICTURE.resize((16, 16))

TEXT = 16  # width of every text encoder but CLIP's


def clip_tokenizer() -> CLIPTokenizer:
    vocab = {"<|startoftext|>": 0, "<|endoftext|>": 1, **{f"{w}</w>": i + 2 for i, w in enumerate(WORDS)}}
    vocab |= {c: len(vocab) + i for i, c in enumerate("abcdefghijklmnopqrstuvwxyz")}
    return CLIPTokenizer(vocab=vocab, merges=[], model_max_length=8)


def t5_tokenizer() -> T5TokenizerFast:
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *[(f"▁{w}", -1.0) for w in WORDS]]
    return T5TokenizerFast(vocab=pieces, extra_ids=0)


def clip(name: str = "text_encoder", length: int = 8, kind: Any = CLIPTextModel) -> dict[str, Any]:
    """Width 8, pooled width 8."""
    config = CLIPTextConfig(
        vocab_size=40,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=length,
        projection_dim=8,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return {name: kind(config), name.replace("text_encoder", "tokenizer"): clip_tokenizer()}


def t5(name: str = "text_encoder") -> dict[str, Any]:
    config = T5Config(vocab_size=16, d_model=TEXT, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    return {name: T5EncoderModel(config), name.replace("text_encoder", "tokenizer"): t5_tokenizer()}


def umt5() -> dict[str, Any]:
    config = UMT5Config(vocab_size=16, d_model=TEXT, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    return {"text_encoder": UMT5EncoderModel(config), "tokenizer": t5_tokenizer()}


def word_tokenizer(**settings: Any) -> PreTrainedTokenizerFast:
    """Words and punctuation after a first token; everything outside the prompts' words is unknown."""
    vocab = {word: n for n, word in enumerate(["<pad>", "<unk>", "<bos>", "<eos>", *WORDS])}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", vocab["<bos>"])])
    specials = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "<eos>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **(specials | settings))


DECODER = {
    "vocab_size": 16,
    "hidden_size": TEXT,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
"""Of the language models that serve as text encoders."""


def qwen_vl() -> dict[str, Any]:
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": TEXT}
    config = Qwen2_5_VLConfig(text_config=DECODER | {"rope_parameters": rope}, vision_config=vision)
    return {"text_encoder": Qwen2_5_VLForConditionalGeneration(config), "tokenizer": word_tokenizer()}


def qwen_vl_with_pictures() -> dict[str, Any]:
    """What the pipelines that look at pictures need beside `qwen_vl`: a picture becomes four tokens."""
    parts = qwen_vl()
    tokenizer = word_tokenizer(extra_special_tokens=["<|image_pad|>", "<|video_pad|>"])
    parts["text_encoder"].config.image_token_id = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    pictures = Qwen2VLImageProcessorPil(size={"shortest_edge": 28 * 28, "longest_edge": 56 * 56})
    return parts | {"tokenizer": tokenizer, "processor": Qwen2VLProcessor(pictures, tokenizer)}


def llava() -> dict[str, Any]:
    """A decoder that sees a picture as four tokens, after the first one."""
    tokenizer = word_tokenizer(extra_special_tokens=["<image>", "<|end_header_id|>"])
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**VISION),
        text_config=LlamaConfig(**DECODER),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=4,
        pad_token_id=0,
    )
    return {
        "text_encoder": LlavaForConditionalGeneration(config),
        "tokenizer": tokenizer,
        "image_processor": clip_pictures(),
    }


VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "projection_dim": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def clip_pictures() -> CLIPImageProcessorPil:
    return CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=28)


def gemma() -> dict[str, Any]:
    return {"text_encoder": Gemma2Model(Gemma2Config(**DECODER, head_dim=8)), "tokenizer": word_tokenizer()}


def image_vae(**settings: Any) -> AutoencoderKL:
    """Twice smaller, 4 channels."""
    config = {
        "block_out_channels": (8, 8),
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
        "latent_channels": 4,
        "norm_num_groups": 4,
        "layers_per_block": 1,
        "shift_factor": 0.1,
        "scaling_factor": 1.5,
    }
    return AutoencoderKL(**(config | settings))


_WAN = {
    "base_dim": 4,
    "z_dim": 4,
    "dim_mult": [1, 1],
    "num_res_blocks": 1,
    "temperal_downsample": [True],
    "latents_mean": [0.1] * 4,
    "latents_std": [1.5] * 4,
}


def wan_vae() -> AutoencoderKLWan:
    """Four times smaller in space and time, 4 channels."""
    deeper = {"dim_mult": [1, 1, 1], "temperal_downsample": [True, True]}
    return AutoencoderKLWan(**(_WAN | deeper), scale_factor_spatial=4, scale_factor_temporal=4)


def qwen_vae() -> AutoencoderKLQwenImage:
    return AutoencoderKLQwenImage(**_WAN)


def wake(module: torch.nn.Module) -> torch.nn.Module:
    """Output layers and gates that start at zero would hide everything before them."""
    with torch.no_grad():
        for parameter in module.parameters():
            if not parameter.any():
                parameter.normal_(0, 0.1)
    return module.eval()
