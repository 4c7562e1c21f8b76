"""The sections made of charts: reward curves against three x-axes, and the numerics of the updates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from onetake.report.charts import RUN_COLOURS, Axis, Curve, chart
from onetake.report.run import Line, Run
from onetake.report.text import plural

ABSCISSAE = {"update": "updates", "wall_s": "wall-clock", "forwards": "forwards"}
SMOOTHING = 25  # the trailing mean covers one part in so many of a run's updates


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One chart of the numerics, of the metric that its axis is named after, perhaps with metrics that bound its band."""

    title: str
    note: str
    axis: Axis
    band: tuple[str, str] | None = None


NUMERICS = (
    Panel(
        title="Ratio",
        note="mean, band from min to max",
        axis=Axis(name="ratio_mean", from_zero=False),
        band=("ratio_min", "ratio_max"),
    ),
    Panel(title="Clipped events", note="share of all events", axis=Axis(name="clip_fraction", percent=True)),
    Panel(title="Gradient norm", note="before clipping", axis=Axis(name="grad_norm", log=True)),
    Panel(title="Step norm", note="change of the parameters", axis=Axis(name="step_norm", log=True)),
    Panel(title="Dead groups", note="all rewards equal, no gradient", axis=Axis(name="dead_groups", whole=True)),
    Panel(title="Peak memory", note="highest resident MiB so far", axis=Axis(name="peak_rss_mib")),
)


def colour(index: int) -> str:
    return f"run{index % RUN_COLOURS + 1}"


def swatch(index: int) -> str:
    """The mark of run number `index` in legends and tables."""
    return f'<i class="swatch{" dashed" if _dashed(index) else ""}" style="--c:var(--{colour(index)})"></i>'


def legend(runs: Sequence[Run]) -> str:
    """The runs' names in their colours; nothing for a single run."""
    if len(runs) == 1:
        return ""
    items = (f"<li>{swatch(i)}{escape(run.name)}</li>" for i, run in enumerate(runs))
    return f'<ul class="legend">{"".join(items)}</ul>'


def rewards(runs: Sequence[Run]) -> str:
    """Training and held-out score and success, one tab per x-axis."""
    present = {key: title for key, title in ABSCISSAE.items() if all(key in run.last for run in runs)}
    inputs = "".join(
        f'<input type="radio" name="abscissa" id="by-{key}"{" checked" if key == "update" else ""}>'
        f'<label for="by-{key}">{title}</label>'
        for key, title in present.items()
    )
    panels = "".join(
        f'<div class="charts two panel" id="panel-{key}">{_reward_charts(runs, key)}</div>' for key in present
    )
    return (
        f'<section id="rewards"><h2>Reward</h2><p class="note">{_reward_note(runs)}</p>{legend(runs)}'
        f'<div class="tabs"><span class="against">against</span>{inputs}{panels}</div></section>'
    )


def _reward_note(runs: Sequence[Run]) -> str:
    held_out = (
        "Strong line with dots: held-out prompts" if any(run.evaluations for run in runs) else "No held-out evaluation"
    )
    band = ", band of one standard error" if any("stderr" in e for run in runs for e in run.evaluations) else ""
    spans = [_span(run) for run in runs if run.updates]
    if not spans:
        return f"{held_out}{band}."
    if max(spans) == 1:
        return f"{held_out}{band}. Thin line: training."
    width = plural(spans[0], "update") if len(set(spans)) == 1 else f"{min(spans)} to {max(spans)} updates"
    pale = " Pale: each update." if len(runs) == 1 else ""
    return f"{held_out}{band}. Thin line: training, trailing mean of {width}.{pale}"


def _reward_charts(runs: Sequence[Run], x_key: str) -> str:
    scale, label = _unit(x_key, max(run.last[x_key] for run in runs))
    score = _reward_curves(runs, x_key, scale, "score_mean")
    success = _reward_curves(runs, x_key, scale, "success_rate")
    charts = [_figure("Mean score", "", score, Axis(name=f"score-{x_key}", x_label=label, from_zero=False))]
    if success:
        axis = Axis(name=f"success-{x_key}", x_label=label, percent=True)
        charts.insert(0, _figure("Success", "", success, axis, spoken="Success rate"))
    several = dict.fromkeys(key for run in runs for line in run.updates for key in line if key.startswith("reward "))
    for number, key in enumerate(several):
        axis = Axis(name=f"reward{number}-{x_key}", x_label=label, from_zero=False)
        curves = _reward_curves(runs, x_key, scale, key)
        charts.append(_figure(key.removeprefix("reward "), "mean, before its weight", curves, axis, spoken=key))
    return "".join(charts)


def _unit(x_key: str, last: float) -> tuple[float, str]:
    if x_key != "wall_s":
        return 1.0, {"update": "update", "forwards": "forwards"}[x_key]
    if last < 300:
        return 1.0, "seconds"
    return (60.0, "minutes") if last < 3 * 3600 else (3600.0, "hours")


def _reward_curves(runs: Sequence[Run], x_key: str, scale: float, y_key: str) -> list[Curve]:
    curves: list[Curve] = []
    for i, run in enumerate(runs):
        alone = len(runs) == 1
        hue = "train" if alone else colour(i)
        x, y = _series(run.updates, x_key, y_key, scale)
        span = _span(run)
        if x and alone and span > 1:
            curves.append(Curve(x=x, y=y, colour=hue, weight="faint"))
        if x:
            curves.append(Curve(x=x, y=_trailing_mean(y, span), colour=hue, dashed=_dashed(i)))
        curves += _held_out(run, x_key, scale, y_key, i)
    return curves


def _held_out(run: Run, x_key: str, scale: float, y_key: str, index: int) -> list[Curve]:
    x, y = _series(run.evaluations, x_key, y_key, scale)
    if not x:
        return []
    band = None
    errors = [line["stderr"] for line in run.evaluations if y_key in line and "stderr" in line]
    if y_key == "success_rate" and len(errors) == len(y):
        low = [max(0.0, a - e) for a, e in zip(y, errors, strict=True)]
        high = [min(1.0, a + e) for a, e in zip(y, errors, strict=True)]
        band = (low, high)
    return [Curve(x=x, y=y, colour=colour(index), weight="strong", dashed=_dashed(index), band=band)]


def _span(run: Run) -> int:
    return max(1, round(len(run.updates) / SMOOTHING))


def _trailing_mean(values: list[float], span: int) -> list[float]:
    return [float(np.mean(values[max(0, i + 1 - span) : i + 1])) for i in range(len(values))]


def _series(lines: Sequence[Line], x_key: str, y_key: str, scale: float = 1.0) -> tuple[list[float], list[float]]:
    found = [line for line in lines if x_key in line and y_key in line]
    return [line[x_key] / scale for line in found], [float(line[y_key]) for line in found]


def _dashed(index: int) -> bool:
    return index // RUN_COLOURS % 2 == 1


def _figure(title: str, note: str, curves: Sequence[Curve], axis: Axis, *, spoken: str | None = None) -> str:
    """A chart under its title; `spoken` is its name for a reader who does not see it, by default title and note."""
    small = f" <small>{note}</small>" if note else ""
    svg = chart(curves, axis, spoken or ", ".join(filter(None, (title, note))))
    return f"<figure><figcaption>{escape(title)}{small}</figcaption>{svg}</figure>"


def numerics(runs: Sequence[Run]) -> str:
    """Small multiples of what each update did; nothing when no update was made."""
    charts = [_numeric(runs, panel) for panel in NUMERICS]
    if not any(charts):
        return ""
    return (
        f'<section id="numerics"><h2>Numerics</h2><p class="note">{_numerics_note(runs)}</p>{legend(runs)}'
        f'<div class="charts three">{"".join(charts)}</div></section>'
    )


def _numerics_note(runs: Sequence[Run]) -> str:
    odd = sum(not math.isfinite(line.get("grad_norm", 0.0)) for run in runs for line in run.updates)
    trouble = f" <strong>{plural(odd, 'update')} had a gradient norm that is not finite.</strong>" if odd else ""
    return f"One value per update.{trouble}"


def _numeric(runs: Sequence[Run], panel: Panel) -> str:
    curves: list[Curve] = []
    for i, run in enumerate(runs):
        x, y = _series(run.updates, "update", panel.axis.name)
        if not x:
            continue
        band = None
        if panel.band:
            low, high = (_series(run.updates, "update", key)[1] for key in panel.band)
            band = (low, high) if len(low) == len(high) == len(x) else None
        curves.append(Curve(x=x, y=y, colour=colour(i), dashed=_dashed(i), band=band))
    return _figure(panel.title, panel.note, curves, panel.axis) if curves else ""
