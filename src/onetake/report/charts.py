"""Line charts as inline SVG: matplotlib draws, the page's style sheet gives the colours, so that dark mode works.

Colours are names of CSS variables. Matplotlib only knows literal ones, so each name is drawn as a placeholder and
replaced in the SVG. Text stays text, in the page's font. Titles and legends are HTML, not part of the chart.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

WIDTH, HEIGHT = 400, 236  # user units of the SVG; the page scales it
RUN_COLOURS = 8
COLOURS = ("muted", "line", "train", "paper", *(f"run{i + 1}" for i in range(RUN_COLOURS)))
LOG_FROM = 50.0  # largest ÷ smallest value from which a norm's axis is logarithmic
WEIGHTS = {"strong": (2.0, 1.0, 5.0), "plain": (1.3, 0.9, 0.0), "faint": (0.8, 0.35, 0.0)}  # width, alpha, marker size


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One line. `weight` is "strong" (with markers), "plain", or "faint"; a `band` around it has a lower and an upper edge."""

    x: Sequence[float]
    y: Sequence[float]
    colour: str
    weight: str = "plain"
    dashed: bool = False
    band: tuple[Sequence[float], Sequence[float]] | None = None


@dataclass(frozen=True, kw_only=True)
class Axis:
    """What a chart shows; `name` makes the ids inside the page's SVGs unique and is its only identity."""

    name: str
    x_label: str = "update"
    percent: bool = False
    from_zero: bool = True
    whole: bool = False  # ticks at integers only
    log: bool = False  # logarithmic if the values span a factor of LOG_FROM


def chart(curves: Sequence[Curve], axis: Axis, spoken: str) -> str:
    """The SVG of `curves`, for direct use in HTML; `spoken` is its name for a reader who does not see it."""
    style: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": axis.name,
        "font.size": 10.5,
        "text.color": _placeholder("muted"),
        "axes.labelcolor": _placeholder("muted"),
        "xtick.color": _placeholder("muted"),
        "ytick.color": _placeholder("muted"),
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72), facecolor="none")
        axes = figure.add_axes((0.115, 0.18, 0.865, 0.79), facecolor="none")
        for curve in curves:
            _draw(axes, curve)
        _dress(axes, curves, axis)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    return _inline(file.getvalue(), spoken)


def _placeholder(name: str) -> str:
    return f"#0a0b{COLOURS.index(name):02x}"


def _draw(axes: Axes, curve: Curve) -> None:
    colour = _placeholder(curve.colour)
    if curve.band:
        axes.fill_between(curve.x, *curve.band, color=colour, alpha=0.16, linewidth=0)
    width, alpha, marker = WEIGHTS[curve.weight]
    alone = len(curve.x) == 1
    axes.plot(
        curve.x,
        curve.y,
        color=colour,
        linewidth=width,
        alpha=alpha,
        linestyle="--" if curve.dashed else "-",
        marker="o" if marker or alone else "",
        markersize=max(marker, 7.0 if alone else 0.0),
        markeredgecolor=_placeholder("paper"),
        markeredgewidth=1.0 if marker else 0.0,
        solid_joinstyle="round",
        clip_on=False,
        zorder=3 if curve.weight == "strong" else 2,
    )


def _dress(axes: Axes, curves: Sequence[Curve], axis: Axis) -> None:
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_placeholder("line"))
    axes.tick_params(axis="x", length=0, pad=7)
    axes.tick_params(axis="y", length=0, pad=6)
    axes.grid(axis="y", color=_placeholder("line"), linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel(axis.x_label, loc="right", labelpad=3)
    axes.set_xlim(0.0, max(max(curve.x) for curve in curves) or 1.0)
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 6, 10], integer=axis.x_label == "update"))
    axes.xaxis.set_major_formatter(FuncFormatter(_tick))
    _scale(axes, curves, axis)


def _scale(axes: Axes, curves: Sequence[Curve], axis: Axis) -> None:
    values = np.concatenate([np.asarray(y, float) for c in curves for y in (c.y, *(c.band or ()))])
    values = values[np.isfinite(values)]
    if axis.log and values.size and values.min() > 0 and values.max() / values.min() > LOG_FROM:
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(*_y_limits(values, axis))
        axes.yaxis.set_major_locator(
            MaxNLocator(5, steps=[1, 2, 5, 10] if axis.whole else [1, 2, 2.5, 5, 10], integer=axis.whole)
        )
    axes.yaxis.set_major_formatter(FuncFormatter(_percent_tick if axis.percent else _tick))


def _y_limits(values: np.ndarray, axis: Axis) -> tuple[float, float]:
    if not values.size:
        return 0.0, 1.0
    low, high = float(values.min()), float(values.max())
    constant = high - low <= 1e-4 * abs(high)  # such a difference is not worth an axis of its own
    margin = (0.1 * abs(high) or 0.1) if constant else 0.06 * (high - low)
    bottom = 0.0 if axis.from_zero or axis.percent else low - margin
    return bottom, min(high + margin, 1.0) if axis.percent else high + margin


def _tick(value: float, _: object = None) -> str:
    unit, letter = (1e6, "M") if abs(value) >= 1e6 else (1e3, "k") if abs(value) >= 1e4 else (1.0, "")
    shown = 0 if math.isclose(value, 0.0, abs_tol=1e-12) else value / unit
    return f"{shown:.6g}{letter}".replace("-", "−")


def _percent_tick(value: float, _: object = None) -> str:
    return f"{100 * value:.4g} %"


def _inline(svg: str, spoken: str) -> str:
    """Matplotlib's file → an element for HTML: no prologue or metadata, unique ids, style-sheet colours, two decimals."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    used = set(re.findall(r"(?:url\(#|href=\"#)([\w-]+)", svg))
    svg = re.sub(r' id="([^"]+)"', lambda match: match.group(0) if match.group(1) in used else "", svg)
    svg = re.sub(r"#0a0b([0-9a-f]{2})", lambda match: f"var(--{COLOURS[int(match.group(1), 16)]})", svg)
    svg = re.sub(r' (?:d|x|y|transform)="[^"]*"', lambda match: re.sub(r"(\.\d\d)\d+", r"\1", match.group(0)), svg)
    svg = re.sub(r" font-family: [^;\"]+;", "", svg)
    svg = re.sub(r"\s*\n\s*", "\n", svg)
    head = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(spoken)}">'
    return re.sub(r"^<svg[^>]*>", lambda _: head, svg).strip()
