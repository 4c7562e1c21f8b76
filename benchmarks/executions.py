"""Time of one update under each execution, interleaved: sampling + gradient, no decoding, no reward, no optimizer.

    python benchmarks/executions.py [--rounds 7] [--group 8] [--steps 8] [--width 384] [--tokens 256]

One process, one thread, one Stable Diffusion 3 transformer of the given size with random weights (time does not depend on
their values); every step but the last is trained. Each round runs every execution once, in another order; the figures are
medians over the rounds of process CPU time and wall-clock. The bound counts forwards F and a backward of 2F (full) or F
(LoRA), exactly, for the T−1 trained of T steps: with it, ratio ÷ bound compares with what arithmetic alone allows. A second
bound takes the backward's cost as measured here by the retained graphs.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline

from onetake.allocator import keep_freed_memory
from onetake.core.coefficients import Coefficients
from onetake.core.objectives import Grpo
from onetake.core.records import Address, Prompt
from onetake.core.selection import All
from onetake.execution import EXECUTIONS
from onetake.policies.adapters import Full, Lora
from onetake.policies.diffusion import DiffusionPolicy
from onetake.policies.loading import PolicyConfig
from onetake.rollout.sampling import RolloutConfig, deal, sample


def random_embeddings(transformer: SD3Transformer2DModel, **given: Any) -> tuple[torch.Tensor | None, ...]:
    """Instead of text encoders, which an update with cached prompts does not run either."""
    if given["prompt_embeds"] is not None:
        return given["prompt_embeds"], None, given["pooled_prompt_embeds"], None
    config, random = transformer.config, torch.Generator().manual_seed(0)
    embeds = torch.randn(1, 24, config.joint_attention_dim, generator=random)
    return embeds, None, torch.randn(1, config.pooled_projection_dim, generator=random), None


def policy(arguments: argparse.Namespace, adapter: Full | Lora, *, checkpointing: bool) -> DiffusionPolicy:
    torch.manual_seed(0)
    side = int(arguments.tokens**0.5)
    transformer = SD3Transformer2DModel(
        sample_size=side,
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_layers=arguments.layers,
        attention_head_dim=64,
        num_attention_heads=arguments.width // 64,
        joint_attention_dim=64,
        caption_projection_dim=arguments.width,
        pooled_projection_dim=64,
        pos_embed_max_size=side,
        qk_norm="rms_norm",
    )
    vae = AutoencoderKL(block_out_channels=(8,), latent_channels=4, norm_num_groups=4)
    pipe = StableDiffusion3Pipeline(
        transformer=transformer.eval(),
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        **dict.fromkeys(
            ["text_encoder", "text_encoder_2", "text_encoder_3", "tokenizer", "tokenizer_2", "tokenizer_3"], None
        ),
    )
    pipe.encode_prompt = partial(random_embeddings, transformer)
    pipe.set_progress_bar_config(disable=True)
    adapter.attach(pipe, 0)
    if checkpointing:
        pipe.transformer.enable_gradient_checkpointing()
    return DiffusionPolicy(pipe, PolicyConfig(steps=arguments.steps), output_type="latent")


def one_update(policy: DiffusionPolicy, execution: str, arguments: argparse.Namespace) -> tuple[float, float]:
    """(process CPU seconds, wall-clock seconds)."""
    size = RolloutConfig(groups=1, group_size=arguments.group, micro_batch=arguments.group)
    batches = deal(size, [Prompt("a prompt")], policy, All(), Grpo(), Address(seed=0, stream="train", update=0))
    strategy = EXECUTIONS[execution]()
    policy.module.zero_grad(set_to_none=True)
    gc.collect()
    cpu, wall = time.process_time(), time.perf_counter()
    rollout = sample(policy, strategy, batches)
    rollout.advantages = torch.linspace(-1, 1, arguments.group, dtype=torch.float64)[None]
    strategy.accumulate(policy, rollout, Coefficients(Grpo(), rollout))
    return time.process_time() - cpu, time.perf_counter() - wall


def bound(steps: int, backward: float, *, checkpointing: bool) -> float:
    """Native ÷ lean in forwards: every step samples, T−1 are trained."""
    trained = steps - 1
    lean = steps + trained * backward
    return (lean + trained * (2 if checkpointing else 1)) / lean


def rows(arguments: argparse.Namespace) -> Iterator[str]:
    for name, adapter, theory in (("LoRA", Lora(rank=arguments.rank, alpha=1), 1.0), ("full", Full(), 2.0)):
        plain = policy(arguments, adapter, checkpointing=False)
        checkpointed = policy(arguments, adapter, checkpointing=True)
        runs = {
            "recompute": (plain, "recompute"),
            "retain": (plain, "retain"),
            "reweight": (plain, "reweight"),
            "recompute + checkpointing": (checkpointed, "recompute"),
        }
        times: dict[str, list[tuple[float, float]]] = {key: [] for key in runs}
        for round_number in range(arguments.rounds + 1):
            order = list(runs)
            shift = round_number % len(order)
            for key in order[shift:] + order[:shift]:
                measured = one_update(*runs[key], arguments)
                if round_number:  # the first round warms up
                    times[key].append(measured)
        cpu, wall = ({key: statistics.median(t[i] for t in times[key]) for key in runs} for i in (0, 1))
        for key in runs:
            yield f"{name:5} {key:26} {cpu[key]:8.3f} {wall[key]:8.3f}"
        for base in ("recompute", "recompute + checkpointing"):
            limit = bound(arguments.steps, theory, checkpointing=base != "recompute")
            for lean in ("retain", "reweight"):
                pairs = [(b[0] / x[0], b[1] / x[1]) for b, x in zip(times[base], times[lean], strict=True)]
                ratio_cpu, ratio_wall = (statistics.median(p[i] for p in pairs) for i in (0, 1))
                yield (
                    f"{name:5} {base} ÷ {lean}: {ratio_cpu:.3f} CPU, {ratio_wall:.3f} wall; bound {limit:.3f}; "
                    f"{100 * (ratio_cpu - 1) / (limit - 1):.0f} % of the bound's gain"
                )


def profile(arguments: argparse.Namespace) -> Iterator[str]:
    """Where full fine-tuning under reweight spends more than under retain, by operator (self CPU time, one update)."""
    full = policy(arguments, Full(), checkpointing=False)
    spent = {}
    for execution in ("retain", "reweight"):
        one_update(full, execution, arguments)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            one_update(full, execution, arguments)
        spent[execution] = {row.key: row.self_cpu_time_total / 1e6 for row in profiler.key_averages()}
    extra = {
        key: spent["reweight"].get(key, 0.0) - spent["retain"].get(key, 0.0)
        for key in spent["retain"] | spent["reweight"]
    }
    for key, seconds in sorted(extra.items(), key=lambda item: -abs(item[1]))[:8]:
        yield f"{key:40} {seconds:+.3f} s"
    yield f"{'all operators':40} {sum(extra.values()):+.3f} s of {sum(spent['retain'].values()):.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {
        "rounds": 7,
        "group": 8,
        "steps": 8,
        "width": 384,
        "tokens": 256,
        "layers": 4,
        "rank": 8,
        "threads": 1,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument(
        "--allocator", choices=["keep", "default"], default="keep", help="keep: as `onetake train` does"
    )
    parser.add_argument(
        "--profile", action="store_true", help="what full reweight spends more than retain, by operator"
    )
    arguments = parser.parse_args()
    if arguments.allocator == "keep":
        keep_freed_memory()
    torch.set_num_threads(arguments.threads)
    print(" ".join(f"{key} {value}" for key, value in vars(arguments).items()), f"torch {torch.__version__}")
    if arguments.profile:
        print("\n".join(profile(arguments)))
        return
    print(f"{'':5} {'':26} {'CPU s':>8} {'wall s':>8}")
    for row in rows(arguments):
        print(row, flush=True)


if __name__ == "__main__":
    main()
