"""Train the base model of the `shapes` task from seeds, on CPU: `python bases/shapes.py --out FOLDER`.

The result is a stock `StableDiffusion3Pipeline` of 2.6 M parameters that makes 32 x 32 px pictures, loaded by plain
`StableDiffusion3Pipeline.from_pretrained(FOLDER)`. Left out on purpose: good pictures. The base knows colours and
shapes and often confuses who stands where, which is what post-training is for. Log and measurements: `shapes.log`.
"""

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One training of transformer and text encoders on pictures of its own; the optimizers start afresh.

    `seed` draws the pictures, `seed` + 2 the batches; `decay` is the last share of the updates, in which the learning
    rate falls to zero.
    """

    seed: int
    pictures: int
    shares: tuple[float, ...]  # of `FAMILIES` among the pictures
    updates: int
    muon_lr: float
    adam_lr: float
    warm_up: int
    decay: float


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides the result. `seed` draws the weights, `seed` + 1 the batches of the VAE."""

    seed: int = 0
    vae_updates: int = 1_200
    vae_batch: int = 32
    vae_lr: float = 3e-3
    kl_weight: float = 3e-4
    batch: int = 64
    ema: float = 0.998
    caption_dropout: float = 0.1
    phases: tuple[Phase, ...] = (
        Phase(
            seed=0,
            pictures=32_000,
            shares=(0.1, 0.4, 0.5),
            updates=2_600,
            muon_lr=2e-3,
            adam_lr=1.5e-3,
            warm_up=100,
            decay=0.4,
        ),
        Phase(
            seed=10,
            pictures=8_000,
            shares=(0.1, 0.2, 0.7),
            updates=700,
            muon_lr=1.4e-3,
            adam_lr=1e-3,
            warm_up=40,
            decay=0.9,
        ),
    )


class Log:
    """Prints and keeps lines; the file is rewritten by every run."""

    def __init__(self, path: Path) -> None:
        self.path, self.start = path, time.perf_counter()
        path.write_text("")

    def __call__(self, text: str) -> None:
        line = f"[{time.perf_counter() - self.start:6.0f} s, {time.process_time():6.0f} CPU-s] {text}"
        print(line, flush=True)
        with self.path.open("a") as file:
            file.write(line + "\n")


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
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((f"▁{word}", -1.0) for word in words)]
    t5 = T5TokenizerFast(vocab=pieces, extra_ids=0, model_max_length=T5_TOKENS)
    return clip, t5


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


def draw_pictures(phase: Phase) -> tuple[Tensor, list[str]]:
    """Training pictures, float32 (N, 3, 32, 32) in [-1, 1], and their captions; held-out captions never appear."""
    rng = np.random.default_rng(phase.seed)
    families = rng.choice(len(FAMILIES), phase.pictures, p=phase.shares)
    pools = [prompts(family, "train") for family in FAMILIES]
    texts = [pools[family][rng.integers(len(pools[family]))] for family in families]
    pixels = np.stack([render(parse(text), rng) for text in texts])
    return to_float(pixels), texts


def batches(n: int, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Index batches, epoch after epoch, without end."""
    while True:
        yield from torch.randperm(n, generator=generator).split(size)[: n // size]


def warm_up_and_decay(update: int, updates: int, warm_up: int, decay: float = 0.4) -> float:
    """Learning rate factor: linear up, flat, and linear down to zero over the last share `decay`."""
    return min(1.0, (update + 1) / warm_up, (updates - update) / (decay * updates))


def train_vae(vae: AutoencoderKL, pictures: Tensor, recipe: Recipe, log: Log) -> None:
    generator = torch.Generator().manual_seed(recipe.seed + 1)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=recipe.vae_lr, weight_decay=0.0)
    picks = batches(len(pictures), recipe.vae_batch, generator)
    for update in range(recipe.vae_updates):
        optimizer.param_groups[0]["lr"] = recipe.vae_lr * warm_up_and_decay(update, recipe.vae_updates, 50)
        x = pictures[next(picks)].contiguous(memory_format=torch.channels_last)
        posterior = vae.encode(x).latent_dist
        y = vae.decode(posterior.sample(generator=generator)).sample
        error, kl = F.l1_loss(y, x), posterior.kl().mean() / posterior.mean[0].numel()
        optimizer.zero_grad()
        (error + recipe.kl_weight * kl).backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        if update % 200 == 0 or update == recipe.vae_updates - 1:
            log(f"vae update {update:5d}  L1 {error.item():.4f}  KL per latent {kl.item():.3f}")


@torch.no_grad()
def raw_latents(vae: AutoencoderKL, pictures: Tensor) -> Tensor:
    return torch.cat([vae.encode(part).latent_dist.mode() for part in pictures.split(256)])


def normalise(vae: AutoencoderKL, pictures: Tensor) -> None:
    """Set the VAE's shift and scaling factor, which give latents mean 0 and standard deviation 1."""
    raw = raw_latents(vae, pictures)
    vae.register_to_config(shift_factor=raw.mean().item(), scaling_factor=1 / raw.std().item())


class Ema:
    """An exponential moving average of parameters; `applied` swaps it in for the time of a block."""

    def __init__(self, params: list[nn.Parameter], decay: float) -> None:
        self.params, self.decay = params, decay
        self.means = [param.detach().clone() for param in params]

    @torch.no_grad()
    def update(self, count: int) -> None:
        decay = min(self.decay, (1 + count) / (10 + count))
        torch._foreach_lerp_(self.means, self.params, 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        self.swap()
        try:
            yield
        finally:
            self.swap()

    def swap(self) -> None:
        for param, mean in zip(self.params, self.means, strict=True):
            param.data, mean.data = mean.data, param.data


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
    dropped = torch.rand(n, generator=generator) < dropout
    embeds, pooled = encode(pipe, ["" if drop else text for drop, text in zip(dropped.tolist(), texts, strict=True)])
    noise = torch.randn(latents.shape, generator=generator)
    sigma = torch.randn(n, generator=generator).sigmoid()[:, None, None, None]
    x = (1 - sigma) * latents + sigma * noise
    v = pipe.transformer(x, embeds, pooled, sigma.flatten() * 1000, return_dict=False)[0]
    return F.mse_loss(v, noise - latents)


def train_denoiser(
    pipe: StableDiffusion3Pipeline,
    latents: Tensor,
    texts: list[str],
    recipe: Recipe,
    phase: Phase,
    log: Log,
    every: int,
) -> None:
    """Transformer and text encoders together; their moving average is left in the pipeline."""
    generator = torch.Generator().manual_seed(phase.seed + 2)
    named = pipe.transformer.transformer_blocks.named_parameters()
    matrices = [p for name, p in named if p.ndim == 2 and ".norm1" not in name]  # modulation: wide, slow in Muon
    modules = (pipe.transformer, pipe.text_encoder, pipe.text_encoder_2, pipe.text_encoder_3)
    params = [p for module in modules for p in module.parameters()]
    chosen = {id(p) for p in matrices}
    others = [p for p in params if id(p) not in chosen]
    muon = torch.optim.Muon(matrices, phase.muon_lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    adam = torch.optim.AdamW(others, lr=phase.adam_lr, betas=(0.9, 0.98), weight_decay=0.0)
    ema = Ema(params, recipe.ema)
    picks, mean = batches(len(texts), recipe.batch, generator), 0.0
    for update in range(phase.updates):
        factor = warm_up_and_decay(update, phase.updates, phase.warm_up, phase.decay)
        muon.param_groups[0]["lr"], adam.param_groups[0]["lr"] = factor * phase.muon_lr, factor * phase.adam_lr
        pick = next(picks)
        loss = flow_loss(pipe, latents[pick], [texts[i] for i in pick.tolist()], recipe.caption_dropout, generator)
        for p in params:
            p.grad = None
        loss.backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        muon.step()
        adam.step()
        ema.update(update)
        mean += loss.item() / 100
        if update % 100 == 99:
            log(f"update {update + 1:5d}  mean loss {mean:.4f}  learning rate × {factor:.2f}")
            mean = 0.0
        if update % every == every - 1 and update + 1 < phase.updates:
            with ema.applied():
                log(f"update {update + 1:5d}  " + measure(pipe, "relation", 148, steps=12, seed=update))
    ema.swap()


def sizes(pipe: StableDiffusion3Pipeline) -> str:
    counts = {name: sum(p.numel() for p in module.parameters()) for name, module in networks(pipe).items()}
    return ", ".join(f"{name} {count:,}" for name, count in counts.items()) + f"; {sum(counts.values()):,} in all"


def networks(pipe: StableDiffusion3Pipeline) -> dict[str, nn.Module]:
    return {name: module for name, module in pipe.components.items() if isinstance(module, nn.Module)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the pipeline")
    parser.add_argument("--log", type=Path, default=Path(__file__).with_suffix(".log"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--every", type=int, default=400, help="updates between two measurements")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    recipe, log = Recipe(), Log(arguments.log)
    log(f"{recipe}")
    log(f"torch {torch.__version__}, threads {arguments.threads}")

    torch.manual_seed(recipe.seed)
    pipe = build_pipeline()
    log("parameters: " + sizes(pipe))
    pictures, _ = draw_pictures(recipe.phases[0])
    pipe.vae.to(memory_format=torch.channels_last).train()
    train_vae(pipe.vae, pictures, recipe, log)
    pipe.vae.eval()
    pipe.vae.to(memory_format=torch.contiguous_format)
    log(reconstruction(pipe.vae, 500, seed=99))
    normalise(pipe.vae, pictures)
    scaling, shift = pipe.vae.config.scaling_factor, pipe.vae.config.shift_factor
    log(f"latents: shift {shift:.4f}, scale {scaling:.4f}")
    for phase in recipe.phases:
        pictures, texts = draw_pictures(phase)
        log(f"{phase}, {len(set(texts))} captions")
        latents = (raw_latents(pipe.vae, pictures) - shift) * scaling
        train_denoiser(pipe, latents, texts, recipe, phase, log, arguments.every)
    pipe.save_pretrained(arguments.out)
    size = sum(file.stat().st_size for file in arguments.out.rglob("*") if file.is_file())
    log(f"saved, {size / 1e6:.2f} MB")
    final_measurements(pipe, log)


if __name__ == "__main__":
    main()
