"""Rewards by a model: the real classes on a tiny random checkpoint. This tests plumbing, not scores."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from PIL import Image
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor

from onetake.rewards import load_reward, load_rewards
from onetake.rewards.clip import PICKSCORE, ClipScore
from tiny import clip_tokenizer

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
