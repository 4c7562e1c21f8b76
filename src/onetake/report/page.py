"""The page: headline, sections, recipe, environment and glossary, put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from importlib.resources import files

from onetake.metrics import METRICS
from onetake.report import costs, curves, pictures
from onetake.report.run import Line, Run
from onetake.report.text import (
    ARROW,
    choice,
    code,
    count,
    duration,
    flatten,
    percent,
    plural,
    row,
    score,
    signed,
    table,
)

MEASURES: dict[str, tuple[str, Callable[[float], str]]] = {
    "success_rate": ("Success", percent),
    "score_mean": ("Mean score", score),
    "diversity": ("Diversity", score),
}
"""What a run is to improve, or to keep: the name and the form of each."""


def page(runs: Sequence[Run]) -> str:
    """The whole document."""
    title = f"{runs[0].name} · onetake" if len(runs) == 1 else f"{len(runs)} runs · onetake"
    style = files("onetake.report").joinpath("style.css").read_text(encoding="utf-8")
    body = "\n".join(
        (
            headline(runs[0]) if len(runs) == 1 else comparison(runs),
            curves.rewards(runs),
            pictures.section(runs),
            costs.section(runs),
            curves.numerics(runs),
            recipe(runs),
        )
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def headline(run: Run) -> str:
    """One run: held-out results before and after, then what they cost."""
    rows = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in _facts(run).items())
    return (
        f'<header><p class="kicker">onetake run</p><h1>{escape(run.name)}</h1><p class="lede">{_lede(run)}</p>'
        f'{_hero(run)}<dl class="facts">{rows}</dl></header>'
    )


def _lede(run: Run) -> str:
    keys = {"task": "task", "seed": "seed", "selection": "selection", "objective": "objective"}
    parts = [f"{label} <b>{choice(run.config[key])}</b>" for key, label in keys.items() if key in run.config]
    return " · ".join(parts)


def _facts(run: Run) -> dict[str, str]:
    facts = {
        "updates": count(run.last["update"]),
        "wall-clock": duration(run.last["wall_s"]),
    }
    if "forwards" in run.last:
        facts["forwards"] = count(run.last["forwards"])
    if run.executions:
        facts["execution"] = escape(" + ".join(run.executions))
    if run.peak_rss_mib is not None:
        facts["peak memory"] = f"{count(run.peak_rss_mib)} MiB"
    return facts


def _hero(run: Run) -> str:
    ends = run.evaluations or run.updates
    first, last = ends[0], ends[-1]
    cards = "".join(_change(key, first, last) for key in MEASURES if key in first and key in last)
    return f'<p class="where">{_where(run, first, last)}</p><div class="hero">{cards}</div>'


def _where(run: Run, first: Line, last: Line) -> str:
    if not run.evaluations:
        which = "first and last update" if first is not last else f"update {last['update']}"
        return f"On training prompts, {which}; this run holds no held-out evaluation"
    images = f", {plural(last['n'], run.made)}" if "n" in last else ""
    if first is last:
        return f"On held-out prompts, after {plural(last['update'], 'update')}{images}"
    return f"On held-out prompts, after {first['update']} {ARROW} {plural(last['update'], 'update')}{images and images + ' each'}"


def _error(key: str, line: Line) -> str:
    known = key == "success_rate" and "stderr" in line
    return f'<span class="error">± {100 * line["stderr"]:.1f}</span>' if known else ""


def _change(key: str, first: Line, last: Line) -> str:
    name, show = MEASURES[key]
    after = f'<span class="after">{show(last[key])}</span>{_error(key, last)}'
    if first is last:
        return f'<div class="change"><h3>{name}</h3><p>{after}</p></div>'
    difference = last[key] - first[key]
    delta = f"{signed(100 * difference, 1)} points" if key == "success_rate" else signed(difference, 3)
    before = f'<span class="before">{show(first[key])}{_error(key, first)}</span>'
    return f'<div class="change"><h3>{name} <small>{delta}</small></h3><p>{before} {ARROW} {after}</p></div>'


def comparison(runs: Sequence[Run]) -> str:
    """Several runs: their table, and the recipe's keys in which they differ."""
    return (
        f'<header><p class="kicker">onetake comparison</p><h1>{len(runs)} runs</h1>'
        f'<p class="where">On held-out prompts, first evaluation {ARROW} last</p>{_runs_table(runs)}{_differences(runs)}</header>'
    )


def _runs_table(runs: Sequence[Run]) -> str:
    heads = ("run", "execution", "updates", "wall-clock", "forwards", "success", "mean score", "diversity", "peak MiB")
    return table("numbers runs", heads, "".join(_run_row(run, i) for i, run in enumerate(runs)))


def _run_row(run: Run, index: int) -> str:
    cells = (
        escape(" + ".join(run.executions)) or "–",
        count(run.last["update"]),
        duration(run.last["wall_s"]),
        count(run.last["forwards"]) if "forwards" in run.last else "–",
        *(_pair(run, key) for key in MEASURES),
        count(run.peak_rss_mib) if run.peak_rss_mib is not None else "–",
    )
    return row(f"{curves.swatch(index)}{escape(run.name)}", cells)


def _pair(run: Run, key: str) -> str:
    lines = [line for line in run.evaluations if key in line]
    if not lines:
        return "–"
    show = MEASURES[key][1]
    after = f"<b>{show(lines[-1][key])}</b> {_error(key, lines[-1])}"
    return after if len(lines) == 1 else f'<span class="before">{show(lines[0][key])}</span> {ARROW} {after}'


def _differences(runs: Sequence[Run]) -> str:
    flat = [flatten(run.config) for run in runs]
    keys = [key for key in dict.fromkeys(k for tree in flat for k in tree) if len({tree.get(key) for tree in flat}) > 1]
    if not keys:
        return '<p class="note">The recipes are equal.</p>'
    heads = ("", *(escape(run.name) for run in runs))
    rows = "".join(row(f"<code>{escape(key)}</code>", (escape(tree.get(key, "–")) for tree in flat)) for key in keys)
    return f"<h2>Where the recipes differ</h2>{table('differences', heads, rows)}"


def recipe(runs: Sequence[Run]) -> str:
    """What is needed to run it again, and what the words mean."""
    several = len(runs) > 1
    configs = "".join(_details(_title("Recipe", run, several), f"<pre>{escape(run.config_text)}</pre>") for run in runs)
    environments = "".join(_details(_title("Environment", run, several), _environment(run)) for run in runs)
    glossary = _details("Glossary: what each metric means", _glossary(runs))
    return f'<section id="appendix"><h2>Recipe, environment, glossary</h2>{configs}{environments}{glossary}</section>'


def _title(what: str, run: Run, several: bool) -> str:
    return f"{what} of {escape(run.name)}" if several else what


def _details(title: str, body: str) -> str:
    return f"<details><summary>{title}</summary>{body}</details>"


def _environment(run: Run) -> str:
    if not run.environment:
        return '<p class="note">This run holds no environment.json.</p>'
    return _definitions({escape(key): escape(str(value)) for key, value in run.environment.items()})


def _glossary(runs: Sequence[Run]) -> str:
    used = {key for run in runs for line in run.updates + run.evaluations for key in line}
    return _definitions({f"<code>{key}</code>": code(text) for key, text in METRICS.items() if key in used})


def _definitions(rows: dict[str, str]) -> str:
    return f'<dl class="definitions">{"".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in rows.items())}</dl>'
