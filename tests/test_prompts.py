"""Files of prompts: what a line may bring, every wrong line named, and what pictures, negative prompts and metadata do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from onetake.cli import main as cli
from onetake.core.records import Prompt
from onetake.metrics import Log
from onetake.policies import prompts
from onetake.policies.diffusion import DiffusionPolicy
from onetake.policies.loading import PolicyConfig
from onetake.rewards import load_rewards
from onetake.run import config
from onetake.run.train import Watcher, train
from onetake.tasks.prompts import read
from test_diffusion import CALL, ode_batch, policy_on
from tiny import tiny_recipe
from tiny_families import tiny
from tiny_parts import OTHER_PICTURE, PICTURE


@pytest.fixture
def folder(tmp_path) -> Path:
    """Two pictures and a file that is none."""
    (tmp_path / "pictures").mkdir()
    PICTURE.save(tmp_path / "pictures" / "a.png")
    OTHER_PICTURE.save(tmp_path / "b.png")
    (tmp_path / "text.png").write_text("no picture")
    return tmp_path


def written(folder: Path, *lines: dict[str, Any] | str | bytes) -> Path:
    file = folder / "prompts.jsonl"
    texts = [line if isinstance(line, str | bytes) else json.dumps(line) for line in lines]
    file.write_bytes(b"\n".join(text.encode() if isinstance(text, str) else text for text in texts))
    return file


def test_a_line_brings_words_pictures_a_negative_prompt_and_metadata(folder):
    file = written(
        folder,
        {"prompt": " plain "},
        "",
        {"prompt": "one", "image": "pictures/a.png", "negative_prompt": "", "metadata": {"answer": [1, None]}},
        {"prompt": "two", "image": ["b.png", "pictures/a.png"]},
    )
    plain, one, two = read(file)[0]
    assert plain == Prompt("plain")
    assert one == Prompt("one", (folder / "pictures" / "a.png",), "")
    assert one.metadata == {"answer": [1, None]}
    assert two.images == (folder / "b.png", folder / "pictures" / "a.png")


WRONG = {
    '{"prompt": "a"': "is not JSON: EOF while parsing an object at column 14",
    b'{"prompt": "\xff"}': "is not JSON: invalid unicode code point at column 13",
    "[]": "the line: Input should be an object (got [])",
    '{"image": "b.png"}': "prompt: is missing",
    '{"prompt": " "}': "prompt: String should have at least 1 character (got ' ')",
    '{"prompt": 3}': "prompt: Input should be a valid string (got 3)",
    '{"prompt": "a", "images": "b.png"}': "images: is not a key of a prompt; did you mean image?",
    '{"prompt": "a", "image": "c.png"}': "image: FOLDER/c.png cannot be opened (No such file or directory)",
    '{"prompt": "a", "image": ["b.png", "text.png"]}': "image: FOLDER/text.png is not an image that Pillow reads",
    '{"prompt": "a", "image": ["b.png", 1]}': "image.1: Input should be a valid string (got 1)",
    '{"prompt": "a", "metadata": []}': "metadata: Input should be an object (got [])",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_line_is_named(line, folder):
    file = written(folder, {"prompt": "good"}, line)
    prompts, wrong = read(file)
    assert [prompt.text for prompt in prompts] == ["good"]
    assert wrong == [f"{file}:2: {WRONG[line].replace('FOLDER', str(folder))}"]


def test_all_wrong_lines_are_told_before_anything_loads(folder):
    """The first ten of a file, and how many more."""
    file = written(folder, *[{"prompt": "a", "image": ["c.png", "d.png"]}] * 8)
    recipe = f"task: {{kind: prompts, train: {file}, held_out: {folder / 'none.jsonl'}, reward: jpeg}}"
    with pytest.raises(config.RecipeError) as raised:
        config.load(recipe, [f"policy.pipeline={folder}"])
    told = str(raised.value).splitlines()
    assert [line.startswith(f"task.train: {file}:") for line in told[:10]] == [True] * 10
    assert told[10:12] == [
        f"task.train: {file}: and 6 problems more",
        f"task.held_out: there is no file {folder / 'none.jsonl'}",
    ]


def test_text_files_name_a_wrong_line_too(folder):
    file = folder / "prompts.txt"
    file.write_bytes(b"good\n\n\xff\n")
    prompts, (wrong,) = read(file)
    assert prompts == [Prompt("good")]
    assert wrong.startswith(f"{file}:3: 'utf-8' codec can't decode")


def answer(images, prompts, metadata):
    return torch.tensor([float(one["answer"] + len(prompt)) for prompt, one in zip(prompts, metadata, strict=True)])


def brightness(images, prompts):
    return images.mean((1, 2, 3))


def test_a_reward_may_take_the_metadata():
    rewards = load_rewards({"test_prompts:answer": 2.0, "test_prompts:brightness": 1.0})
    prompts = [Prompt("a", metadata={"answer": 1}), Prompt("bcd", metadata={"answer": 0.5})]
    parts = rewards(torch.full((2, 3, 4, 4), 0.25), prompts)
    assert parts["test_prompts:answer"].tolist() == [2.0, 3.5]
    assert rewards.total(parts).tolist() == [4.25, 7.25]


def test_a_line_replaces_the_negative_prompt():
    """Where it says nothing the policy's holds; and an empty one is one."""
    drawn = {}
    for own in ("", "third"):
        config = PolicyConfig(steps=4, guidance=3.0, call=CALL, negative_prompt=own)
        policy = DiffusionPolicy(policy_on().pipe, config)
        for negative in (None, "", "third"):
            batch = replace(ode_batch(policy), prompt=Prompt("first", negative=negative))
            drawn[own, negative] = policy.rollout(batch, pytest.fail, grad=False)
    assert torch.equal(drawn["", None], drawn["third", ""])
    assert torch.equal(drawn["third", None], drawn["", "third"])
    assert not torch.equal(drawn["", None], drawn["third", None])


@pytest.mark.parametrize(("kept", "encoded"), [(2, 2), (1, 3)])
def test_embeddings_of_so_many_prompts_are_kept(kept, encoded, monkeypatch):
    monkeypatch.setattr(prompts, "KEPT", kept)
    policy = policy_on()
    policy.sigmas  # noqa: B018  asks for a text of its own
    encode, calls = policy.pipe.encode_prompt, []
    policy.pipe.encode_prompt = lambda **given: calls.append(given["prompt"]) or encode(**given)
    first, second, again = (
        policy.draw(Prompt(text), [torch.Generator().manual_seed(0)]) for text in ("first", "second", "first")
    )
    assert len([text for text in calls if text is not None]) == encoded
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_sizes_that_would_follow_the_pictures_are_refused(folder):
    policy = DiffusionPolicy(tiny("flux-kontext"), PolicyConfig(steps=2, call={"max_sequence_length": 8}))
    policy.check([Prompt("first")])
    with pytest.raises(ValueError, match=r"policy\.call\.height: FluxKontextPipeline would take it from each prompt's"):
        policy.check([Prompt("first", (folder / "b.png",))])
    with pytest.raises(ValueError, match="takes at most one picture for a prompt, and 'first' brings 2"):
        policy.check([Prompt("first", (folder / "b.png",) * 2)])


@pytest.mark.parametrize(("name", "guidance"), [("flux2-klein", 3.0), ("sd3", 1.0)])
def test_a_negative_prompt_that_would_be_ignored_is_refused(name, guidance):
    """The call of FLUX.2 klein takes none, that of Stable Diffusion 3 ignores it without guidance."""
    settings = {"steps": 2, "guidance": guidance}
    policy = DiffusionPolicy(tiny(name), PolicyConfig(**settings))
    policy.check([Prompt("first", negative="")])
    with pytest.raises(
        ValueError, match=r"task: the negative prompt of 'first': .* would not use it as it is called here"
    ):
        policy.check([Prompt("first", negative="second")])
    with pytest.raises(
        ValueError, match=r"policy\.negative_prompt: .* would not use it as it is called here; leave it out"
    ):
        DiffusionPolicy(tiny(name), PolicyConfig(**settings, negative_prompt="second"))


def test_training_and_sampling_with_pictures(folder):
    """An update on prompts with one text and two pictures; then `onetake sample --image`."""
    lines = [
        {"prompt": "first", "image": path, "metadata": {"answer": n}}
        for n, path in enumerate(["pictures/a.png", "b.png"])
    ]
    file = str(written(folder, *lines))
    tiny("flux-kontext").save_pretrained(folder / "kontext")
    recipe = config.load(
        tiny_recipe(
            folder,
            task={
                "kind": "prompts",
                "train": file,
                "held_out": file,
                "reward": {"test_prompts:answer": 1.0, "jpeg": 1.0},
            },
            evaluation={"samples": 1},
            updates=1,
        ),
        [
            f"policy.pipeline={folder / 'kontext'}",
            "policy.call={max_area: 64, _auto_resize: false, height: 8, width: 8}",
        ],
    )
    run = folder / "run"
    run.mkdir()
    (run / "config.yaml").write_text(config.dump(recipe))
    train(recipe, run, config.dump(recipe), Watcher(say=lambda text: None))
    (line,) = [line for line in Log(run / "metrics.jsonl").read() if line["kind"] == "update"]
    assert line["rewards"]["test_prompts:answer"] == 5.5  # of both prompts, once each
    assert line["ratio_min"] == line["ratio_max"] == 1
    drawn = []
    for n, picture in enumerate(["pictures/a.png", "b.png"]):
        cli.sample(run, ["first"], folder / f"drawn-{n}", images=1, image=[folder / picture])
        drawn += [path.read_bytes() for path in (folder / f"drawn-{n}").iterdir()]
    assert len(set(drawn)) == 2
