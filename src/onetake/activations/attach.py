"""The one place that knows how models switch checkpointing on: transformers' and diffusers' gradient-checkpointing functions.

Both libraries call ``model._set_gradient_checkpointing(enable=…, gradient_checkpointing_func=…)``, trainers again and again.
It is wrapped on the instance, so that whoever turns checkpointing on gets the units' recovery with it, until `detach`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from onetake.activations.capture import Capture
from onetake.activations.units import Unit

_DIFFUSERS_DEFAULT = "ModelMixin.enable_gradient_checkpointing.<locals>._gradient_checkpointing_func"


class Attachment:
    """A model whose units run under a `Capture` while checkpointing is on; it is turned on at once.

    Raises ValueError if the model has no units, is compiled as a whole, or checkpoints in a way that cannot be built upon.
    """

    def __init__(self, model: nn.Module, capture: Capture) -> None:
        self.host: Any = _host(model)
        self.capture = capture
        self.units = _units(self.host)
        self._of = {unit.module: unit for unit in self.units}
        # each library has a property for this; transformers renamed its own within the versions claimed
        self._was_on = any(vars(module).get("gradient_checkpointing", False) for module in self.host.modules())
        self._original: Callable[..., None] = self.host._set_gradient_checkpointing
        if self._was_on:
            _refuse_unknown(_current(self.host))
        self.host._set_gradient_checkpointing = self._switch
        self._switch(enable=True, gradient_checkpointing_func=checkpoint)

    def _switch(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Callable[..., Any] = checkpoint,
        every_n_layers: int = 1,
    ) -> None:
        """Takes the place of the model's own; the parameters' names are those of the libraries."""
        if every_n_layers != 1:
            raise ValueError(
                f"every_n_layers: {every_n_layers} and recovery both choose the layers to recompute; leave it at 1, the "
                "plan fills the memory you give it"
            )
        given = _refuse_unknown(gradient_checkpointing_func) if enable else checkpoint
        self._original(enable=enable, gradient_checkpointing_func=partial(self._run_block, given))
        for unit in self.units:
            block: Any = unit.module
            if isinstance(unit.module, GradientCheckpointingLayer):  # transformers: the layer itself asks for it
                block._gradient_checkpointing_func = partial(self.capture.run, unit, given)

    def _run_block(self, given: Callable[..., Any], function: Callable[..., Any], *args: Any) -> Any:
        """diffusers hands over the block; what is no unit is checkpointed as usual."""
        unit = self._of.get(function) if isinstance(function, nn.Module) else None
        if unit is None:
            return given(function, *args, use_reentrant=False)
        return self.capture.run(unit, given, function, *args)

    def detach(self) -> None:
        """Give the model its own switch back, and checkpointing as it was."""
        del self.host._set_gradient_checkpointing
        self._original(enable=self._was_on, gradient_checkpointing_func=partial(checkpoint, use_reentrant=False))


def _host(model: nn.Module) -> nn.Module:
    """The module with the switch, under whatever wraps it (PEFT, data parallel)."""
    for module in model.modules():
        if isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None:
            raise ValueError(
                f"{type(module).__name__} is compiled: torch.compile must stay inside units. Attach recovery first and compile "
                "the attention or the MLP of each block instead, or train without recovery"
            )
        # diffusers' models are known by their switch: this package's doors to diffusers are elsewhere
        if isinstance(module, PreTrainedModel) or hasattr(module, "enable_gradient_checkpointing"):
            if "_set_gradient_checkpointing" in vars(module):
                raise ValueError("recovery is attached to this model already; call detach() on it first")
            return module
    raise ValueError(
        f"{type(model).__name__} is neither a transformers model nor a diffusers one: recovery attaches through their "
        "gradient-checkpointing switch"
    )


def _units(host: nn.Module) -> list[Unit]:
    if isinstance(host, PreTrainedModel):
        named = [(n, m) for n, m in host.named_modules() if isinstance(m, GradientCheckpointingLayer)]
    else:
        lists = [(n, m) for n, m in host.named_children() if isinstance(m, nn.ModuleList)]
        named = [(f"{name}.{index}", block) for name, blocks in lists for index, block in enumerate(blocks)]
    if not named:
        raise ValueError(
            f"{type(host).__name__} has no units: its blocks are no GradientCheckpointingLayers; use a transformers version whose "
            "model has them, or the trainer's own gradient checkpointing"
        )
    return [Unit(name=name, module=module) for name, module in named]


def _current(host: Any) -> Callable[..., Any]:
    functions = [m._gradient_checkpointing_func for m in host.modules() if "_gradient_checkpointing_func" in vars(m)]
    return functions[0] if functions else checkpoint


def _refuse_unknown(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function if units can be built upon it; diffusers' default stands for torch's."""
    if (isinstance(function, FunctionType) and function.__qualname__ == _DIFFUSERS_DEFAULT) or function is checkpoint:
        return checkpoint
    keywords = function.keywords if isinstance(function, partial) else {}
    if keywords.get("use_reentrant"):
        raise ValueError(
            "use_reentrant: true replays blocks outside of autograd's hooks, where nothing can be kept. Set "
            'gradient_checkpointing_kwargs={"use_reentrant": False}'
        )
    if not isinstance(function, partial) or keywords.get("context_fn") is not None:
        raise ValueError(
            f"gradient checkpointing already runs {function}, which recovery would have to replace; use the library's default "
            "checkpointing function (non-reentrant, without context_fn), or train without recovery"
        )
    return function
