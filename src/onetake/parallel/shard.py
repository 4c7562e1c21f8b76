"""Sharded weights: FSDP2 gathers a block's weights while it runs; here their gradients are summed, once per update.

FSDP2 would reduce in every backward. That is too often for `retain` and `recompute`, and wrong for `reweight`: once
summed over ranks, gradients of trajectories with different advantages cannot be weighed (LeanGRPO, arXiv 2609.03528).
So its own reduction stays off, gradients pile up in the gathered tensors' `.grad`, and `sum_shards` scatters their sum.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.utils._pytree import tree_map

from onetake.core.records import Config
from onetake.parallel.layout import Layout

Pair = tuple[DTensor, nn.Parameter]
"""A sharded parameter, and the whole tensor that it is gathered into for a forward: the leaf of its graphs."""

AnyPair = TypeVar("AnyPair", bound=tuple[Any, nn.Parameter])
BUCKET = 2**28  # elements reduced at once: a bucket is copied, and 1 GiB of float32 fits beside the gradients


class ParallelConfig(Config):
    """Ranks that hold one copy of the transformer between them; the R/`shard` copies are replicas (HSDP)."""

    shard: int | Literal["all"] = Field(
        default=1, description="ranks over which the transformer's weights are sharded (FSDP2); 1: each has all of them"
    )

    def over(self, ranks: int) -> int:
        """Ranks of one copy, when there are `ranks`."""
        return ranks if self.shard == "all" else self.shard

    def mesh(self, ranks: int, device: torch.device) -> DeviceMesh | None:
        """Replicas × shards, of `ranks` processes; None if nothing is to be sharded."""
        shards = self.over(ranks)
        if shards == 1:
            return None
        if shards == ranks:
            return init_device_mesh(device.type, (ranks,), mesh_dim_names=("shard",))
        return init_device_mesh(device.type, (ranks // shards, shards), mesh_dim_names=("replicate", "shard"))

    def problems(self, layout: Layout, *, events_per: str, resample: int) -> list[str]:
        """Why sharded weights could not work, in the recipe's words.

        Ranks gather each other's weights, so all must run the model equally often, and forwards and backwards in one order.
        """
        shards, ranks = self.over(layout.ranks), layout.ranks
        name = f"parallel.shard: {self.shard}"
        if shards < 1 or ranks % shards:
            fits = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
            return [f"{name} does not divide {ranks} {'rank' if ranks == 1 else 'ranks'}; {fits} or all works"]
        if shards == 1:
            return []
        same = "shared-prompt with at most group_size ranks lets all ranks work on the same prompts"
        found = []
        if events_per == "sample":
            found.append(
                f"{name} needs all ranks to train the same events, and selection.per: sample draws other events for each; "
                "use another selection.per, or parallel.shard: 1"
            )
        if events_per == "group" and layout.sets > 1:
            found.append(
                f"{name} needs all ranks to train the same events, and selection.per: group draws other events for each "
                f"prompt; rollout.layout: {same}, or use parallel.shard: 1"
            )
        if resample and layout.sets > 1:
            found.append(
                f"{name} needs all ranks to sample equally often, and rollout.resample: {resample} draws again what some ranks "
                f"sampled; rollout.layout: {same}, or use rollout.resample: 0"
            )
        return found


def shard(model: nn.Module, mesh: DeviceMesh, whole: set[nn.Parameter]) -> dict[str, nn.Parameter]:
    """Shard `model` in place, each block of its lists of blocks by itself, except the parameters that stay `whole`.

    Returns, by parameter name, the tensors that the sharded ones are gathered into: the leaves of the model's graphs.
    """
    sharded: dict[nn.Module, FSDPModule] = {}
    for unit in [*blocks(model), model]:
        unit.register_forward_hook(_own)  # before FSDP2's hooks, which go on the output
        sharded[unit] = fully_shard(unit, mesh=mesh, reshard_after_forward=True, ignored_params=whole)
    sharded[model].set_requires_gradient_sync(False)
    gathered: dict[str, nn.Parameter] = {}
    for prefix, unit in model.named_modules():
        if unit in sharded:
            sharded[unit].unshard()
            gathered |= {n: p for n, p in unit.named_parameters(prefix) if not isinstance(p, DTensor)}
            sharded[unit].reshard()
    return gathered


def blocks(model: nn.Module) -> list[nn.Module]:
    """Of its lists of blocks; they and the rest of the model are the units that are gathered."""
    return [block for child in model.children() if isinstance(child, nn.ModuleList) for block in child]


def _own(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Views copied: an operation in place on one would drop the hook by which FSDP2 gathers weights for the backward."""
    return tree_map(lambda value: value.clone() if isinstance(value, Tensor) and value._is_view() else value, output)


def sum_shards(pairs: Sequence[Pair]) -> None:
    """Each rank's part of the sum of the gathered tensors' gradients becomes the sharded parameters' `.grad`.

    One reduce-scatter for a bucket, and one all-reduce among replicas. None stays where no rank has a gradient.
    """
    for bucket in buckets(pairs):
        mesh, placements = bucket[0][0].device_mesh, bucket[0][0].placements
        shards = mesh.size(-1)
        present = torch.stack([leaf.new_tensor(leaf.grad is not None) for _, leaf in bucket])
        rows = [present.expand(shards, -1), *(_rows(leaf, shards) for _, leaf in bucket)]
        for _, leaf in bucket:
            leaf.grad = None
        summands = DTensor.from_local(torch.cat(rows, 1), mesh, [Partial()] * mesh.ndim, run_check=False)
        scattered = summands.redistribute(placements=[*summands.placements[:-1], Shard(0)])
        total = scattered.redistribute(placements=placements).to_local()[0]
        counts, *sums = total.split([len(bucket), *(row.shape[1] for row in rows[1:])])
        for (parameter, _), count, part in zip(bucket, counts.tolist(), sums, strict=True):
            parameter.grad = _part(parameter, part) if count else None


def buckets(pairs: Iterable[AnyPair]) -> Iterator[list[AnyPair]]:
    """Those that are reduced together."""
    bucket: list[AnyPair] = []
    for pair in pairs:
        if bucket and sum(leaf.numel() for _, leaf in [*bucket, pair]) > BUCKET:
            yield bucket
            bucket = []
        bucket.append(pair)
    yield bucket


def _rows(leaf: nn.Parameter, shards: int) -> Tensor:
    """(shards, n) the gradient as FSDP2 cuts it: blocks of ⌈d/shards⌉ along the first of its dimensions d, the last padded."""
    gradient = leaf.new_zeros(leaf.shape) if leaf.grad is None else leaf.grad
    lines = gradient.reshape(len(gradient), -1)
    return F.pad(lines, (0, 0, 0, -len(lines) % shards)).reshape(shards, -1)


def _part(parameter: DTensor, part: Tensor) -> DTensor:
    """This rank's row of a sum as a sharded tensor, without its padding."""
    mine = parameter.to_local()
    return DTensor.from_local(
        part[: mine.numel()].view_as(mine).clone(),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def held(tensor: Tensor) -> Tensor:
    """What this rank has of it: its shard, or all."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shards_of(tensor: Tensor) -> int:
    """Parts that ranks hold different ones of; rank r has part r % `shards_of`."""
    return tensor.device_mesh.size(-1) if isinstance(tensor, DTensor) else 1


def total_norm(tensors: Iterable[Tensor]) -> float:
    """The L2 norm of all of them together, over all shards; ranks call it together."""
    norm = torch.nn.utils.get_total_norm(tensors)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def placed(whole: Tensor, like: Tensor) -> Tensor:
    """`whole`, which every rank has, on the device of `like` and sharded as it is. What is sharded already is left alone."""
    if isinstance(like, DTensor) and not isinstance(whole, DTensor):
        return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    return whole.to(like.device)


def whole_state(model: nn.Module) -> dict[str, Any]:
    """The state dict of a sharded model with whole tensors on the CPU, on rank 0; empty on the other ranks."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def load_whole_state(model: nn.Module, state: dict[str, Any]) -> None:
    """Every rank takes what it holds of `state`, whole tensors that each of them has read."""
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))


def save_shards(tensors: dict[str, Tensor], folder: Path) -> None:
    """Each rank writes its shards, by torch.distributed.checkpoint, to a `folder` that all of them see."""
    save(tensors, checkpoint_id=folder)


def load_shards(folder: Path, like: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """What `save_shards` wrote as ``NAME.KEY``, on any number of ranks, sharded as the parameter ``like[NAME]`` is now."""
    names = FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {name: torch.zeros_like(like[name.rpartition(".")[0]]) for name in names}
    with warnings.catch_warnings():  # one process without a group is what is meant
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        load(tensors, checkpoint_id=folder)
    return tensors
