"""A reward that another process computes: named by its URL, and asked while the next group is sampled.

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
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

PATIENCE = 600.0  # s for an answer
PAUSES = (1.0, 4.0, 16.0)  # s before a server that cannot be reached is tried again


class HttpReward:
    """Nothing is sent before the first call. Raises ValueError with the URL and the cause if the server does not score."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="reward")
        self._asked: Any = WeakIdKeyDictionary()  # images → the answer that is on its way

    def ahead(self, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> None:
        """Ask now; the call with the same tensor takes the answer."""
        self._asked[images] = self._pool.submit(self._ask, images, prompts, metadata)

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
        """(B,) scores of images (B, [frames,] 3, H, W) in [0, 1]."""
        asked: Future[list[float]] | None = self._asked.pop(images, None)
        return torch.tensor(self._ask(images, prompts, metadata) if asked is None else asked.result()).double()

    def _ask(self, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> list[float]:
        pixels = (images.float().clamp(0, 1) * 255).round().byte().movedim(-3, -1).cpu().numpy()
        body = {"prompts": prompts, "metadata": metadata, "images": [_png(sample) for sample in pixels]}
        request = urllib.request.Request(self._url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        answer = self._answer(request)
        try:
            return [float(score) for score in json.loads(answer)["scores"]]
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
