"""Sharded weights (FSDP2): gradients, runs and checkpoints are those of whole weights, and every collective is counted."""

from __future__ import annotations

import itertools

import pytest

from helpers import relative_error
from onetake.execution import EXECUTIONS
from onetake.parallel import ALONE
from ranks import on_ranks, sharded_updates

SHARED = {"groups": 2, "group_size": 2, "micro_batch": 1, "layout": "shared-prompt"}
CONVENTIONALLY = {**SHARED, "micro_batch": 2, "layout": "conventional"}
CASES = list(itertools.product(["lora", "full"], EXECUTIONS, [SHARED, CONVENTIONALLY]))


def name_of(case) -> str:
    kind, execution, sizes = case
    return f"{kind}-{execution}-{sizes['layout']}-{sizes['micro_batch']}"


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> list[list[dict]]:
    return on_ranks(2, tmp_path_factory.mktemp("two") / "ranks", sharded_updates, CASES)


@pytest.mark.parametrize("index", range(len(CASES)), ids=[name_of(case) for case in CASES])
def test_the_gradient_of_sharded_weights_is_that_of_one_process(two, index):
    (wanted,) = sharded_updates(ALONE, [CASES[index]])
    for rank in two:
        assert relative_error(rank[index]["gradient"], wanted["gradient"]) < 1e-12
