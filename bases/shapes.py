"""Train the base model of the `shapes` task from seeds, on CPU: `python bases/shapes.py --out FOLDER`.

The result is a stock `StableDiffusion3Pipeline` of 2.6 M parameters that makes 32 x 32 px pictures, loaded by plain
`StableDiffusion3Pipeline.from_pretrained(FOLDER)`. Left out on purpose: good pictures. The base knows colours and
shapes and often confuses who stands where, which is what post-training is for. Log and measurements: `shapes.log`.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from shapes_measure import SAMPLING_SHIFT, T5_TOKENS, final_measurements, measure, reconstruction, to_float
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor, nn
from training import Log, Phase, Settings, VaePhase, drop, save, sizes, t5_tokenizer, train_denoiser, train_vae
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

from onetake.tasks.shapes.captions import FAMILIES, caption, parse, prompts, scenes
from onetake.tasks.shapes.render import render

CLIP_TOKENS = 10  # the longest caption has 8 words; CLIP adds a start and an end token
WIDTH = 128  # transformer width = T5 width = the two CLIP widths together
SETTINGS = Settings(
    vae=(VaePhase(updates=1_200, batch=32),),
    phases=(
        Phase(seed=0, samples=32_000, updates=2_600, muon_lr=2e-3, adam_lr=1.5e-3, warm_up=100, decay=0.4),
        Phase(seed=10, samples=8_000, updates=700, muon_lr=1.4e-3, adam_lr=1e-3, warm_up=40, decay=0.9),
    ),
)
SHARES = ((0.1, 0.4, 0.5), (0.1, 0.2, 0.7))  # of `FAMILIES` among the pictures of each phase


def build_tokenizers() -> tuple[CLIPTokenizer, T5TokenizerFast]:
    """Word-level tokenizers in the two stock classes: BPE merged until a word is one token, and a Unigram of words."""
    words = sorted({word for family in FAMILIES for scene in scenes(family) for word in caption(scene).split()})
    bpe = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    bpe.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["<|startoftext|>", "<|endoftext|>"]
    bpe.train_from_iterator(
        words,
        trainers.BpeTrainer(end_of_word_suffix="</w>", min_frequency=1, special_tokens=special, show_progress=False),
    )
    model = json.loads(bpe.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    clip = CLIPTokenizer(vocab=model["vocab"], merges=merges, model_max_length=CLIP_TOKENS)
    return clip, t5_tokenizer(words, T5_TOKENS)


def build_text_encoders(clip: CLIPTokenizer, t5: T5TokenizerFast) -> dict[str, nn.Module]:
    """Two CLIP text models of half width each, and a tiny T5, which plain SD3 cannot be loaded without."""
    clip_config = CLIPTextConfig(
        vocab_size=len(clip),
        hidden_size=WIDTH // 2,
        intermediate_size=WIDTH,
        projection_dim=WIDTH // 2,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=CLIP_TOKENS,
        bos_token_id=clip.bos_token_id,
        eos_token_id=clip.eos_token_id,
        pad_token_id=clip.pad_token_id,
    )
    t5_config = T5Config(
        vocab_size=len(t5), d_model=WIDTH, d_kv=16, d_ff=WIDTH // 2, num_layers=1, num_heads=2, dropout_rate=0.0
    )
    return {
        "text_encoder": CLIPTextModelWithProjection(clip_config),
        "text_encoder_2": CLIPTextModelWithProjection(clip_config),
        "text_encoder_3": T5EncoderModel(t5_config),
    }


def build_pipeline() -> StableDiffusion3Pipeline:
    clip, t5 = build_tokenizers()
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(12, 24),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=32,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    transformer = SD3Transformer2DModel(
        sample_size=16,
        patch_size=4,
        in_channels=4,
        out_channels=4,
        num_layers=4,
        attention_head_dim=32,
        num_attention_heads=WIDTH // 32,
        joint_attention_dim=WIDTH,
        caption_projection_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        pos_embed_max_size=8,
        qk_norm="rms_norm",
    )
    pipe = StableDiffusion3Pipeline(
        vae=vae,
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SAMPLING_SHIFT),
        tokenizer=clip,
        tokenizer_2=clip,
        tokenizer_3=t5,
        **build_text_encoders(clip, t5),
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw_pictures(phase: Phase, shares: tuple[float, ...]) -> tuple[Tensor, list[str]]:
    """Training pictures, float32 (N, 3, 32, 32) in [-1, 1], and their captions; held-out captions never appear."""
    rng = np.random.default_rng(phase.seed)
    families = rng.choice(len(FAMILIES), phase.samples, p=shares)
    pools = [prompts(family, "train") for family in FAMILIES]
    texts = [pools[family][rng.integers(len(pools[family]))] for family in families]
    pixels = np.stack([render(parse(text), rng) for text in texts])
    return to_float(pixels), texts


@torch.no_grad()
def raw_latents(vae: AutoencoderKL, pictures: Tensor) -> Tensor:
    return torch.cat([vae.encode(part).latent_dist.mode() for part in pictures.split(256)])


def normalise(vae: AutoencoderKL, pictures: Tensor) -> None:
    """Set the VAE's shift and scaling factor, which give latents mean 0 and standard deviation 1."""
    raw = raw_latents(vae, pictures)
    vae.register_to_config(shift_factor=raw.mean().item(), scaling_factor=1 / raw.std().item())


def encode(pipe: StableDiffusion3Pipeline, texts: list[str]) -> tuple[Tensor, Tensor]:
    """The pipeline's own embeddings (N, 22, 128) and pooled embeddings (N, 128), with gradient."""
    embeds, _, pooled, _ = pipe.encode_prompt(
        texts, None, None, do_classifier_free_guidance=False, max_sequence_length=T5_TOKENS
    )
    return embeds, pooled


def flow_loss(
    pipe: StableDiffusion3Pipeline, latents: Tensor, texts: list[str], dropout: float, generator: torch.Generator
) -> Tensor:
    """Flow matching: x = (1 − σ) x₀ + σ ε, v = ε − x₀, logit-normal σ (Esser et al. 2024)."""
    n = len(texts)
    embeds, pooled = encode(pipe, drop(texts, dropout, generator))
    noise = torch.randn(latents.shape, generator=generator)
    sigma = torch.randn(n, generator=generator).sigmoid()[:, None, None, None]
    x = (1 - sigma) * latents + sigma * noise
    v = pipe.transformer(x, embeds, pooled, sigma.flatten() * 1000, return_dict=False)[0]
    return F.mse_loss(v, noise - latents)


def train_phase(pipe: StableDiffusion3Pipeline, phase: Phase, shares: tuple[float, ...], log: Log, every: int) -> None:
    pictures, texts = draw_pictures(phase, shares)
    log(f"{phase}, shares {shares}, {len(set(texts))} captions")
    latents = (raw_latents(pipe.vae, pictures) - pipe.vae.config.shift_factor) * pipe.vae.config.scaling_factor
    train_denoiser(
        pipe,
        pipe.transformer.transformer_blocks,
        ".norm1",
        len(texts),
        lambda pick, generator: flow_loss(
            pipe, latents[pick], [texts[i] for i in pick.tolist()], SETTINGS.caption_dropout, generator
        ),
        phase,
        SETTINGS,
        log,
        lambda update: measure(pipe, "relation", 148, steps=12, seed=update),
        every,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the pipeline")
    parser.add_argument("--log", type=Path, default=Path(__file__).with_suffix(".log"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--every", type=int, default=400, help="updates between two measurements")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    log = Log(arguments.log)
    log(f"{SETTINGS}, {SHARES}")
    log(f"torch {torch.__version__}, threads {arguments.threads}")

    torch.manual_seed(SETTINGS.seed)
    pipe = build_pipeline()
    log("parameters: " + sizes(pipe))
    pictures, _ = draw_pictures(SETTINGS.phases[0], SHARES[0])
    pipe.vae.to(memory_format=torch.channels_last).train()
    train_vae(
        pipe.vae,
        SETTINGS.vae[0],
        SETTINGS.seed + 1,
        len(pictures),
        lambda pick: pictures[pick].contiguous(memory_format=torch.channels_last),
        lambda latents: pipe.vae.decode(latents).sample,
        F.l1_loss,
        log,
    )
    pipe.vae.eval()
    pipe.vae.to(memory_format=torch.contiguous_format)
    log(reconstruction(pipe.vae, 500, seed=99))
    normalise(pipe.vae, pictures)
    scaling, shift = pipe.vae.config.scaling_factor, pipe.vae.config.shift_factor
    log(f"latents: shift {shift:.4f}, scale {scaling:.4f}")
    for phase, shares in zip(SETTINGS.phases, SHARES, strict=True):
        train_phase(pipe, phase, shares, log, arguments.every)
    save(pipe, arguments.out, log)
    final_measurements(pipe, log)


if __name__ == "__main__":
    main()
