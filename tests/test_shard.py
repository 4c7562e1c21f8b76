"""Sharded weights (FSDP2): gradients, runs and checkpoints are those of whole weights, and every collective is counted."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest
from diffusers import SD3Transformer2DModel

from helpers import assert_close, relative_error, weights
from onetake.execution import EXECUTIONS
from onetake.parallel import ALONE, ParallelConfig
from onetake.rollout.sampling import RolloutConfig
from onetake.run import config
from ranks import (
    LORA,
    assert_same_evaluation,
    continued_run,
    on_ranks,
    sharded_session,
    sharded_updates,
    tiny_policy,
    whole_run,
)
from test_resume import untimed
from test_scaling import predicted
from tiny import tiny_recipe_file

SHARED = {"groups": 2, "group_size": 2, "micro_batch": 1, "layout": "shared-prompt"}
CONVENTIONALLY = {**SHARED, "micro_batch": 2, "layout": "conventional"}
CASES = list(itertools.product(["lora", "full"], EXECUTIONS, [SHARED, CONVENTIONALLY]))
CASES_OF_4 = [(kind, execution, {**SHARED, "group_size": 4}) for kind in ("lora", "full") for execution in EXECUTIONS]


def name_of(case) -> str:
    kind, execution, sizes = case
    return f"{kind}-{execution}-{sizes['layout']}"


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory) -> Path:
    return tiny_recipe_file(
        tmp_path_factory.mktemp("recipe"),
        policy={"trainable": {"kind": "full"}},
        execution="reweight",
        rollout={"groups": 1, "micro_batch": 1},
        kl={"beta": 0.1},
        ema={"decay": 0.5, "every": 1},
        optimizer={"learning_rate": 0.01, "eps": 1e-3},  # rounding moves a small gradient little
        evaluation={"every": 2, "samples": 2},
        checkpoint={"every": 1, "keep": 2},
        updates=2,
    )


@pytest.fixture(scope="module")
def one(recipe_file, tmp_path_factory) -> Path:
    """The folder of runs on one process: a whole one, and the first half of one."""
    root = tmp_path_factory.mktemp("runs")
    whole_run(ALONE, recipe_file, f"out={root / 'whole'}")
    whole_run(ALONE, recipe_file, f"out={root / 'begun-on-1'}", "updates=1")
    whole_run(ALONE, recipe_file, f"out={root / 'lora'}", *LORA)
    return root


def on_several(ranks: int, cases: list, recipe_file: Path, one: Path, root: Path, shard) -> tuple[list, Path]:
    """What each rank found, and the folder of the runs."""
    shutil.copytree(one / "begun-on-1", root / "begun-on-1")
    return on_ranks(ranks, root / "ranks", sharded_session, cases, recipe_file, root, shard), root


@pytest.fixture(scope="module")
def two(recipe_file, one, tmp_path_factory) -> tuple[list[list[dict]], Path]:
    return on_several(2, CASES, recipe_file, one, tmp_path_factory.mktemp("two"), "all")


@pytest.fixture(scope="module")
def four(recipe_file, one, tmp_path_factory) -> tuple[list[list[dict]], Path]:
    """Two replicas of two shards each."""
    return on_several(4, CASES_OF_4, recipe_file, one, tmp_path_factory.mktemp("four"), 2)


def assert_same_gradient(case, found: list[dict]) -> None:
    (wanted,) = sharded_updates(ALONE, [case])
    for rank in found:
        assert relative_error(rank["gradient"], wanted["gradient"]) < 1e-12
    assert sum(rank["held"] for rank in found[:2]) < 1.1 * wanted["held"]  # adapters are held twice


@pytest.mark.parametrize("index", range(len(CASES)), ids=[name_of(case) for case in CASES])
def test_the_gradient_of_sharded_weights_is_that_of_one_process(two, index):
    assert_same_gradient(CASES[index], [rank[index] for rank in two[0]])


@pytest.mark.ranks4
@pytest.mark.parametrize("index", range(len(CASES_OF_4)), ids=[name_of(case) for case in CASES_OF_4])
def test_two_replicas_of_two_shards_have_the_gradient_of_one_process(four, index):
    assert_same_gradient(CASES_OF_4[index], [rank[index] for rank in four[0]])


UNITS, STEPS, EVENTS = 3, 3, 2  # two blocks and the rest; the last step is no event


@pytest.mark.parametrize("index", range(len(CASES)), ids=[name_of(case) for case in CASES])
def test_collectives_of_an_update_are_counted(two, index):
    """Each forward and each backward gathers each unit; gradients travel once, after all events were weighed."""
    kind, execution, sizes = CASES[index]
    (elements,) = {sum(g.numel() for g in rank[index]["gradient"].values()) for rank in two[0]}
    calls = sizes["groups"] * sizes["group_size"] // sizes["micro_batch"] // 2
    sampled, scored = {  # gatherings in sampling, and in accumulating
        "recompute": (STEPS, 2 * EVENTS),
        "retain": (STEPS, EVENTS),
        "reweight": (STEPS + EVENTS, 0),
    }[execution]
    for rank in two[0]:
        found = rank[index]
        names = {phase: [name for name, _ in found[phase]] for phase in ("sampling", "backward", "reduction")}
        assert names["sampling"] == ["_allgather_base_"] * (UNITS * calls * sampled)
        assert names["backward"] == ["_allgather_base_"] * (UNITS * calls * scored)
        assert names["reduction"] == ["allreduce_" if kind == "lora" else "reduce_scatter_tensor"]
        ((_, bytes_sent),) = found["reduction"]
        flags = len(found["gradient"]) * (1 if kind == "lora" else 2)
        padding = 0 if kind == "lora" else bytes_sent // 8 - elements - flags
        assert bytes_sent == 8 * (elements + flags + padding)
        assert 0 <= padding < 0.05 * elements
        assert_predicted(CASES[index], found, 2, 2)


@pytest.mark.ranks4
@pytest.mark.parametrize("index", range(len(CASES_OF_4)), ids=[name_of(case) for case in CASES_OF_4])
def test_collectives_of_two_replicas_are_those_that_plan_predicts(four, index):
    for rank in four[0]:
        assert_predicted(CASES_OF_4[index], rank[index], 4, 2)


def assert_predicted(case, found: dict, ranks: int, shards: int) -> None:
    """All collectives of the update and the bytes of each, besides the rewards'."""
    kind, execution, sizes = case
    policy = tiny_policy(kind)
    wanted = predicted(policy, sizes, execution, ranks, shards=shards, scores=0, steps=STEPS)
    sent = found["sampling"] + found["backward"] + found["reduction"]
    names = {"all_reduce": "allreduce_"}  # DTensor's name for it
    assert sorted((names.get(name, name), size) for name, size in sent) == wanted


def assert_same_run(found: Path, wanted: Path) -> None:
    ours, theirs = weights(found, 2), weights(wanted, 2)
    assert ours.keys() == theirs.keys()
    assert relative_error(ours, theirs) < 1e-5
    moved = {name: tensor - weights(wanted, 1)[name] for name, tensor in theirs.items()}
    assert relative_error({name: tensor - weights(wanted, 1)[name] for name, tensor in ours.items()}, moved) < 1e-2
    assert_close(*([line for line in untimed(run) if line["kind"] == "update"] for run in (found, wanted)))


def test_saved_by_one_process_and_resumed_sharded_equals_uninterrupted(two, one):
    assert_same_run(two[1] / "begun-on-1", one / "whole")


def test_an_evaluation_of_sharded_weights_is_that_of_one_process(two, one):
    """Of three prompts on two ranks: one of them repeats what the other makes, so that both gather weights equally often."""
    assert_same_evaluation(two[1] / "begun-on-2", one / "whole", 0)


def test_adapters_on_a_sharded_base_run_and_resume_as_on_a_whole_one(two, one):
    assert_same_run(two[1] / "lora", one / "lora")


def test_saved_sharded_and_resumed_by_one_process_equals_uninterrupted(two, one):
    continued_run(ALONE, two[1] / "begun-on-2", "updates=2")
    assert_same_run(two[1] / "begun-on-2", one / "whole")


def test_sharded_weights_are_saved_as_diffusers_saves_them(two, one):
    """Every file of the folder but the numbers, byte for byte; plain diffusers loads it."""
    ours, theirs = (
        folder / "checkpoints" / "update-000001" / "weights" / "transformer"
        for folder in (two[1] / "begun-on-2", one / "begun-on-1")
    )
    assert sorted(p.name for p in ours.iterdir()) == sorted(p.name for p in theirs.iterdir())
    assert (ours / "config.json").read_text() == (theirs / "config.json").read_text()
    loaded = SD3Transformer2DModel.from_pretrained(ours).state_dict()
    assert relative_error(loaded, SD3Transformer2DModel.from_pretrained(theirs).state_dict()) < 1e-5


@pytest.mark.ranks4
def test_saved_on_four_and_resumed_on_two_and_on_one_equals_uninterrupted(four, one, tmp_path):
    begun = four[1] / "begun-on-4"
    for name in ("two", "one"):
        shutil.copytree(begun, tmp_path / name)
    on_ranks(2, tmp_path / "ranks", continued_run, tmp_path / "two", "updates=2")
    continued_run(ALONE, tmp_path / "one", "updates=2", "parallel.shard=1")
    for folder in (four[1] / "begun-on-1", tmp_path / "two", tmp_path / "one"):
        assert_same_run(folder, one / "whole")


@pytest.mark.parametrize(
    ("shard", "ranks", "changes", "per", "text"),
    [
        (3, 4, {}, "update", "parallel.shard: 3 does not divide 4 ranks; 1, 2, 4 or all works"),
        (2, 1, {}, "update", "parallel.shard: 2 does not divide 1 rank; 1 or all works"),
        ("all", 2, {}, "sample", "selection.per: sample draws other events for each"),
        ("all", 2, {"layout": "conventional"}, "group", "selection.per: group draws other events for each prompt"),
        ("all", 2, {"layout": "conventional", "resample": 1}, "update", "rollout.resample: 1 draws again"),
    ],
)
def test_what_ranks_could_not_do_in_step_is_refused(shard, ranks, changes, per, text):
    rollout = RolloutConfig(**(SHARED | {"group_size": 4} | changes))
    problems = ParallelConfig(shard=shard).problems(rollout.over(ranks), events_per=per, resample=rollout.resample)
    assert len(problems) == 1
    assert text in problems[0]


def test_a_recipe_asks_its_selection_whose_events_differ():
    changes = ["parallel.shard=all", "selection={kind: fraction, per: sample}"]
    with pytest.raises(ValueError, match=r"parallel\.shard: all needs all ranks to train the same events"):
        config.load("", changes, ranks=2)
    config.load("", changes)  # alone, nothing is sharded
