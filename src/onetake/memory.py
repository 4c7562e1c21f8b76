"""The most memory a stretch of work had in use at once: as the machine saw it, or counted tensor by tensor."""

from __future__ import annotations

import re
import resource
import sys
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from onetake.allocator import malloc_bytes

_forgotten: dict[str, float] = {"cpu": 0.0, "cuda": 0.0}  # the highest peaks that a restart cleared, MiB


class PeakMemory:
    """The most memory in use at once since the last `restart`: of the device's allocator, or on CPU of the process (Linux)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def restart(self) -> bool:
        """Forget the peak so far. False where that is impossible, and later ones not known: not Linux, or a strict container."""
        _forgotten[self._device.type] = peak_mib(self._device)
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return True
        try:
            Path("/proc/self/clear_refs").write_text("5")  # resets the kernel's high-water mark to the current size
        except OSError:
            return False
        return True

    @property
    def bytes(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return _kibibytes("/proc/self/status", "VmHWM") * 1024

    @property
    def used(self) -> int:
        """Bytes in use now: given out by the device's allocator, or on CPU by malloc; 0 if not known."""
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else malloc_bytes()

    @property
    def free(self) -> int:
        """Bytes that could be in use beyond the peak."""
        if self._device.type == "cuda":
            return torch.cuda.mem_get_info(self._device)[1] - self.bytes
        grown = self.bytes - _kibibytes("/proc/self/status", "VmRSS") * 1024
        return _kibibytes("/proc/meminfo", "MemAvailable") * 1024 - grown


def _kibibytes(file: str, key: str) -> int:
    (line,) = [line for line in Path(file).read_text().splitlines() if line.startswith(f"{key}:")]
    return int(line.split()[1])


class LiveBytes(TorchDispatchMode):
    """Counts every block of memory that is made inside while it is in use, once however it is viewed.

    Exact, on any device, and on tensors that hold no data. What a kernel needs while it runs is not seen, nor what an
    allocator adds.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        """The blocks of `known` tensors are not counted."""
        super().__init__()
        self.now = self.peak = 0
        self._seen: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet(t.untyped_storage() for t in known)

    def restart(self) -> None:
        """Forget the peak so far."""
        self.peak = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # asked for by a FakeTensor of itself, at every operation
            return args[0].device
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._seen:
            return
        self._seen.add(storage)
        weakref.finalize(storage, self._freed, storage.nbytes()).atexit = False
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)

    def _freed(self, nbytes: int) -> None:
        self.now -= nbytes


def peak_mib(device: torch.device) -> float:
    """The most memory in use so far, MiB, `restart` or not: on a GPU what its allocator gave out, else `peak_rss_mib`."""
    if device.type != "cuda":
        return peak_rss_mib()
    return max(_forgotten["cuda"], torch.cuda.max_memory_allocated(device) / (1 << 20))


def peak_rss_mib() -> float:
    """Highest resident memory of this process so far, MiB (the kernel counts KiB on Linux, bytes on macOS)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # on Linux a restart clears it too
    return max(_forgotten["cpu"], peak / (1 << 20 if sys.platform == "darwin" else 1 << 10))


def parse_bytes(text: str, name: str = "memory") -> int:
    """``80GiB``, ``24 GB`` or ``512MiB`` as bytes. Raises ValueError for anything else, which `name` was to be."""
    told = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kKMGT]?)(i?)B", text.strip())
    if told is None:
        raise ValueError(f"{name}: {text!r} is not a size; write 80GiB, 24GB or 512MiB")
    return int(float(told[1]) * (1024 if told[3] else 1000) ** " KMGT".index(told[2].upper() or " "))


def parse_budget(memory: int | str) -> Callable[[int, int], int]:
    """Memory for saved activations: a size in bytes or like ``40GiB`` that the peak may reach, ``1.10x`` of the peak, or ``80%``
    of what is free (``auto``).

    The function takes the peak of recomputing everything and the bytes free beside it. Raises ValueError for anything else.
    """
    memory = "80%" if memory == "auto" else memory
    told = re.fullmatch(r"(\d+(?:\.\d+)?)(x|%)", memory) if isinstance(memory, str) else None
    if told is None:
        try:
            total = memory if isinstance(memory, int) else parse_bytes(str(memory))
        except ValueError as error:
            raise ValueError(
                f'memory: "{memory}" is not understood; write a size such as 40GiB, "1.10x" of the peak of recomputing everything, '
                '"80%" of what is free beside it, or "auto", which is that'
            ) from error
        return lambda peak, _: total - peak
    number = float(told[1])
    if told[2] == "x":
        return lambda peak, _: round((number - 1) * peak)
    return lambda _, free: round(number / 100 * free)


def device_memory(device: torch.device) -> int | None:
    """All of an accelerator's, in bytes; None on CPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the blocks of memory behind `tensors`, each once."""
    return sum({storage._cdata: storage.nbytes() for t in tensors for storage in [t.untyped_storage()]}.values())
