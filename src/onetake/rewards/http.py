"""A reward that another process computes: named by its URL, and asked while the next micro-batch is sampled.

The server gets one POST for a micro-batch, as JSON: ``prompts``, ``metadata`` and ``images``, a PNG in base64 for each sample, of
a video a list of them. It answers ``{"scores": [...]}``, one number a sample.
"""

from __future__ import annotations

import base64
import io
import json
import time
import urllib.error
import urllib.request
from typing import Any

import torch
from PIL import Image
from torch import Tensor

REQUESTS = 4  # under way at once
PATIENCE = 600.0  # s for an answer
PAUSES = (1.0, 4.0, 16.0)  # s before a server that cannot be reached is tried again


class HttpReward:
    """Raises ValueError with the URL and the cause if the server does not score."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
        """(B,) scores of images (B, [frames,] 3, H, W) in [0, 1]."""
        pixels = (images.float().clamp(0, 1) * 255).round().byte().movedim(-3, -1).cpu().numpy()
        body = {"prompts": prompts, "metadata": metadata, "images": [_png(sample) for sample in pixels]}
        request = urllib.request.Request(self._url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        answer = self._answer(request)
        try:
            return torch.tensor([float(score) for score in json.loads(answer)["scores"]], dtype=torch.float64)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f'task.reward: {self._url} answered {answer[:100]!r}; expected {{"scores": [one number a sample]}}'
            ) from error

    def _answer(self, request: urllib.request.Request) -> bytes:
        for pause in (*PAUSES, None):
            try:
                with urllib.request.urlopen(request, timeout=PATIENCE) as response:
                    return response.read()
            except urllib.error.HTTPError as error:
                raise ValueError(
                    f"task.reward: {self._url} answered {error.code} {error.reason}: {error.read(200)!r}"
                ) from error
            except (urllib.error.URLError, ConnectionError, TimeoutError) as error:
                if pause is None:
                    raise ValueError(
                        f"task.reward: {self._url} cannot be reached ({error}), tried {len(PAUSES) + 1} times; nothing was "
                        "trained on this rollout and the last checkpoint stands"
                    ) from error
                time.sleep(pause)
        raise AssertionError("the last try returns or raises")


def _png(pixels: Any) -> str | list[str]:
    """uint8 (H, W, 3), or (frames, H, W, 3)."""
    if pixels.ndim == 4:
        return [str(_png(frame)) for frame in pixels]
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()
