"""The command line: ``onetake train | plan | verify | sample | report | recipes``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from onetake import __version__

if TYPE_CHECKING:
    from onetake.activations.compare import ActionRow
    from onetake.policies.diffusion import DiffusionPolicy
    from onetake.run.recipe import Recipe
    from onetake.tasks import Task

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
console = Console(highlight=False, soft_wrap=True)
errors = Console(stderr=True, highlight=False, soft_wrap=True)

RecipeArgument = Annotated[str, typer.Argument(help="A recipe's name (see `onetake recipes`) or a YAML file.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="key=value, e.g. policy.steps=10; repeatable.")]
DEFAULT_RECIPE = "shapes"


def main() -> None:
    """Entry point. The heavy libraries are imported by the commands that need them, so that help answers at once."""
    # Their notices about optional packages and their loading bars are not about this program.
    for library in ("TRANSFORMERS", "DIFFUSERS"):
        os.environ.setdefault(f"{library}_VERBOSITY", "error")
    for bars in ("HF_HUB_DISABLE_PROGRESS_BARS", "TQDM_DISABLE"):
        os.environ.setdefault(bars, "1")
    sys.path.insert(0, "")  # a reward written module:function may lie in the working directory, as with python -m
    app()


def _say_version(asked: bool) -> None:
    if asked:
        console.print(f"onetake {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Say which this is, and end.")
    ] = False,
) -> None: ...


@contextmanager
def _errors_in_one_place() -> Iterator[None]:
    """What the user can mend is one message and exit code 2, not a traceback."""
    try:
        yield
    except (ValueError, OSError) as error:
        lines = str(error).splitlines()
        errors.print(f"[bold red]{'Errors' if len(lines) > 1 else 'Error'}[/]", end=" ")
        errors.print("\n  ".join(["", *lines]) if len(lines) > 1 else lines[0] if lines else repr(error), markup=False)
        raise typer.Exit(2) from error


@app.command()
def train(
    recipe: RecipeArgument = DEFAULT_RECIPE,
    overrides: SetOption = None,
    quick: Annotated[bool, typer.Option("--quick", help="The recipe's small variant, to see that it works.")] = False,
    resume: Annotated[Path | None, typer.Option(help="A run folder to continue, bit for bit.")] = None,
    nproc: Annotated[int, typer.Option(min=1, help="Processes on this machine, one for each GPU; by torchrun.")] = 1,
    restarts: Annotated[
        int, typer.Option(min=0, help="Times to go on from the last checkpoint when a process has died.")
    ] = 0,
) -> None:
    """Train a policy; without a recipe, the built-in task. Ends with before → after and a report."""
    from onetake.parallel import world
    from onetake.parallel.launch import launch

    name, changes = f"{recipe}-quick" if quick else recipe, overrides or []
    with _errors_in_one_place():
        if nproc > 1 or restarts:
            options = [f"--set={change}" for change in changes] + ([f"--resume={resume}"] if resume else [])
            launch(nproc, ["train", name, *options], restarts=restarts)
            return
        from onetake.run.session import continued, opened, train_and_report

        with world() as ranks:
            session = ranks.told(
                lambda: continued(resume, changes, ranks.size) if resume else opened(name, changes, ranks.size)
            )
            train_and_report(session, console, ranks)


@app.command()
def plan(
    recipe: Annotated[
        str, typer.Argument(help="A recipe's name or YAML file; with --world, the folder of a run on one device.")
    ] = DEFAULT_RECIPE,
    overrides: SetOption = None,
    memory: Annotated[
        str | None, typer.Option(help="To fit in, e.g. 80GiB; by default the GPU's, if one is used.")
    ] = None,
    world: Annotated[
        int | None, typer.Option(min=2, help="Devices: what an update would take on them, from a run on one.")
    ] = None,
    per_node: Annotated[int | None, typer.Option("--gpus-per-node", min=1, help="Of those of --world; 8.")] = None,
    link: Annotated[str | None, typer.Option(help="What one of them sends to another of its node; 450GB/s.")] = None,
    network: Annotated[str | None, typer.Option(help="And to one of another node; 50GB/s.")] = None,
    leave_one_out: Annotated[
        bool, typer.Option("--leave-one-out", help="Of activations: keep what saves time beside the others. Slow.")
    ] = False,
) -> None:
    """What a run will need in memory, phase by phase and under every execution, before anything loads; with activations, the plan.

    For a language model it is the plan alone, measured on one micro-batch.
    """
    machine = {"gpus-per-node": per_node, "link": link, "network": network}
    given = {name: value for name, value in machine.items() if value is not None}
    if world is not None and not leave_one_out:
        _plan_world(Path(recipe), overrides or [], memory, world, given)
        return
    from onetake.forecast.memory import Forecast, verdict
    from onetake.language.recipe import LanguageRecipe
    from onetake.memory import device_memory, parse_bytes
    from onetake.run import config
    from onetake.run.session import plan_lines
    from onetake.run.train import device_of

    with _errors_in_one_place():
        if world is not None:
            raise ValueError(
                "--leave-one-out measures blocks on this machine, --world measures nothing; give one of them"
            )
        if given:
            raise ValueError(f"--{next(iter(given))} describes the devices of --world, and there is none; give both")
        loaded = config.load_any(config.recipe_text(recipe), overrides)
        if isinstance(loaded, LanguageRecipe):
            from onetake.language.run import measured_plan

            console.print(loaded.plan_line())
            console.print(measured_plan(loaded, leave_one_out).table(), markup=False)
            return
        if leave_one_out and loaded.activations is None:
            raise ValueError(
                "--leave-one-out measures a plan of activations, and the recipe has none; --set activations=1.10x"
            )
        limit = device_memory(device_of(loaded)) if memory is None else parse_bytes(memory)
        for line in plan_lines(loaded):
            console.print(line)
        forecast = Forecast(loaded)
        own = forecast.own()
        table = Table(f"{own.execution}, GiB", "frozen", "trained", "prompts", "kept", "transient", "peak", box=None)
        for phase in own.phases:
            parts = (phase.frozen, phase.trained, phase.prompts, phase.kept, phase.transient, phase.peak)
            table.add_row(phase.name, *(f"{part / 2**30:.3f}" for part in parts))
        console.print(table)
        choices = [own, *forecast.others()]
        table = Table("execution", "checkpointing", "extra forwards", "peak, GiB", "in phase", "", box=None)
        for choice in choices:
            row = [choice.execution, "on" if choice.checkpointing else "off", *[""] * 3]
            remarks = [*(["the recipe's"] if choice is own else []), *([choice.problem] if choice.problem else [])]
            if choice.phases:
                row[2:] = [str(choice.extra_forwards), f"{choice.peak.peak / 2**30:.3f}", choice.peak.name]
            if limit is not None and not choice.problem:
                remarks.append("fits" if choice.fits(limit) else "does not fit")
            table.add_row(*row, "; ".join(remarks))
        console.print(table)
        if loaded.activations is not None:
            from onetake.run.verify import measured_plans

            for name, found in measured_plans(loaded, *_loaded(loaded), leave_one_out).items():
                console.print(f"\nactivations: {loaded.activations}, measured {name}".rstrip())
                console.print(found.table(), markup=False)
        if limit is not None:
            console.print(verdict(forecast, choices, limit))


def _plan_world(folder: Path, overrides: list[str], memory: str | None, world: int, given: dict[str, Any]) -> None:
    from onetake.forecast.scaling import Machine, Profile, predictions, rescaled
    from onetake.memory import parse_bytes

    with _errors_in_one_place():
        limit = None if memory is None else parse_bytes(memory)
        rates = {n: parse_bytes(given[n].removesuffix("/s"), f"--{n}") for n in ("link", "network") if n in given}
        machine = Machine(ranks=world, per_node=given.get("gpus-per-node", Machine.per_node), **rates)
        loaded, profile = rescaled(folder, overrides), Profile.of(folder)
        found, refused = predictions(loaded, profile, machine)
        size = loaded.rollout
        console.print(
            f"measured by {folder}: {profile.forward:.4g} s a step of an image, {profile.backward:.4g} s an event's backward, "
            f"{profile.scoring:.4g} s decoding and reward, {profile.optimizer:.4g} s the optimizer"
        )
        console.print(
            f"predicted for an update of {size.groups} prompts × {size.group_size} images on {world} devices, {machine.per_node} "
            f"to a node, {machine.link / 1e9:g} GB/s in it and {machine.network / 1e9:g} GB/s between (docs/plan.md)"
        )
        heads = ("layout", "execution", "B", "compute", "send, s", "MB", "sends", "GiB", "of ideal", "")
        table = Table(*heads, box=None, padding=(0, 1, 0, 0))
        for row in found:
            sent, collectives = sum(m.sent for m in row.messages), sum(m.count for m in row.messages)
            numbers = (f"{row.computing:.4g}", f"{row.sending:.3g}", f"{sent / 1e6:.4g}", f"{collectives:.0f}")
            peak = "?" if row.peak is None else f"{row.peak / 2**30:.3f}"
            fits = "" if limit is None or row.peak is None else "fits" if row.peak <= limit else "no"
            cells = (row.layout.kind, row.execution, str(row.layout.micro_batch))
            table.add_row(*cells, *numbers, peak, f"{row.efficiency:.1%}", fits)
        console.print(table)
        for problem in refused:
            console.print(problem)


def _loaded(recipe: Recipe) -> tuple[DiffusionPolicy, Task]:
    """The policy on its device, and the task whose prompts it takes."""
    from onetake.policies.diffusion import DiffusionPolicy
    from onetake.run.train import device_of

    policy = DiffusionPolicy.from_config(
        recipe.policy, recipe.pipeline_source, recipe.seed, with_reference=recipe.penalty is not None
    )
    policy.to(device_of(recipe))
    task = recipe.task.load()
    policy.check(task.train)
    return policy, task


@app.command()
def verify(recipe: RecipeArgument = DEFAULT_RECIPE, overrides: SetOption = None) -> None:
    """One update's gradient under every execution: equality, time, peak memory, forwards; with activations, every action too.

    For a language model it is the actions alone, on one micro-batch. Exit code 1 if one that must not change a gradient does.
    """
    from onetake.run import config

    with _errors_in_one_place():
        text = config.recipe_text(recipe)
        if config.is_language(text):
            _verify_language(text, overrides)
            return
        from onetake.policies import trainable
        from onetake.run.verify import verify as compare
        from onetake.run.verify import verify_actions

        every = [*(overrides or []), "execution=reweight"]  # all are run; this is the one that needs most
        loaded = config.load(text, every)
        policy, task = _loaded(loaded)
        count = sum(p.numel() for p in trainable(policy).values())
        console.print(f"{loaded.policy.trainable.kind}, {count:,} trainable parameters, one update of recipe {recipe}")
        table = Table("execution", "cosine", "rel. L2", "max abs", "s", "peak MiB", "calls", "forwards", box=None)
        for row in compare(loaded, policy, task):
            table.add_row(
                row.execution,
                f"{row.cosine:.9f}",
                f"{row.relative_l2:.1e}",
                f"{row.max_abs:.1e}",
                f"{row.seconds:.2f}",
                "–" if row.peak_mib is None else f"{row.peak_mib:.0f}",
                str(row.calls),
                str(row.forwards),
            )
        console.print(table)
        if loaded.activations is not None:
            _show_actions(verify_actions(loaded, policy, task))


def _verify_language(text: str, overrides: list[str] | None) -> None:
    from onetake.language.recipe import LanguageRecipe
    from onetake.language.run import verify_actions
    from onetake.run import config

    loaded = config.load_any(text, overrides)
    assert isinstance(loaded, LanguageRecipe)
    console.print(loaded.plan_line())
    _show_actions(verify_actions(loaded))


def _show_actions(rows: list[ActionRow]) -> None:
    table = Table("action", "units", "rel. L2 to R", "s", "replays", "MiB kept", box=None)
    for row in rows:
        error = "bit-equal" if row.relative_l2 == 0 else f"{row.relative_l2:.1e}"
        table.add_row(row.action, row.units, error, f"{row.seconds:.2f}", str(row.replays), f"{row.kept_mib:.1f}")
    console.print(table)
    failed = dict.fromkeys(row.action for row in rows if row.failed)
    if failed:
        errors.print(
            f"[bold red]Failed[/] {', '.join(failed)} must give R's gradient bit for bit. Train this model with its own "
            "checkpointing (no activations; recovery: null) and report the table; if R itself is named, kernels here do not repeat "
            "their bits"
        )
        raise typer.Exit(1)


@app.command()
def sample(
    checkpoint: Annotated[Path, typer.Argument(help="A run folder or one of its checkpoints.")],
    prompts: Annotated[list[str], typer.Argument(help="What to draw.")],
    out: Annotated[Path, typer.Option(help="Folder for the PNG files.")] = Path("samples"),
    images: Annotated[int, typer.Option(min=1, help="Images of each prompt.")] = 4,
    image: Annotated[
        list[Path] | None,
        typer.Option(help="Picture that every prompt brings; repeatable.", exists=True, dir_okay=False),
    ] = None,
    seed: int = 0,
) -> None:
    """Draw prompts with a checkpoint's weights on the plain pipeline."""
    from onetake.core.records import Prompt
    from onetake.run.session import draw

    asked = [Prompt(text, tuple(image or ())) for text in prompts]
    with _errors_in_one_place():
        for path in draw(checkpoint, asked, out, images=images, seed=seed):
            console.print(str(path))


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="One run folder, or several to compare.")],
    out: Annotated[Path | None, typer.Option(help="HTML file; by default report.html in the first run.")] = None,
) -> None:
    """Write a self-contained HTML report of one run, or a comparison of several."""
    from onetake.report import write

    with _errors_in_one_place():
        console.print(str(write(runs, out or runs[0] / "report.html")))


recipes_app = typer.Typer(
    help="List, show and copy the recipes that come with the package.", invoke_without_command=True
)
app.add_typer(recipes_app, name="recipes")


@recipes_app.callback()
def recipes(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        list_recipes()


@recipes_app.command("list")
def list_recipes() -> None:
    """Names, each with the first line of its file."""
    from onetake.run import config

    table = Table.grid(padding=(0, 2))
    for name in config.recipe_names():
        table.add_row(name, config.recipe_text(name).splitlines()[0].removeprefix("# "))
    console.print(table)


@recipes_app.command()
def show(name: str) -> None:
    """Print a recipe with every default filled in."""
    from onetake.run import config

    with _errors_in_one_place():
        console.print(config.dump(config.load_any(config.recipe_text(name))), markup=False, end="")


@recipes_app.command()
def copy(name: str, to: Path) -> None:
    """Copy a recipe's file, to edit it."""
    from onetake.run import config

    with _errors_in_one_place():
        if to.exists():
            raise ValueError(f"{to} exists already; choose another name")
        to.write_text(config.recipe_text(name))
        console.print(f"{to}: train it with `onetake train {to}`")
