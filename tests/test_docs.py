"""The documentation is executed: code blocks run, the metrics table is the code's, links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from onetake import config
from onetake.metrics import METRICS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.S))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_python_blocks_run(block):
    exec(compile(block, "documentation", "exec"), {"__name__": "documentation"})


def test_metrics_page_is_the_code():
    text = (ROOT / "docs" / "metrics.md").read_text()
    assert dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", text, re.M)) == METRICS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_pictures_exist(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_documented_recipes_and_commands_exist():
    text = "\n".join(page.read_text() for page in PAGES)
    for script in re.findall(r"python ((?:benchmarks|bases)/\w+\.py)", text):
        assert (ROOT / script).is_file(), script
    for name in re.findall(r"onetake (?:train|verify) ([a-z][a-z-]*)(?![\w./-])", text):
        assert name in config.recipe_names(), name
