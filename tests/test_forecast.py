"""`onetake plan`: what is predicted without weights is what a run with weights then uses, byte for byte."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor, nn
from typer.testing import CliRunner

from onetake import config
from onetake.cli import app
from onetake.coefficients import Coefficients
from onetake.execution import EXECUTIONS
from onetake.execution.sampling import deal, sample
from onetake.forecast import Choice, Phase, choices, forecast, largest_micro_batch
from onetake.memory import LiveBytes, storage_bytes
from onetake.optimizer import Optimizer
from onetake.policies import trainable
from onetake.policies.blank import blank_policy
from onetake.policies.diffusion import DiffusionPolicy
from onetake.recipe import Recipe
from onetake.records import Address, Rollout
from tiny import tiny_recipe, tiny_task
from tiny_families import CASES, tiny

RUN = {
    "rollout": {"groups": 2, "group_size": 4, "micro_batch": 2},
    "selection": "all",
    "evaluation": {"samples": 2, "prompts": 2},
}


def recipe_of(name: str, root: Path, **policy) -> Recipe:
    """Of a tiny pipeline, four steps of which three are events; no file that could hold weights stays."""
    task, _ = tiny_task(root)
    case, folder = CASES[name], root / name
    tiny(name).save_pretrained(folder)
    settings = {
        "pipeline": str(folder),
        "steps": 4,
        "guidance": case.guidance,
        "call": case.call,
        "trainable": {"kind": "lora", "rank": 2},
    }
    return config.load(yaml.safe_dump({"task": task, "policy": settings | policy, **RUN}))
