"""What a run cost: seconds per phase, and the forwards its execution spent and saved."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from onetake.metrics import PHASES
from onetake.report.run import Run
from onetake.report.text import count, duration, percent, plural, row, table


def section(runs: Sequence[Run]) -> str:
    """Bars and table of phases, then the sentence on forwards; nothing when no update that counts them was made."""
    timed = [run for run in runs if run.updates and "forwards" in run.last]
    if not timed:
        return ""
    longest = max(sum(phases(run).values()) for run in timed)
    bars = "".join(_bar(run, longest, named=len(runs) > 1) for run in timed)
    key = "".join(f'<li><i class="swatch" style="--c:var(--{name})"></i>{name}</li>' for name in PHASES)
    sentences = "".join(f"<p>{_prefix(run, runs)}{execution_sentence(run)}</p>{_ranks(run, runs)}" for run in timed)
    return (
        f'<section id="costs"><h2>Time and forwards</h2><ul class="legend">{key}</ul>'
        f'<div class="bars">{bars}</div>{_table(timed, named=len(timed) > 1)}{sentences}</section>'
    )


def phases(run: Run) -> dict[str, float]:
    """Seconds per phase, summed over the updates."""
    return {name: sum(line.get(f"{name}_s", 0.0) for line in run.updates) for name in PHASES}


def _prefix(run: Run, runs: Sequence[Run]) -> str:
    return f"<strong>{escape(run.name)}.</strong> " if len(runs) > 1 else ""


def _bar(run: Run, longest: float, *, named: bool) -> str:
    seconds = phases(run)
    total = sum(seconds.values())
    parts = "".join(
        f'<span style="flex-grow:{value / (total or 1.0):.5f};background:var(--{name})" title="{name}: {duration(value)}"></span>'
        for name, value in seconds.items()
        if value > 0
    )
    name = f'<span class="who">{escape(run.name)}</span>' if named else ""
    return f'<div class="bar-row">{name}<div class="bar" style="width:{100 * total / (longest or 1.0):.2f}%">{parts}</div></div>'


def _table(runs: Sequence[Run], *, named: bool) -> str:
    heads = ("", *PHASES, "sum", "evaluation", "wall-clock")
    return table("numbers", heads, "".join(_rows(run, named=named) for run in runs))


def _rows(run: Run, *, named: bool) -> str:
    seconds = phases(run)
    total = sum(seconds.values())
    evaluation = sum(line.get("evaluation_s", 0.0) for line in run.evaluations)
    every = (*seconds.values(), total, evaluation, run.last["wall_s"])
    rows = row(escape(run.name) if named else "total", map(duration, every))
    if not named:
        means = (duration(value / len(run.updates)) for value in (*seconds.values(), total))
        rows += row("per update", (*means, "", ""), "sub")
    shares = (percent(value / (total or 1.0)) for value in seconds.values())
    return rows + row("share", (*shares, "", "", ""), "sub")


def _ranks(run: Run, runs: Sequence[Run]) -> str:
    """Peak and seconds of each rank; nothing for one process."""
    if not run.ranks:
        return ""
    rows = ""
    for number, rank in enumerate(run.ranks):
        seconds = (duration(rank[f"{name}_s"]) for name in PHASES)
        rows += row(f"rank {number}", (count(rank["peak_mib"]), *seconds))
    title = f"{_prefix(run, runs)}{plural(len(run.ranks), 'rank')}, waiting for each other included"
    return f"<details><summary>{title}</summary>{table('numbers', ('', 'peak MiB', *PHASES), rows)}</details>"


def execution_sentence(run: Run) -> str:
    """Which execution ran, what it spent, and against native what it saved, if the run says what it trained."""
    used = run.executions
    names = " and ".join(f"<code>{escape(name)}</code> in {plural(n, 'update')}" for name, n in used.items())
    if len(used) == 1:
        names = f"<code>{escape(next(iter(used)))}</code>"
    spent = run.last["forwards"]
    told = f"{f'Execution {names}: ' if names else ''}training spent {count(spent)} forwards. "
    return told[0].upper() + told[1:] + _saving(run.updates[-1]["saved_forwards"], spent)


def _saving(saved: int, spent: int) -> str:
    if not saved:
        return "Each trained event ran once more, so nothing was saved."
    native = spent + saved
    return (
        f"Native <code>recompute</code> runs every trained event once more: {count(spent)} + {count(saved)} = "
        f"{count(native)}. Saved: <strong>{count(saved)} forwards, {percent(saved / native)}</strong> of native's."
    )
