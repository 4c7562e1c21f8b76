"""A policy without weights, from a pipeline's configuration files alone: it runs as ever, on tensors that hold no data."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import init_empty_weights
from diffusers import DiffusionPipeline
from diffusers.pipelines.pipeline_loading_utils import simple_get_class_obj
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from onetake.policies.diffusion import DiffusionPolicy
from onetake.policies.loading import DTYPES, PolicyConfig, load_pipeline

NEEDS_DATA = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
"""What a call raises that asks a tensor without data for its values; the message names the operation."""


class _Blank(FakeTensorMode):
    """Selects by real masks, such as a tokenizer's, as what they are: the result's shape is known then."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.index.Tensor:
            args = args[0], [place for index in args[1] for place in _places(index)]
        return super().__torch_dispatch__(func, types, args, kwargs)


def _places(index: Tensor | None) -> tuple[Tensor | None, ...]:
    if index is None or isinstance(index, FakeTensor) or index.dtype != torch.bool:
        return (index,)
    return index.nonzero(as_tuple=True)


class NumbersAsOne(TorchDispatchMode):
    """Inside, a number asked of a tensor without data is 1: for arithmetic whose shapes depend on it only where it is zero."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return 1.0
        return func(*args, **(kwargs or {}))


def blank_policy(config: PolicyConfig, source: str, seed: int, *, with_reference: bool = False) -> DiffusionPolicy:
    """`DiffusionPolicy.from_config` without opening, or downloading, a file that holds weights.

    Parameters, and whatever is computed from them, are torch's FakeTensors: shape, dtype and memory layout of the real
    ones, no data. Schedules, noise and tokens are real. Raises ValueError as `from_config` does.
    """
    mode = _Blank(allow_non_fake_inputs=True)
    try:
        index = DiffusionPipeline.load_config(source)
        kinds = {
            name: simple_get_class_obj(*part)
            for name, part in index.items()
            if isinstance(part, list) and part[0] is not None
        }
        models = {
            name: _blank(kind, source, name, DTYPES[config.dtype], mode)
            for name, kind in kinds.items()
            if issubclass(kind, nn.Module)
        }
    except OSError as error:
        raise ValueError(
            f"policy.pipeline: the configuration files of {source!r} could not be read: {error}"
        ) from error
    pipe = load_pipeline(source, config, simple_get_class_obj("diffusers", index["_class_name"]), **models)
    policy = DiffusionPolicy.around(pipe, config, seed, with_reference=with_reference)
    _empty(policy.module, mode)  # the adapters
    return policy


def _blank(kind: Any, source: str, name: str, dtype: torch.dtype, mode: FakeTensorMode) -> nn.Module:
    """A component of a pipeline, in evaluation mode, with the dtypes that ``from_pretrained`` gives it."""
    with init_empty_weights():
        if issubclass(kind, PreTrainedModel):
            model = kind._from_config(kind.config_class.from_pretrained(source, subfolder=name), dtype=dtype)
        else:
            model = kind.from_config(kind.load_config(source, subfolder=name))
    if isinstance(model, PreTrainedModel):
        model.tie_weights()
        kept = model._keep_in_fp32_modules_strict
    else:
        kept = model._keep_in_fp32_modules
    for key, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.float32 if set(kept or ()).intersection(key.split(".")) else dtype)
    _empty(model, mode)
    return model.eval()


def _empty(model: nn.Module, mode: FakeTensorMode) -> None:
    """Give every parameter that has memory of its own, or none at all, a FakeTensor's; tied ones stay tied."""
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for owner in model.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if parameter not in replaced:
                with mode:
                    blank = torch.empty(parameter.shape, dtype=parameter.dtype)
                replaced[parameter] = nn.Parameter(blank, requires_grad=parameter.requires_grad)
            setattr(owner, name, replaced[parameter])
