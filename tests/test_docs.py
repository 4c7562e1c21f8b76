"""The documentation is executed: code blocks run, the metrics table is the code's, links lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from onetake.metrics import METRICS
from onetake.run import config

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


def commands() -> list[list[str]]:
    """Words of every ``onetake train`` of docs/large.md after these two."""
    text = (ROOT / "docs" / "large.md").read_text().replace("\\\n", "")
    return [shlex.split(line) for line in re.findall(r"^onetake train (.*)$", text, re.M)]


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_commands_for_large_models_are_valid(words, tmp_path, monkeypatch):
    """The recipe with its changes, on as many ranks as the command starts."""
    (tmp_path / "prompts").mkdir()
    for name in ("train", "test"):
        (tmp_path / "prompts" / f"{name}.txt").write_text("a cat\n")
    (tmp_path / "mine.py").write_text("def score(images, prompts):\n    return images.flatten(1).mean(1)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    name, *options = words
    pairs = list(zip(options[::2], options[1::2], strict=True))
    assert {option for option, _ in pairs} <= {"--set", "--nproc"}
    ranks = next((int(value) for option, value in pairs if option == "--nproc"), 1)
    config.load(config.recipe_text(name), [value for option, value in pairs if option == "--set"], ranks)


def test_documented_recipes_and_commands_exist():
    text = "\n".join(page.read_text() for page in PAGES)
    for script in re.findall(r"python ((?:benchmarks|bases)/\w+\.py)", text):
        assert (ROOT / script).is_file(), script
    for name in re.findall(r"onetake (?:train|verify) ([a-z][a-z-]*)(?![\w./-])", text):
        assert name in config.recipe_names(), name
