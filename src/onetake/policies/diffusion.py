"""Any diffusers flow-matching pipeline as a policy, through its scheduler. The only door to diffusers' pipelines."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from diffusers import DiffusionPipeline
from diffusers.utils.logging import disable_progress_bar
from pydantic import Field
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from onetake.noise import start_generators
from onetake.parallel.shard import DeviceMesh, shard
from onetake.policies import Observer
from onetake.policies.adapters import Lora, Trainable, adapter_parameters, adapters_off
from onetake.policies.episode import Episode
from onetake.policies.families import embed, family_of, refuse, transformers_of
from onetake.policies.finish import DpmSolver, Euler, Finish
from onetake.policies.scheduler import Finished, RolloutScheduler
from onetake.records import Config, Entry, MicroBatch, Transition
from onetake.transitions import Flow, Kernel, StochasticKernel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class PolicyConfig(Config):
    """Which pipeline is trained, how it samples, and which of its weights move."""

    pipeline: str = Field(default="shapes", description="a diffusers folder, or the name of a built-in base")
    kernel: StochasticKernel = Flow()
    steps: int = Field(default=8, ge=2, description="T, denoising steps of a rollout and of an evaluation")
    finish: Finish = Euler()
    guidance: float = Field(default=1.0, ge=1.0, description="classifier-free guidance; 1 is off")
    negative_prompt: str = ""
    call: dict[str, Any] = Field(default_factory=dict, description="further arguments of the pipeline's call")
    scheduler: dict[str, Any] = Field(
        default_factory=dict, description="values of the pipeline's scheduler to replace, such as shift"
    )
    dtype: Literal["float32", "bfloat16"] = "float32"
    trainable: Trainable = Lora()
    gradient_checkpointing: bool = False

    def problems(self) -> list[str]:
        """Everything that can be said before the pipeline loads."""
        taken = {
            "prompt",
            "negative_prompt",
            "guidance_scale",
            "num_inference_steps",
            "generator",
            "latents",
            "output_type",
        }
        found = [f"policy.call.{key}: is set by onetake itself; remove it" for key in sorted(taken & set(self.call))]
        if self.dtype != "float32" and self.trainable.kind == "full":
            found.append(
                f"policy.trainable: full trains float32 weights, but policy.dtype: {self.dtype} would round them; "
                "use trainable: lora (float32 adapters on a bfloat16 base) or dtype: float32"
            )
        return found


def load_pipeline(source: str, config: PolicyConfig) -> DiffusionPipeline:
    """Load a diffusers folder or hub repository, its scheduler changed as `config` says. Raises ValueError if it cannot be."""
    disable_progress_bar()  # of loading; ours is the only bar
    try:
        pipe = DiffusionPipeline.from_pretrained(source, dtype=DTYPES[config.dtype])
    except OSError as error:
        raise ValueError(
            f"policy.pipeline: {source!r} is not a folder here, and could not be loaded as a hub repository: {error}"
        ) from error
    unknown = [key for key in config.scheduler if key not in pipe.scheduler.config]
    if unknown:
        known = ", ".join(key for key in pipe.scheduler.config if not key.startswith("_"))
        raise ValueError(
            f"policy.scheduler.{unknown[0]}: {type(pipe.scheduler).__name__} has no such value; it has {known}"
        )
    if config.scheduler:
        pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, **config.scheduler)
    pipe.set_progress_bar_config(disable=True)
    return pipe


class DiffusionPolicy:
    """Samples micro-batches through the stock pipeline's own call and re-scores single events with it.

    `way` is how an event is re-scored; the pre-flight check chooses it (see `execution.preflight`).
    """

    def __init__(
        self,
        pipe: DiffusionPipeline,
        *,
        kernel: Kernel,
        steps: int,
        guidance: float = 1.0,
        negative_prompt: str = "",
        call: dict[str, Any] | None = None,
        output_type: str = "pt",
        finish: DpmSolver | None = None,
        frozen: dict[str, nn.Module] | None = None,
    ) -> None:
        """`frozen` holds the reference's transformers; without it, the reference is the transformers with adapters off.

        Raises ValueError if the pipeline is not one that can be trained, or does not take an argument of `call`.
        """
        self.pipe = pipe
        self.kernel = kernel
        self._family = family_of(pipe)
        self._guidance, self._negative_prompt, self._steps = guidance, negative_prompt, steps
        self._call_arguments = self._family.call | (call or {})
        self._output_type = output_type
        refuse(pipe, self._family, self._call_arguments)
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
            pipe.guider = pipe.guider.new(guidance_scale=guidance)
        if self._family.decode_one_by_one:
            pipe.vae.enable_slicing()
        self._embeds: dict[str, dict[str, Any] | None] = {}
        self._sigmas: list[float] | None = None
        trained = transformers_of(pipe)
        self._module = nn.ModuleDict(trained) if len(trained) > 1 else next(iter(trained.values()))
        for name, component in pipe.components.items():
            if isinstance(component, nn.Module) and name not in trained:
                component.requires_grad_(False)
        # A second pipeline over the same modules: the reference is asked in the middle of a rollout, whose scheduler is busy
        self._reference_pipe = copy.copy(pipe)
        self._reference_pipe.scheduler = RolloutScheduler.replacing(shipped)
        self.scheduler.finish = self._reference_pipe.scheduler.finish = finish
        self._frozen = frozen
        for name, module in (frozen or {}).items():
            setattr(self._reference_pipe, name, module.requires_grad_(False))
        self._active = self.scheduler  # of the pipeline that is being called
        self._answers: dict[nn.Module, Any] = {}
        for transformer in {*trained.values(), *transformers_of(self._reference_pipe).values()}:
            transformer.register_forward_hook(self._count)

    @classmethod
    def from_config(
        cls, config: PolicyConfig, source: str, seed: int, *, with_reference: bool = False
    ) -> DiffusionPolicy:
        """Load the pipeline of `source`, attach the trainable weights, and wrap it.

        `with_reference` keeps a frozen copy of the transformer where adapters cannot simply be switched off.
        """
        pipe = load_pipeline(source, config)
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
        return cls(
            pipe,
            kernel=config.kernel,
            steps=config.steps,
            guidance=config.guidance,
            negative_prompt=config.negative_prompt,
            call=config.call,
            finish=config.finish if isinstance(config.finish, DpmSolver) else None,
            frozen=frozen,
        )

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
    def sigmas(self) -> list[float]:
        if self._sigmas is None:
            with self.scheduler.schedule_only():
                self._call_pipeline(self.pipe, self._arguments([""], [torch.Generator()], self._steps))
            self._sigmas = self.scheduler.grid
        return self._sigmas

    def _count(self, module: nn.Module, args: tuple, output: Any) -> None:
        if not self._active.skipping:
            rows = len(output[0])
            self._answers[module] = tree_map(_first_row, output, is_leaf=_is_rows)
            self.calls += 1
            self.forwards += rows
            self.trained_forwards += rows * torch.is_grad_enabled()

    def _prompt_arguments(self, prompt: str, rows: int) -> dict[str, Any]:
        """The prompt as the call takes it, for `rows` samples. Embedded once per prompt, then cached."""
        if prompt not in self._embeds:
            with torch.no_grad():
                self._embeds[prompt] = embed(
                    self.pipe,
                    self._family,
                    prompt,
                    self._negative_prompt,
                    guided=self._guided,
                    call=self._call_arguments,
                )
        embeds = self._embeds[prompt]
        if embeds is None:
            negative = {"negative_prompt": [self._negative_prompt] * rows} if self._guided else {}
            return {"prompt": [prompt] * rows, **negative}
        return {
            name: value.repeat_interleave(rows, 0) if isinstance(value, Tensor) else value * rows
            for name, value in embeds.items()
        }

    @property
    def _guided(self) -> bool:
        """Whether the pipeline is going to use a negative prompt."""
        family = self._family
        if family.guidance is None:
            return self._guidance > 1
        if family.negative is None:
            return False
        asked = {family.guidance: self._guidance, **self._call_arguments}
        return asked.get(family.negative, 1.0) > 1

    def _arguments(self, prompts: list[str], generators: list[torch.Generator], steps: int) -> dict[str, Any]:
        guidance = {} if self._family.guidance is None else {self._family.guidance: self._guidance}
        each = {name: [self._call_arguments[name]] * len(prompts) for name in self._family.each}
        return {
            **self._prompt_arguments(prompts[0], len(prompts)),
            **guidance,
            "generator": generators,
            "num_inference_steps": steps,
            "output_type": self._output_type,
            "return_dict": False,
            **self._call_arguments,
            **each,
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

    def draw(self, prompt: str, generators: list[torch.Generator]) -> Any:
        """What the pipeline makes of `prompt` without events, one output for each generator, in the policy's output type."""
        outputs = self._call_pipeline(self.pipe, self._arguments([prompt] * len(generators), generators, self._steps))
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
        arguments = self._arguments(
            [batch.prompt] * len(batch.samples), start_generators(batch), batch.stochastic.shape[1]
        )
        skippable = nullcontext()
        if begin is not None and self.way == "tail":
            arguments["latents"] = begin.sample.expand(len(batch.samples), *begin.sample.shape[1:]).clone()
        elif begin is not None:
            skippable = self._skippable(pipe)
        outer, self._active = self._active, pipe.scheduler
        try:
            with pipe.scheduler.playing(episode, self.way), skippable:
                return self._call_pipeline(pipe, arguments)
        finally:
            self._active = outer

    @contextmanager
    def _skippable(self, pipe: DiffusionPipeline) -> Iterator[None]:
        """While fast-forwarding, the models answer zeros instead of running; nobody uses them."""
        models = transformers_of(pipe).values()
        for model in models:
            model.forward = partial(self._skip_or_run, pipe.scheduler, model, model.forward)
        try:
            yield
        finally:
            for model in models:
                del model.forward

    def _skip_or_run(
        self, scheduler: RolloutScheduler, model: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if not scheduler.skipping:
            return forward(*args, **kwargs)
        latents = args[0] if args else kwargs["hidden_states"]
        return tree_map(partial(_zeros, rows=len(latents)), self._answers[model], is_leaf=_is_rows)


def _is_rows(answer: Any) -> bool:
    """A batch: a tensor (rows, ...), or a list with one tensor a row (Z-Image)."""
    return isinstance(answer, Tensor | list)


def _first_row(answer: Tensor | list[Tensor]) -> Tensor | list[Tensor]:
    return answer[:1].detach() if isinstance(answer, Tensor) else [answer[0].detach()]


def _zeros(answer: Tensor | list[Tensor], rows: int) -> Tensor | list[Tensor]:
    if isinstance(answer, Tensor):
        return answer.new_zeros(rows, *answer.shape[1:])
    return [torch.zeros_like(answer[0])] * rows
