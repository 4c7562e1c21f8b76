"""Numbers and names as the report prints them. Every function returns HTML-safe text."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape
from typing import Any

ARROW = '<span class="arrow">→</span>'
THIN = "\N{NARROW NO-BREAK SPACE}"


def code(text: str) -> str:
    """Escaped text in which `backticks` have become <code>."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def count(value: float) -> str:
    return f"{value:,.0f}".replace(",", THIN)


def score(value: float) -> str:
    return f"{value:.3f}"


def percent(share: float) -> str:
    return f"{100 * share:.1f}{THIN}%"


def signed(value: float, digits: int) -> str:
    return f"{value:+.{digits}f}".replace("-", "−")


def duration(seconds: float) -> str:
    """Two units at most: "20 ms", "8.3 s", "4 min 05 s", "2 h 13 min"."""
    if 0 < seconds < 0.0995:
        return f"{1000 * seconds:.0f}{THIN}ms"
    if seconds < 59.95:
        return f"{seconds:.1f}{THIN}s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}{THIN}min {whole % 60:02d}{THIN}s"
    return f"{whole // 3600}{THIN}h {whole % 3600 // 60:02d}{THIN}min"


def plural(number: int, noun: str) -> str:
    return f"{count(number)} {noun}" + ("" if number == 1 else "s")


def choice(value: Any) -> str:
    """A recipe's choice by its name: ``retain`` and ``{kind: retain, …}`` both read "retain"."""
    return escape(str(value["kind"] if isinstance(value, dict) and "kind" in value else value))


def table(kind: str, heads: Iterable[str], rows: str) -> str:
    """`rows` under `heads`; a wide one scrolls by itself."""
    head = "".join(f"<th>{name}</th>" for name in heads)
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    )


def row(head: str, cells: Iterable[str], kind: str = "") -> str:
    opening = f'<tr class="{kind}">' if kind else "<tr>"
    return f"{opening}<th>{head}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested mapping → dotted key → text of the value."""
    flat: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = str(value)
    return flat
