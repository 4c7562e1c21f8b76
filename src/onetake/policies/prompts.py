"""Prompts as call arguments: embedded once and kept, so that text encoders need not stay on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from onetake.core.records import Prompt

KEPT = 512
"""Prompts whose embeddings are kept, the latest used, in CPU memory: 2 GiB of FLUX.1's."""


class Offloaded:
    """Text encoders that stay on the CPU, and that `pipe` has only while it embeds: it takes its device from its first model."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        self.encoders: dict[str, nn.Module] = {
            name: model
            for name, model in pipe.components.items()
            if name.startswith("text_encoder") and model is not None
        }
        self._put(dict.fromkeys(self.encoders))

    @contextmanager
    def present(self, device: torch.device) -> Iterator[None]:
        """The pipeline has its encoders, on `device`."""
        self._put({name: encoder.to(device) for name, encoder in self.encoders.items()})
        try:
            yield
        finally:
            self._put(dict.fromkeys(self.encoders))
            for encoder in self.encoders.values():
                encoder.to("cpu")

    def _put(self, encoders: dict[str, nn.Module | None]) -> None:
        vars(self._pipe).update(encoders)  # not by setattr, which would also forget their classes


class Embeddings:
    """What `make` says of a prompt."""

    def __init__(self, make: Callable[[Prompt], dict[str, Any]], offloaded: Offloaded | None = None) -> None:
        self._make, self._offloaded = make, offloaded
        self._kept: dict[Prompt, dict[str, Any]] = {}  # least recently used first

    def of(self, prompt: Prompt, device: torch.device) -> dict[str, Any]:
        """The prompt's call arguments, tensors on `device`."""
        self.add([prompt], device)
        embeds = self._kept[prompt] = self._kept.pop(prompt)
        return tree_map_only(Tensor, lambda tensor: tensor.to(device), embeds)

    def add(self, prompts: Iterable[Prompt], device: torch.device) -> None:
        """Embed those prompts that are not kept, in one stay of the encoders on `device`."""
        missing = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self._kept]
        with self.encoders_on(device) if missing else nullcontext(), torch.no_grad():
            self._kept |= {prompt: tree_map_only(Tensor, Tensor.cpu, self._make(prompt)) for prompt in missing}
        for prompt in list(self._kept)[:-KEPT]:
            del self._kept[prompt]

    @contextmanager
    def encoders_on(self, device: torch.device) -> Iterator[None]:
        """The pipeline can encode prompts on `device`."""
        with nullcontext() if self._offloaded is None else self._offloaded.present(device):
            yield
