"""Freed memory stays with the process: on CPUs, glibc otherwise gives large blocks back and faults them in again.

An update frees and allocates the same activations over and over. Measured by `benchmarks/executions.py --allocator default`,
retained graphs lose their whole advantage to page faults without this.
"""

from __future__ import annotations

import ctypes
import platform

_TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # names of mallopt(3)
_MAPPED, _IN_USE = 4, 7  # hblkhd and uordblks of mallinfo(3)
_LARGEST_MMAP_THRESHOLD = 32 << 20  # glibc accepts no more on 64-bit systems


def keep_freed_memory() -> bool:
    """Ask glibc not to return freed memory to the system until exit. False where there is no glibc."""
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    kept = libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1)
    return bool(kept and libc.mallopt(MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD))


def malloc_bytes() -> int:
    """What glibc's malloc has given out to this process and not got back; 0 without glibc 2.33 (2021), which can tell."""
    name, version = platform.libc_ver()
    if name != "glibc" or [int(part) for part in version.split(".")] < [2, 33]:
        return 0
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _MallocInfo
    told = mallinfo().fields
    return told[_MAPPED] + told[_IN_USE]


class _MallocInfo(ctypes.Structure):
    _fields_ = (("fields", ctypes.c_size_t * 10),)
