"""Rewards by a model: the real classes on a tiny random checkpoint. This tests plumbing, not scores."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor

from onetake.core.records import Prompt
from onetake.metrics import Log
from onetake.rewards import Rewards, load_reward, load_rewards
from onetake.rewards.clip import PICKSCORE, ClipScore
from onetake.run import config
from onetake.run.session import opened
from onetake.run.train import Watcher, train
from tiny import tiny_recipe_file
from tiny_parts import clip_tokenizer

PROMPTS = ["first", "second third", "first second third first second third first second third"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = CLIPConfig(
        text_config=small | {"vocab_size": 40, "max_position_embeddings": 8, "bos_token_id": 0, "eos_token_id": 1},
        vision_config=small | {"image_size": 32, "patch_size": 16},
        projection_dim=8,
    )
    folder = tmp_path_factory.mktemp("clip")
    CLIPModel(config).save_pretrained(folder)
    pictures = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    CLIPProcessor(image_processor=pictures, tokenizer=clip_tokenizer()).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("name", ["clip", "pickscore"])
def test_scores_are_the_models_own(folder, name):
    """One by one through the processor and the model, as their documentation does; a long prompt is cut."""
    images = torch.rand(3, 3, 40, 48, generator=torch.Generator().manual_seed(1))
    found = load_reward(f"{name}:{folder}")(images, PROMPTS)
    model = CLIPModel.from_pretrained(folder).eval()
    processor: Any = CLIPProcessor.from_pretrained(folder)
    for image, prompt, score in zip(images, PROMPTS, found, strict=True):
        picture = Image.fromarray((image * 255).round().byte().permute(1, 2, 0).numpy())
        inputs = processor(images=picture, text=[prompt], truncation=True, max_length=8, return_tensors="pt")
        torch.testing.assert_close(model(**inputs).logits_per_image[0, 0], score, rtol=1e-5, atol=1e-6)
    assert len(set(found.tolist())) == 3


def test_a_model_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere' could not be loaded as a CLIP model: .* Name a folder"):
        load_reward(f"clip:{tmp_path / 'nowhere'}")(torch.zeros(1, 3, 8, 8), ["first"])


def test_naming_a_reward_loads_nothing():
    rewards = load_rewards({"pickscore": 1.0, "jpeg": 0.1})
    assert isinstance(rewards.functions["pickscore"], ClipScore)
    assert PICKSCORE == "yuvalkirstain/PickScore_v1"
    assert "_loaded" not in vars(rewards.functions["pickscore"])


def test_in_the_background_a_reward_works_while_we_do_in_order_and_without_gradients():
    go_on, seen = threading.Event(), []
    weight = torch.ones(3, requires_grad=True)

    def mean(images: torch.Tensor, prompts: list[str]) -> torch.Tensor:
        found = images.mean((2, 3)) @ weight
        if threading.current_thread() is not threading.main_thread():
            assert go_on.wait(20)
        seen.append((prompts[0], threading.current_thread() is threading.main_thread(), found.requires_grad))
        return found

    rewards = Rewards(functions={"mean": mean}, weights={"mean": 1.0}, threads={"mean": ThreadPoolExecutor(1)})
    batches = {name: torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(len(name))) for name in PROMPTS}
    rewards.ahead(batches[PROMPTS[0]], [Prompt(PROMPTS[0])] * 2)  # nothing: its first call may load a model
    first = rewards(batches[PROMPTS[0]], [Prompt(PROMPTS[0])] * 2)
    for name, images in batches.items():
        rewards.ahead(images, [Prompt(name)] * 2)
    assert len(seen) == 1  # three are waiting, and we are here
    go_on.set()
    found = {name: rewards(images, [Prompt(name)] * 2)["mean"] for name, images in reversed(batches.items())}
    assert seen == [(PROMPTS[0], True, False), *((name, False, False) for name in PROMPTS)]
    assert found[PROMPTS[0]].equal(first["mean"])
    for name, images in batches.items():
        assert found[name].equal(rewards(images, [Prompt(name)] * 2)["mean"])


def test_what_fails_in_the_background_stops_the_call():
    rewards = load_rewards("jpeg", background="thread")
    rewards(torch.zeros(1, 3, 8, 8), [Prompt("first")])
    rewards.ahead(images := torch.zeros(2, 3, 8, 8), [Prompt("first")])
    with pytest.raises(ValueError, match=r"the reward jpeg returned shape \(2,\) for 1 images"):
        rewards(images, [Prompt("first")])


FRAGILE = """
import os
from pathlib import Path

import torch


def fragile(images, prompts, metadata):
    if prompts[0] == "die":
        os._exit(3)
    Path(metadata[0]["pid"]).write_text(str(os.getpid()))
    return images.mean((1, 2, 3))
"""
KILLED = """
import os, signal, sys
import torch
from onetake.core.records import Prompt
from onetake.rewards import load_rewards

if __name__ == "__main__":
    rewards = load_rewards("fragile:fragile", background="process")
    rewards(torch.zeros(1, 3, 2, 2), [Prompt("live", metadata={"pid": sys.argv[1]})])
    os.kill(os.getpid(), signal.SIGKILL)
"""


def gone(pid: int) -> bool:
    """Whether the process ended, also if nobody waited for it yet."""
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] == "Z"


def test_a_reward_in_a_process_of_its_own_can_die_and_does_not_outlive_its_run(tmp_path, monkeypatch):
    (tmp_path / "fragile.py").write_text(FRAGILE)
    monkeypatch.syspath_prepend(tmp_path)
    rewards, images = load_rewards("fragile:fragile", background="process"), torch.rand(1, 3, 2, 2).bfloat16()
    prompt = Prompt("live", metadata={"pid": str(tmp_path / "pid")})
    assert rewards(images, [prompt])["fragile:fragile"].equal(images.mean((1, 2, 3)).double())
    assert int((tmp_path / "pid").read_text()) != os.getpid()
    with pytest.raises(ValueError, match=r"the process of fragile:fragile died.*With task\.background=thread"):
        rewards(images, [Prompt("die")])

    (tmp_path / "killed.py").write_text(KILLED)
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, str(tmp_path / "killed.py"), str(tmp_path / "pid")]
    assert subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}).returncode == -signal.SIGKILL
    pid, patience = int((tmp_path / "pid").read_text()), time.monotonic() + 20
    while not gone(pid) and time.monotonic() < patience:
        time.sleep(0.05)
    assert gone(pid)


def test_a_run_that_scores_in_the_background_is_the_same_run(folder, tmp_path):
    def run(background: str) -> tuple[list[dict[str, Any]], dict[str, list]]:
        out = tmp_path / background
        changes = [
            "task.reward={clip:%s: 1, jpeg: 0.1}" % folder,  # noqa: UP031 - braces of YAML
            f"task.background={background}",
            "rollout.micro_batch=2",
            "updates=2",
            "evaluation.prompts=1",
            f"out={out}",
        ]
        recipe = opened(str(tmp_path / "recipe.yaml"), changes).recipe
        assert set(recipe.task.load().rewards.threads) == (
            {f"clip:{folder}", "jpeg"} if background != "null" else set()
        )
        train(recipe, out, config.dump(recipe), Watcher(say=lambda text: None))
        (weights,) = out.glob("checkpoints/*/weights/*.safetensors")
        lines = [
            {key: value for key, value in line.items() if not key.endswith(("_s", "_mib"))}
            for line in Log(out / "metrics.jsonl").read()
        ]
        return lines, {name: tensor.tolist() for name, tensor in load_file(weights).items()}

    tiny_recipe_file(tmp_path)
    assert run("thread") == run("process") == run("null")
