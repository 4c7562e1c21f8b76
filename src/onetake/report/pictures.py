"""Before and after: the same prompts and noise, drawn by the policy before training and after it."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape

import numpy as np
from PIL import Image

from onetake.report.run import Pictures, Run
from onetake.report.text import score

CARDS = 12
LARGEST_SIDE = 320  # px; larger images are scaled down to keep the page small
SHOWN_FAILURES = 3
FRAME_MS = 125  # of a video
PIXELATED_BELOW = 128  # px; smaller images are enlarged without blur


Column = tuple[str, Pictures]
"""One picture per card, under a label."""


def section(runs: Sequence[Run]) -> str:
    """The cards, or a sentence that says why there are none; nothing when no run kept pictures."""
    shown = [run for run in runs if run.before]
    if not shown:
        return ""
    if len({tuple(run.before.rows) for run in shown if run.before}) > 1:
        body = '<p class="note">The runs were evaluated on different prompts; see the report of each run alone.</p>'
    else:
        columns = _columns(shown)
        rows = subset(columns[0][1].rows)
        cards = "".join(_card(columns, row) for row in rows)
        grid = f'class="cards{" many" if len(columns) > 2 else ""}" style="--columns:{len(columns)}"'
        body = f'<p class="note">{_note(shown, columns, len(rows))}</p><div {grid}>{cards}</div>'
    title = "Before and after" if any(run.after for run in shown) else "Before training"
    return f'<section id="pictures"><h2>{title}</h2>{body}</section>'


def subset(rows: Sequence[tuple[str, int]]) -> list[int]:
    """Row numbers of the first sample of up to `CARDS` prompts, evenly spaced over the prompts in their order."""
    rows_of_prompts = [i for i, (_, sample) in enumerate(rows) if sample == 0]  # equal texts are prompts of their own
    n = min(CARDS, len(rows_of_prompts))
    return [rows_of_prompts[i * len(rows_of_prompts) // n] for i in range(n)]


def _columns(runs: Sequence[Run]) -> list[Column]:
    """Before once if all runs start from the same pictures, otherwise before and after of each run."""
    alone, shared = len(runs) == 1, _same_start(runs)
    columns: list[Column] = []
    for i, run in enumerate(runs):
        suffix = "" if alone else f" · {run.name}"
        if run.before and (i == 0 or not shared):
            columns.append(("before" if shared else f"before{suffix}", run.before))
        if run.after:
            columns.append(("after" if alone else run.name if shared else f"after{suffix}", run.after))
    return columns


def _same_start(runs: Sequence[Run]) -> bool:
    images = [run.before.images for run in runs if run.before]
    return all(np.array_equal(images[0], other) for other in images)


def _note(runs: Sequence[Run], columns: Sequence[Column], cards: int) -> str:
    prompts = sum(sample == 0 for _, sample in columns[0][1].rows)
    chosen = (
        f"The first sample of every one of the {prompts} held-out prompts."
        if cards == prompts
        else f"The first sample of {cards} of the {prompts} held-out prompts, evenly spaced through the list; "
        "none is picked by its result."
    )
    noise = "The pictures of a card share prompt and initial noise." if len(columns) > 1 else ""
    if not _same_start(runs):
        noise = "Before and after share prompt and initial noise; the runs start from different noise or another base."
    last = sorted(run.after.update for run in runs if run.after)
    span = f"{last[0]} to {last[-1]}" if len(set(last)) > 1 else str(last[-1]) if last else ""
    after = f" After: {span} updates, the last evaluation." if last else ""
    return f"{chosen} {noise}{after}"


def _card(columns: Sequence[Column], row: int) -> str:
    prompt = escape(columns[0][1].records[row]["prompt"])
    return f'<article class="card"><h3>{prompt}</h3><div>{"".join(_picture(c, row, prompt) for c in columns)}</div></article>'


def _picture(column: Column, row: int, prompt: str) -> str:
    label, image, record = escape(column[0]), column[1].images[row], column[1].records[row]
    small = ' class="pixelated"' if max(image.shape[-3:-1]) < PIXELATED_BELOW else ""
    return (
        f'<figure><img src="{data_uri(image)}" alt="{label}: {prompt}"{small}>'
        f'<figcaption><span class="when">{label}</span>{verdict(record["score"], record["verdict"])}</figcaption></figure>'
    )


def data_uri(image: np.ndarray) -> str:
    """PNG of a uint8 (H, W, 3) image, or animated WebP of (frames, H, W, 3), at most LARGEST_SIDE px wide and high."""
    pictures = [Image.fromarray(frame) for frame in (image if image.ndim == 4 else image[None])]
    for picture in pictures:
        picture.thumbnail((LARGEST_SIDE, LARGEST_SIDE), Image.Resampling.LANCZOS)
    first, *rest = pictures
    file, kind = io.BytesIO(), "webp" if rest else "png"
    if rest:
        first.save(file, format="WEBP", lossless=True, save_all=True, append_images=rest, duration=FRAME_MS, loop=0)
    else:
        first.save(file, format="PNG", optimize=True)
    return f"data:image/{kind};base64," + base64.b64encode(file.getvalue()).decode("ascii")


def verdict(value: float, constraints: dict[str, bool]) -> str:
    """The score, and which constraints failed; all of them on hover. Without constraints the score alone."""
    if not constraints:
        return f'<span class="score">{score(value)}</span>'
    failed = [name for name, held in constraints.items() if not held]
    every = escape("\n".join(f"{'✓' if held else '✗'} {name}" for name, held in constraints.items()))
    if not failed:
        return f'<span class="score pass" title="{every}">✓ {value:.2f}</span>'
    told = f'<p class="held">{len(failed)} of {len(constraints)} <span class="long">constraints </span>fail</p>{_failures(failed)}'
    return f'<span class="score fail" title="{every}">✗ {value:.2f}</span>{told}'


def _failures(names: Sequence[str]) -> str:
    """The first few names, and the rest behind a click."""
    items = [f"<li>{escape(name)}</li>" for name in names]
    shown = f'<ul class="failed">{"".join(items[:SHOWN_FAILURES])}</ul>'
    rest = items[SHOWN_FAILURES:]
    if not rest:
        return shown
    return f'{shown}<details><summary>{len(rest)} more</summary><ul class="failed">{"".join(rest)}</ul></details>'
