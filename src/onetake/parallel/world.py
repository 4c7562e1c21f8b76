"""What the processes of a run tell each other.

A run is written once, for any number of processes: it asks its world, and alone in it the answers cost nothing.
Every method of `Ranks` but `once` is a collective: all ranks call it, in the same order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from hashlib import blake2b
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous

from onetake.parallel.shard import DTensor, held, shards_of, sum_shards

T = TypeVar("T")
PATIENCE = timedelta(hours=2)  # for a rank that is busy, with a slow reward say; torchrun notices at once one that died


class Alone:
    """One process, which answers as `Ranks` does."""

    rank, size = 0, 1

    def once(self, function: Callable[[], T]) -> T | None:
        return function()

    def told(self, function: Callable[[], T]) -> T:
        return function()

    def table(self, own: Tensor) -> Tensor:
        return own

    def rows(self, own: Tensor) -> Tensor:
        return own

    def gathered(self, own: T) -> list[T]:
        return [own]

    def sum_gradients(self, parameters: Iterable[nn.Parameter], leaves: Iterable[nn.Parameter]) -> None:
        pass

    def check_equal(self, parameters: Iterable[nn.Parameter], when: str) -> None:
        pass


ALONE = Alone()


class Ranks:
    """The processes of torch.distributed's default group, each with a copy of the policy or a shard of one."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def once(self, function: Callable[[], T]) -> T | None:
        """Call `function` on rank 0 alone (what prints or writes); None elsewhere."""
        return function() if self.rank == 0 else None

    def told(self, function: Callable[[], T]) -> T:
        """What `function` returns on rank 0, on every rank. Where it raises there, the others leave without a word."""
        answer: list[Any] = [None, "failed"]
        try:
            if self.rank == 0:
                answer = [function(), "succeeded"]
        finally:  # the others wait for it either way
            dist.broadcast_object_list(answer, src=0)
        value, outcome = answer
        if outcome == "failed":
            raise SystemExit(2)
        return value

    def table(self, own: Tensor) -> Tensor:
        """A table whose cells different ranks know (NaN elsewhere), whole; a cell that not exactly one rank knows is NaN."""
        known = ~own.isnan()
        sums = torch.stack([torch.where(known, own, 0), known.to(own)])  # adding zeros is exact
        dist.all_reduce(sums)
        return torch.where(sums[1] == 1, sums[0], torch.nan)

    def rows(self, own: Tensor) -> Tensor:
        """All ranks' rows (n_r, ...), one after the other in the order of ranks: (Σ n_r, ...)."""
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, own.cpu())
        return torch.cat(gathered).to(own.device)

    def gathered(self, own: T) -> list[T]:
        """Every rank's `own`, in the order of ranks, on rank 0; empty elsewhere."""
        everyone: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(own, everyone)
        return everyone or []

    def sum_gradients(self, parameters: Iterable[nn.Parameter], leaves: Iterable[nn.Parameter]) -> None:
        """The parameters' .grad becomes the sum of all ranks' `leaves`' .grad, by one reduction; None where no rank has one.

        A parameter is its own leaf, unless it is sharded; then each rank gets its part of the sum. Which parameters have a
        gradient travels in front of the gradients, so that it costs no reduction of its own.
        """
        parameters = list(parameters)
        sharded = [(p, leaf) for p, leaf in zip(parameters, leaves, strict=True) if isinstance(p, DTensor)]
        if sharded:  # then all of them are: what is trained whole, adapters, is trained alone
            sum_shards(sharded)
            return
        present = parameters[0].new_tensor([p.grad is not None for p in parameters])
        pieces = [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in parameters]
        flat = torch.cat([present, *pieces])
        dist.all_reduce(flat)
        counts, *sums = flat.split([len(parameters), *(p.numel() for p in parameters)])
        for parameter, count, total in zip(parameters, counts.tolist(), sums, strict=True):
            parameter.grad = total.view_as(parameter).to(parameter.dtype) if count else None

    def check_equal(self, parameters: Iterable[nn.Parameter], when: str) -> None:
        """Raises ValueError naming the ranks whose parameters, or shards, are not bit for bit those of the first replica."""
        parameters = list(parameters)
        shards = shards_of(parameters[0])
        if shards == self.size:
            return  # no part is there twice
        digests = self.rows(torch.tensor([_digest(parameters)])).tolist()
        others = [rank for rank, digest in enumerate(digests) if digest != digests[rank % shards]]
        if others:
            theirs, ours = (
                ", ".join(str(n) for n in sorted(ranks)) for ranks in (others, {r % shards for r in others})
            )
            raise ValueError(
                f"{when}: the trainable weights of rank {theirs} are not those of rank {ours}, so the ranks no longer train "
                "one policy; the last checkpoint stands. All ranks need the same versions of the libraries and the same kind of "
                "device; a memory fault does this too"
            )


World = Alone | Ranks
"""The processes of a run, seen from one of them."""


@contextmanager
def world() -> Iterator[World]:
    """The world that torchrun describes in its environment variables; without them, or for one process, `ALONE`.

    CPU tensors travel by gloo, CUDA tensors by nccl, and each process takes the GPU of its local rank. On an error the
    group is left as it is: the other ranks may be inside a collective, and torchrun ends them.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield ALONE
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    store, rank, size = next(rendezvous("env://", timeout=PATIENCE))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    # torchrun's store outlives a restart, and with it the addresses of ranks that are dead: each attempt has keys of its own
    own = dist.PrefixStore(f"attempt {attempt}", store)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group(store=own, rank=rank, world_size=size, timeout=PATIENCE)
    yield Ranks()
    dist.destroy_process_group()


def _digest(parameters: Iterable[nn.Parameter]) -> int:
    digest = blake2b(digest_size=7)  # fits an int64
    for parameter in parameters:
        digest.update(held(parameter.detach()).cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return int.from_bytes(digest.digest(), "big")
