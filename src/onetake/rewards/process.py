"""A reward in a process of its own: it shares neither the interpreter nor the memory with sampling."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache, cached_property
from threading import Thread
from typing import Any

import torch
from torch import Tensor


class ProcessReward:
    """The reward of this name, with values of its fields, loaded in its process at the first call. Every rank has its own.

    Raises ValueError if the process dies, and whatever the reward raises.
    """

    def __init__(self, name: str, fields: dict[str, Any]) -> None:
        self._name, self._fields = name, json.dumps(fields)

    @cached_property
    def _process(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_follow_parent)

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
        """(B,) scores, on the CPU. There as here the reward gets the images on the device they are on."""
        file = io.BytesIO()
        torch.save(images.cpu(), file)
        reward = self._name, self._fields
        asked = self._process.submit(_score, reward, file.getvalue(), str(images.device), prompts, metadata)
        try:
            return asked.result()
        except BrokenProcessPool as error:
            raise ValueError(
                f"task.reward: the process of {self._name} died, perhaps for want of memory; nothing was trained on this rollout "
                "and the last checkpoint stands. With task.background=thread the reward runs in the run's own process"
            ) from error


def _follow_parent() -> None:
    """A run that is killed tells nobody; its reward must not outlive it."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    Thread(target=wait, daemon=True).start()


@cache
def _reward(name: str, fields: str) -> Any:
    from onetake.rewards import load_reward

    return load_reward(name, json.loads(fields))


def _score(
    reward: tuple[str, str], images: bytes, device: str, prompts: list[str], metadata: list[dict[str, Any]]
) -> Tensor:
    from onetake.rewards import call

    return call(_reward(*reward), torch.load(io.BytesIO(images)).to(device), prompts, metadata)
