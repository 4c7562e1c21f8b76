"""Train the base model of the `motion` task from seeds, on CPU: `python bases/motion.py --out FOLDER`.

The result is a stock `WanPipeline` of 1.7 M parameters that makes clips of 9 frames of 32 x 32 px, loaded by plain
`WanPipeline.from_pretrained(FOLDER)`. A VAE that is in the folder already is kept. Log and measurements: `motion.log`.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from torch import Tensor
from training import Log, Phase, Settings, VaePhase, drop, save, sizes, t5_tokenizer, train_denoiser, train_vae
from transformers import UMT5Config, UMT5EncoderModel

from onetake.tasks.motion.captions import caption, motions, parse, prompts
from onetake.tasks.motion.render import FRAMES, SIZE, render
from onetake.tasks.motion.verify import verify
from onetake.tasks.shapes.render import GROUND

TOKENS = 8  # the longest caption has seven words; T5 adds an end token
TEXT_WIDTH, CHANNELS = 64, 8
SHIFT = 3.0
VAE_SIZE = 24  # px of the clips that the VAE learns on: it is convolutional, and these cost half of the larger ones
VAE_SAMPLES = 12_000
SETTINGS = Settings(
    vae=(VaePhase(updates=800, batch=16, kl_weight=1e-4), VaePhase(updates=1_800, batch=4, kl_weight=1e-4)),
    phases=(Phase(seed=0, samples=24_000, updates=3_200, muon_lr=2e-3, adam_lr=1.5e-3, warm_up=100, decay=0.4),),
)


def build_pipeline() -> WanPipeline:
    words = sorted({word for motion in motions() for word in caption(motion).split()})
    tokenizer = t5_tokenizer(words, TOKENS)
    text = UMT5Config(
        vocab_size=len(tokenizer),
        d_model=TEXT_WIDTH,
        d_kv=16,
        d_ff=2 * TEXT_WIDTH,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
    )
    vae = AutoencoderKLWan(
        base_dim=12,
        z_dim=CHANNELS,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        attn_scales=[],
        temperal_downsample=[True, True],
        latents_mean=[0.0] * CHANNELS,
        latents_std=[1.0] * CHANNELS,
        scale_factor_temporal=4,
        scale_factor_spatial=4,
    )
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=4,
        attention_head_dim=32,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        text_dim=TEXT_WIDTH,
        freq_dim=128,
        ffn_dim=512,
        num_layers=4,
        rope_max_seq_len=32,
    )
    pipe = WanPipeline(
        tokenizer=tokenizer,
        text_encoder=UMT5EncoderModel(text),
        vae=vae,
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def to_float(clips: np.ndarray) -> Tensor:
    """uint8 (N, frames, H, W, 3) as float32 (N, 3, frames, H, W) in [-1, 1]."""
    return torch.from_numpy(clips).permute(0, 4, 1, 2, 3).float() / 127.5 - 1


def draw_clips(seed: int, samples: int, size: int) -> tuple[np.ndarray, list[str]]:
    """Training clips and their captions; held-out captions never appear."""
    rng = np.random.default_rng(seed)
    pool = prompts("train")
    texts = [pool[i] for i in rng.integers(len(pool), size=samples)]
    return np.stack([render(parse(text), rng, size) for text in texts]), texts


def train_autoencoder(vae: AutoencoderKLWan, clips: np.ndarray, log: Log) -> None:
    """First on single frames, then on clips. Latents start with little noise, or nothing gets through them."""
    parts: list[Tensor] = []
    watch = vae.decoder.register_forward_hook(lambda module, arguments, output: parts.append(output))
    with torch.no_grad():
        vae.quant_conv.bias[CHANNELS:] -= 5

    def decode(latents: Tensor) -> Tensor:
        """Without the clamp to [-1, 1] in which the pipeline's decoding ends: it has no gradient outside."""
        parts.clear()
        vae.decode(latents)
        return torch.cat(parts, 2)

    def frames(pick: Tensor) -> Tensor:
        return to_float(clips[pick.numpy(), pick.numpy() % FRAMES][:, None])

    for phase, pixels in zip(SETTINGS.vae, (frames, lambda pick: to_float(clips[pick.numpy()])), strict=True):
        log(f"{phase}")
        train_vae(vae, phase, SETTINGS.seed + 1, len(clips), pixels, decode, error, log)
    watch.remove()


def error(y: Tensor, x: Tensor) -> Tensor:
    """Absolute and squared error, ten times on the object, else the ground (nine tenths of the pixels) is all that is learnt."""
    ground = torch.tensor(GROUND).view(3, 1, 1, 1) / 127.5 - 1
    weight = 1 + 9 * ((x - ground).abs().amax(1, keepdim=True) > 0.1)
    return (weight * ((y - x).abs() + (y - x) ** 2)).mean()


@torch.no_grad()
def raw_latents(vae: AutoencoderKLWan, clips: np.ndarray) -> Tensor:
    return torch.cat([vae.encode(to_float(clips[i : i + 64])).latent_dist.mode() for i in range(0, len(clips), 64)])


def normalised(vae: AutoencoderKLWan, latents: Tensor) -> Tensor:
    """Each channel with mean 0 and standard deviation 1; the VAE's configuration keeps what that takes."""
    mean, std = latents.mean((0, 2, 3, 4)), latents.std((0, 2, 3, 4))
    vae.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())
    return (latents - mean[:, None, None, None]) / std[:, None, None, None]


def flow_loss(pipe: WanPipeline, latents: Tensor, texts: list[str], generator: torch.Generator) -> Tensor:
    """Flow matching: x = (1 − σ) x₀ + σ ε, v = ε − x₀, logit-normal σ (Esser et al. 2024)."""
    embeds = pipe._get_t5_prompt_embeds(
        drop(texts, SETTINGS.caption_dropout, generator), max_sequence_length=TOKENS, device=latents.device
    )
    noise = torch.randn(latents.shape, generator=generator)
    sigma = torch.randn(len(texts), generator=generator).sigmoid()[:, None, None, None, None]
    v = pipe.transformer((1 - sigma) * latents + sigma * noise, sigma.flatten() * 1000, embeds, return_dict=False)[0]
    return F.mse_loss(v, noise - latents)


def judged(clips: np.ndarray, texts: list[str]) -> str:
    """Strict success, the mean score, and how often each kind of constraint holds."""
    verdicts = [verify(*pair) for pair in zip(clips, texts, strict=True)]
    success, score = np.mean([v.success for v in verdicts]), np.mean([v.score for v in verdicts])
    error = (success * (1 - success) / len(verdicts)) ** 0.5
    kinds = ("colour", "shape", "nothing else", "direction", "pace", "smoothly")
    held = zip(kinds, np.mean([list(v.constraints.values()) for v in verdicts], 0), strict=True)
    told = ", ".join(f"{kind} {share:.2f}" for kind, share in held)
    return f"success {success:.3f} ± {error:.3f}, score {score:.3f} ({told}; n {len(verdicts)})"


@torch.no_grad()
def reconstruction(vae: AutoencoderKLWan, n: int, seed: int) -> str:
    """The ceiling: the verifier's verdict on clips that went through the VAE."""
    rng = np.random.default_rng(seed)
    chosen = [motions()[i] for i in rng.integers(len(motions()), size=n)]
    clips = np.stack([render(motion, rng) for motion in chosen])
    decoded = torch.cat([vae.decode(part).sample for part in raw_latents(vae, clips).split(64)])
    pixels = (decoded.clamp(-1, 1) + 1).mul(127.5).round().byte().permute(0, 2, 3, 4, 1).numpy()
    return "vae reconstructions: " + judged(pixels, [caption(motion) for motion in chosen])


@torch.no_grad()
def measure(pipe: WanPipeline, n: int, *, steps: int, seed: int, split: str = "held_out", guidance: float = 1.0) -> str:
    """The plain pipeline's clips of prompts that go round the split, fresh noise for each."""
    pool = prompts(split)
    texts = [pool[i % len(pool)] for i in range(n)]
    generator, parts = torch.Generator().manual_seed(seed), []
    for start in range(0, n, 64):
        frames = pipe(
            texts[start : start + 64],
            height=SIZE,
            width=SIZE,
            num_frames=FRAMES,
            num_inference_steps=steps,
            guidance_scale=guidance,
            max_sequence_length=TOKENS,
            generator=generator,
            output_type="np",
        ).frames
        parts.append(np.rint(frames * 255).astype(np.uint8))
    return f"{split} T {steps:2d}, guidance {guidance:g}: " + judged(np.concatenate(parts), texts)


def final_measurements(pipe: WanPipeline, log: Callable[[str], None]) -> None:
    log("final measurements, deterministic sampler, fresh noise, moving-average weights")
    log(reconstruction(pipe.vae, 400, seed=100))
    for steps in (6, 8, 12):
        log(measure(pipe, 270, steps=steps, seed=101))
    log(measure(pipe, 270, steps=8, seed=103, split="train"))
    log(measure(pipe, 270, steps=8, seed=104, guidance=3.0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the pipeline")
    parser.add_argument("--log", type=Path, default=Path(__file__).with_suffix(".log"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--measure", action="store_true", help="do not train: measure the pipeline in --out again")
    parser.add_argument("--every", type=int, default=400, help="updates between two measurements")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.measure:
        pipe = WanPipeline.from_pretrained(arguments.out)
        pipe.set_progress_bar_config(disable=True)
        final_measurements(pipe, print)
        return
    log, phase = Log(arguments.log), SETTINGS.phases[0]
    log(f"{SETTINGS}")
    log(f"torch {torch.__version__}, threads {arguments.threads}")

    torch.manual_seed(SETTINGS.seed)
    pipe = build_pipeline()
    log("parameters: " + sizes(pipe))
    if (arguments.out / "vae").is_dir():
        pipe.register_modules(vae=AutoencoderKLWan.from_pretrained(arguments.out / "vae"))
    else:
        train_autoencoder(pipe.vae.train(), draw_clips(phase.seed, VAE_SAMPLES, VAE_SIZE)[0], log)
        pipe.vae.eval()
        pipe.vae.save_pretrained(arguments.out / "vae")
    log(reconstruction(pipe.vae, 200, seed=99))
    clips, texts = draw_clips(phase.seed, phase.samples, SIZE)
    latents = normalised(pipe.vae, raw_latents(pipe.vae, clips))
    log(f"latents: means {pipe.vae.config.latents_mean}, standard deviations {pipe.vae.config.latents_std}")
    train_denoiser(
        pipe,
        pipe.transformer.blocks,
        "scale_shift_table",
        len(texts),
        lambda pick, generator: flow_loss(pipe, latents[pick], [texts[i] for i in pick.tolist()], generator),
        phase,
        SETTINGS,
        log,
        lambda update: measure(pipe, 135, steps=8, seed=update),
        arguments.every,
    )
    save(pipe, arguments.out, log)
    final_measurements(pipe, log)


if __name__ == "__main__":
    main()
