"""Rewards score what a policy made. A reward is any callable ``(images, prompts) -> scores``.

images (B, 3, H, W) float in [0, 1]; prompts: B strings; scores (B,). One with a parameter ``metadata`` is also given what the
prompts' lines say there: B dictionaries. A reward of your own is named in the recipe as ``module:function``, or as
``module:Class`` with the class's fields as keys; one on another machine by its URL (see `http`). A score is never invented: a
reward that fails, stops the update.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from pydantic import ConfigDict, ValidationError
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from onetake.core.axes import imported
from onetake.core.records import Config, Prompt, nearest
from onetake.rewards import http
from onetake.rewards.clip import ClipScore, pickscore
from onetake.rewards.http import HttpReward
from onetake.rewards.jpeg import jpeg_size
from onetake.rewards.process import ProcessReward

Reward = Callable[..., Tensor]
Background = Literal["thread", "process"]

REWARDS: dict[str, Reward] = {"jpeg": jpeg_size, "pickscore": pickscore(None)}
"""By name alone."""
MODELS: dict[str, Callable[[str], Reward]] = {"clip": ClipScore, "pickscore": pickscore}
"""By name and the folder or hub repository of their model, as in ``clip:openai/clip-vit-large-patch14``."""


class Weighted(Config):
    """One of several rewards, and its weight; for a class of yours the other keys are its fields."""

    model_config = ConfigDict(extra="allow")
    weight: float = 1.0

    @property
    def fields(self) -> dict[str, Any]:
        return self.model_extra or {}


Weights = dict[str, float | Weighted]
"""Rewards by name and weight."""


def load_reward(name: str, fields: dict[str, Any] | None = None) -> Reward:
    """A built-in reward, ``module:function``, ``module:Class`` with values of its fields, or a server's URL.

    Raises ValueError, with the names that work, for anything else.
    """
    reward = _named(name)
    if isinstance(reward, type) and issubclass(reward, Config):
        try:
            reward = reward.model_validate(fields or {})
        except ValidationError as error:
            raise ValueError("\n".join(_explain(name, list(reward.model_fields), d) for d in error.errors())) from error
    elif fields:
        raise ValueError(f"task.reward.{name}: is no class of onetake's Config, and has no key {', '.join(fields)}")
    if not callable(reward):
        raise ValueError(f"task.reward: {name!r} is not a function: {reward!r}")
    return cast(Reward, reward)


def _named(name: str) -> Any:
    if name in REWARDS:
        return REWARDS[name]
    if name.startswith(("http://", "https://")):
        return HttpReward(name)
    module, _, function = name.partition(":")
    if module in MODELS and function:
        return MODELS[module](function)
    if not (module and function):
        raise ValueError(
            f"task.reward: {name!r} is not a reward; built in are {', '.join(sorted(REWARDS))} and clip:MODEL, and your own is "
            "written module:function, or http://… on a server"
        )
    try:
        return imported(name)
    except ValueError as error:
        raise ValueError(f"task.reward: {error}") from error


def _explain(name: str, known: list[str], detail: Any) -> str:
    key = ".".join(map(str, detail["loc"]))
    if detail["type"] == "extra_forbidden":
        return f"task.reward.{name}.{key}: is not a key of it{nearest(key, ['weight', *known])}"
    return f"task.reward.{name}.{key}: {detail['msg']} (got {detail['input']!r})"


@dataclass(kw_only=True)
class Rewards:
    """Named rewards and their weights: what a task scores with. One that has `threads` may begin ahead of its call."""

    functions: dict[str, Reward]
    weights: dict[str, float]
    threads: dict[str, ThreadPoolExecutor] = field(default_factory=dict)
    _called: bool = field(default=False, init=False)
    _begun: Any = field(default_factory=WeakIdKeyDictionary, init=False, repr=False, compare=False)  # images → futures

    def __call__(self, images: Tensor, prompts: Sequence[Prompt]) -> dict[str, Tensor]:
        """Name → (B,) scores, as `scores` does. Raises ValueError as `scores` does, naming the reward."""
        begun: dict[str, Future[Tensor]] = self._begun.pop(images, {})
        self._called = True
        return {
            name: begun[name].result() if name in begun else scores(name, reward, images, prompts)
            for name, reward in self.functions.items()
        }

    def ahead(self, images: Tensor, prompts: Sequence[Prompt]) -> None:
        """Begin what has threads; the call with the same tensor takes the scores.

        Not before the first call: it may load a model, and loading changes torch's default dtype for all threads.
        """
        if self._called:
            self._begun[images] = {
                name: pool.submit(scores, name, self.functions[name], images, prompts)
                for name, pool in self.threads.items()
            }

    def total(self, parts: dict[str, Tensor]) -> Tensor:
        """Weighted sum of the parts in float64, in their shape."""
        return sum(
            (self.weights[name] * parts[name].double() for name in self.functions), start=torch.zeros(()).double()
        )


def takes_metadata(reward: Reward) -> bool:
    """Whether the reward wants the prompts' metadata beside their text."""
    return "metadata" in inspect.signature(reward).parameters


def load_rewards(names: str | Weights, *, background: Background | None = None) -> Rewards:
    """One reward by its name, or several by name and weight; begun in the `background`, as servers always are.

    A reward on this machine has one thread or process: it sees micro-batches one after the other, in the order in which they are
    sampled. Raises ValueError as `load_reward` does.
    """
    given = {names: 1.0} if isinstance(names, str) else names
    asked = {name: one if isinstance(one, Weighted) else Weighted(weight=one) for name, one in given.items()}
    functions = {name: load_reward(name, one.fields) for name, one in asked.items()}
    workers = {
        n: http.REQUESTS if isinstance(f, HttpReward) else int(background is not None) for n, f in functions.items()
    }
    threads = {name: ThreadPoolExecutor(count, "reward") for name, count in workers.items() if count}
    if background == "process":
        functions = {
            name: f if isinstance(f, HttpReward) else ProcessReward(name, asked[name].fields)
            for name, f in functions.items()
        }
    return Rewards(functions=functions, weights={n: one.weight for n, one in asked.items()}, threads=threads)


def scores(name: str, reward: Reward, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
    """(B,) scores in the dtype in which the reward gives them, which says how well it knows them; float64 if that is no float.

    Raises ValueError for a wrong length or a score that is not finite, naming the prompt.
    """
    values = call(reward, images, [prompt.text for prompt in prompts], [prompt.metadata for prompt in prompts])
    values = values if values.is_floating_point() else values.double()
    if values.shape != (len(prompts),):
        raise ValueError(
            f"the reward {name} returned shape {tuple(values.shape)} for {len(prompts)} images; it must be ({len(prompts)},)"
        )
    if not values.isfinite().all():
        bad = int((~values.isfinite()).nonzero()[0])
        raise ValueError(
            f"the reward {name} returned {float(values[bad])} for image {bad} of prompt {prompts[bad].text!r}; the update is "
            "stopped, nothing was trained on it and the last checkpoint stands"
        )
    return values


def call(reward: Reward, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
    """What the reward returns, on the CPU; it gets the metadata if it has a parameter for it."""
    given = {"metadata": metadata} if takes_metadata(reward) else {}
    with torch.cuda.device_of(images), torch.no_grad():  # a new thread begins on the first GPU, and with gradients
        return torch.as_tensor(reward(images, prompts, **given)).detach().cpu()
