"""One process = N processes: trajectories and rewards bit for bit, gradients and runs up to the order of one sum."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from helpers import PROMPTS, assert_close, relative_error, weights
from onetake.core.objectives import Grpo
from onetake.core.records import Address
from onetake.core.selection import All
from onetake.core.transitions import Flow
from onetake.execution import EXECUTIONS
from onetake.forecast.scaling import SMALL
from onetake.metrics import PHASES, Log
from onetake.parallel import ALONE, Layout, world
from onetake.policies import trainable
from onetake.policies.blank import blank_policy
from onetake.policies.toy import ToyPolicy
from onetake.report.text import count, duration
from onetake.rollout.sampling import RolloutConfig, deal
from onetake.run import config
from onetake.run.session import continued
from onetake.run.train import Watcher, train
from ranks import (
    CONVENTIONAL,
    VARIANTS,
    assert_same_evaluation,
    on_agent,
    on_ranks,
    restarted_run,
    tiny_session,
    toy_evaluation,
    toy_session,
    toy_updates,
    whole_run,
)
from test_resume import untimed
from test_scaling import predicted
from tiny import tiny_recipe_file

SHARED = {"groups": 4, "group_size": 4, "micro_batch": 2, "layout": "shared-prompt"}
CONVENTIONALLY = {**SHARED, "micro_batch": 4, "layout": "conventional"}
CASES = list(itertools.product(EXECUTIONS, VARIANTS, [SHARED, CONVENTIONALLY]))
SINGLE = {**SHARED, "micro_batch": 1}  # on 4 ranks, Q = 1
NARROW = {**SINGLE, "group_size": 2}  # G < R: two sets of two ranks
CASES_OF_4 = list(itertools.product(EXECUTIONS, VARIANTS, [SINGLE, NARROW, CONVENTIONALLY]))


def name_of(case) -> str:
    execution, variant, sizes = case
    return f"{execution}-{variant}-{sizes['layout']}-{sizes['group_size']}"


# Layouts: arithmetic on indices


def dealt(sizes: dict) -> list:
    address = Address(seed=0, stream="train", update=0)
    return deal(RolloutConfig(**sizes), PROMPTS, ToyPolicy(Flow()), All(), Grpo(), address)


@pytest.mark.parametrize(
    ("sizes", "ranks", "wanted"),
    [
        (SHARED, 2, {(g, s) for g in range(4) for s in (2, 3)}),
        (CONVENTIONALLY, 2, {(g, s) for g in (2, 3) for s in range(4)}),
        (NARROW, 4, {(0, 1), (1, 1)}),
        (SINGLE, 16, {(0, 1)}),
        (SINGLE, 1, {(g, s) for g in range(4) for s in range(4)}),
    ],
)
def test_what_a_rank_samples(sizes, ranks, wanted):
    """Rank 1's share (rank 0's, alone); all shares together are what was dealt."""
    layout, batches = RolloutConfig(**sizes).over(ranks), dealt(sizes)
    assert layout.problems() == []
    shares = [layout.share(batches, rank) for rank in range(ranks)]
    assert {(b.group, s) for b in shares[min(1, ranks - 1)] for s in b.samples} == wanted
    assert len({len(share) for share in shares}) == 1
    assert sorted((b.group, b.samples) for share in shares for b in share) == [(b.group, b.samples) for b in batches]


@pytest.mark.parametrize("kind", ["shared-prompt", "conventional"])
def test_what_is_not_refused_is_divided_evenly_and_what_is_proposed_works(kind):
    """Over a grid of sizes: every rank gets the same number of trajectories, and whole micro-batches."""
    refused = 0
    for ranks, groups, group_size in itertools.product(range(1, 9), range(1, 7), range(2, 9)):
        layout = Layout(kind=kind, ranks=ranks, groups=groups, group_size=group_size, micro_batch=1)
        if layout.problems():
            refused += 1
            works = layout.problems()[0].rpartition("works, or ")[2].removesuffix(" ranks").split(" or ")
            for other in works:
                fits = Layout(kind=kind, ranks=int(other), groups=groups, group_size=group_size, micro_batch=1)
                assert fits.problems() == []
        else:
            assert groups * group_size % ranks == 0
            sizes = {"groups": groups, "group_size": group_size, "micro_batch": 1}
            counts = [len(layout.share(dealt(sizes), rank)) for rank in range(ranks)]
            assert counts == [groups * group_size // ranks] * ranks
    assert refused > 50


@pytest.mark.parametrize(
    ("changes", "ranks", "text"),
    [
        (
            {"group_size": 24, "micro_batch": 4},
            5,
            "rollout.group_size: 24 samples cannot be divided evenly over 5 ranks (rollout.layout: shared-prompt); "
            "rollout.group_size: 20 or 25 works, or 4 or 6 ranks",
        ),
        (
            {"groups": 3, "group_size": 4, "micro_batch": 1},
            8,
            "rollout.groups: 3 prompts cannot be dealt evenly to 2 sets of 4 ranks (rollout.layout: shared-prompt); "
            "rollout.groups: 2 or 4 works, or 4 or 12 ranks",
        ),
        (
            {"groups": 4, "layout": "conventional"},
            3,
            "rollout.groups: 4 prompts cannot be dealt evenly to 3 ranks (rollout.layout: conventional); "
            "rollout.groups: 3 or 6 works, or 2 or 4 ranks",
        ),
        (
            {"group_size": 24, "micro_batch": 24},
            2,
            "rollout.micro_batch: 24 does not divide the samples of a group that one of 2 ranks takes, 12 of "
            "rollout.group_size: 24 (rollout.layout: shared-prompt); sizes that work: 1, 2, 3, 4, 6, 12",
        ),
    ],
)
def test_impossible_divisions_are_refused_with_the_nearest_that_work(changes, ranks, text):
    assert RolloutConfig(**changes).problems() == []  # alone it would work
    assert RolloutConfig(**changes).problems(ranks) == [text]


def test_all_problems_of_a_run_on_several_ranks_come_at_once():
    changes = ["rollout.micro_batch=24", "device=cuda:0", "updates=3", "updates_per_rollout=2"]
    with pytest.raises(ValueError, match="works") as refused:
        config.load("", changes, ranks=2)
    assert [line.partition(":")[0] for line in str(refused.value).splitlines()] == [
        "rollout.micro_batch",
        "device",
        "updates",
    ]
    assert "device: cuda:0 puts all 2 ranks on one GPU" in str(refused.value)


def test_without_torchrun_there_is_no_process_group(monkeypatch):
    for variables in ({}, {"WORLD_SIZE": "1", "RANK": "0"}):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with world() as alone:
            assert alone is ALONE
            assert not torch.distributed.is_initialized()


# Updates of the toy policy, in float64


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> list[dict]:
    return on_ranks(2, tmp_path_factory.mktemp("two") / "ranks", toy_session, CASES)


@pytest.fixture(scope="module")
def four(tmp_path_factory) -> list[list[dict]]:
    return on_ranks(4, tmp_path_factory.mktemp("four") / "ranks", toy_updates, CASES_OF_4)


def assert_same_update(case, found: list[dict]) -> None:
    """`found` by each rank, against one process."""
    (wanted,) = toy_updates(ALONE, [case])
    made = [key for rank in found for key in rank["made"]]
    assert sorted(made) == sorted(wanted["made"])
    for rank in found:
        for key, (output, actions) in rank["made"].items():
            assert torch.equal(output, wanted["made"][key][0])
            assert all(torch.equal(a, b) for a, b in zip(actions, wanted["made"][key][1], strict=True))
        for table in ("rewards", "advantages"):
            assert torch.equal(rank[table], wanted[table])
        assert all(torch.equal(rank["scores"][name], wanted["scores"][name]) for name in wanted["scores"])
        assert rank["kl"] == pytest.approx(wanted["kl"], rel=1e-12)
        assert rank["kl"] == found[0]["kl"]
        for gradient in ("gradient", "second"):
            assert relative_error(rank[gradient], wanted[gradient]) < 1e-12
            assert all(torch.equal(rank[gradient][name], found[0][gradient][name]) for name in wanted[gradient])
        assert relative_error(rank["own"], wanted["gradient"]) > 0.1  # each has a part only
        assert rank["statistics"] == found[0]["statistics"]
        for name, value in wanted["statistics"].items():
            assert rank["statistics"][name] == pytest.approx(value, rel=1e-9, abs=1e-12), name
    assert 0 < wanted["statistics"]["clip_fraction"] < 1 or case[1] != "plain"


def assert_one_reduction(case, ranks: int, found: list[dict]) -> None:
    """Of all gradients at once, and of one number a parameter that says whether there is a gradient. `plan` predicts it."""
    execution, variant, sizes = case
    parameters = trainable(ToyPolicy(Flow()))
    elements = sum(p.numel() for p in parameters.values()) + len(parameters)
    scores = len(found[0]["scores"]) + ("KL" in variant)
    wanted = predicted(ToyPolicy(Flow()), sizes, execution, ranks, scores=scores, steps=5)
    for rank in found:
        assert rank["sent"] == [("allreduce_", 8 * elements)]
        assert sorted(rank["scoring"] + rank["sent"]) == wanted


@pytest.mark.parametrize("index", range(len(CASES)), ids=[name_of(case) for case in CASES])
def test_an_update_on_two_ranks_is_the_update_of_one(two, index):
    found = [rank["updates"][index] for rank in two]
    assert_same_update(CASES[index], found)
    assert_one_reduction(CASES[index], 2, found)


@pytest.mark.ranks4
@pytest.mark.parametrize("index", range(len(CASES_OF_4)), ids=[name_of(case) for case in CASES_OF_4])
def test_an_update_on_four_ranks_is_the_update_of_one(four, index):
    found = [rank[index] for rank in four]
    assert_same_update(CASES_OF_4[index], found)
    assert_one_reduction(CASES_OF_4[index], 4, found)


def test_one_process_sends_nothing():
    assert [update["sent"] for update in toy_updates(ALONE, CASES[:2])] == [[], []]


def test_a_gradient_that_one_rank_lacks_is_the_others_and_one_that_all_lack_stays_none(two):
    """Else Adam's momentum would move what no rank has trained."""
    assert [rank["missing"] for rank in two] == [[[1.0, 1.0], [2.0, 2.0], None]] * 2


def test_a_reward_that_no_rank_or_two_ranks_know_is_not_a_number(two):
    for rank in two:
        assert rank["table"].isnan().all()  # both ranks claimed two cells, and none the others


def test_unequal_weights_stop_the_run(two):
    for rank in two:
        assert rank["unequal"][0] == "equal"
        assert rank["unequal"][1].startswith("update 3: the trainable weights of rank 1 are not those of rank 0")


def test_where_rank_0_fails_it_alone_says_why(two):
    assert [rank["failed"] for rank in two] == ["no such recipe", "exit 2"]


def test_an_evaluation_is_shared_and_is_that_of_one_process(two):
    """Of three prompts on two ranks: both run the model equally often, and each prompt is scored once."""
    alone, (first, second) = toy_evaluation(ALONE), [rank["evaluation"] for rank in two]
    assert (first["scored"], second["scored"]) == (["first", "first", "third", "third"], ["second", "second"])
    assert first["calls"] == second["calls"] == alone["calls"] * 2 // 3
    assert first["billed"] == second["billed"] == 0
    assert second["made"] is None
    ours, theirs = vars(first["made"]), vars(alone["made"])
    assert torch.equal(ours.pop("images"), theirs.pop("images"))
    assert torch.equal(ours.pop("scores"), theirs.pop("scores"))
    assert ours | {"seconds": 0} == theirs | {"seconds": 0}


# Runs of a tiny pipeline


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory) -> Path:
    return tiny_recipe_file(
        tmp_path_factory.mktemp("recipe"),
        task={"reward": "ranks:blind_to_first"},
        rollout={"micro_batch": 2, "resample": 2},
        kl={"beta": 0.1, "target": 0.01},
        optimizer={"learning_rate": 0.05, "eps": 1e-3},  # rounding moves a small gradient little
        evaluation={"every": 2, "samples": 2},
        checkpoint={"every": 1, "keep": 2},
        updates=4,
    )


@pytest.fixture(scope="module")
def tiny_runs(recipe_file, tmp_path_factory) -> tuple[Path, list[str], list[list[tuple[str, int]]]]:
    """The folder of runs on two ranks, what each rank printed, and sent in an update; the same runs on one process."""
    root = tmp_path_factory.mktemp("runs")
    ranks = on_ranks(2, root / "ranks", tiny_session, recipe_file, root)
    whole_run(ALONE, recipe_file, f"out={root / 'whole-1'}")
    whole_run(ALONE, recipe_file, f"out={root / 'conventional-1'}", *CONVENTIONAL)
    return root, *map(list, zip(*ranks, strict=True))


def assert_same_up_to_rounding(found: Path, wanted: Path) -> None:
    ours, theirs = weights(found), weights(wanted)
    assert ours.keys() == theirs.keys()
    assert relative_error(ours, theirs) < 1e-4
    lines, wanted_lines = untimed(found), untimed(wanted)
    assert len(lines) == len(wanted_lines) == 7  # four updates, three evaluations
    assert [line.keys() for line in lines] == [line.keys() for line in wanted_lines]
    assert_close(lines, wanted_lines)


@pytest.mark.parametrize("name", ["whole", "conventional"])
def test_a_run_on_two_ranks_is_the_run_of_one(tiny_runs, name):
    root, *_ = tiny_runs
    assert_same_up_to_rounding(root / name, root / f"{name}-1")
    updates = [line for line in Log(root / name / "metrics.jsonl").read() if line["kind"] == "update"]
    assert all(line["step_norm"] > 0 for line in updates)
    assert sum(line["resampled_groups"] for line in updates) > 0


def test_broken_and_resumed_on_two_ranks_equals_uninterrupted(tiny_runs):
    root, *_ = tiny_runs
    whole, broken = weights(root / "whole"), weights(root / "broken")
    assert all(torch.equal(whole[name], broken[name]) for name in whole | broken)
    assert untimed(root / "whole") == untimed(root / "broken")


def test_the_first_evaluation_on_two_ranks_is_that_of_one_bit_for_bit(tiny_runs):
    root, *_ = tiny_runs
    assert_same_evaluation(root / "whole", root / "whole-1", 0)


def test_all_that_an_update_of_a_run_sends_is_what_plan_predicts(tiny_runs, recipe_file):
    """Gradients and scores by the byte; of the small things, their number."""
    recipe = config.load(recipe_file.read_text())
    policy = blank_policy(recipe.policy, recipe.pipeline_source, recipe.seed)
    wanted = predicted(policy, recipe.rollout.model_dump(), recipe.execution, 2, scores=1, steps=3)
    for sent in tiny_runs[2]:
        assert sorted(m for m in sent if m[0] == "allreduce_") == wanted
        small = [size for name, size in sent if name in ("allgather_", "_allgather_base_")]  # by torch's version
        assert len(small) == len(sent) - len(wanted) == SMALL
        assert sum(small) < 8192  # 32 bytes an event, for the log


def test_what_each_rank_took_is_logged_and_reported(tiny_runs):
    root, *_ = tiny_runs
    updates = [line for line in Log(root / "whole" / "metrics.jsonl").read() if line["kind"] == "update"]
    for line in updates:
        assert len(line["ranks"]) == 2
        assert {key: line["ranks"][0][key] for key in line["ranks"][0] if key != "peak_mib"} == {
            f"{name}_s": line[f"{name}_s"] for name in PHASES
        }
        assert line["ranks"][0] != line["ranks"][1]
        assert all(rank["peak_mib"] > 50 and rank["sampling_s"] > 0 for rank in line["ranks"])
    alone = Log(root / "whole-1" / "metrics.jsonl").read()
    assert not any("ranks" in line for line in alone)
    report = (root / "whole" / "report.html").read_text()
    peak = max(line["ranks"][1]["peak_mib"] for line in updates)
    seconds = sum(line["ranks"][1]["sampling_s"] for line in updates)
    assert f"<tr><th>rank 1</th><td>{count(peak)}</td><td>{duration(seconds)}</td>" in report
    assert "rank 1" not in (root / "whole-1" / "report.html").read_text()


def test_rank_0_alone_prints_and_writes(tiny_runs):
    root, (first, second), _ = tiny_runs
    assert "on 2 ranks, shared-prompt: each samples 2 images of 2 prompts" in first
    assert "report" in first
    assert second == ""
    assert (root / "whole" / "report.html").is_file()
    assert '"ranks": 2' in (root / "whole" / "environment.json").read_text()


def test_a_rank_killed_in_an_update_is_started_again_and_ends_as_uninterrupted(recipe_file, tiny_runs, tmp_path):
    """By torchrun's agent, as `--restarts 1` asks it; the reward kills rank 1 in the third update of the first attempt."""
    folder, wanted = tmp_path / "run", tiny_runs[0] / "whole"
    printed, silent = on_agent(2, 1, restarted_run, recipe_file, f"out={folder}", "task.reward=ranks:deadly")
    assert "update 0: held-out" not in printed  # it went on; and in the first attempt
    assert "update 4: held-out" in printed
    assert silent == ""
    assert all(torch.equal(weights(folder)[name], value) for name, value in weights(wanted).items())
    ours, theirs = ([line | {"rewards": None} for line in untimed(f)] for f in (folder, wanted))  # by another name
    assert ours == theirs


@pytest.mark.slow  # three more processes import the pipelines
@pytest.mark.parametrize("end", ["rank killed", "ctrl-c"])
def test_a_launched_job_that_ends_early_says_why_and_one_process_goes_on(recipe_file, tiny_runs, tmp_path, end):
    """Launched as a user does; what two ranks saved, one resumes."""
    folder = tmp_path / "run"
    job = launched(recipe_file, folder)
    deadline = time.monotonic() + 240
    while not (folder / "checkpoints" / "update-000001").is_dir():
        assert job.poll() is None, job.communicate()
        assert time.monotonic() < deadline, "no checkpoint came"
        time.sleep(0.005)
    if end == "ctrl-c":
        job.send_signal(signal.SIGINT)
    else:
        os.kill(rank_1_of(job), signal.SIGKILL)
    out, err = job.communicate(timeout=240)
    if end == "ctrl-c":
        assert job.returncode == 128 + signal.SIGINT, (out, err)
        assert f"stopped; what is done is saved. Continue with: onetake train --resume {folder}" in " ".join(
            out.split()
        )
    else:
        assert job.returncode == 2, (out, err)
        assert "rank 1 ended with exit code -9" in " ".join(err.split())
    session = continued(folder, [])
    train(session.recipe, folder, config.dump(session.recipe), Watcher(say=lambda line: None))
    assert_same_up_to_rounding(folder, tiny_runs[0] / "whole-1")


KILLS = 20


@pytest.mark.slow
def test_ranks_killed_at_random_moments_are_started_again_and_end_as_uninterrupted(recipe_file, tmp_path):
    """One of three kills falls anywhere in a start, the others after progress, so that the run ends."""
    folder, wanted, randomness, seen = tmp_path / "run", tmp_path / "whole", random.Random(0), 0
    updates = f"updates={8 * KILLS}"  # some are made between two kills
    on_ranks(2, tmp_path / "ranks", whole_run, recipe_file, f"out={wanted}", updates)
    job, dead = launched(recipe_file, folder, "--restarts", str(KILLS), "--set", updates), set()
    for _ in range(KILLS):
        wait_for(job, lambda: len(living(job) - dead) == 2)  # noqa: B023
        if randomness.random() > 1 / 3:
            wait_for(job, lambda: progress(folder) > seen)  # noqa: B023
        time.sleep(randomness.uniform(0, 1.5))
        pids = living(job) - dead
        if len(pids) < 2:
            break  # it ended in the meantime
        seen, dead = progress(folder), dead | pids
        os.kill(randomness.choice(sorted(pids)), signal.SIGKILL)
    out, err = job.communicate(timeout=600)
    assert job.returncode == 0, (out, err)
    assert len(dead) > KILLS  # more than half of the kills
    ours, theirs = weights(folder), weights(wanted)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours | theirs)
    assert untimed(folder) == untimed(wanted)


def progress(folder: Path) -> int:
    """The last update with a checkpoint."""
    return max((int(p.name[-6:]) for p in (folder / "checkpoints").glob("update-*")), default=0)


def wait_for(job: subprocess.Popen, condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        if job.poll() is not None:
            return
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.005)


def launched(recipe: Path, folder: Path, *options: str) -> subprocess.Popen:
    command = [
        sys.executable,
        "-m",
        "onetake",
        "train",
        str(recipe),
        "--nproc",
        "2",
        "--set",
        f"out={folder}",
        *options,
    ]
    search = os.pathsep.join(
        [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    )  # the reward is in ranks.py
    environment = {**os.environ, "PYTHONPATH": search}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def rank_1_of(job: subprocess.Popen) -> int:
    return next(pid for pid in living(job) if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes())


def living(job: subprocess.Popen) -> set[int]:
    """The processes of a job's ranks."""
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split() if job.poll() is None else []
    found = set()
    for pid in map(int, children):
        with suppress(FileNotFoundError, ProcessLookupError):
            if b"\0RANK=" in Path(f"/proc/{pid}/environ").read_bytes():
                found.add(pid)
    return found
