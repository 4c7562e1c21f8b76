"""Checkpoints are whole or not there; the optimizer and the log continue as if nothing had happened."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from onetake.metrics import METRICS, Log
from onetake.policies.toy import ToyVelocity
from onetake.run.checkpoint import CheckpointConfig, Checkpoints, State, read
from onetake.run.optimizer import Optimizer, OptimizerConfig

RECIPE = "updates: 3  # σ\n"


def state(update: int, held_out: float | None = None) -> State:
    return State(
        update=update,
        wall_s=update + 0.1,
        cpu_s=update + 0.2,
        calls=7 * update,
        forwards=48 * update,
        saved_forwards=5 * update,
        held_out=held_out,
    )


def save(checkpoints: Checkpoints, update: int, held_out: float | None = None):
    weight = {"weight": torch.full((4, 3), float(update))}
    return checkpoints.save(
        state(update, held_out),
        lambda folder: save_file(weight, folder / "weights" / "weights.safetensors"),
        {"weight.exp_avg": torch.arange(6.0).view(2, 3).mT},  # not contiguous
        RECIPE,
    )


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


# What is kept


def test_a_checkpoint_reads_back(tmp_path):
    saved = save(Checkpoints(tmp_path, CheckpointConfig()), 20, 0.5)
    found = read(saved.folder)
    assert found == saved
    assert found.state == state(20, 0.5)
    assert load_file(found.weights / "weights.safetensors")["weight"].eq(20).all()
    assert torch.equal(found.optimizer({})["weight.exp_avg"], torch.arange(6.0).view(2, 3).mT)
    assert (found.folder / "config.yaml").read_text() == RECIPE
    assert names(tmp_path) == ["update-000020"]


def test_before_the_first_update_there_is_nothing_to_keep_of_the_optimizer(tmp_path):
    saved = Checkpoints(tmp_path, CheckpointConfig()).save(state(0), lambda folder: None, {}, RECIPE)
    assert read(saved.folder).optimizer({}) == {}


@pytest.mark.parametrize(
    ("keep", "scores", "left"),
    [
        (2, [None] * 4, [3, 4]),
        (1, [None] * 4, [4]),
        (2, [0.1, 0.9, 0.3, 0.2], [2, 3, 4]),
        (1, [0.1, 0.9, None, 0.2], [2, 4]),
        (1, [0.5, 0.9, 0.9, 0.2], [3, 4]),  # of equal scores the newest
        (1, [-3.0, -2.0, -9.0, -8.0], [2, 4]),
        (9, [0.1, 0.9, 0.3, 0.2], [1, 2, 3, 4]),
    ],
)
def test_the_last_and_the_best_are_kept(tmp_path, keep, scores, left):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep=keep))
    for update, score in enumerate(scores, start=1):
        save(checkpoints, update, score)
    assert names(tmp_path) == [f"update-{update:06d}" for update in left]
    assert checkpoints.latest(pytest.fail).state.update == 4
    best = checkpoints.best()
    if scores == [None] * 4:
        assert best is None
    else:
        assert best.state.held_out == max(score for score in scores if score is not None)


def test_a_folder_without_checkpoints(tmp_path):
    checkpoints = Checkpoints(tmp_path / "none", CheckpointConfig())
    assert checkpoints.latest(pytest.fail) is checkpoints.best() is None


# Damage

FILES = ["config.yaml", "optimizer.safetensors", "state.json", "weights/weights.safetensors"]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "emptied": lambda path: path.write_bytes(b""),
    "flipped": flip,
    "missing": Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_checkpoint_is_passed_over_aloud(tmp_path, damage, file):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep=3))
    for update, score in ((1, 0.5), (2, 0.4), (3, 0.9)):
        last = save(checkpoints, update, score)
    assert [str(p.relative_to(last.folder)) for p in sorted(last.folder.rglob("*")) if p.is_file()] == FILES
    DAMAGE[damage](last.folder / file)
    said: list[str] = []
    assert checkpoints.latest(said.append).state == state(2, 0.4)
    assert checkpoints.best().state == state(1, 0.5)
    (text,) = said
    assert str(last.folder) in text
    assert file in text
    assert text.endswith("; falling back to the checkpoint before it")
    with pytest.raises(ValueError, match=r"whole checkpoint|is missing|is not what was written"):
        read(last.folder)


def test_no_single_bit_of_the_counters_can_lie(tmp_path):
    saved = save(Checkpoints(tmp_path, CheckpointConfig()), 20, 0.25)
    path = saved.folder / "state.json"
    whole, unseen = path.read_bytes(), 0
    for bit in range(0, 8 * len(whole), 3):  # every byte, every place in a byte
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        try:
            assert read(saved.folder) == saved  # another spelling of the same content, at most
            unseen += 1
        except ValueError:
            pass
    assert unseen < 8


def test_all_damaged(tmp_path):
    checkpoints, said = Checkpoints(tmp_path, CheckpointConfig()), []
    for folder in [save(checkpoints, update).folder for update in (1, 2)]:
        flip(folder / "config.yaml")
    assert checkpoints.latest(said.append) is checkpoints.best() is None
    assert [text.partition(" is damaged")[0][-1] for text in said] == ["2", "1"]


def test_a_damaged_checkpoint_does_not_crowd_out_whole_ones(tmp_path):
    """Resumed from 10 and stopped at 15, with keep 1: what stays is 15, not the damaged 20."""
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep=2))
    save(checkpoints, 10)
    flip(save(checkpoints, 20).folder / "state.json")
    again = Checkpoints(tmp_path, CheckpointConfig(keep=1))
    assert save(again, 15) == again.latest(pytest.fail)
    assert names(tmp_path) == ["update-000015"]
    flip(tmp_path / "update-000015" / "state.json")
    assert save(again, 15) == again.latest(pytest.fail)  # saving again replaces it


def test_an_interrupted_save_is_ignored(tmp_path):
    """Killed while weights are written: the checkpoint before it stands, and the next save starts afresh."""

    class Killed(BaseException):
        pass

    def killed(folder: Path) -> None:
        (folder / "half.safetensors").write_bytes(b"half")
        raise Killed

    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    save(checkpoints, 1)
    with pytest.raises(Killed):
        checkpoints.save(state(2), killed, {}, RECIPE)
    assert names(tmp_path) == [".update-000002.partial", "update-000001"]
    assert checkpoints.latest(pytest.fail).state == state(1)
    folder = save(checkpoints, 2).folder
    assert names(tmp_path) == ["update-000001", "update-000002"]
    assert names(folder / "weights") == ["weights.safetensors"]


# Optimizer


def network() -> tuple[nn.Module, dict[str, nn.Parameter]]:
    module = ToyVelocity(4, 8, 3, seed=0).float()
    module.unused = nn.Parameter(torch.ones(2))  # never has a gradient
    return module, dict(module.named_parameters())


def backpropagate(module: nn.Module, update: int, size: float = 1.0) -> None:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(update))
    (size * module(x, 0.5, update % 3).square().mean()).backward()


def test_resumed_is_uninterrupted_bit_for_bit(tmp_path):
    config = OptimizerConfig(learning_rate=0.01, weight_decay=0.1, warmup=6, max_grad_norm=0.5)

    def run(module: nn.Module, optimizer: Optimizer, updates: range) -> list[dict[str, float]]:
        lines = []
        for update in updates:
            backpropagate(module, update)
            lines.append(optimizer.step(update))
        return lines

    module, parameters = network()
    optimizer = Optimizer(config, parameters)
    run(module, optimizer, range(4))
    saved = Checkpoints(tmp_path, CheckpointConfig()).save(
        state(4),
        lambda folder: save_file(module.state_dict(), folder / "weights" / "w.safetensors"),
        optimizer.state(),
        RECIPE,
    )
    wanted = run(module, optimizer, range(4, 9))

    resumed, resumed_parameters = network()
    found = read(saved.folder)
    resumed.load_state_dict(load_file(found.weights / "w.safetensors"))
    again = Optimizer(config, resumed_parameters)
    again.load(found.optimizer({}))
    assert run(resumed, again, range(4, 9)) == wanted
    assert all(torch.equal(resumed_parameters[name], value) for name, value in parameters.items())
    assert again.state().keys() == optimizer.state().keys()
    assert all(torch.equal(again.state()[name], value) for name, value in optimizer.state().items())

    forgetful, _ = network()
    forgetful.load_state_dict(load_file(found.weights / "w.safetensors"))
    assert run(forgetful, Optimizer(config, dict(forgetful.named_parameters())), range(4, 9)) != wanted


def test_without_clip_and_warm_up_it_is_adamw():
    (ours, parameters), (theirs, _) = network(), network()
    optimizer = Optimizer(OptimizerConfig(learning_rate=0.01, weight_decay=0.1, max_grad_norm=None), parameters)
    adamw = torch.optim.AdamW(theirs.parameters(), lr=0.01, weight_decay=0.1)
    for update in range(5):
        for module in (ours, theirs):
            backpropagate(module, update, size=100)
        before = torch.cat([p.detach().flatten() for p in ours.parameters()])
        found = optimizer.step(update)
        adamw.step()
        gradient = torch.cat([p.grad.flatten() for p in theirs.parameters() if p.grad is not None])
        moved = torch.cat([p.detach().flatten() for p in ours.parameters()]) - before
        assert found["grad_norm"] == pytest.approx(float(gradient.norm()), rel=1e-5)
        assert found["step_norm"] == pytest.approx(float(moved.norm()), rel=1e-5)
        adamw.zero_grad()
        assert all(p.grad is None for p in ours.parameters())
    assert all(torch.equal(one, other) for one, other in zip(ours.parameters(), theirs.parameters(), strict=True))


@pytest.mark.parametrize("norm", [0.25, 10.0])
def test_clipping_by_the_global_norm(norm):
    """Adam's first moment is 0.1 times the clipped gradient; a gradient within the bound is left alone."""
    module, parameters = network()
    optimizer = Optimizer(OptimizerConfig(max_grad_norm=1.0), parameters)
    count = sum(p.numel() for name, p in parameters.items() if name != "unused")
    for name, parameter in parameters.items():
        if name != "unused":
            parameter.grad = torch.full_like(parameter, norm / count**0.5)
    assert optimizer.step(0)["grad_norm"] == pytest.approx(norm, rel=1e-5)
    moments = [value for key, value in optimizer.state().items() if key.endswith(".exp_avg")]
    clipped = min(norm, 1.0) / count**0.5
    assert torch.cat([m.flatten() for m in moments]).tolist() == pytest.approx([0.1 * clipped] * count, rel=1e-5)
    assert (module.unused == 1).all()


def test_warm_up_is_a_function_of_the_update():
    config = OptimizerConfig(learning_rate=0.8, warmup=4)
    module, parameters = network()
    optimizer = Optimizer(config, parameters)
    rates = []
    for update in range(6):
        backpropagate(module, update)
        rates.append(optimizer.step(update)["learning_rate"])
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8])
    assert Optimizer(OptimizerConfig(learning_rate=0.8), parameters).learning_rate(0) == 0.8


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("max_grad_norm", [1.0, None])
def test_a_gradient_that_is_not_finite_changes_nothing(bad, max_grad_norm):
    module, parameters = network()
    optimizer = Optimizer(OptimizerConfig(max_grad_norm=max_grad_norm), parameters)
    backpropagate(module, 0)
    optimizer.step(0)
    before = {name: value.detach().clone() for name, value in (parameters | optimizer.state()).items()}
    backpropagate(module, 1)
    parameters["inner.weight"].grad[0, 0] = bad
    with pytest.raises(ValueError, match=f"update 2: the gradient's norm is {bad}; nothing was changed, the last"):
        optimizer.step(1)
    assert all(torch.equal(before[name], value) for name, value in (parameters | optimizer.state()).items())


# Log


def test_a_metric_needs_a_definition(tmp_path):
    log = Log(tmp_path / "metrics.jsonl")
    with pytest.raises(AssertionError, match=r"metrics without a definition: \{'reward'\}"):
        log.write(kind="update", update=1, reward=0.5)
    assert log.read() == []
    log.write(**dict.fromkeys(METRICS, 1))
    assert log.read() == [dict.fromkeys(METRICS, 1)]


def test_a_line_cut_short_is_left_out_and_rewritten(tmp_path):
    """Killed in the middle of a line, resumed at update 2: line 3 is written again, and each update is there once."""
    log = Log(tmp_path / "metrics.jsonl")
    lines = [{"kind": "evaluation", "update": 0}, *({"kind": "update", "update": u, "loss": u / 7} for u in (1, 2, 3))]
    for line in lines:
        log.write(**line)
    whole = log.path.read_text()
    assert [json.loads(text) for text in whole.splitlines()] == log.read() == lines
    log.path.write_text(whole[:-9])
    assert log.read() == lines[:3]
    log.rewind(2)
    log.write(**lines[3])
    assert log.path.read_text() == whole
    log.rewind(1)
    assert log.read() == lines[:2]
    log.rewind(-1)
    assert log.read() == []
    assert names(tmp_path) == ["metrics.jsonl"]
