"""The built-in video task: captions invert, the tracker is strict, the recipe is complete."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusers import WanPipeline

from onetake.core.records import Prompt
from onetake.run import config
from onetake.tasks import BASES, MotionTask
from onetake.tasks.motion.captions import DIRECTIONS, PACES, Motion, caption, motions, parse, prompts
from onetake.tasks.motion.render import FRAMES, SIZE, render
from onetake.tasks.motion.verify import verify
from onetake.tasks.shapes.render import GROUND

OPPOSITE = {"left": "right", "right": "left", "up": "down", "down": "up"}


def clips(seed: int, pace: str | None = None) -> list[tuple[np.ndarray, Motion]]:
    rng = np.random.default_rng(seed)
    return [(render(motion, rng), motion) for motion in motions() if pace in (None, motion.pace)]


def failed(clip: np.ndarray, motion: Motion) -> set[str]:
    return {name for name, held in verify(clip, caption(motion)).constraints.items() if not held}


def test_caption_and_parse_are_inverse() -> None:
    assert [parse(caption(motion)) for motion in motions()] == motions()
    assert len({caption(motion) for motion in motions()}) == 4 * 3 * 4 * 4


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "COLOUR SHAPE moving"),
        ("a red circle left of a green circle", "COLOUR SHAPE moving"),
        ("a purple circle moving left", "not a colour"),
        ("a red hexagon moving left", "not a shape"),
        ("a red circle moving sideways", "not a direction"),
        ("a red circle moving left and back", "not a pace"),
    ],
)
def test_parse_says_what_is_wrong(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse(text)


def test_splits_are_disjoint_and_complete() -> None:
    train, held_out = prompts("train"), prompts("held_out")
    assert not set(train) & set(held_out)
    assert sorted(train + held_out) == sorted(caption(motion) for motion in motions())
    assert {parse(text).pace for text in held_out} == set(PACES)
    assert {parse(text).direction for text in held_out} == set(DIRECTIONS)


def test_rendered_clips_pass() -> None:
    for clip, motion in clips(0) + clips(1):
        assert verify(clip, caption(motion)).success, (motion, failed(clip, motion))


def test_backwards_is_another_direction() -> None:
    for clip, motion in clips(2):
        assert f"moving {motion.direction}" in failed(clip[::-1], motion)
        if motion.pace != "then stopping":
            assert not failed(clip[::-1], replace(motion, direction=OPPOSITE[motion.direction]))


def test_other_identities_and_directions_fail() -> None:
    for clip, motion in clips(3)[::13]:
        for other in motions()[::3]:
            if (motion.colour, motion.shape, motion.direction) != (other.colour, other.shape, other.direction):
                assert not verify(clip, caption(other)).success


@pytest.mark.parametrize(
    ("pace", "told"),
    [("slowly", "quickly"), ("quickly", "slowly"), ("quickly", "then stopping"), ("then stopping", "")],
)
def test_another_pace_fails(pace: str, told: str) -> None:
    for clip, motion in clips(4, pace):
        assert failed(clip, replace(motion, pace=told)) & {told or "going on", "smoothly"}


def test_standing_still_is_not_moving() -> None:
    for clip, motion in clips(5):
        assert {f"moving {motion.direction}"} <= failed(np.repeat(clip[:1], FRAMES, 0), motion)


def test_a_jump_is_not_smooth() -> None:
    for clip, motion in clips(6, "quickly"):
        swapped = clip[[0, 1, 6, 3, 4, 5, 2, 7, 8]]
        assert failed(swapped, motion) == {"smoothly"}


def test_one_bad_frame_is_noticed() -> None:
    for clip, motion in clips(7, "slowly"):
        empty, ghost = clip.copy(), clip.copy()
        empty[4] = GROUND
        ghost[4, :4, :4] = (90, 90, 90)
        assert motion.colour in failed(empty, motion)
        assert "nothing else" in failed(ghost, motion)


def test_a_shape_that_turns_into_another_fails() -> None:
    rng = np.random.default_rng(7)
    for motion in motions():
        other = "square" if motion.shape == "triangle" else "triangle"
        state = rng.bit_generator.state
        clip = render(motion, rng)
        rng.bit_generator.state = state
        assert f"{motion.colour} {motion.shape}" in failed(
            np.concatenate([clip[:5], render(replace(motion, shape=other), rng)[5:]]), motion
        )


def test_another_number_of_frames_is_refused() -> None:
    clip, motion = clips(8)[0]
    with pytest.raises(ValueError, match=r"takes \(9, H, W, 3\) clips"):
        verify(clip[:5], caption(motion))


def test_reward_is_the_share_of_constraints() -> None:
    clip, motion = clips(9, "slowly")[0]
    video = torch.from_numpy(np.stack([clip, clip[::-1].copy()])).movedim(-1, -3) / 255
    rewards = MotionTask().load().rewards(video, [Prompt(caption(motion))] * 2)["constraints"]
    assert rewards.tolist() == [1.0, pytest.approx(4 / 6)]


@pytest.fixture(scope="module")
def base() -> WanPipeline:
    pipe = WanPipeline.from_pretrained(BASES["motion"])
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_base_has_room_and_signal_for_post_training(base: WanPipeline) -> None:
    """Strict success on held-out captions without guidance, by a plain call; n = 81, so two standard errors are 0.11."""
    texts = prompts("held_out") * 3
    call = config.load(config.recipe_text("motion")).policy.call
    generator = torch.Generator().manual_seed(11)
    frames = base(
        texts, **call, num_inference_steps=8, guidance_scale=1.0, generator=generator, output_type="np"
    ).frames
    assert frames.shape == (81, FRAMES, SIZE, SIZE, 3)
    verdicts = [verify(*pair) for pair in zip(np.rint(frames * 255).astype(np.uint8), texts, strict=True)]
    assert 0.3 <= np.mean([verdict.success for verdict in verdicts]) <= 0.65
    assert len({round(verdict.score, 3) for verdict in verdicts}) >= 4


def test_shipped_base_is_small() -> None:
    assert sum(file.stat().st_size for file in BASES["motion"].rglob("*") if file.is_file()) <= 12e6


def test_every_word_is_one_token(base: WanPipeline) -> None:
    for motion in motions():
        text = caption(motion)
        ids = base.tokenizer(text).input_ids
        assert len(ids) == len(text.split()) + 1 <= base.tokenizer.model_max_length
        assert base.tokenizer.unk_token_id not in ids
