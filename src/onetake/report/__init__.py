"""The report: one self-contained HTML page about a run, or about several runs side by side."""

from __future__ import annotations

from pathlib import Path

from onetake.report.page import page
from onetake.report.run import load

__all__ = ["write"]


def write(runs: list[Path], out: Path) -> Path:
    """Write the report of one run folder, or the comparison of several in their order, as a page without external resources.

    `out` is the file if it ends in ``.html``, otherwise the folder that gets ``report.html``; returns the file. Equal inputs give
    equal bytes. Raises ValueError if no folder is given, if one is not a run, or if a run's files contradict each other.
    """
    if not runs:
        raise ValueError("a report needs at least one run folder")
    target = out if out.suffix == ".html" else out / "report.html"
    text = page(load(runs))
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")
    return target
