"""A recovery beside the steps of a transformers Trainer: its log, TRL's coefficients, dead micro-batches, calibration."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from onetake.activations.calibrate import Calibration
from onetake.activations.exposure import Skip, exposure
from onetake.activations.lossy import Lossy
from onetake.activations.steps import Steps

TRL_SCORE = "_get_per_token_logps_and_entropies"  # TRL has no public name for it


def attach(recovery: Steps, trainer: Any) -> None:
    """Wrap the trainer's step; what `Steps.report` tells goes into its log as ``recovery/…``, means and, of peaks, the highest.

    Of TRL's GRPOTrainer the log-probs and entropies are read too: where all their coefficients are zero, on all ranks, the
    micro-batch's backward is skipped. With `lossy`, what is not in the profile is calibrated beside the first micro-batches.
    Raises ValueError where `lossy` cannot work.
    """
    _log(recovery, trainer)
    lossy = recovery.lossy
    # TRL is optional: its trainer is known by this method, not by its class
    if hasattr(trainer, TRL_SCORE):
        _read_coefficients(recovery, trainer)
    elif lossy is not None and lossy.by == "coefficients":
        raise ValueError(
            f"Lossy(by='coefficients') reads the log-probs of TRL's GRPOTrainer, and {type(trainer).__name__} has none; leave "
            "`by` at 'gradient', or use recovery.step() and recovery.watch() in a loop of your own"
        )
    if lossy is not None and not lossy.sensitivity:
        _calibrate(recovery, lossy, trainer)


def _log(recovery: Steps, trainer: Any) -> None:
    inner: Callable[..., Tensor] = trainer.training_step
    inner_log: Callable[..., None] = trainer.log
    reports: list[dict[str, float]] = []  # since the trainer logged last

    def training_step(*args: Any, **kwargs: Any) -> Tensor:
        with recovery.step():
            loss = inner(*args, **kwargs)
        reports.append(recovery.report())
        return loss

    def log(logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        told: dict[str, list[float]] = {}
        for name, value in (item for report in reports for item in report.items()):
            told.setdefault(f"recovery/{name}", []).append(value)
        reports.clear()
        merged = {n: max(v) if n.endswith("peak_mib") else sum(v) / len(v) for n, v in told.items()}
        inner_log(logs | merged, *args, **kwargs)

    trainer.training_step, trainer.log = training_step, log


def _read_coefficients(recovery: Steps, trainer: Any) -> None:
    score: Callable[..., tuple[Tensor | None, ...]] = getattr(trainer, TRL_SCORE)
    inner: Callable[..., Tensor] = trainer.compute_loss
    skip = Skip(trainer.accelerator)
    scored: list[Tensor] = []  # by this micro-batch's forward

    def noted(*args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
        found = score(*args, **kwargs)
        scored.extend(tensor for tensor in found if tensor is not None and tensor.requires_grad)
        return found

    def compute_loss(model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        scored.clear()
        inside = recovery.begin_loss()
        loss = inner(model, *args, **kwargs)
        if scored and inside:
            recovery.exposure = exposure(loss, scored)
            ready = recovery.reached is not None and recovery.attachment.capture.probe is None
            recovery.skipped = skip(model, ready and recovery.exposure == 0)
            if recovery.skipped:
                return _without_graph(loss, recovery.reached or [])
        if scored and recovery.lossy is not None and recovery.lossy.by == "coefficients":
            recovery.watch(*scored)
        return loss

    setattr(trainer, TRL_SCORE, noted)
    trainer.compute_loss = compute_loss


def _without_graph(loss: Tensor, reached: list[nn.Parameter]) -> Tensor:
    """A loss whose backward does nothing, after every parameter has got the zero gradient that the true one would leave."""
    for parameter in reached:
        if parameter.grad is None:  # an optimizer passes over parameters without one, momentum and decay included
            parameter.grad = torch.zeros_like(parameter)
    return loss.detach().requires_grad_()


def _calibrate(recovery: Steps, lossy: Lossy, trainer: Any) -> None:
    """Measure κ beside micro-batches with a gradient, from the second update on: before, LoRA's A has none.

    Each costs two more forwards and backwards; nothing that the trainer sees changes.
    """
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise ValueError(
            "lossy: how losses reach the gradient cannot be measured on sharded weights; calibrate on one device, with profile=…, "
            "and give this run that profile, or leave lossy out"
        )
    step, compute = trainer.training_step, trainer.compute_loss
    calibration = Calibration(recovery)
    latest: list[Callable[[], Tensor]] = []

    def compute_loss(*args: Any, **kwargs: Any) -> Tensor:
        latest[:] = [partial(compute, *args, **kwargs)]
        return compute(*args, **kwargs)

    def again() -> None:
        with trainer.compute_loss_context_manager():
            loss = latest[0]()
        loss.backward()

    def training_step(model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        loss = step(model, *args, **kwargs)
        if not (calibration.done or recovery.skipped or not lossy.norms):
            with model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext():
                calibration.add(again)
        latest.clear()
        return loss

    trainer.training_step, trainer.compute_loss = training_step, compute_loss
