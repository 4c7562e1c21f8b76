"""What a run cost: seconds per phase, and the forwards its execution spent and saved."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from onetake.metrics import PHASES
from onetake.report.run import Run
from onetake.report.text import count, duration, percent, plural


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
        f'<div class="bars">{bars}</div>{_table(timed)}{sentences}</section>'
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


def _table(runs: Sequence[Run]) -> str:
    head = "".join(f"<th>{name}</th>" for name in PHASES)
    rows = "".join(_row(run, named=len(runs) > 1) for run in runs)
    return (
        '<div class="scroll"><table class="numbers"><thead><tr><th></th>'
        f"{head}<th>sum</th><th>evaluation</th><th>wall-clock</th></tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _row(run: Run, *, named: bool) -> str:
    seconds = phases(run)
    total = sum(seconds.values())
    evaluation = sum(line.get("evaluation_s", 0.0) for line in run.evaluations)
    cells = "".join(
        f"<td>{duration(value)}</td>" for value in (*seconds.values(), total, evaluation, run.last["wall_s"])
    )
    shares = "".join(f"<td>{percent(value / (total or 1.0))}</td>" for value in seconds.values())
    means = "".join(f"<td>{duration(v / len(run.updates))}</td>" for v in (*seconds.values(), total))
    title = escape(run.name) if named else "total"
    if named:
        return f'<tr><th>{title}</th>{cells}</tr><tr class="sub"><th>share</th>{shares}<td></td><td></td><td></td></tr>'
    return (
        f"<tr><th>{title}</th>{cells}</tr>"
        f'<tr class="sub"><th>per update</th>{means}<td></td><td></td></tr>'
        f'<tr class="sub"><th>share</th>{shares}<td></td><td></td><td></td></tr>'
    )


def _ranks(run: Run, runs: Sequence[Run]) -> str:
    """Peak and seconds of each rank; nothing for one process."""
    if not run.ranks:
        return ""
    head = "".join(f"<th>{name}</th>" for name in ("peak MiB", *PHASES))
    rows = ""
    for number, rank in enumerate(run.ranks):
        cells = "".join(f"<td>{duration(rank[name + '_s'])}</td>" for name in PHASES)
        rows += f"<tr><th>rank {number}</th><td>{count(rank['peak_mib'])}</td>{cells}</tr>"
    return (
        f"<details><summary>{_prefix(run, runs)}{plural(len(run.ranks), 'rank')}, waiting for each other included</summary>"
        f'<div class="scroll"><table class="numbers"><thead><tr><th></th>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
        "</details>"
    )


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
