"""Per-trajectory gradients of a micro-batch from one ordinary backward.

With one trajectory, autograd's own gradient is the bank. With more, a trainable linear layer must not sum its weight
gradient over rows: its backward records the pair (input, output gradient) instead of multiplying it out. Pairs wait until
they would be larger than the per-trajectory gradients they stand for, then collapse into those; what never collapsed is
multiplied out once, with the advantages already inside, which costs what an ordinary weight gradient costs. So no matrix
product is done twice, and the bank never holds more than two gradients per trajectory.

Layers whose only parameter is a scale (normalisations) and convolutions get theirs through hooks; they are small.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _RecordedLinear(torch.autograd.Function):
    """``F.linear`` whose backward, while its bank collects, hands over (input, output gradient) and forms no weight gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, bank: Bank, layer: nn.Linear) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bank, ctx.layer = bank, layer
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias, *_ = ctx.needs_input_grad
        grad_x, grad_weight, grad_bias = grad @ weight if of_x else None, None, None
        if ctx.bank.banking:
            ctx.bank.record_matrix(ctx.layer, x.detach(), grad)
        else:
            rows = grad.flatten(0, -2)
            grad_weight = rows.mT @ x.flatten(0, -2).to(rows.dtype) if of_weight else None
            grad_bias = rows.sum(0) if of_bias else None
        return grad_x, grad_weight, grad_bias, None, None


class _Account:
    """The banked gradients (B, *shape) of one matrix parameter: uncollapsed pairs, and their collapsed sum."""

    def __init__(self, parameter: nn.Parameter, samples: int) -> None:
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
    def waiting(self) -> list[tuple[torch.Size, torch.Size]]:
        """Shapes of all pairs so far; empty once some have collapsed."""
        return [] if self._sum_Boi is not None else [(x.shape, grad.shape) for x, grad in self._pairs]

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
        self._module, self._parameters, self._samples = module, parameters, samples
        self._accounts: dict[nn.Parameter, _Account] = {}
        self._sums: dict[nn.Parameter, Tensor] = {}  # (B, *shape) of biases and scales, and of everything when B = 1
        self._direct: dict[nn.Parameter, Tensor] = {}  # (*shape) of terms that no advantage scales
        self.banking = False  # while `add` goes backward; what others do is autograd's own
        if samples > 1:
            self._owners = _owners(module, parameters)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, forwards of trainable layers are recorded so that `add` can tell trajectories apart."""
        if self._samples == 1:
            yield
            return
        handles, swapped = [], []
        for layer in self._owners:
            if isinstance(layer, nn.Linear):
                layer.__dict__["forward"] = partial(self._linear_forward, layer)  # hides the class's own
                swapped.append(layer)
            else:
                handles.append(layer.register_forward_hook(self._watch))
        try:
            yield
        finally:
            for layer in swapped:
                del layer.forward
            for handle in handles:
                handle.remove()

    def add(self, log_prob: Tensor, cotangent: Tensor, *, retain_graph: bool = False) -> None:
        """Backpropagate Σ_i cotangent_i · log_prob_i and bank it trajectory by trajectory. Frees the graph by default."""
        if self._samples == 1:
            for parameter, gradient in self._gradients(log_prob, cotangent, retain_graph):
                self._add_sum(parameter, gradient[None])
            return
        before = {p: p.grad for p in self._parameters.values()}
        self.banking = True
        try:
            log_prob.backward(cotangent, retain_graph=retain_graph)
        finally:
            self.banking = False
        for parameter, gradient in before.items():  # what hooked layers summed over rows is not wanted
            parameter.grad = gradient

    def add_direct(self, term: Tensor, cotangent: Tensor) -> None:
        """Backpropagate Σ_i cotangent_i · term_i, a term that no advantage scales, and bank its sum. Frees the graph."""
        for parameter, gradient in self._gradients(term, cotangent, retain_graph=False):
            known = self._direct.get(parameter)
            self._direct[parameter] = gradient if known is None else known + gradient

    @property
    def waiting(self) -> dict[nn.Parameter, list[tuple[torch.Size, torch.Size]]]:
        """Shapes of the pairs of every matrix parameter of which none has collapsed."""
        return {parameter: account.waiting for parameter, account in self._accounts.items() if account.waiting}

    def repeat(self, pairs: dict[nn.Parameter, list[tuple[torch.Size, torch.Size]]], times: int) -> None:
        """Record pairs of these shapes again, without values: what `times` more events would bank, to see its size."""
        for _ in range(times):
            for parameter, shapes in pairs.items():
                for x, grad in shapes:
                    self._accounts[parameter].record(parameter.new_empty(x), parameter.new_empty(grad))

    def pay_out(self, factor_B: Tensor, *, direct: float) -> None:
        """p.grad += Σ_i factor_i · banked gradient_i + direct · banked direct terms, and forget them."""
        for account in self._accounts.values():
            _accumulate(account.parameter, account.paid(factor_B))
        for parameter, total in self._sums.items():
            _accumulate(parameter, torch.tensordot(factor_B.to(total), total, 1))
        for parameter, total in self._direct.items():
            _accumulate(parameter, direct * total)
        self._accounts, self._sums, self._direct = {}, {}, {}

    def _gradients(
        self, output: Tensor, cotangent: Tensor, retain_graph: bool
    ) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Autograd's own gradients, where there are any."""
        parameters = list(self._parameters.values())
        gradients = torch.autograd.grad(output, parameters, cotangent, retain_graph=retain_graph, allow_unused=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                yield parameter, gradient

    def _linear_forward(self, layer: nn.Linear, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return F.linear(x, layer.weight, layer.bias)
        return _RecordedLinear.apply(x, layer.weight, layer.bias, self, layer)

    def _watch(self, layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        if torch.is_grad_enabled() and output.requires_grad:
            x = args[0].detach()
            if isinstance(layer, nn.Conv2d):
                output.register_hook(lambda grad: self.record_matrix(layer, _patches(layer, x), grad.flatten(2).mT))
            else:
                output.register_hook(lambda grad: self._record_scale(layer, x, grad))

    def record_matrix(self, layer: nn.Linear | nn.Conv2d, x: Tensor, grad: Tensor) -> None:
        if not self.banking:
            return
        x_BTi, grad_BTo = self._by_sample(x), self._by_sample(grad)
        for name, parameter in layer.named_parameters(recurse=False):
            if not parameter.requires_grad:
                continue
            if name == "weight":
                account = self._accounts.setdefault(parameter, _Account(parameter, self._samples))
                account.record(x_BTi.to(grad_BTo.dtype), grad_BTo)
            else:
                self._add_sum(parameter, grad_BTo.sum(1))

    def _record_scale(self, layer: nn.Module, x: Tensor, grad: Tensor) -> None:
        if not self.banking:
            return
        with torch.no_grad():
            plain = {
                n: torch.ones_like(p) if n == "weight" else torch.zeros_like(p) for n, p in layer.named_parameters()
            }
            normalised = torch.func.functional_call(layer, plain, (x,))
        grad_BTd = self._by_sample(grad)
        for name, parameter in layer.named_parameters():
            if parameter.requires_grad:
                per_token = grad_BTd * self._by_sample(normalised) if name == "weight" else grad_BTd
                self._add_sum(parameter, per_token.sum(1))

    def _by_sample(self, rows: Tensor) -> Tensor:
        """(c·B, ..., d) → (B, c·tokens, d). Rows repeat the samples c times, as batch-concatenated guidance does.

        The pre-flight check compares the banked gradient with a native one, so another order cannot pass unseen.
        """
        if len(rows) % self._samples:
            raise ValueError(
                f"execution: reweight with rollout.micro_batch: {self._samples} met a layer with {len(rows)} rows, which "
                "it cannot assign to trajectories; use rollout.micro_batch: 1, or execution: retain"
            )
        return rows.unflatten(0, (-1, self._samples)).transpose(0, 1).reshape(self._samples, -1, rows.shape[-1])

    def _add_sum(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        if parameter in self._sums:
            self._sums[parameter] += gradient
        else:
            self._sums[parameter] = gradient.clone()


def _accumulate(parameter: nn.Parameter, gradient: Tensor | None) -> None:
    if gradient is not None:
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def _patches(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """(rows, positions, in·k·k): the convolution as a linear layer on patches."""
    assert not isinstance(layer.padding, str), "refused when the bank was made"
    return F.unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride).mT


def _is_scale(layer: nn.Module) -> bool:
    """A layer whose parameters are one scale vector and at most one shift vector, such as RMSNorm and LayerNorm."""
    shapes = {name: parameter.dim() for name, parameter in layer.named_parameters(recurse=False)}
    return shapes in ({"weight": 1}, {"weight": 1, "bias": 1}) and not any(layer.children())


def _owners(module: nn.Module, parameters: dict[str, nn.Parameter]) -> list[nn.Module]:
    """The layers that own trainable parameters, each known to `Bank`."""
    owners, unknown = [], []
    for name, layer in module.named_modules():
        prefix = f"{name}." if name else ""
        own = [n for n, _ in layer.named_parameters(recurse=False) if f"{prefix}{n}" in parameters]
        if not own:
            continue
        plain_conv = isinstance(layer, nn.Conv2d) and layer.groups == 1 and layer.padding_mode == "zeros"
        plain_conv = plain_conv and not isinstance(layer.padding, str)
        if isinstance(layer, nn.Linear) or plain_conv or _is_scale(layer):
            owners.append(layer)
        else:
            unknown += [f"{name}.{n} ({type(layer).__name__})" for n in own]
    if unknown:
        raise ValueError(
            "execution: reweight with rollout.micro_batch above 1 needs per-trajectory gradients, which are not known for "
            f"{', '.join(unknown[:3])}{' and others' if len(unknown) > 3 else ''}. Use rollout.micro_batch: 1, "
            "policy.trainable: lora, or execution: retain"
        )
    return owners
