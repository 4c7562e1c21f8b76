"""A run as a user sees it: its folder, its progress bar, its last words. Between the command line and `train`."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from PIL.Image import Image
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from onetake.core.axes import kind_of
from onetake.core.records import Address, Prompt
from onetake.language.recipe import LanguageRecipe
from onetake.parallel import ALONE, World
from onetake.parallel.launch import may_restart, restarted
from onetake.policies.adapters import apply_weights
from onetake.policies.diffusion import DiffusionPolicy
from onetake.policies.loading import load_pipeline
from onetake.report import write
from onetake.rollout.evaluation import Evaluation
from onetake.rollout.preflight import Preflight
from onetake.run import config
from onetake.run.checkpoint import Checkpoint, Checkpoints, read
from onetake.run.recipe import Recipe
from onetake.run.train import Outcome, Watcher, device_of
from onetake.run.train import train as train_recipe


@dataclass(frozen=True, kw_only=True)
class Session:
    """A checked recipe and the folder it runs in."""

    recipe: Recipe | LanguageRecipe
    folder: Path


def opened(name: str, overrides: list[str], ranks: int = 1) -> Session:
    """A new run of a recipe: everything is checked, then its folder is made. Raises ValueError before that if not.

    Where torchrun has started the ranks again, it is the run that they had begun.
    """
    recipe = config.load_any(config.recipe_text(name), overrides, ranks)
    if may_restart() and recipe.out is None:
        raise ValueError(
            "out: a run that torchrun may start again must find its folder then; name one with --set out=…, or allow no restarts"
        )
    if restarted() and recipe.out is not None and (recipe.out / "config.yaml").is_file():
        return continued(recipe.out, overrides, ranks)
    folder = recipe.out or _next_free(Path("runs"), Path(name).stem)
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(
            f"out: {folder} is not empty; continue that run with `onetake train --resume {folder}`, or choose another folder "
            "with --set out=…"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(config.dump(recipe))
    except OSError as error:
        raise ValueError(
            f"out: cannot write to {folder} ({error.strerror}); choose another folder with --set out=…"
        ) from error
    return Session(recipe=recipe, folder=folder)


def continued(folder: Path, overrides: list[str], ranks: int = 1) -> Session:
    """An earlier run, to be continued. Raises ValueError if its recipe would change (other than growing `updates`)."""
    saved = folder / "config.yaml"
    if not saved.is_file():
        raise ValueError(f"--resume {folder}: not a run folder (it has no config.yaml)")
    text = saved.read_text()
    old, new = config.load_any(text, ranks=None), config.load_any(text, overrides, ranks)
    changed = config.changes(old, new)
    if changed:
        raise ValueError(
            f"--resume {folder}: a resumed run keeps its recipe, but this would change\n"
            + "\n".join(changed)
            + "\nstart a new run for that, or leave the changes out"
        )
    saved.write_text(config.dump(new))
    return Session(recipe=new, folder=folder)


def train_and_report(session: Session, console: Console, world: World = ALONE) -> None:
    """Train with a progress bar, write the report, and say how it went: on rank 0, for all."""
    recipe, folder = session.recipe, session.folder
    console = world.once(lambda: console) or Console(quiet=True)
    facts = environment(str(device_of(recipe) if isinstance(recipe, Recipe) else recipe.device), world)
    world.once(lambda: (folder / "environment.json").write_text(json.dumps(facts, indent=1)))
    if isinstance(recipe, LanguageRecipe):
        lines = _train_language(recipe, folder, console)
    else:
        lines = _train_diffusion(recipe, folder, console, world)
    report = world.once(lambda: write([folder], folder / "report.html"))
    for line in lines:
        console.print(line)
    console.print(f"report  {report}")


def _train_diffusion(recipe: Recipe, folder: Path, console: Console, world: World) -> list[str]:
    """What to say at the end."""
    for line in plan_lines(recipe, world.size):
        console.print(line)
    with _progress(console, recipe.updates) as (say, show):
        outcome = train_recipe(recipe, folder, config.dump(recipe), _watcher(recipe, say=say, show=show), world)
    stopped = f"stopped; what is done is saved. Continue with: onetake train --resume {folder}"
    return [*([stopped] if outcome.stopped else []), *closing_lines(outcome)]


def _train_language(recipe: LanguageRecipe, folder: Path, console: Console) -> list[str]:
    from onetake.language.run import train

    console.print(recipe.plan_line())
    with _progress(console, recipe.updates) as (say, show):
        before, after = train(recipe, folder, say, show)
    accuracies = " → ".join(f"{line['success_rate']:.3f} ± {line['stderr']:.3f}" for line in (before, after))
    return [
        f"held-out problems, {after['n']} completions, sampled from the same state before and after",
        f"  accuracy   {accuracies}",
    ]


@contextmanager
def _progress(console: Console, updates: int) -> Iterator[tuple[Callable[[str], None], Callable[[str, int], None]]]:
    """A bar: what prints a line above it, and what sets its text and the number of updates done."""
    columns = (TextColumn("{task.description}"), BarColumn(8), MofNCompleteColumn(), "ETA", TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("starting", total=updates)
        yield (
            lambda text: progress.console.print(text, markup=False),
            lambda text, done: progress.update(bar, description=text, completed=done),
        )


def plan_lines(recipe: Recipe, ranks: int = 1) -> list[str]:
    """What the run will do, in numbers."""
    size = recipe.rollout
    images = recipe.rollouts * size.groups * size.group_size
    rollouts = "" if recipe.updates_per_rollout == 1 else f" on {recipe.rollouts} rollouts"
    events = recipe.selection.mask(
        groups=1,
        group_size=size.group_size,
        steps=recipe.policy.steps,
        address=Address(seed=recipe.seed, stream="train", update=0),
    )
    lines = [
        f"{recipe.updates} updates{rollouts} × {size.groups} prompts × {size.group_size} images = {images:,} images, "
        f"{recipe.policy.steps} steps each, {int(events[0, 0].sum())} of them trained; micro-batches of {size.micro_batch}",
        f"trained: {recipe.policy.trainable.kind}; events: {kind_of(recipe.selection)}; execution: {recipe.execution}",
    ]
    if ranks > 1:
        layout = size.over(ranks)
        lines.append(
            f"on {ranks} ranks, {size.layout}: each samples {size.group_size // layout.width} images of "
            f"{size.groups // layout.sets} prompts, and the gradients are summed once per update"
        )
    if recipe.updates_per_rollout == 1:
        lines.append(
            "one update per rollout: the ratio is always exactly 1 and nothing is clipped; step_norm and grad_norm show learning"
        )
    return lines


def closing_lines(outcome: Outcome) -> list[str]:
    """Before → after on held-out prompts."""
    if outcome.before is None or outcome.after is None:
        return []
    before, after = outcome.before, outcome.after
    lines = [f"held-out prompts, {after['n']} images, ODE sampler, the same noise before and after"]
    if "success_rate" in after:
        lines.append(
            f"  success    {before['success_rate']:.3f} ± {before['stderr']:.3f} → "
            f"{after['success_rate']:.3f} ± {after['stderr']:.3f}"
        )
    for key, label in (("score_mean", "score"), ("diversity", "diversity")):
        if key in after:
            lines.append(f"  {label:<10} {before[key]:.3f} → {after[key]:.3f}")
    if outcome.best is not None:
        lines.append(f"best checkpoint on them: {outcome.best.folder} ({outcome.best.state.held_out:.3f})")
    return lines


def draw(checkpoint: Path, prompts: list[Prompt], out: Path, *, images: int, seed: int) -> list[Path]:
    """PNG files (GIF files of videos) of `prompts` with a checkpoint's weights. Raises ValueError if it is no checkpoint."""
    found = find_checkpoint(checkpoint)
    recipe = config.load((found.folder / "config.yaml").read_text(), ranks=None)
    chosen = recipe.policy
    pipe = load_pipeline(recipe.pipeline_source, chosen)
    apply_weights(pipe, found.evaluated)
    pipe.to(device_of(recipe))
    steps = recipe.evaluation.steps or chosen.steps
    policy = DiffusionPolicy(pipe, chosen.model_copy(update={"steps": steps}), output_type="pil")
    policy.check(prompts)
    out.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, prompt in enumerate(prompts):
        drawn = policy.draw(prompt, [torch.Generator().manual_seed(seed + i) for i in range(images)])
        for i, made in enumerate(drawn):
            name = f"{number:03d}-{i:02d}-{prompt.text.replace(' ', '-')[:60].replace('/', '-')}"
            paths.append(save_drawn(made, out / name))
    return paths


def save_drawn(made: Image | list[Image], stem: Path) -> Path:
    """An image as ``stem.png``, a video's frames as ``stem.gif``."""
    if isinstance(made, list):
        path = stem.with_name(f"{stem.name}.gif")
        made[0].save(path, save_all=True, append_images=made[1:], duration=125, loop=0)
    else:
        path = stem.with_name(f"{stem.name}.png")
        made.save(path)
    return path


def find_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint that `folder` is, or the latest of the run that it is. Raises ValueError if it is neither."""
    if (folder / "state.json").is_file():
        return read(folder)
    if not (folder / "config.yaml").is_file():
        raise ValueError(f"{folder} is neither a run folder (config.yaml) nor a checkpoint (state.json)")
    recipe = config.load((folder / "config.yaml").read_text(), ranks=None)
    found = Checkpoints(folder / "checkpoints", recipe.checkpoint).latest(say=lambda text: print(text, file=sys.stderr))
    if found is None:
        raise ValueError(f"{folder} has no whole checkpoint yet")
    return found


def environment(device: str, world: World = ALONE) -> dict[str, str | int]:
    """Where a run runs, for its report."""
    packages = ("onetake", "torch", "diffusers", "transformers", "peft")
    git = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return {
        "command": " ".join(sys.argv),
        "started": time.strftime("%Y-%m-%d %H:%M:%S"),
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
        "git": git.stdout.strip() or "not a checkout",
        "platform": platform.platform(),
        "cpu_cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "device": device,
        "ranks": world.size,
    }


def _next_free(root: Path, name: str) -> Path:
    taken = [int(p.name[len(name) + 1 :]) for p in root.glob(f"{name}-[0-9][0-9][0-9]")]
    return root / f"{name}-{max(taken, default=0) + 1:03d}"


def _watcher(recipe: Recipe, say: Callable[[str], None], show: Callable[[str, int], None]) -> Watcher:
    """Prints evaluations and the pre-flight's findings, and keeps the bar's text at the latest update."""

    def preflight(found: Preflight) -> None:
        say(f"pre-flight: events {found.events} re-scored by {found.way}: equal latents and velocities, ratio 1")
        if found.closest is not None:
            say(
                f"pre-flight: every tensor's gradient equals the native one ({found.gradient_error:.0e} apart; at most "
                f"{found.closest.excess:.0%} of what rounding may do, in {found.closest.name})"
            )
        if found.silent:
            say(
                f"pre-flight: the gradient of {len(found.silent)} trainable tensors is zero, so nothing will train them: "
                f"{', '.join(found.silent[:3])}{' …' if len(found.silent) > 3 else ''}"
            )
        for model in found.unreached:
            say(f"pre-flight: no event of the first update runs {model}, so nothing is known of its gradient")
        say(recipe.objective.limit(found.dims))

    def update(columns: dict) -> None:
        short = {"sampling_s": "sample", "reward_s": "score", "backward_s": "backward"}
        phases = " ".join(f"{name} {columns[key]:.1f}" for key, name in short.items())
        success = f" success {columns['success_rate']:.2f}" if "success_rate" in columns else ""
        show(f"reward {columns['score_mean']:.2f}{success} | {phases} s", columns["update"])

    def evaluation(number: int, result: Evaluation) -> None:
        summary = result.summary
        success = (
            f", success {summary['success_rate']:.3f} ± {summary['stderr']:.3f}" if "success_rate" in summary else ""
        )
        say(f"update {number}: held-out score {summary['score_mean']:.3f}{success} (n = {summary['n']})")

    return Watcher(say=say, preflight=preflight, update=update, evaluation=evaluation)
