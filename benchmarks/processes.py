"""Ranks on this machine, for the benchmarks that need several."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.spawn import ProcessContext
from torch.multiprocessing.spawn import spawn as processes

from onetake.parallel import world


def spawn(ranks: int, function: Callable[..., None], *arguments: Any) -> None:
    """`function(world, *arguments)` in `ranks` processes of this machine, gloo between them, one thread each."""
    started = start(ranks, function, *arguments)
    while not started.join():
        pass


def start(ranks: int, function: Callable[..., None], *arguments: Any) -> ProcessContext:
    """As `spawn`, without waiting for them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = processes(_one_rank, (ranks, port, function, arguments), nprocs=ranks, join=False)
    assert started is not None
    return started


def _one_rank(rank: int, size: int, port: int, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ |= {"MASTER_ADDR": "127.0.0.1"} | {name: str(value) for name, value in names.items()}
    with world() as ranks:
        function(ranks, *arguments)
