"""Per-trajectory gradients of a micro-batch from one ordinary backward.

With one trajectory, autograd's own gradient is the bank. With more, a layer must not sum its weight gradient over rows: its
backward records the pair (input, output gradient) instead of multiplying it out. Pairs wait until they would be larger than
the per-trajectory gradients they stand for, then collapse into those; what never collapsed is multiplied out once, with the
advantages already inside, which costs what an ordinary weight gradient costs. So no matrix product is done twice, and the bank
never holds more than two gradients per trajectory.

Nothing is taken for granted. Layers are known by their exact type (`layers`). Which rows are whose is read off each event's
graph (`rows`), or, where it does not tell, measured in each event (`measured`). A weight used anywhere else gets a gradient
from autograd that nobody can divide among trajectories. What cannot be had is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from onetake.execution.layers import Kind, kind_of, rows_of, unknown
from onetake.execution.measured import BASE, Listed, Owners, Regular, digit_of, digits, scale
from onetake.execution.recorded import Recorded, is_recorded, parameters_of
from onetake.execution.rows import follow

Block = tuple[torch.Size, int]
"""A tensor's shape, and which memory it has."""


def _block(tensor: Tensor) -> Block:
    return tensor.shape, tensor.untyped_storage()._cdata


@dataclass(frozen=True)
class _Call:
    """One use of a layer, as its backward reported it."""

    layer: nn.Module
    kind: Kind
    parameters: dict[str, Tensor]
    x: Tensor
    grad: Tensor

    @property
    def lead(self) -> int:
        return self.kind.lead(self.layer, self.grad.dim())

    @property
    def rows(self) -> Tensor:
        """(R, ...) the output gradient by row."""
        return rows_of(self.grad, self.lead)

    def matches(self, other: _Call) -> bool:
        return self.layer is other.layer and self.grad.shape == other.grad.shape


class _Account:
    """The banked gradients (B, *shape) of one matrix parameter: uncollapsed pairs, and their collapsed sum."""

    def __init__(self, parameter: Tensor, samples: int) -> None:
        self.parameter = parameter
        self._samples = samples
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._waiting = 0
        self._sum_Boi: Tensor | None = None

    def record(self, x_BTi: Tensor, grad_BTo: Tensor) -> None:
        self._pairs.append((x_BTi, grad_BTo))
        self._waiting += x_BTi.numel() + grad_BTo.numel()
        if self._waiting > self._samples * self.parameter.numel():
            x, grad = self._joined()
            if self._sum_Boi is None:
                self._sum_Boi = torch.bmm(grad.transpose(1, 2), x)
            else:
                self._sum_Boi.baddbmm_(grad.transpose(1, 2), x)

    @property
    def waiting(self) -> list[tuple[Block, Block]]:
        """All pairs so far; empty once some have collapsed."""
        return [] if self._sum_Boi is not None else [(_block(x), _block(grad)) for x, grad in self._pairs]

    def _joined(self) -> tuple[Tensor, Tensor]:
        """All waiting pairs as one pair, tokens of all events side by side; the waiting list is emptied."""
        pairs, self._pairs, self._waiting = self._pairs, [], 0
        if len(pairs) == 1:
            return pairs[0]
        return torch.cat([x for x, _ in pairs], 1), torch.cat([grad for _, grad in pairs], 1)

    def paid(self, factor_B: Tensor) -> Tensor | None:
        """Σ_i factor_i · gradient_i in the parameter's shape; None if nothing was banked."""
        total = None
        if self._sum_Boi is not None:
            total = torch.tensordot(factor_B.to(self._sum_Boi), self._sum_Boi, 1)
        if self._pairs:
            x, grad = self._joined()
            late = (grad * factor_B.to(grad)[:, None, None]).flatten(0, 1).mT @ x.flatten(0, 1)
            total = late if total is None else total + late
        return None if total is None else total.view_as(self.parameter)


class Bank:
    """One gradient per trajectory of a micro-batch, for every trainable parameter: for the leaves of its graphs, by name."""

    def __init__(self, module: nn.Module, parameters: dict[str, nn.Parameter], samples: int) -> None:
        """Raises ValueError naming the parameters whose per-trajectory gradient cannot be had with B > 1."""
        self._parameters, self._samples = parameters, samples
        self._leaves = set(parameters.values())
        self._accounts: dict[Tensor, _Account] = {}
        self._sums: dict[Tensor, Tensor] = {}  # (B, *shape) of vectors, and of everything when B = 1
        self._direct: dict[nn.Parameter, Tensor] = {}  # (*shape) of terms that no advantage scales
        self.banking = False  # while `add` goes backward; what others do is autograd's own
        self._measuring: list[_Call] | None = None  # calls in the order of a backward that is to be measured
        self._names = _owners(module, parameters) if samples > 1 else {}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, forwards of trainable layers are recorded so that `add` can tell trajectories apart."""
        for layer in self._names:
            assert "forward" not in vars(layer), "refused when the bank was made"
            layer.__dict__["forward"] = partial(self._forward, layer)  # hides the class's own
        try:
            yield
        finally:
            for layer in self._names:
                del layer.forward

    def add(self, log_prob: Tensor, cotangent: Tensor, *, retain_graph: bool = False) -> None:
        """Backpropagate Σ_i cotangent_i · log_prob_i and bank it trajectory by trajectory. Frees the graph by default.

        Raises ValueError where the model makes trajectories inseparable, naming the layer or the parameter.
        """
        if self._samples == 1:
            for parameter, gradient in self._gradients(log_prob, cotangent, retain_graph):
                self._add_sum(parameter, gradient[None])
            return
        followed = follow(log_prob, self._lead)
        told = True
        for call, place in followed.places.items():
            row = math.prod(call._input_metadata[0].shape[self._lead(call) :])
            call.place = place
            told &= place is not None and not (place.block % row or place.phase % row)  # no row lies in two blocks
        if followed.opaque or not told:
            self._measure(log_prob, cotangent, retain_graph)
        else:
            self._collect(log_prob, cotangent, retain_graph)

    def add_direct(self, term: Tensor, cotangent: Tensor) -> None:
        """Backpropagate Σ_i cotangent_i · term_i, a term that no advantage scales, and bank its sum. Frees the graph."""
        for parameter, gradient in self._gradients(term, cotangent, retain_graph=False):
            known = self._direct.get(parameter)
            self._direct[parameter] = gradient if known is None else known + gradient

    @property
    def waiting(self) -> dict[Tensor, list[tuple[Block, Block]]]:
        """The pairs of every matrix parameter of which none has collapsed."""
        return {parameter: account.waiting for parameter, account in self._accounts.items() if account.waiting}

    def repeat(self, pairs: dict[Tensor, list[tuple[Block, Block]]], times: int) -> None:
        """Record such pairs again, without values: what `times` more events would bank, to see its size."""
        for _ in range(times):
            made: dict[Block, Tensor] = {}  # layers side by side have one input
            for parameter, blocks in pairs.items():
                for pair in blocks:
                    x, grad = (made.setdefault(block, parameter.new_empty(block[0])) for block in pair)
                    self._accounts[parameter].record(x, grad)

    def pay_out(self, factor_B: Tensor, *, direct: float) -> None:
        """p.grad += Σ_i factor_i · banked gradient_i + direct · banked direct terms, and forget them."""
        for account in self._accounts.values():
            _accumulate(account.parameter, account.paid(factor_B))
        for parameter, total in self._sums.items():
            _accumulate(parameter, torch.tensordot(factor_B.to(total), total, 1))
        for parameter, total in self._direct.items():
            _accumulate(parameter, direct * total)
        self._accounts, self._sums, self._direct = {}, {}, {}

    def record(self, call: Any, x: Tensor, grad: Tensor) -> None:
        """What a recorded layer's backward tells while this bank collects."""
        told = _Call(call.layer, call.kind, parameters_of(call), x, grad)
        if self._measuring is not None:
            self._measuring.append(told)
            return
        assert call.place is not None, "measured otherwise"
        row = math.prod(grad.shape[told.lead :])
        block, phase = call.place
        run, first = block // row, phase // row
        if first or len(told.rows) % (run * self._samples):
            numbers = torch.arange(len(told.rows), device=grad.device)
            self._bank(told, Listed(self._samples, (numbers + first) // run % self._samples))
        else:
            self._bank(told, Regular(self._samples, run))

    def _collect(self, log_prob: Tensor, cotangent: Tensor, retain_graph: bool) -> None:
        """Backpropagate; recorded layers call `record`."""
        self.banking = True
        try:
            stray = [parameter for parameter, _ in self._gradients(log_prob, cotangent, retain_graph)]
        finally:
            self.banking = False
        names = [name for name, parameter in self._parameters.items() if any(parameter is one for one in stray)]
        if names:
            raise self._refusal(
                f"{_few(names)} also got a gradient that is summed over trajectories: used outside its layer's own forward, as in "
                "F.linear(x, layer.weight), by another module, or through a functional call"
            )

    def _measure(self, log_prob: Tensor, cotangent: Tensor, retain_graph: bool) -> None:
        """Backpropagate as often as it takes to see which row is whose, then bank."""
        calls = self._measured(log_prob, cotangent, retain_graph=True)
        owners: list[Tensor | None] = [None] * len(calls)
        numbers = digits(self._samples, cotangent.device)
        for place, digit in enumerate(numbers):
            scaled = cotangent * scale(digit).to(cotangent)
            last = place == len(numbers) - 1
            again = self._measured(log_prob, scaled, retain_graph=retain_graph or not last)
            if len(calls) != len(again) or not all(map(_Call.matches, calls, again)):
                raise self._refusal("its backward runs other layers each time")
            for n, (call, other) in enumerate(zip(calls, again, strict=True)):
                owners[n] = self._owners_of(call, other, owners[n], BASE**place)
        for call, owner in zip(calls, owners, strict=True):
            assert owner is not None
            self._bank(call, Listed(self._samples, owner))

    def _owners_of(self, call: _Call, scaled: _Call, lower: Tensor | None, worth: int) -> Tensor:
        """The rows' owners as far as they are known: those of `lower` digits, and one digit more."""
        digit = digit_of(call.rows, scaled.rows)
        if digit is None:
            raise self._refusal(
                f"in {self._names[call.layer]} trajectories of a micro-batch influence each other (statistics or attention over "
                "the batch, experts that share their capacity), or share rows, so that none has a gradient of its own there"
            )
        return digit if lower is None else torch.where(digit < 0, digit, lower + worth * digit)

    def _measured(self, log_prob: Tensor, cotangent: Tensor, retain_graph: bool) -> list[_Call]:
        self._measuring = []
        try:
            self._collect(log_prob, cotangent, retain_graph)
            return self._measuring
        finally:
            self._measuring = None

    def _bank(self, call: _Call, owners: Owners) -> None:
        if "weight" in call.parameters:
            parameter, by_row = call.parameters["weight"], call.kind.weight(call.layer, call.x, call.grad)
            if isinstance(by_row, Tensor):
                self._add_sum(parameter, owners.grouped(by_row).sum(1))
            else:
                x, grad = (owners.grouped(part).flatten(1, 2).to(parameter.dtype) for part in by_row)
                self._accounts.setdefault(parameter, _Account(parameter, self._samples)).record(x, grad)
        if "bias" in call.parameters:
            self._add_sum(call.parameters["bias"], owners.grouped(call.kind.bias(call.grad, call.lead)).sum(1))

    def _gradients(
        self, output: Tensor, cotangent: Tensor, retain_graph: bool
    ) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Autograd's own gradients, where there are any. Nothing else's `.grad` is touched."""
        parameters = list(self._parameters.values())
        gradients = torch.autograd.grad(output, parameters, cotangent, retain_graph=retain_graph, allow_unused=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                yield parameter, gradient

    def _forward(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The layer's own, recorded if it is a plain call that trains this bank's parameters and no others."""
        inputs = (*args, *kwargs.values())
        kind, weight, bias = kind_of(layer), layer.weight, layer._parameters.get("bias")
        assert kind is not None, "refused when the bank was made"
        trained = {p for p in (weight, bias) if isinstance(p, Tensor) and p.requires_grad}
        if (
            not torch.is_grad_enabled()
            or len(inputs) != 1
            or not trained
            or not trained <= self._leaves
            or not kind.batched(layer, inputs[0])
        ):
            return type(layer).forward(layer, *args, **kwargs)
        return Recorded.apply(inputs[0], weight, bias, layer, kind, self)

    def _lead(self, node: Any) -> int | None:
        """Of a recorded call of this bank, the number of dimensions that number its rows."""
        if not is_recorded(node) or node.bank is not self:
            return None
        return node.kind.lead(node.layer, len(node._input_metadata[0].shape))

    def _add_sum(self, parameter: Tensor, gradient: Tensor) -> None:
        gradient = gradient.to(parameter.dtype)
        if parameter in self._sums:
            self._sums[parameter] += gradient
        else:
            self._sums[parameter] = gradient.clone()

    def _refusal(self, cause: str) -> ValueError:
        return ValueError(
            f"execution: reweight with rollout.micro_batch: {self._samples} banks one gradient per trajectory, but {cause}. Use "
            "rollout.micro_batch: 1 or execution: retain"
        )


def _accumulate(parameter: Tensor, gradient: Tensor | None) -> None:
    """As autograd does: whoever holds `.grad` sees it grow."""
    if gradient is None:
        return
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient


def _few(names: list[str]) -> str:
    return f"{', '.join(names[:3])}{' and others' if len(names) > 3 else ''}"


def _owners(module: nn.Module, parameters: dict[str, nn.Parameter]) -> dict[nn.Module, str]:
    """The layers that own trainable parameters, each known to `Bank`, and their names."""
    every = dict(module.named_parameters())
    trained, owners, found = {every[name] for name in parameters}, {}, []
    for name, layer in module.named_modules():
        own = [key for key, parameter in layer.named_parameters(recurse=False) if parameter in trained]
        if not own:
            continue
        owners[layer] = name or type(layer).__name__
        problem = unknown(layer, own)
        if problem is not None:
            found += [f"{name}.{key} ({problem})".removeprefix(".") for key in own]
    if found:
        raise ValueError(
            "execution: reweight with rollout.micro_batch above 1 needs per-trajectory gradients, which are not known for "
            f"{_few(found)}. Use rollout.micro_batch: 1, policy.trainable: lora, or execution: retain"
        )
    return owners
