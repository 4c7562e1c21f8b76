"""Content-addressed randomness: every draw is a pure function of its address.

The order of calls, the micro-batch size, the number of workers and the point of resumption cannot change a draw.
Drawn on CPU generators, so that the device cannot change it either.
"""

from __future__ import annotations

from hashlib import blake2b

import torch
from torch import Generator, Tensor

from onetake.core.records import Address, MicroBatch


def generator(*address: int | str) -> Generator:
    """A CPU generator whose state is a function of `address` alone (of 32 bits of its digest: torch's engine keeps no more)."""
    digest = blake2b(repr(address).encode(), digest_size=8).digest()
    return Generator().manual_seed(int.from_bytes(digest, "big") >> 1)  # manual_seed takes 63 bits


def choice(address: Address, purpose: str, *more: int) -> Generator:
    """Generator for choices (event selection, stratification) of one update, the same on every rank."""
    return generator(address.seed, address.stream, address.update, purpose, *more)


def _sample_generator(batch: MicroBatch, sample: int, purpose: str, *more: int) -> Generator:
    at = batch.address
    return generator(at.seed, at.stream, at.update, batch.prompt_index, batch.group, sample, purpose, *more)


def start_generators(batch: MicroBatch) -> list[Generator]:
    """(B,) generators for the initial noise; diffusers' pipelines take such a list as ``generator=``.

    With ``shared_start`` all samples of the group draw the same initial noise (DanceGRPO's habit).
    """
    return [_sample_generator(batch, 0 if batch.shared_start else s, "start") for s in batch.samples]


def transition_noise(batch: MicroBatch, index: int, like: Tensor, stream: int = 0) -> Tensor:
    """Standard normal noise (B, ...) of event `index`, in the shape, dtype and device of `like`.

    Streams that are denoised side by side (video and audio) draw apart.
    """
    address = (index,) if stream == 0 else (index, stream)
    draws = [
        torch.randn(like.shape[1:], generator=_sample_generator(batch, s, "event", *address), dtype=like.dtype)
        for s in batch.samples
    ]
    return torch.stack(draws).to(like.device)


def prompt_indices(seed: int, update: int, groups: int, available: int) -> list[int]:
    """(P,) prompt indices of an update: epochs of seeded permutations, every prompt once before any returns."""
    indices: list[int] = []
    for position in range(update * groups, (update + 1) * groups):
        epoch, place = divmod(position, available)
        indices.append(int(torch.randperm(available, generator=generator(seed, "prompts", epoch))[place]))
    return indices
