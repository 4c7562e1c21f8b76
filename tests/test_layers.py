"""Imports point down the map in CONTRIBUTING.md, heavy libraries have one door each, and nothing heavy happens on import."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import onetake

ROOT = Path(onetake.__file__).parent
CONTRIBUTING = Path(__file__).parents[1] / "CONTRIBUTING.md"
ROOT_ITSELF = "onetake"  # holds the version; belongs to no layer
START = "__main__"  # ``python -m onetake``: one line above the command line


def read_map(page: str) -> dict[str, int]:
    """Part → its layer. ``policies/`` is a folder, ``noise`` a module, ``activations/{plan,cut}`` two modules of a folder."""
    found: dict[str, int] = {}
    for line in re.findall(r"^\d  .*$", page, flags=re.M):
        layer, *parts = line.split()
        for part in parts:
            folder, _, modules = part.strip("}").partition("/{")
            names = [f"{folder}.{module}" for module in modules.split(",")] if modules else [folder.strip("/")]
            found |= dict.fromkeys(names, int(layer))
    return found


LAYER = read_map(CONTRIBUTING.read_text())
SPLIT = {name.partition(".")[0] for name in LAYER if "." in name}  # folders over several layers, which import nothing


def files() -> dict[str, Path]:
    """Dotted module name → file."""
    named = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = ("onetake", *path.relative_to(ROOT).with_suffix("").parts)
        named[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return named


FILES = files()


@cache
def imports(module: str) -> set[str]:
    """Modules that `module` imports anywhere in its text, inside functions too. Our own are resolved to files."""
    found = set()
    for node in ast.walk(ast.parse(FILES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: write imports in full"
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= submodules & FILES.keys()
            if not submodules <= FILES.keys():
                found.add(node.module)
    return found


def ours(module: str) -> set[str]:
    return {name for name in imports(module) if name.partition(".")[0] == "onetake"} - {ROOT_ITSELF}


def part(module: str) -> str:
    """``onetake.policies.toy`` → ``policies``; ``onetake.activations.plan`` → ``activations.plan``."""
    names = module.split(".")[1:]
    return ".".join(names[:2]) if names[0] in SPLIT else names[0]


OUTSIDE_LAYERS = {ROOT_ITSELF, f"onetake.{START}", *(f"onetake.{package}" for package in SPLIT)}
INSIDE = sorted(FILES.keys() - OUTSIDE_LAYERS)


def test_every_module_has_a_layer_and_every_layer_its_modules():
    assert {part(module) for module in INSIDE} == LAYER.keys()


def test_the_parser_sees_imports_of_every_kind():
    """Of a submodule, of a name, inside a function; else the tests below would pass for nothing."""
    assert "onetake.run.train" in ours("onetake.run.session")
    assert "onetake.run.config" in ours("onetake.cli.main")
    assert "onetake.core.noise" in ours("onetake.core.selection")
    assert "onetake.tasks.shapes.captions" in ours("onetake.tasks")
    assert "torch" in imports("onetake.core.noise")


def test_imports_point_down():
    """To a lower layer, or inside a folder (no cycle: see below)."""
    up = [
        f"{module} (layer {LAYER[part(module)]}) imports {name} (layer {LAYER[part(name)]})"
        for module in INSIDE
        for name in sorted(ours(module))
        if part(name) != part(module) and LAYER[part(name)] >= LAYER[part(module)]
    ]
    assert not up, "\n".join(up)
    for package in SPLIT:
        assert not imports(f"onetake.{package}") - {"__future__"}


def test_executions_and_activation_plans_never_meet():
    """A plan enters as a context around a forward; when ∇ℓ is materialised is none of its business, and the reverse."""
    for module in INSIDE:
        users = {name.split(".")[1] for name in ours(module) if name not in OUTSIDE_LAYERS}
        if module.startswith("onetake.activations"):
            assert "execution" not in users
        if module.startswith("onetake.execution"):
            assert "activations" not in users


def test_no_cycles():
    """Importing a submodule runs its packages first, so a module also depends on the packages of what it imports."""

    def needs(module: str) -> set[str]:
        packages = {".".join(name.split(".")[:n]) for name in ours(module) for n in range(2, name.count(".") + 1)}
        packages -= OUTSIDE_LAYERS
        return {name for name in ours(module) | packages if not module.startswith(f"{name}.")} - {module}

    try:
        order = list(TopologicalSorter({module: needs(module) for module in INSIDE}).static_order())
    except CycleError as error:
        pytest.fail(" ← ".join(error.args[1]))
    assert set(order) == set(INSIDE)


# Library → the only part that may import it
DOORS = {
    "diffusers": "policies",
    "peft": "policies",
    "matplotlib": "report",
    "typer": "cli",
    "trl": "language",
    "reasoning_gym": "language",
}


def test_one_door_to_each_library_and_only_parallel_talks_to_other_processes():
    libraries = {m: {name.partition(".")[0] for name in imports(m)} for m in INSIDE}
    doors = {library: {part(m) for m in INSIDE if library in libraries[m]} for library in DOORS}
    assert doors == {library: {door} for library, door in DOORS.items()}
    talking = {m for m in INSIDE if any(name.startswith("torch.distributed") for name in imports(m))}
    assert {part(m) for m in talking} == {"parallel"}


def test_only_execution_and_above_know_how_gradients_are_used():
    """The mathematics (`core`) imports nothing but torch, NumPy, pydantic and the standard library."""
    allowed = {"onetake", "torch", "numpy", "pydantic", "pydantic_core", "typing_extensions", *sys.stdlib_module_names}
    for module in INSIDE:
        if part(module) == "core":
            assert {name.partition(".")[0] for name in imports(module)} <= allowed


@pytest.mark.parametrize("module", ["onetake", "onetake.cli.main", "onetake.report", "onetake.activations.solve"])
def test_importing_stays_light(module):
    """``onetake --help`` and ``onetake report`` answer without torch; pyplot would probe for a display."""
    heavy = ("torch", "diffusers", "transformers", "peft", "pydantic", "matplotlib.pyplot")
    program = f"import sys, {module}; print(*sorted(set({heavy}) & sys.modules.keys()))"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert told.stdout.split() == []


def test_importing_everything_prints_nothing_and_leaves_settings_alone():
    """No logging set-up, no seeding, no probing on import: what changes, the libraries change by themselves."""
    modules = ", ".join(INSIDE)
    program = f"""
import logging, os, torch
import diffusers.loaders.peft, matplotlib.figure, peft, transformers, typer
from diffusers import DiffusionPipeline
torch.manual_seed(0)
def settings():
    seen = logging.root.handlers[:], logging.root.level, dict(os.environ), torch.get_default_dtype()
    return *seen, torch.get_num_threads(), torch.is_grad_enabled(), torch.initial_seed(), torch.get_rng_state().tolist()
before = settings()
import {modules}
assert settings() == before
"""
    told = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert (told.returncode, told.stdout) == (0, ""), told.stderr


def test_files_fit_in_one_head():
    lengths = {module: len(path.read_text().splitlines()) for module, path in FILES.items()}
    assert not {module: lines for module, lines in lengths.items() if lines > 400}
