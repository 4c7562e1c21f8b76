"""The wheel and the source distribution, built here without a network: what is in them, and what they say of themselves."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from typer.testing import CliRunner

import onetake
from onetake.cli.main import app

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """The folder with both, the wheel made from the source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def package_files() -> set[str]:
    """All that lies in the package, bases and recipes and styles included."""
    found = (ROOT / "src" / "onetake").rglob("*")
    return {path.relative_to(ROOT / "src").as_posix() for path in found if path.is_file() and path.suffix != ".pyc"}


def test_the_wheel_holds_the_package_and_nothing_else(built):
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        about = f"onetake-{onetake.__version__}.dist-info"
        names = {name for name in wheel.namelist() if not name.startswith(f"{about}/")}
        metadata = Parser().parsestr(wheel.read(f"{about}/METADATA").decode())
        entry = wheel.read(f"{about}/entry_points.txt").decode()
    assert names == package_files()
    assert {"onetake/py.typed", "onetake/recipes/shapes.yaml", "onetake/tasks/shapes/base/model_index.json"} <= names
    assert (metadata["Name"], metadata["Version"]) == ("onetake", onetake.__version__)
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    assert "GRPO post-training" in str(metadata.get_payload())  # the README
    assert "onetake = onetake.cli.main:main" in entry
    assert path.stat().st_size < 17e6  # of which the bases are 16 MB


def test_the_source_distribution_holds_what_the_tests_need(built):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as source:
        names = {name.partition("/")[2] for name in source.getnames()}
    assert {f"src/{name}" for name in package_files()} <= names
    assert {"pyproject.toml", "LICENSE", "README.md", "tests/test_packaging.py", "benchmarks/executions.py"} <= names
    assert "docs/extending.md" in names


def test_the_version_is_said():
    said = CliRunner().invoke(app, ["--version"])
    assert (said.exit_code, said.stdout) == (0, f"onetake {onetake.__version__}\n")
