"""Compressibility (DDPO, arXiv 2305.13301): a reward that needs no model, for trying out a new pipeline."""

from __future__ import annotations

import io

import torch
from PIL import Image
from torch import Tensor


def jpeg_size(images: Tensor, prompts: list[str]) -> Tensor:
    """(B,) minus the size in kilobytes of each image (B, 3, H, W) as a JPEG of quality 95."""
    sizes = []
    for pixels in (images.clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy():
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, format="JPEG", quality=95)
        sizes.append(-len(file.getvalue()) / 1000)
    return torch.tensor(sizes)
