"""The built-in image task: captions invert, the verifier is strict, the shipped base is a stock pipeline."""

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import StableDiffusion3Pipeline

from onetake.tasks import shapes
from onetake.tasks.shapes.captions import FAMILIES, RELATIONS, Group, Scene, caption, parse, prompts, scenes
from onetake.tasks.shapes.render import GROUND, PALETTE, coverage, render
from onetake.tasks.shapes.verify import analyse, verify

BASE = Path(shapes.__file__).parent / "base"
SCENES = [scene for family in FAMILIES for scene in scenes(family)]
OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}


def renders(family: str, n: int, seed: int) -> list[tuple[np.ndarray, Scene]]:
    rng = np.random.default_rng(seed)
    pool = scenes(family)
    chosen = [pool[i] for i in rng.integers(len(pool), size=n)]
    return [(render(scene, rng), scene) for scene in chosen]


def paint(image: np.ndarray, colour: tuple[int, ...], shape: str, y: float, x: float, area: float) -> np.ndarray:
    ys, xs = np.mgrid[0 : image.shape[0], 0 : image.shape[1]]
    alpha = coverage(shape, ys - y, xs - x, area)[..., None]
    return np.rint((1 - alpha) * image + alpha * np.array(colour)).astype(np.uint8)


def ground() -> np.ndarray:
    return np.tile(np.array(GROUND, np.uint8), (32, 32, 1))


def test_caption_and_parse_are_inverse() -> None:
    assert [parse(caption(scene)) for scene in SCENES] == SCENES


def test_captions_are_unique() -> None:
    assert len({caption(scene) for scene in SCENES}) == len(SCENES)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "number colour shape"),
        ("a purple circle", "not a colour"),
        ("a red hexagon", "not a shape"),
        ("five red circles", "not a number"),
        ("one red circle", 'should read "a red circle"'),
        ("two red circle", 'should read "two red circles"'),
        ("a red circle above a red circle", "must differ"),
        ("two red circles above a red square", "two single objects"),
        ("three red circles and two red squares", "at most 4"),
        ("a red circle near a red square", "number colour shape"),
    ],
)
def test_parse_says_what_is_wrong_and_what_works(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"{reason}.*Forms that work"):
        parse(text)


@pytest.mark.parametrize(("family", "least"), [("single", 1), ("count", 15), ("relation", 50)])
def test_splits_are_disjoint_and_complete(family: str, least: int) -> None:
    train, held_out = prompts(family, "train"), prompts(family, "held_out")
    assert not set(train) & set(held_out)
    assert sorted(train + held_out) == sorted(caption(scene) for scene in scenes(family))
    assert len(held_out) >= least
    assert prompts(family, "train") == train


def test_unknown_family_and_split_are_refused() -> None:
    with pytest.raises(ValueError, match="single, count, relation"):
        prompts("colours", "train")
    with pytest.raises(ValueError, match="held_out"):
        prompts("single", "test")


@pytest.mark.parametrize("family", FAMILIES)
def test_verifier_accepts_renders(family: str) -> None:
    verdicts = [verify(image, caption(scene)) for image, scene in renders(family, 400, seed=1)]
    assert np.mean([verdict.success for verdict in verdicts]) >= 0.99


def test_verdict_is_the_share_of_constraints() -> None:
    image = paint(ground(), PALETTE["red"], "circle", 16, 8, 60)
    verdict = verify(image, "a red circle left of a green square")
    met = ["red object 1", "red circle 1", "exactly 1 red circle", "nothing else"]
    assert [name for name, holds in verdict.constraints.items() if holds] == met
    assert verdict.score == 4 / 8
    assert not verdict.success


def test_analyse_measures_place_and_area() -> None:
    for shape in ("circle", "square", "triangle"):
        (found,) = analyse(paint(ground(), PALETTE["blue"], shape, 14.3, 17.6, 70))
        assert (found.colour, found.shape) == ("blue", shape)
        assert found.y == pytest.approx(14.3, abs=0.3)
        assert found.x == pytest.approx(17.6, abs=0.3)
        assert found.area == pytest.approx(70, rel=0.06)


def test_verifier_is_deterministic_and_leaves_the_image_alone() -> None:
    image, scene = renders("relation", 1, seed=2)[0]
    before = image.copy()
    assert verify(image, caption(scene)) == verify(image, caption(scene))
    assert np.array_equal(image, before)


def test_renders_are_a_function_of_the_generator() -> None:
    scene = parse("two red circles and one green square")
    one, again, other = (render(scene, np.random.default_rng(seed)) for seed in (3, 3, 4))
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)


def test_larger_pictures_are_verified_too() -> None:
    rng = np.random.default_rng(5)
    assert all(verify(render(scene, rng, size=64), caption(scene)).success for scene in scenes("relation")[::40])


NEXT = {
    **{"red": "green", "green": "blue", "blue": "yellow", "yellow": "red"},
    **{"circle": "square", "square": "triangle", "triangle": "circle"},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_wrong_colour_or_shape_is_rejected(family: str) -> None:
    for image, scene in renders(family, 60, seed=6):
        first, *rest = scene.groups
        for changed in (
            Group(first.count, NEXT[first.colour], first.shape),
            Group(first.count, first.colour, NEXT[first.shape]),
        ):
            if changed.kind not in {group.kind for group in rest}:
                assert not verify(image, caption(Scene((changed, *rest), scene.relation))).success


def test_reversed_relation_is_rejected_and_nothing_else() -> None:
    for image, scene in renders("relation", 100, seed=7):
        for relation in RELATIONS:
            verdict = verify(image, caption(Scene(scene.groups, relation)))
            failed = [name for name, holds in verdict.constraints.items() if not holds]
            assert failed == ([] if relation == scene.relation else [relation])


def test_missing_and_extra_objects_are_rejected() -> None:
    two, three = "two blue squares", "three blue squares"
    for image, scene in renders("count", 300, seed=8):
        if caption(scene) == two:
            assert not verify(image, three).success
        if caption(scene) == three:
            assert not verify(image, two).success
    image = paint(ground(), PALETTE["red"], "circle", 9, 9, 60)
    assert verify(image, "a red circle").success
    assert not verify(paint(image, PALETTE["green"], "square", 22, 22, 20), "a red circle").success


@pytest.mark.parametrize("drifted", [(40, 150, 150), (30, 127, 143), (235, 120, 40), (130, 60, 150), (120, 120, 120)])
def test_drifted_hues_have_no_colour(drifted: tuple[int, int, int]) -> None:
    found = analyse(paint(ground(), drifted, "square", 16, 16, 80))
    assert {item.colour for item in found} == {None}


@pytest.mark.parametrize("colour", PALETTE)
def test_half_faded_objects_are_rejected(colour: str) -> None:
    for strength in (0.3, 0.55, 0.75):
        faded = strength * np.array(PALETTE[colour]) + (1 - strength) * np.array(GROUND)
        found = analyse(paint(ground(), tuple(faded), "circle", 16, 16, 80))
        assert [item.colour for item in found] == [None]


@pytest.mark.parametrize("shape", ["circle", "square", "triangle"])
def test_malformed_shapes_are_rejected(shape: str) -> None:
    text = f"a green {shape}"
    image = paint(ground(), PALETTE["green"], shape, 16, 16, 90)
    assert verify(image, text).success
    erased = image.copy()
    erased[:, 16:] = GROUND
    assert not verify(erased, text).success
    holed = paint(image, GROUND, "circle", 16, 16, 20)
    assert not verify(holed, text).success
    stretched = np.repeat(image, 2, axis=1)[:, 16:48]
    assert not verify(stretched, text).success


def test_blurred_mush_is_rejected() -> None:
    for image, scene in renders("relation", 40, seed=9):
        padded = np.pad(image.astype(float), ((4, 4), (4, 4), (0, 0)), mode="edge")
        windows = np.lib.stride_tricks.sliding_window_view(padded, (9, 9), axis=(0, 1))
        assert not verify(np.rint(windows.mean((3, 4))).astype(np.uint8), caption(scene)).success


def test_noise_and_empty_pictures_are_rejected() -> None:
    noise = np.random.default_rng(10).integers(0, 256, (32, 32, 3)).astype(np.uint8)
    assert verify(noise, "a red circle").score < 0.7
    assert not verify(noise, "a red circle").success
    assert verify(ground(), "a red circle").constraints["nothing else"]
    assert not verify(ground(), "a red circle").success


def test_other_image_types_are_refused() -> None:
    with pytest.raises(ValueError, match="uint8"):
        analyse(np.zeros((32, 32, 3), np.float32))


@pytest.fixture(scope="module")
def base() -> StableDiffusion3Pipeline:
    pipe = StableDiffusion3Pipeline.from_pretrained(BASE)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_plain_call_of_the_base_makes_a_picture(base: StableDiffusion3Pipeline) -> None:
    image = base("a red circle above a blue square", num_inference_steps=2).images[0]
    assert image.size == (32, 32)


def test_shipped_base_is_small() -> None:
    assert sum(file.stat().st_size for file in BASE.rglob("*") if file.is_file()) <= 12e6


def test_base_has_room_and_signal_for_post_training(base: StableDiffusion3Pipeline) -> None:
    """Strict success on held-out relations without guidance; n = 148, so two standard errors are about 0.08."""
    texts = prompts("relation", "held_out") * 2
    before = torch.get_rng_state()
    images = base(
        texts,
        num_inference_steps=8,
        guidance_scale=1.0,
        max_sequence_length=12,
        generator=torch.Generator().manual_seed(11),
        output_type="np",
    ).images
    assert torch.equal(before, torch.get_rng_state())
    pixels = np.rint(images * 255).astype(np.uint8)
    verdicts = [verify(image, text) for image, text in zip(pixels, texts, strict=True)]
    assert 0.12 <= np.mean([verdict.success for verdict in verdicts]) <= 0.6
    assert len({round(verdict.score, 3) for verdict in verdicts}) >= 5


def test_every_word_is_one_token(base: StableDiffusion3Pipeline) -> None:
    for text in map(caption, SCENES):
        words = len(text.split())
        assert len(base.tokenizer(text).input_ids) == words + 2 <= base.tokenizer.model_max_length
        assert len(base.tokenizer_3(text).input_ids) == words + 1
        assert base.tokenizer_3.unk_token_id not in base.tokenizer_3(text).input_ids


@torch.no_grad()
def test_prompt_embeds_are_clip_features_beside_and_t5_tokens_behind(base: StableDiffusion3Pipeline) -> None:
    texts = ["a red circle above a blue square", ""]
    embeds, _, pooled, _ = base.encode_prompt(
        texts, None, None, do_classifier_free_guidance=False, max_sequence_length=12
    )
    ids = base.tokenizer(texts, padding="max_length", return_tensors="pt").input_ids
    clips = [encoder(ids, output_hidden_states=True) for encoder in (base.text_encoder, base.text_encoder_2)]
    t5_ids = base.tokenizer_3(texts, padding="max_length", max_length=12, return_tensors="pt").input_ids
    beside = torch.cat([clip.hidden_states[-2] for clip in clips], dim=-1)
    assert torch.equal(embeds, torch.cat([beside, base.text_encoder_3(t5_ids)[0]], dim=1))
    assert torch.equal(pooled, torch.cat([clip.text_embeds for clip in clips], dim=-1))
