"""Updates without an advantage: what is left to train, what is not, and what the log says of them."""

from __future__ import annotations

import pytest
import torch

from helpers import move, relative_error, roll
from onetake.core.coefficients import Coefficients
from onetake.core.objectives import Grpo, Kl
from onetake.core.transitions import Flow
from onetake.execution import EXECUTIONS, Recompute
from onetake.policies import trainable
from onetake.policies.toy import ToyPolicy
from onetake.run.optimizer import NOISE, Optimizer, OptimizerConfig
from test_agreement import by_formula
from test_field_cases import run
from tiny import tiny_recipe

CALLS: list[int] = []


def alive_once(images, prompts):
    """Tells the images of the first two training micro-batches apart, an update of the recipe below, and no later ones."""
    CALLS.extend([1] * (len(images) > 1))  # an evaluation scores one image at a time
    return images.mean((1, 2, 3)) if len(CALLS) <= 2 else torch.ones(len(images))


def a_step_apart(images, prompts):
    """In float32, scores of a group that differ by one rounding step."""
    step = torch.arange(len(images)) % 2
    return torch.where(step == 0, torch.tensor(0.7), torch.nextafter(torch.tensor(0.7), torch.tensor(1.0)))


@pytest.fixture(scope="module")
def recipe_text(tmp_path_factory) -> str:
    return tiny_recipe(
        tmp_path_factory.mktemp("base"),
        rollout={"groups": 2, "group_size": 4, "micro_batch": 4},
        optimizer={"learning_rate": 0.02},
        evaluation={"every": 50, "samples": 1},
        updates=3,
    )


@pytest.mark.parametrize("scale", ["per_dim", "exact"])
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_without_advantages_the_gradient_is_the_kls_alone(execution, scale):
    policy, kl = ToyPolicy(Flow()), Kl(beta=0.3, scale=scale)
    move(policy, 0.1)
    strategy = EXECUTIONS[execution](kl)
    rollout = roll(policy, strategy)
    rollout.advantages = torch.zeros_like(rollout.advantages)
    strategy.accumulate(policy, rollout, Coefficients(Grpo(), rollout))
    found = {name: p.grad.clone() for name, p in trainable(policy).items()}
    policy.module.zero_grad(set_to_none=True)
    native = roll(policy, Recompute())
    native.advantages = torch.zeros_like(native.advantages)
    assert relative_error(found, by_formula(policy, Grpo(), native, kl)) < 1e-9
    assert all(gradient.abs().max() > 0 for gradient in found.values())


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_a_dead_update_steps_on_its_kl(recipe_text, tmp_path, execution):
    CALLS.clear()
    alive = [f"execution={execution}", "task.reward=test_dead_updates:alive_once"]
    lines, said = run(recipe_text, tmp_path, *alive, "kl.beta=0.5")
    assert [line["dead_groups"] for line in lines][1:] == [2, 2]
    assert [line["skipped"] for line in lines][1:] == [0, 0]
    assert all(line["step_norm"] > 0 for line in lines[1:])
    assert not any("nothing was trained" in text for text in said)


def test_without_a_kl_a_dead_update_changes_nothing(recipe_text, tmp_path):
    reward = ["task.reward=test_dead_updates:a_step_apart", "advantages.eps=0.0"]
    lines, said = run(recipe_text, tmp_path, *reward, name="plain")
    assert [line["dead_by_rounding"] for line in lines] == [line["dead_groups"] for line in lines] == [2] * 3
    assert {line["step_norm"] for line in lines} == {0.0}
    assert sum("all groups are dead" in text for text in said) == 3
    lines, said = run(
        recipe_text, tmp_path, *reward, "kl.beta=0.5", name="at the reference"
    )  # its gradient is zero there
    assert {line["step_norm"] for line in lines} == {0.0}
    assert sum("its gradient is zero in every trainable tensor" in text for text in said) == 3
    lines, said = run(recipe_text, tmp_path, *reward, "kl.beta=0.5", "kl.as_reward=true", name="as reward")
    assert {line["step_norm"] for line in lines} == {0.0}


def test_rounding_is_no_step_along_old_momentum():
    """Adam's step does not shrink with its gradient; weights and moments stay, and the level of the norms too."""
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = Optimizer(OptimizerConfig(learning_rate=0.1), {"weight": weight})

    def step(size: float) -> dict[str, float]:
        weight.grad = torch.full((4,), size)
        return optimizer.step(0)

    for _ in range(3):
        assert step(1.0)["step_norm"] == pytest.approx(0.2, rel=1e-3)
    state, before = {name: t.clone() for name, t in optimizer.state().items()}, weight.detach().clone()
    for size in (0.0, 0.9 * NOISE):
        columns = step(size)
        assert (columns["skipped"], columns["step_norm"]) == (1, 0.0)
        assert "gradient" in optimizer.why_skipped(columns["grad_norm"])
    assert torch.equal(weight, before)
    assert all(torch.equal(optimizer.state()[name], t) for name, t in state.items())
    assert step(1e-3)["skipped"] == 0
    assert step(1.0)["skipped"] == 0
