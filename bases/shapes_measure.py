"""Measure the base model of the `shapes` task with the verifier: `python bases/shapes_measure.py FOLDER`.

Strict success means that all of a caption's constraints hold; ± is one standard error. Noise is fresh for every
picture and comes from a generator of its own, so that measuring never moves the training's random state.
"""

import sys
from collections.abc import Callable

import numpy as np
import torch
from diffusers import AutoencoderKL, StableDiffusion3Pipeline
from torch import Tensor

from onetake.tasks.shapes.captions import FAMILIES, caption, prompts, scenes
from onetake.tasks.shapes.render import render
from onetake.tasks.shapes.verify import verify

T5_TOKENS = 12  # `max_sequence_length` in training
SAMPLING_SHIFT = 3.0


def to_float(pixels: np.ndarray) -> Tensor:
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1


@torch.no_grad()
def sample(
    pipe: StableDiffusion3Pipeline,
    texts: list[str],
    steps: int,
    guidance: float,
    seed: int,
    max_tokens: int = T5_TOKENS,
) -> np.ndarray:
    """Pictures uint8 (N, 32, 32, 3) by the plain pipeline, fresh noise for each."""
    parts = []
    generator = torch.Generator().manual_seed(seed)
    for start in range(0, len(texts), 64):
        images = pipe(
            texts[start : start + 64],
            num_inference_steps=steps,
            guidance_scale=guidance,
            max_sequence_length=max_tokens,
            generator=generator,
            output_type="np",
        ).images
        parts.append(np.rint(images * 255).astype(np.uint8))
    return np.concatenate(parts)


def measure(
    pipe: StableDiffusion3Pipeline,
    family: str,
    n: int,
    *,
    steps: int,
    seed: int,
    split: str = "held_out",
    shift: float = SAMPLING_SHIFT,
    guidance: float = 1.0,
    max_tokens: int = T5_TOKENS,
) -> str:
    """One line: strict success and mean score of n pictures whose prompts go round the split."""
    pool = prompts(family, split)
    texts = [pool[i % len(pool)] for i in range(n)]
    pipe.scheduler.set_shift(shift)
    verdicts = [
        verify(*pair) for pair in zip(sample(pipe, texts, steps, guidance, seed, max_tokens), texts, strict=True)
    ]
    pipe.scheduler.set_shift(SAMPLING_SHIFT)
    success, score = np.mean([v.success for v in verdicts]), np.mean([v.score for v in verdicts])
    error = (success * (1 - success) / n) ** 0.5
    setting = f"T {steps:2d}, shift {shift:g}, guidance {guidance:g}, max_sequence_length {max_tokens}, n {n}"
    return f"{family:8s} {split:8s} success {success:.3f} ± {error:.3f}, score {score:.3f}  ({setting})"


@torch.no_grad()
def reconstruction(vae: AutoencoderKL, n: int, seed: int) -> str:
    """The ceiling: the verifier's verdict on pictures that went through the VAE."""
    rng = np.random.default_rng(seed)
    pool = [scene for family in FAMILIES for scene in scenes(family)]
    chosen = [pool[i] for i in rng.integers(len(pool), size=n)]
    pictures = to_float(np.stack([render(scene, rng) for scene in chosen]))
    decoded = torch.cat([vae.decode(vae.encode(x).latent_dist.mode()).sample for x in pictures.split(128)])
    pixels = (decoded.clamp(-1, 1) + 1).mul(127.5).round().byte().permute(0, 2, 3, 1).numpy()
    success = np.mean([verify(x, caption(scene)).success for x, scene in zip(pixels, chosen, strict=True)])
    error = (decoded - pictures).pow(2).mean().sqrt().item() * 127.5
    return f"vae reconstructions: success {success:.3f} (n {n}), root mean square error {error:.1f} of 255"


def final_measurements(pipe: StableDiffusion3Pipeline, log: Callable[[str], None]) -> None:
    log("final measurements, deterministic sampler, fresh noise, moving-average weights")
    log(reconstruction(pipe.vae, 1000, seed=100))
    for steps in (8, 10, 12):
        for shift in (1.0, 3.0):
            log(measure(pipe, "relation", 444, steps=steps, shift=shift, seed=101))
    for family, n in (("single", 200), ("count", 400)):
        for steps in (8, 12):
            log(measure(pipe, family, n, steps=steps, seed=102))
    for family in ("relation", "count"):
        log(measure(pipe, family, 400, steps=12, seed=103, split="train"))
    for family, n in (("relation", 296), ("count", 280), ("single", 200)):
        log(measure(pipe, family, n, steps=12, guidance=3.0, seed=104))
    log(measure(pipe, "relation", 222, steps=12, max_tokens=256, seed=105))


if __name__ == "__main__":
    torch.set_num_threads(1)
    loaded = StableDiffusion3Pipeline.from_pretrained(sys.argv[1])
    loaded.set_progress_bar_config(disable=True)
    final_measurements(loaded, print)
