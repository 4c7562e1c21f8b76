"""What users of comparable tools ran into, each reduced to a small case; the number is the case's."""

from __future__ import annotations

import math
import re

import pytest
import torch

from helpers import PROMPTS, gradient_of, move, relative_error, roll
from onetake.core.advantages import Advantages
from onetake.core.coefficients import Coefficients
from onetake.core.objectives import Grpo, Kl
from onetake.core.records import Address, Prompt
from onetake.core.transitions import Flow
from onetake.execution import EXECUTIONS, Recompute, Retain
from onetake.metrics import Log
from onetake.policies import trainable
from onetake.policies.toy import ToyPolicy
from onetake.rewards import Rewards
from onetake.rollout.preflight import PreflightError
from onetake.rollout.recheck import DRIFT, drifted
from onetake.rollout.sampling import RolloutConfig, deal, sample, score
from onetake.run import config
from onetake.run.optimizer import Optimizer, OptimizerConfig
from onetake.run.session import plan_lines
from onetake.run.train import Watcher, train
from test_diffusion import policy_on
from tiny import tiny_recipe

SIZE = RolloutConfig(groups=3, group_size=4, micro_batch=2)


@pytest.fixture(scope="module")
def recipe_text(tmp_path_factory) -> str:
    return tiny_recipe(
        tmp_path_factory.mktemp("base"),
        rollout={"groups": 2, "group_size": 4, "micro_batch": 2},
        optimizer={"learning_rate": 0.02},
        evaluation={"every": 50, "samples": 2},
        updates=2,
    )


def run(text: str, folder, *overrides: str, name: str = "run") -> tuple[list[dict], list[str]]:
    """The update lines of a small run, and what it said."""
    said: list[str] = []
    recipe = config.load(text, list(overrides))
    (folder / name).mkdir()
    train(recipe, folder / name, config.dump(recipe), Watcher(say=said.append))
    return [line for line in Log(folder / name / "metrics.jsonl").read() if line["kind"] == "update"], said


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_1_every_prompt_has_its_copies_and_the_next_update_has_new_prompts(micro_batch):
    prompts, size = (
        [Prompt(f"prompt {i}") for i in range(12)],
        RolloutConfig(groups=3, group_size=4, micro_batch=micro_batch),
    )
    policy, updates = ToyPolicy(Flow(), prompts=12), []
    for update in range(4):
        address = Address(seed=5, stream="train", update=update)
        batches = deal(size, prompts, policy, config.load("selection: all").selection, Grpo(), address)
        copies = [(batch.prompt_index, batch.group, sample) for batch in batches for sample in batch.samples]
        assert len(set(copies)) == len(copies) == 12
        assert all(batch.prompt == prompts[batch.prompt_index] for batch in batches)
        updates.append({index for index, _, _ in copies})
    assert sorted(index for chosen in updates for index in chosen) == list(range(12))  # one pass over the list


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_2_beta_changes_the_gradient(execution):
    policy = ToyPolicy(Flow())
    move(policy, 0.1)
    weak, strong = (gradient_of(policy, execution, kl=Kl(beta=beta)) for beta in (0.1, 0.5))
    assert relative_error(weak, strong) > 1e-3


def test_3_the_clip_is_said_in_nats():
    assert Grpo(clip_high=1e-4).limit(4096).endswith("reached when an event's log_prob moves by 0.41 nats")
    assert Grpo(clip_high=0.2, scale="exact").limit(4096).endswith("moves by 0.2 nats")


def test_4_ratios_are_logged_event_by_event(recipe_text, tmp_path):
    first, second = run(recipe_text, tmp_path, "updates_per_rollout=2")[0]
    assert first["events"] == second["events"] == [0, 1]
    assert first["event_ratio_mean"] == [1.0, 1.0]
    for low, mean, high in zip(*(second[f"event_ratio_{n}"] for n in ("min", "mean", "max")), strict=True):
        assert low < mean < high
    assert second["ratio_min"] == min(second["event_ratio_min"])
    assert second["clip_fraction"] == pytest.approx(sum(second["event_clip_fraction"]) / 2)


def test_5_a_ratio_of_one_is_explained_and_learning_is_shown(recipe_text, tmp_path):
    recipe = config.load(recipe_text)
    assert "the ratio is always exactly 1 and nothing is clipped; step_norm and grad_norm show learning" in "\n".join(
        plan_lines(recipe)
    )
    assert not any("always" in line for line in plan_lines(config.load(recipe_text, ["updates_per_rollout=2"])))
    for line in run(recipe_text, tmp_path)[0]:
        assert line["ratio_min"] == line["ratio_max"] == 1
        assert line["grad_norm"] > 0
        assert line["step_norm"] > 0


def test_6_log_probs_are_compared_all_along():
    """Under recompute every event is; under retain and reweight a micro-batch's every few rollouts, with its gradient."""
    policy = policy_on()
    rollout = roll(policy, Retain(), config=SIZE)
    native = Coefficients(Grpo(), rollout)
    Recompute().accumulate(policy, rollout, native)
    assert native.shift == 0
    move(policy, 1e-3)  # stands for whatever lets rollout and update disagree
    moved = Coefficients(Grpo(), rollout)
    Recompute().accumulate(policy, rollout, moved)
    with pytest.raises(PreflightError, match="the last checkpoint stands"):
        drifted(moved.shift, rollout.transitions[0][0].dims)
    assert DRIFT < 2e-6  # below the smallest published clip range


def test_6_a_run_stops_when_sampling_and_update_disagree(recipe_text, tmp_path, monkeypatch):
    from onetake.policies.diffusion import DiffusionPolicy

    score, scored = DiffusionPolicy.score, []

    def later_with_dropout(self, batch, old):
        scored.append(old)
        new = score(self, batch, old)
        object.__setattr__(new, "log_prob", new.log_prob + (1.0 if len(scored) > 6 else 0.0))
        return new

    monkeypatch.setattr(DiffusionPolicy, "score", later_with_dropout)
    with pytest.raises(PreflightError, match="between sampling and re-scoring"):
        run(recipe_text, tmp_path, "updates=40", "recheck=5", "checkpoint.every=1")


def test_7_a_hard_reward_has_its_own_normalisation_and_curve(recipe_text, tmp_path):
    both = "task.reward={jpeg: 0.1, test_field_cases:redness: 1.0}"
    (line, *_), _ = run(recipe_text, tmp_path, both, "advantages.aggregation=normalize_then_sum")
    assert set(line["rewards"]) == {"jpeg", "test_field_cases:redness"}
    total = 0.1 * line["rewards"]["jpeg"] + line["rewards"]["test_field_cases:redness"]
    assert line["score_mean"] == pytest.approx(total)


def redness(images, prompts):
    return images[:, 0].mean((1, 2))


def test_8_evaluation_is_the_plain_pipeline():
    """Bit for bit: tests/test_diffusion.py. Here: training noise never reaches an evaluation."""
    from onetake.rollout.evaluation import EvaluationConfig, evaluate
    from onetake.tasks import Task, load_rewards

    task = Task(train=PROMPTS[:1], held_out=PROMPTS[:2], rewards=load_rewards("jpeg"))
    images = []
    for noise in (0.1, 0.9):
        policy = policy_on()
        policy.kernel = Flow(noise=noise)
        images.append(evaluate(policy, task, EvaluationConfig(samples=2), seed=0).images)
    assert torch.equal(*images)


def test_9_the_plan_is_printed_and_leftovers_are_refused(recipe_text):
    assert plan_lines(config.load(recipe_text))[0] == (
        "2 updates × 2 prompts × 4 images = 16 images, 3 steps each, 2 of them trained; micro-batches of 2"
    )
    with pytest.raises(ValueError, match=r"micro_batch: 3 does not divide group_size: 4, .* sizes that work: 1, 2, 4"):
        config.load(recipe_text, ["rollout.micro_batch=3"])
    with pytest.raises(ValueError, match=r"updates: 3 is not a multiple of updates_per_rollout: 2, .*; 2 or 4 works"):
        config.load(recipe_text, ["updates=3", "updates_per_rollout=2"])


@pytest.mark.parametrize(("phase", "place"), [("sampling", "rollout"), ("backward", "score")])
def test_10_out_of_memory_names_the_phase(recipe_text, tmp_path, monkeypatch, phase, place):
    from onetake.policies.diffusion import DiffusionPolicy

    method, calls = getattr(DiffusionPolicy, place), []

    def runs_out(self, *args, **kwargs):
        calls.append(1)
        if len(calls) > 12:
            raise torch.OutOfMemoryError("tried to allocate 20.00 GiB")
        return method(self, *args, **kwargs)

    monkeypatch.setattr(DiffusionPolicy, place, runs_out)
    with pytest.raises(ValueError, match=rf"out of memory in phase {phase} of update \d+ .*rollout.micro_batch: 2"):
        run(recipe_text, tmp_path, "execution=recompute", "updates=8")


def test_11_an_exploding_gradient_is_skipped_and_both_norms_are_logged():
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = Optimizer(OptimizerConfig(learning_rate=0.1, abnormal=20.0), {"weight": weight})
    columns = []
    for update in range(14):
        weight.grad = torch.full((4,), 1000.0 if update == 12 else 1.0)
        before = weight.detach().clone()
        columns.append(optimizer.step(update))
        assert torch.equal(before, weight) == (update == 12)
    assert [c["skipped"] for c in columns] == [0] * 12 + [1, 0]
    assert (columns[0]["grad_norm"], columns[0]["grad_norm_clipped"]) == (2.0, 1.0)
    assert columns[12]["grad_norm"] == 2000.0


def test_11_a_lasting_change_of_scale_is_accepted():
    """Skipping for ever would freeze the run."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = Optimizer(OptimizerConfig(), {"weight": weight})
    skipped = []
    for update in range(40):
        weight.grad = torch.full((1,), 1.0 if update < 20 else 100.0)
        skipped.append(optimizer.step(update)["skipped"])
    assert skipped[:21] == [0] * 20 + [1]
    assert not any(skipped[31:])


def test_12_equal_prompts_are_separate_groups():
    """Also prompts that a tokenizer would cut to the same text: a group is an index."""
    policy, size = ToyPolicy(Flow()), RolloutConfig(groups=3, group_size=4, micro_batch=4)
    address = Address(seed=0, stream="train", update=0)
    batches = deal(size, ["same", "same", "same"], policy, config.load("selection: all").selection, Grpo(), address)
    rollout = sample(policy, Recompute(), batches)
    assert [batch.group for batch in rollout.batches] == [0, 1, 2]
    assert len({out.sum().item() for out in rollout.outputs}) == 3
    values = [torch.full((4,), float(batch.group)) for batch in rollout.batches]
    assert rollout.table(values).tolist() == [[0.0] * 4, [1.0] * 4, [2.0] * 4]


# Dead groups, and the KL as reward or controlled


def test_dead_groups_are_drawn_again_with_other_prompts(recipe_text, tmp_path):
    """The reward tells two of the three prompts' images apart; groups of the third are replaced, within the tries."""
    overrides = ["task.reward=test_field_cases:blind_to_first", "updates=6"]
    plain, _ = run(recipe_text, tmp_path, *overrides, name="plain")
    again, _ = run(recipe_text, tmp_path, *overrides, "rollout.resample=4", name="again")
    assert sum(line["dead_groups"] for line in plain) > 0
    assert sum(line["dead_groups"] for line in again) == 0
    assert sum(line["resampled_groups"] for line in again) >= sum(line["dead_groups"] for line in plain)
    rows = 4 * 3  # of a group, on three steps
    assert again[-1]["forwards"] == plain[-1]["forwards"] + rows * sum(line["resampled_groups"] for line in again)


def blind_to_first(images, prompts):
    return torch.where(torch.tensor([p == "first" for p in prompts]), 0.0, images.mean((1, 2, 3)))


def test_redrawn_groups_give_the_gradient_of_the_rollout_they_make():
    """As if the replacing trajectories had been dealt at once; what was kept of the dead ones is gone."""
    from onetake.rollout.sampling import redeal

    found = {}
    for execution in EXECUTIONS:
        policy, strategy = ToyPolicy(Flow()), EXECUTIONS[execution]()
        rollout = roll(policy, strategy)
        again = redeal(rollout.batches, {1}, PROMPTS, 1)
        assert {batch.address.stream for batch in again} == {"train, attempt 1"}
        rollout.drop({1})
        rollout.add(sample(policy, strategy, again))
        assert rollout.event_count == 3 * 4 * 4
        strategy.accumulate(policy, rollout, Coefficients(Grpo(), rollout))
        found[execution] = {name: p.grad for name, p in trainable(policy).items()}
    assert relative_error(found["retain"], found["recompute"]) == 0
    assert relative_error(found["reweight"], found["recompute"]) < 1e-12


def test_the_kl_as_reward_lowers_the_advantage_of_what_strayed():
    """Advantages are those of r − β·KL, KL the mean over a trajectory's events; the logged reward stays the task's own."""
    policy, kl, advantages = ToyPolicy(Flow()), Kl(beta=0.5, as_reward=True), Advantages()
    move(policy, 0.1)
    rollout = roll(policy, Retain(kl), config=SIZE)
    closeness = Rewards(functions={"closeness": lambda x, prompts: -x.square().mean(1)}, weights={"closeness": 2.0})
    score(rollout, closeness, advantages, kl)
    strayed = rollout.table(
        [torch.stack([e.kl(e.reference_mean) / e.dims for e in events]).mean(0) for events in rollout.transitions]
    )
    own = rollout.table([2.0 * -x.square().mean(1) for x in rollout.outputs])
    torch.testing.assert_close(rollout.kl, strayed, rtol=1e-12, atol=0)
    assert torch.equal(rollout.rewards, own)
    torch.testing.assert_close(rollout.advantages, advantages(own - 0.5 * strayed), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(rollout.advantages, advantages(own), atol=1e-3)


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_the_kl_as_reward_is_exact_under_every_execution(execution):
    policy, kl = ToyPolicy(Flow()), Kl(beta=0.5, as_reward=True)
    move(policy, 0.1)
    asked = policy.forwards
    found = gradient_of(policy, execution, kl=kl)
    assert policy.forwards - asked == 12 * (5 + 4) + (12 * 4 if execution == "recompute" else 0)
    assert relative_error(found, gradient_of(policy, "recompute")) < 1e-12  # given the same advantages


def test_beta_follows_its_target():
    kl = Kl(beta=0.1, target=0.02, rate=0.5)
    assert kl.controlled(0.022).beta == pytest.approx(0.1 * (1 + 0.5 * 0.1))
    assert kl.controlled(1.0).beta == pytest.approx(0.1 * 1.1)
    assert kl.controlled(0.0).beta == pytest.approx(0.1 * 0.9)
    assert Kl(beta=0.1).controlled(1.0).beta == 0.1
    assert math.isclose(kl.controlled(0.02).beta, 0.1)
    with pytest.raises(ValueError, match=re.escape("kl.target: β is multiplied until the KL is on target")):
        config.load("kl: {target: 0.1}")


def test_beta_of_a_resumed_run_continues(recipe_text, tmp_path):
    overrides = ["updates=6", "kl.beta=0.1", "kl.target=1e-9", "checkpoint.every=1"]
    whole, _ = run(recipe_text, tmp_path, *overrides, name="whole")
    assert [line["kl_beta"] for line in whole] != sorted(line["kl_beta"] for line in whole)[:1] * 6
    run(recipe_text, tmp_path, *overrides[1:], "updates=3", name="parts")
    recipe = config.load(recipe_text, overrides)
    train(recipe, tmp_path / "parts", config.dump(recipe), Watcher(say=lambda text: None))
    parts = [line for line in Log(tmp_path / "parts" / "metrics.jsonl").read() if line["kind"] == "update"]
    assert [line["kl_beta"] for line in parts] == [line["kl_beta"] for line in whole]
    assert [line["grad_norm"] for line in parts] == [line["grad_norm"] for line in whole]
