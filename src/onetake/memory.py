"""The most memory a stretch of work had in use at once."""

from __future__ import annotations

from pathlib import Path

import torch


class PeakMemory:
    """The most memory in use at once since the last `restart`: of the device's allocator, or on CPU of the process (Linux)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def restart(self) -> bool:
        """Forget the peak so far. False where that is impossible, and later ones not known: not Linux, or a strict container."""
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
    def free(self) -> int:
        """Bytes that could be in use beyond the peak."""
        if self._device.type == "cuda":
            return torch.cuda.mem_get_info(self._device)[1] - self.bytes
        grown = self.bytes - _kibibytes("/proc/self/status", "VmRSS") * 1024
        return _kibibytes("/proc/meminfo", "MemAvailable") * 1024 - grown


def _kibibytes(file: str, key: str) -> int:
    (line,) = [line for line in Path(file).read_text().splitlines() if line.startswith(f"{key}:")]
    return int(line.split()[1])
