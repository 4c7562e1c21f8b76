"""Any diffusers flow-matching pipeline as a policy, through its scheduler. The only door to diffusers' pipelines."""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from diffusers import DiffusionPipeline
from diffusers.utils import load_image
from PIL import Image
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from onetake.core.noise import start_generators
from onetake.core.records import Entry, MicroBatch, Prompt, Transition
from onetake.core.transitions import Kernel
from onetake.parallel.shard import DeviceMesh, shard
from onetake.policies import Observer
from onetake.policies.adapters import adapter_parameters, adapters_off
from onetake.policies.episode import Episode
from onetake.policies.families import (
    embeddings,
    family_of,
    refuse,
    refuse_prompts,
    transformers_of,
    unused_negative,
)
from onetake.policies.finish import DpmSolver
from onetake.policies.loading import PolicyConfig, load_pipeline
from onetake.policies.prompts import Embeddings, Offloaded
from onetake.policies.scheduler import Finished, RolloutScheduler


class DiffusionPolicy:
    """Samples micro-batches through the stock pipeline's own call and re-scores single events with it.

    `way` is how an event is re-scored; the pre-flight check chooses it (see `execution.preflight`).
    """

    def __init__(
        self,
        pipe: DiffusionPipeline,
        config: PolicyConfig,
        *,
        output_type: str = "pt",
        frozen: dict[str, nn.Module] | None = None,
    ) -> None:
        """Sample as `config` says; what it says of loading and of weights is done already (see `around`).

        `frozen` holds the reference's transformers; without it, the reference is the transformers with adapters off.
        Raises ValueError if the pipeline is not one that can be trained, or does not take an argument of the call.
        """
        self.pipe = pipe
        self.kernel: Kernel = config.kernel
        self._config = config
        self._family = family_of(pipe)
        self._call_arguments = self._family.call | config.call
        self._output_type = output_type
        refuse(pipe, self._family, self._call_arguments)
        if config.negative_prompt and not self._guided:
            raise ValueError(f"policy.negative_prompt: {unused_negative(pipe)}")
        self.ways = self._family.ways
        if any(self._call_arguments.get(name) is not None for name in self._family.indexed):
            self.ways = ("fast_forward",)
        self.way = self.ways[0]
        shipped = pipe.scheduler
        self.scheduler = pipe.scheduler = RolloutScheduler.replacing(shipped)
        self.version = self.calls = self.forwards = self.trained_forwards = 0
        self.gathered: dict[str, nn.Parameter] = {}
        self.decode_seconds = 0.0
        if self._family.guidance is None:
            pipe.guider = pipe.guider.new(guidance_scale=config.guidance)
        if self._family.decode_one_by_one:
            pipe.vae.enable_slicing()
        self._embeds = Embeddings(self._embed, Offloaded(pipe) if config.offload_text_encoders else None)
        if config.offload_text_encoders and not self._family.embeds:
            raise ValueError(
                f"policy.offload_text_encoders: {type(pipe).__name__} embeds its prompts anew at every call, for want of a row in "
                "policies/families.py; leave it out"
            )
        self._sigmas: list[float] | None = None
        trained = transformers_of(pipe)
        self._module = nn.ModuleDict(trained) if len(trained) > 1 else next(iter(trained.values()))
        for name, component in pipe.components.items():
            if isinstance(component, nn.Module) and name not in trained:
                component.requires_grad_(False)
        # A second pipeline over the same modules: the reference is asked in the middle of a rollout, whose scheduler is busy
        self._reference_pipe = copy.copy(pipe)
        self._reference_pipe.scheduler = RolloutScheduler.replacing(shipped)
        if isinstance(config.finish, DpmSolver):
            self.scheduler.finish = self._reference_pipe.scheduler.finish = config.finish
        self._frozen = frozen
        for name, module in (frozen or {}).items():
            setattr(self._reference_pipe, name, module.requires_grad_(False))
        self._active = self.scheduler  # of the pipeline that is being called
        self._answers: dict[nn.Module, Any] = {}
        self._idle: set[nn.Module] | None = None  # while idling, those that have answered without gradients
        for transformer in {*trained.values(), *transformers_of(self._reference_pipe).values()}:
            transformer.register_forward_hook(self._count)

    @classmethod
    def from_config(
        cls, config: PolicyConfig, source: str, seed: int, *, with_reference: bool = False
    ) -> DiffusionPolicy:
        """`around` the pipeline that is loaded from `source`."""
        return cls.around(load_pipeline(source, config), config, seed, with_reference=with_reference)

    @classmethod
    def around(
        cls, pipe: DiffusionPipeline, config: PolicyConfig, seed: int, *, with_reference: bool = False
    ) -> DiffusionPolicy:
        """Attach the trainable weights to `pipe`, and wrap it.

        `with_reference` keeps a frozen copy of the transformer where adapters cannot simply be switched off.
        """
        models, reason = transformers_of(pipe), family_of(pipe).no_checkpointing
        if config.gradient_checkpointing and reason is not None:
            raise ValueError(
                f"policy.gradient_checkpointing: true would train another model than {type(pipe).__name__}: {reason}; turn it off"
            )
        frozen = copy.deepcopy(models) if with_reference and config.trainable.kind == "full" else None
        config.trainable.attach(pipe, seed)
        if config.gradient_checkpointing:
            for model in models.values():
                model.enable_gradient_checkpointing()
        if config.compile is not None:
            for model in models.values():
                config.compile.apply(model)
        return cls(pipe, config, frozen=frozen)

    def to(self, device: torch.device) -> None:
        """Move all models there, a frozen reference's too, but not text encoders that are offloaded."""
        for model in (*self.pipe.components.values(), *(self._frozen or {}).values()):
            if isinstance(model, nn.Module):
                model.to(device)

    def shard(self, mesh: DeviceMesh) -> None:
        """Shard the transformers over the ranks of `mesh`, the reference's too. Adapters stay whole on every rank."""
        trained, reference = transformers_of(self.pipe), transformers_of(self._reference_pipe)
        for name, model in trained.items():
            prefix = f"{name}." if len(trained) > 1 else ""
            gathered = shard(model, mesh, adapter_parameters(model))
            self.gathered |= {f"{prefix}{key}": value for key, value in gathered.items()}
        for model in {*reference.values()} - {*trained.values()}:
            shard(model, mesh, set())

    @property
    def module(self) -> nn.Module:
        return self._module

    @property
    def models(self) -> list[nn.Module]:
        """All that the pipeline consists of, and the reference's copies."""
        parts = [*self.pipe.components.values(), *(self._frozen or {}).values()]
        return [part for part in parts if isinstance(part, nn.Module)]

    @property
    def sigmas(self) -> list[float]:
        if self._sigmas is None:
            fewest, _ = self._family.pictures
            grey = [Image.new("RGB", (64, 64), "grey")] * fewest  # levels depend on the output's size alone
            with self._embeds.encoders_on(self._device):
                self._schedule(self._words(Prompt(""), 1) | self._family.image(grey, 1))
            self._sigmas = self.scheduler.grid
        return self._sigmas

    def _count(self, module: nn.Module, args: tuple, output: Any) -> None:
        if not self._active.skipping:
            rows = len(output[0])
            self._answers[module] = tree_map(_first_row, output, is_leaf=_is_rows)
            self.calls += 1
            self.forwards += rows
            self.trained_forwards += rows * torch.is_grad_enabled()

    def check(self, prompts: Iterable[Prompt]) -> None:
        """Raises ValueError if the pipeline could not be called with each of these prompts, naming the first."""
        refuse_prompts(self.pipe, self._family, self._call_arguments, prompts, guided=self._guided)

    def embed(self, prompts: Iterable[Prompt]) -> None:
        """Ahead of sampling, so that offloaded text encoders move once for all of them."""
        if self._family.embeds:
            self._embeds.add(prompts, self._device)

    def condition(self, prompt: Prompt, rows: int) -> dict[str, Any]:
        """The prompt as the call takes it, for `rows` samples. Its pictures are read anew at every call."""
        image = self._family.image(_opened(prompt), rows)
        if not self._family.embeds:
            return self._words(prompt, rows) | image
        embeds = self._embeds.of(prompt, self._device)
        if self._family.copies:
            return embeds | image | {"num_images_per_prompt": rows}
        return image | {
            name: value.repeat_interleave(rows, 0) if isinstance(value, Tensor) else value * rows
            for name, value in embeds.items()
        }

    def _words(self, prompt: Prompt, rows: int) -> dict[str, Any]:
        negative = self._config.negative_prompt if prompt.negative is None else prompt.negative
        return {"prompt": [prompt.text] * rows} | ({"negative_prompt": [negative] * rows} if self._guided else {})

    def _embed(self, prompt: Prompt) -> dict[str, Any]:
        """What ``encode_prompt`` makes in a call with the prompt's text: it gets what the call hands on to it, pictures too."""
        encode, made = self.pipe.encode_prompt, []
        self.pipe.encode_prompt = lambda *args, **kwargs: made.append(encode(*args, **kwargs)) or made[-1]
        try:
            self._schedule(self._words(prompt, 1) | self._family.image(_opened(prompt), 1))
        finally:
            self.pipe.encode_prompt = encode
        return embeddings(self.pipe, self._family, made)

    def _schedule(self, condition: dict[str, Any]) -> None:
        """A call for one sample, up to where its schedule is known; every pipeline embeds its prompt before."""
        with self.scheduler.schedule_only():
            self._call_pipeline(self.pipe, self._arguments(condition, [torch.Generator()], self._config.steps))

    @property
    def _device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def _guided(self) -> bool:
        """Whether the pipeline is going to use a negative prompt that it is given."""
        family = self._family
        if "negative_prompt" not in inspect.signature(self.pipe.__call__).parameters:
            return False
        if family.guidance is None:
            return self._config.guidance > 1
        if family.negative is None:
            return False
        asked = {family.guidance: self._config.guidance, **self._call_arguments}
        return asked.get(family.negative, 1.0) > 1

    def _arguments(self, condition: dict[str, Any], generators: list[torch.Generator], steps: int) -> dict[str, Any]:
        guidance = {} if self._family.guidance is None else {self._family.guidance: self._config.guidance}
        return {
            **guidance,
            "generator": generators,
            "num_inference_steps": steps,
            "output_type": self._output_type,
            "return_dict": False,
            **self._call_arguments,
            **condition,
        }

    def _call_pipeline(self, pipe: DiffusionPipeline, arguments: dict[str, Any]) -> Tensor | None:
        """The pipeline's own `__call__`, without its decorator so that the scheduler decides on gradients.

        Returns None if the call was ended by the scheduler.
        """
        with torch.no_grad():
            try:
                return type(pipe).__call__.__wrapped__(pipe, **arguments)[0]
            except Finished:
                return None

    def _episode(self, batch: MicroBatch, observe: Observer, *, grad: bool, **more: Any) -> Episode:
        hides = self._family.overwritten
        overwritten = None if hides is None else partial(hides, self.pipe)
        return Episode(batch=batch, kernel=self.kernel, observe=observe, grad=grad, overwritten=overwritten, **more)

    def rollout(self, batch: MicroBatch, observe: Observer, *, grad: bool, entry: Entry | None = None) -> Tensor:
        outputs = self._play(self.pipe, self._episode(batch, observe, grad=grad, entry=entry))
        self.decode_seconds += time.perf_counter() - self.scheduler.last_step_at
        assert outputs is not None
        return outputs

    def prefix(self, batch: MicroBatch) -> Entry:
        episode = self._episode(batch.alone(), lambda event: None, grad=False, stop=batch.first)
        self._play(self.pipe, episode)
        assert episode.reached is not None
        return Entry(index=batch.first, sample=episode.reached)

    def draw(self, prompt: Prompt, generators: list[torch.Generator]) -> Any:
        """What the pipeline makes of `prompt` without events, one output for each generator, in the policy's output type."""
        arguments = self._arguments(self.condition(prompt, len(generators)), generators, self._config.steps)
        outputs = self._call_pipeline(self.pipe, arguments)
        assert outputs is not None
        return outputs

    def score(self, batch: MicroBatch, old: Transition) -> Transition:
        return self._replay(self.pipe, batch, old, grad=True)

    def reference(self, batch: MicroBatch, old: Transition) -> Transition:
        with nullcontext() if self._frozen is not None else adapters_off(self.module):
            return self._replay(self._reference_pipe, batch, old, grad=False)

    def _replay(self, pipe: DiffusionPipeline, batch: MicroBatch, old: Transition, *, grad: bool) -> Transition:
        scored: list[Transition] = []
        self._play(pipe, self._episode(batch, scored.append, grad=grad, replay=old))
        return scored[0]

    def _play(self, pipe: DiffusionPipeline, episode: Episode) -> Tensor | None:
        """One call of `pipe`, from where the episode begins; None if it ended before the decoding."""
        batch, begin = episode.batch, episode.begin
        condition = self.condition(batch.prompt, len(batch.samples))
        arguments = self._arguments(condition, start_generators(batch), batch.stochastic.shape[1])
        skippable = nullcontext()
        if begin is not None and self.way == "tail":
            arguments["latents"] = begin.sample.expand(len(batch.samples), *begin.sample.shape[1:]).clone()
        if self._idle is not None or (begin is not None and self.way != "tail"):
            skippable = self._skippable(pipe)
        outer, self._active = self._active, pipe.scheduler
        try:
            with pipe.scheduler.playing(episode, self.way), skippable:
                return self._call_pipeline(pipe, arguments)
        finally:
            self._active = outer

    @contextmanager
    def idling(self) -> Iterator[None]:
        """Inside, a model runs for its first call without gradients; it answers the others by zeros. For when only shapes count."""
        self._idle = set()
        try:
            yield
        finally:
            self._idle = None

    @contextmanager
    def _skippable(self, pipe: DiffusionPipeline) -> Iterator[None]:
        """While fast-forwarding or idling, the models answer zeros instead of running; nobody uses them."""
        models = [model for model in transformers_of(pipe).values() if "forward" not in vars(model)]
        for model in models:
            model.forward = partial(self._skip_or_run, model, model.forward)
        try:
            yield
        finally:
            for model in models:
                del model.forward

    def _skip_or_run(self, model: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        idle = self._idle is not None and not torch.is_grad_enabled()
        if not (self._active.skipping or (idle and model in self._idle)):
            if idle:
                self._idle.add(model)
            return forward(*args, **kwargs)
        latents = args[0] if args else kwargs["hidden_states"]
        return tree_map(partial(_zeros, rows=len(latents)), self._answers[model], is_leaf=_is_rows)


def _opened(prompt: Prompt) -> list[Image.Image]:
    return [load_image(str(path)) for path in prompt.images]


def _is_rows(answer: Any) -> bool:
    """A batch: a tensor (rows, ...), or a list with one tensor a row (Z-Image)."""
    return isinstance(answer, Tensor | list)


def _first_row(answer: Tensor | list[Tensor]) -> Tensor | list[Tensor]:
    return answer[:1].detach().clone() if isinstance(answer, Tensor) else [answer[0].detach().clone()]


def _zeros(answer: Tensor | list[Tensor], rows: int) -> Tensor | list[Tensor]:
    if isinstance(answer, Tensor):
        return answer.new_zeros(rows, *answer.shape[1:])
    return [torch.zeros_like(answer[0])] * rows
