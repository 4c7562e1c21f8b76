"""What `onetake plan` predicts: beside what the kernel counts on the built-in task, or for models of published shapes.

    python benchmarks/plan.py measure [--set rollout.groups=1]
    python benchmarks/plan.py shape flux.1-dev [--set rollout.micro_batch=2] [--memory 80GiB]

`measure` runs one update of recipe `shapes` (sampling to optimizer) under each execution, in a process of its own, and prints
its high-water mark (Linux) less what was resident before the update, beside the same difference as predicted. `shape` builds a
pipeline folder of configuration files alone, from diffusers' and transformers' classes, without weights and with a tokenizer
of three words, and runs `onetake plan` with the settings of the published recipe on it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    FluxTransformer2DModel,
    UniPCMultistepScheduler,
    WanTransformer3DModel,
)
from transformers import CLIPTextConfig, CLIPTokenizer, T5Config, T5TokenizerFast, UMT5Config

from onetake.allocator import keep_freed_memory
from onetake.core.coefficients import Coefficients
from onetake.core.records import Address
from onetake.execution import EXECUTIONS
from onetake.forecast.memory import Forecast
from onetake.memory import PeakMemory
from onetake.policies import trainable
from onetake.policies.diffusion import DiffusionPolicy
from onetake.rollout.sampling import deal, sample, score
from onetake.run import config
from onetake.run.optimizer import Optimizer

T5_XXL = {
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
}


def clip_tokenizer() -> CLIPTokenizer:
    vocab = {"<|startoftext|>": 0, "<|endoftext|>": 1, **{c: n + 2 for n, c in enumerate("abcdefghijklmnopqrstuvwxyz")}}
    return CLIPTokenizer(vocab=vocab, merges=[], model_max_length=77)


def t5_tokenizer() -> T5TokenizerFast:
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁a", -1.0), ("▁red", -1.0), ("▁circle", -1.0)]
    return T5TokenizerFast(vocab=pieces, extra_ids=0)


def flux() -> dict[str, Any]:
    """FLUX.1-dev: diffusers' defaults with embedded guidance, and its encoders by their published sizes."""
    return {
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        "text_encoder": (
            "CLIPTextModel",
            CLIPTextConfig(hidden_size=768, intermediate_size=3072, num_attention_heads=12),
        ),
        "text_encoder_2": ("T5EncoderModel", T5Config(vocab_size=32128, **T5_XXL)),
        "tokenizer": clip_tokenizer(),
        "tokenizer_2": t5_tokenizer(),
        "transformer": (FluxTransformer2DModel, {"guidance_embeds": True}),
        "vae": (
            AutoencoderKL,
            {
                "block_out_channels": (128, 256, 512, 512),
                "down_block_types": ("DownEncoderBlock2D",) * 4,
                "up_block_types": ("UpDecoderBlock2D",) * 4,
                "layers_per_block": 2,
                "latent_channels": 16,
                "sample_size": 1024,
                "scaling_factor": 0.3611,
                "shift_factor": 0.1159,
                "use_quant_conv": False,
                "use_post_quant_conv": False,
            },
        ),
    }


def wan() -> dict[str, Any]:
    """Wan2.1 1.3B: diffusers' defaults are the 14B's; width, depth and feed-forward are the small model's."""
    return {
        "scheduler": UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
        "text_encoder": ("UMT5EncoderModel", UMT5Config(vocab_size=256384, **T5_XXL)),
        "tokenizer": t5_tokenizer(),
        "transformer": (
            WanTransformer3DModel,
            {"num_attention_heads": 12, "attention_head_dim": 128, "ffn_dim": 8960, "num_layers": 30},
        ),
        "vae": (AutoencoderKLWan, {}),
    }


SHAPES = {
    "flux.1-dev": ("FluxPipeline", flux, "flux.1-dev-flow-grpo"),
    "wan2.1-1.3b": ("WanPipeline", wan, "wan2.1-1.3b-flow-grpo"),
}


def write(name: str, folder: Path) -> str:
    """A pipeline folder without weights; returns the recipe's text for it."""
    pipeline, parts, recipe = SHAPES[name]
    index: dict[str, Any] = {"_class_name": pipeline}
    for part, what in parts().items():
        if not isinstance(what, tuple):
            what.save_pretrained(folder / part)
            library = "diffusers" if part == "scheduler" else "transformers"
            index[part] = [library, type(what).__name__]
        elif isinstance(what[0], str):
            what[1].save_pretrained(folder / part)
            index[part] = ["transformers", what[0]]
        else:
            with torch.device("meta"):
                what[0](**what[1]).save_config(folder / part)
            index[part] = ["diffusers", what[0].__name__]
    (folder / "model_index.json").write_text(json.dumps(index))
    (folder / "prompts.txt").write_text("a red circle\n")
    return (
        f"extends: {recipe}\ntask: {{kind: prompts, train: {folder}/prompts.txt, held_out: {folder}/prompts.txt, reward: jpeg}}\n"
        f"policy: {{pipeline: {folder}}}\n"
    )


def shape(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as root:
        path = Path(root) / "recipe.yaml"
        path.write_text(write(arguments.name, Path(root)))
        options = [f"--set={change}" for change in arguments.set]
        options += [f"--memory={arguments.memory}"] if arguments.memory else []
        subprocess.run([sys.executable, "-m", "onetake", "plan", str(path), *options], check=False)


def measured(execution: str, changes: list[str], allocator: str) -> int:
    """Bytes by which one update raised the high-water mark of this process above what was resident before it."""
    if allocator == "keep":
        keep_freed_memory()
    recipe = config.load(config.recipe_text("shapes"), changes)
    policy = DiffusionPolicy.from_config(recipe.policy, recipe.pipeline_source, recipe.seed)
    task, address = recipe.task.load(), Address(seed=recipe.seed, stream="train", update=0)
    optimizer = Optimizer(recipe.optimizer, trainable(policy))
    batches = deal(recipe.rollout, task.train, policy, recipe.selection, recipe.objective, address)
    policy.rollout(batches[0].alone(), lambda transition: None, grad=False)  # what libraries set up once
    peak = PeakMemory(torch.device("cpu"))
    assert peak.restart(), "the high-water mark cannot be restarted here"
    before, strategy = peak.bytes, EXECUTIONS[execution]()
    rollout = sample(policy, strategy, batches)
    score(rollout, task.rewards, recipe.advantages)
    strategy.accumulate(policy, rollout, Coefficients(recipe.objective, rollout))
    optimizer.step(0)
    return peak.bytes - before


def measure(arguments: argparse.Namespace) -> None:
    recipe = config.load(config.recipe_text("shapes"), arguments.set)
    forecast = Forecast(recipe)
    print(f"{'execution':12} {'predicted':>10} {'measured':>10}   MiB above weights and state; measured ÷ predicted")
    for execution in EXECUTIONS:
        phases = forecast.choice(execution, False, recipe.rollout.micro_batch).phases
        predicted = max(phase.kept + phase.transient for phase in phases) / 2**20
        options = ["--allocator", arguments.allocator, *(f"--set={change}" for change in arguments.set)]
        command = [sys.executable, __file__, "one", execution, *options]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found = int(told.split()[-1]) / 2**20
        print(f"{execution:12} {predicted:10.1f} {found:10.1f}   {found / predicted:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["measure", "shape", "one"])
    parser.add_argument("name", nargs="?", help="of a shape, or (one) of an execution")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--memory")
    parser.add_argument(
        "--allocator", choices=["keep", "default"], default="keep", help="keep: as `onetake train` does"
    )
    arguments = parser.parse_args()
    if arguments.what == "measure":
        measure(arguments)
    elif arguments.what == "shape":
        shape(arguments)
    else:
        print(measured(arguments.name, arguments.set, arguments.allocator))


if __name__ == "__main__":
    main()
