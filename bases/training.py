"""What the scripts that train the built-in base models share: log, batches, moving average, and the flow-matching loop."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn
from transformers import T5TokenizerFast


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One training of transformer and text encoders; the optimizers start afresh.

    `seed` draws the training samples, `seed` + 2 the batches; `decay` is the last share of the updates, in which the
    learning rate falls to zero.
    """

    seed: int
    samples: int
    updates: int
    muon_lr: float
    adam_lr: float
    warm_up: int
    decay: float


@dataclass(frozen=True, kw_only=True)
class VaePhase:
    """One training of the VAE; the optimizer starts afresh."""

    updates: int
    batch: int
    lr: float = 3e-3
    kl_weight: float = 3e-4


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Of a base: `seed` draws the weights, `seed` + 1 the batches of the VAE; `ema` is the moving average's decay."""

    seed: int = 0
    vae: tuple[VaePhase, ...]
    batch: int = 64
    ema: float = 0.998
    caption_dropout: float = 0.1
    phases: tuple[Phase, ...]


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


def batches(n: int, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Index batches, epoch after epoch, without end."""
    while True:
        yield from torch.randperm(n, generator=generator).split(size)[: n // size]


def warm_up_and_decay(update: int, updates: int, warm_up: int, decay: float = 0.4) -> float:
    """Learning rate factor: linear up, flat, and linear down to zero over the last share `decay`."""
    return min(1.0, (update + 1) / warm_up, (updates - update) / (decay * updates))


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


def train_vae(
    vae: nn.Module,
    phase: VaePhase,
    seed: int,
    samples: int,
    pixels: Callable[[Tensor], Tensor],
    decode: Callable[[Tensor], Tensor],
    error: Callable[[Tensor, Tensor], Tensor],
    log: Log,
) -> None:
    """`pixels` gives the samples with the given indices, float32 (N, 3, [frames,] H, W) in [-1, 1]."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=phase.lr, weight_decay=0.0)
    picks = batches(samples, phase.batch, generator)
    for update in range(phase.updates):
        optimizer.param_groups[0]["lr"] = phase.lr * warm_up_and_decay(update, phase.updates, 50)
        x = pixels(next(picks))
        posterior = vae.encode(x).latent_dist
        y = decode(posterior.sample(generator=generator))
        wrong, kl = error(y, x), posterior.kl()
        kl = kl.mean() * kl[0].numel() / posterior.mean[0].numel()  # of a video, diffusers sums all but the columns
        optimizer.zero_grad()
        (wrong + phase.kl_weight * kl).backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        if update % 200 == 0 or update == phase.updates - 1:
            log(f"vae update {update:5d}  error {wrong.item():.4f}  KL per latent {kl.item():.3f}")


def train_denoiser(
    pipe: DiffusionPipeline,
    blocks: nn.Module,
    slow: str,
    samples: int,
    loss: Callable[[Tensor, torch.Generator], Tensor],
    phase: Phase,
    settings: Settings,
    log: Log,
    measure: Callable[[int], str],
    every: int,
) -> None:
    """Transformer and text encoders together; their moving average is left in the pipeline.

    Muon takes the matrices of `blocks`, except those with `slow` in their name: modulation is wide, and slow in Muon.
    `loss` is of the samples with the given indices; `measure` is logged every `every` updates.
    """
    generator = torch.Generator().manual_seed(phase.seed + 2)
    matrices = [p for name, p in blocks.named_parameters() if p.ndim == 2 and slow not in name]
    encoders = [module for name, module in networks(pipe).items() if name.startswith("text_encoder")]
    params = [p for module in (pipe.transformer, *encoders) for p in module.parameters()]
    chosen = {id(p) for p in matrices}
    others = [p for p in params if id(p) not in chosen]
    muon = torch.optim.Muon(matrices, phase.muon_lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    adam = torch.optim.AdamW(others, lr=phase.adam_lr, betas=(0.9, 0.98), weight_decay=0.0)
    ema = Ema(params, settings.ema)
    picks, mean = batches(samples, settings.batch, generator), 0.0
    for update in range(phase.updates):
        factor = warm_up_and_decay(update, phase.updates, phase.warm_up, phase.decay)
        muon.param_groups[0]["lr"], adam.param_groups[0]["lr"] = factor * phase.muon_lr, factor * phase.adam_lr
        error = loss(next(picks), generator)
        for p in params:
            p.grad = None
        error.backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        muon.step()
        adam.step()
        ema.update(update)
        mean += error.item() / 100
        if update % 100 == 99:
            log(f"update {update + 1:5d}  mean loss {mean:.4f}  learning rate × {factor:.2f}")
            mean = 0.0
        if update % every == every - 1 and update + 1 < phase.updates:
            with ema.applied():
                log(f"update {update + 1:5d}  " + measure(update))
    ema.swap()


def drop(texts: list[str], share: float, generator: torch.Generator) -> list[str]:
    """`texts`, a random share of them empty: what guidance is going to be away from."""
    dropped = torch.rand(len(texts), generator=generator) < share
    return ["" if lost else text for lost, text in zip(dropped.tolist(), texts, strict=True)]


def t5_tokenizer(words: list[str], length: int) -> T5TokenizerFast:
    """A Unigram of whole words, in the stock class."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((f"▁{word}", -1.0) for word in words)]
    return T5TokenizerFast(vocab=pieces, extra_ids=0, model_max_length=length)


def save(pipe: DiffusionPipeline, folder: Path, log: Log) -> None:
    pipe.save_pretrained(folder)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    log(f"saved, {size / 1e6:.2f} MB")


def sizes(pipe: DiffusionPipeline) -> str:
    counts = {name: sum(p.numel() for p in module.parameters()) for name, module in networks(pipe).items()}
    return ", ".join(f"{name} {count:,}" for name, count in counts.items()) + f"; {sum(counts.values()):,} in all"


def networks(pipe: DiffusionPipeline) -> dict[str, nn.Module]:
    return {name: module for name, module in pipe.components.items() if isinstance(module, nn.Module)}
