"""Prompts as call arguments: embedded once and kept, so that text encoders need not stay on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

KEPT = 512
"""Prompts whose embeddings are kept, the latest used, in CPU memory: 2 GiB of FLUX.1's."""


class Embeddings:
    """What `make` says of a prompt. With `offloaded` encoders, these are on the device only while it is asked."""

    def __init__(self, make: Callable[[str], dict[str, Any] | None], offloaded: Iterable[nn.Module] = ()) -> None:
        self._make, self.offloaded = make, tuple(offloaded)
        self._kept: dict[str, dict[str, Any] | None] = {}  # least recently used first

    def of(self, prompt: str, device: torch.device) -> dict[str, Any] | None:
        """The prompt's call arguments, tensors on `device`."""
        self.add([prompt], device)
        embeds = self._kept[prompt] = self._kept.pop(prompt)
        return tree_map_only(Tensor, lambda tensor: tensor.to(device), embeds)

    def add(self, prompts: Iterable[str], device: torch.device) -> None:
        """Embed those prompts that are not kept, in one stay of the encoders on `device`."""
        missing = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self._kept]
        for encoder in self.offloaded if missing else ():
            encoder.to(device)
        with torch.no_grad():
            self._kept |= {prompt: tree_map_only(Tensor, Tensor.cpu, self._make(prompt)) for prompt in missing}
        for encoder in self.offloaded if missing else ():
            encoder.to("cpu")
        for prompt in list(self._kept)[:-KEPT]:
            del self._kept[prompt]
