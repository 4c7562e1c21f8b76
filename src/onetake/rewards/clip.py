"""How well a picture fits its prompt by a CLIP model: CLIPScore, and PickScore (arXiv 2305.01569), trained on preferences."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import AutoProcessor, CLIPModel

PICKSCORE = "yuvalkirstain/PickScore_v1"
PICKSCORE_PROCESSOR = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"


class ClipScore:
    """Scores are the model's own: exp(logit_scale)·cos(image, text). Loaded at the first call, onto the images' device."""

    def __init__(self, source: str, processor: str | None = None) -> None:
        """`source` is a folder or hub repository of a `CLIPModel`; its processor lies beside it unless named."""
        self._source, self._processor_source = source, processor or source

    @cached_property
    def _loaded(self) -> tuple[Any, Any]:
        try:
            model: Any = CLIPModel.from_pretrained(self._source)
            processor = AutoProcessor.from_pretrained(self._processor_source)
        except OSError as error:
            raise ValueError(
                f"task.reward: {self._source!r} could not be loaded as a CLIP model: {error}. Name a folder that holds one, "
                "as in clip:FOLDER or pickscore:FOLDER"
            ) from error
        return model.eval().requires_grad_(False), processor

    @torch.no_grad()
    def __call__(self, images: Tensor, prompts: list[str]) -> Tensor:
        """(B,) scores of images (B, 3, H, W) in [0, 1]; prompts are cut to the model's length."""
        model, processor = self._loaded
        pixels = (images.float().clamp(0, 1) * 255).round().byte().movedim(1, -1).cpu().numpy()
        inputs = processor(
            images=[Image.fromarray(picture) for picture in pixels],
            text=prompts,
            padding=True,
            truncation=True,
            max_length=model.config.text_config.max_position_embeddings,
            return_tensors="pt",
        )
        return model.to(images.device)(**inputs.to(images.device)).logits_per_image.diagonal()


def pickscore(source: str | None) -> ClipScore:
    """PickScore v1, or a folder that holds it with its processor."""
    return ClipScore(PICKSCORE, PICKSCORE_PROCESSOR) if source is None else ClipScore(source)
