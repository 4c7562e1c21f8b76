"""Any diffusers flow-matching pipeline as a policy, through its scheduler. The only door to diffusers' pipelines."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from diffusers.utils.logging import disable_progress_bar
from pydantic import Field
from torch import Tensor, nn

from onetake.noise import start_generators
from onetake.policies import Observer
from onetake.policies.adapters import Lora, Trainable, adapters_off
from onetake.policies.episode import Episode
from onetake.policies.families import embed
from onetake.policies.scheduler import Finished, RolloutScheduler
from onetake.records import Config, MicroBatch, Transition
from onetake.transitions import Flow, Kernel, StochasticKernel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class PolicyConfig(Config):
    """Which pipeline is trained, how it samples, and which of its weights move."""

    pipeline: str = Field(default="shapes", description="a diffusers folder, or the name of a built-in base")
    kernel: StochasticKernel = Flow()
    steps: int = Field(default=8, ge=2, description="T, denoising steps of a rollout and of an evaluation")
    guidance: float = Field(default=1.0, ge=1.0, description="classifier-free guidance; 1 is off")
    negative_prompt: str = ""
    call: dict[str, Any] = Field(default_factory=dict, description="further arguments of the pipeline's call")
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


def load_pipeline(folder: Path, dtype: str = "float32") -> DiffusionPipeline:
    """Load a diffusers folder. Raises ValueError, in the recipe's words, if there is none."""
    if not (folder / "model_index.json").is_file():
        raise ValueError(f"policy.pipeline: {folder} is not a diffusers pipeline folder (it has no model_index.json)")
    disable_progress_bar()  # of loading; ours is the only bar
    pipe = DiffusionPipeline.from_pretrained(folder, dtype=DTYPES[dtype])
    pipe.set_progress_bar_config(disable=True)
    return pipe


class DiffusionPolicy:
    """Samples micro-batches through the stock pipeline's own call and re-scores single events with it.

    `way` is how an event is re-scored; the pre-flight check chooses it (see `execution.preflight`).
    """

    ways: tuple[str, ...] = ("tail", "fast_forward")

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
        frozen: nn.Module | None = None,
    ) -> None:
        """`frozen` is the reference transformer; without one, the reference is the transformer with its adapters off.

        Raises ValueError if the pipeline's scheduler is not flow matching.
        """
        if not isinstance(pipe.scheduler, FlowMatchEulerDiscreteScheduler):
            raise ValueError(
                f"policy.pipeline: {type(pipe).__name__} samples with {type(pipe.scheduler).__name__}, which is not a "
                "flow-matching scheduler onetake can replace; it trains pipelines with FlowMatchEulerDiscreteScheduler"
            )
        if pipe.scheduler.config.stochastic_sampling:
            raise ValueError(
                "policy.pipeline: its scheduler has stochastic_sampling on, whose noise has no log_prob; turn it off"
            )
        self.pipe = pipe
        self.kernel = kernel
        self.scheduler = pipe.scheduler = RolloutScheduler.from_config(pipe.scheduler.config)
        self.way = "tail"
        self.version = self.calls = self.forwards = self.trained_forwards = 0
        self.decode_seconds = 0.0
        self._guidance, self._negative_prompt, self._call_arguments = guidance, negative_prompt, dict(call or {})
        self._steps, self._output_type = steps, output_type
        self._embeds: dict[str, dict[str, Any] | None] = {}
        self._sigmas: list[float] | None = None
        for component in pipe.components.values():
            if isinstance(component, nn.Module) and component is not pipe.transformer:
                component.requires_grad_(False)
        # A second pipeline over the same modules: the reference is asked in the middle of a rollout, whose scheduler is busy
        self._reference_pipe = copy.copy(pipe)
        self._reference_pipe.scheduler = RolloutScheduler.from_config(pipe.scheduler.config)
        self._frozen = frozen
        if frozen is not None:
            self._reference_pipe.transformer = frozen.requires_grad_(False)
        self._active = self.scheduler  # of the pipeline that is being called
        for transformer in {pipe.transformer, self._reference_pipe.transformer}:
            transformer.register_forward_hook(self._count)

    @classmethod
    def from_config(
        cls, config: PolicyConfig, folder: Path, seed: int, *, with_reference: bool = False
    ) -> DiffusionPolicy:
        """Load the pipeline of `folder`, attach the trainable weights, and wrap it.

        `with_reference` keeps a frozen copy of the transformer where adapters cannot simply be switched off.
        """
        pipe = load_pipeline(folder, config.dtype)
        frozen = copy.deepcopy(pipe.transformer) if with_reference and config.trainable.kind == "full" else None
        config.trainable.attach(pipe, seed)
        if config.gradient_checkpointing:
            pipe.transformer.enable_gradient_checkpointing()
        return cls(
            pipe,
            kernel=config.kernel,
            steps=config.steps,
            guidance=config.guidance,
            negative_prompt=config.negative_prompt,
            call=config.call,
            frozen=frozen,
        )

    @property
    def module(self) -> nn.Module:
        return self.pipe.transformer

    @property
    def sigmas(self) -> list[float]:
        if self._sigmas is None:
            with self.scheduler.schedule_only():
                self._call_pipeline(self.pipe, self._arguments([""], [torch.Generator()]))
            self._sigmas = self.scheduler.grid
        return self._sigmas

    def _count(self, module: nn.Module, args: tuple, output: Any) -> None:
        if not self._active.skipping:
            self._answer = output[0]
            self.calls += 1
            self.forwards += len(self._answer)
            self.trained_forwards += len(self._answer) * torch.is_grad_enabled()

    def _prompt_arguments(self, prompt: str, rows: int) -> dict[str, Any]:
        """The prompt as the call takes it, for `rows` samples. Embedded once per prompt, then cached."""
        if prompt not in self._embeds:
            with torch.no_grad():
                self._embeds[prompt] = embed(
                    self.pipe, prompt, self._negative_prompt, guided=self._guidance > 1, call=self._call_arguments
                )
        embeds = self._embeds[prompt]
        if embeds is None:
            negative = {"negative_prompt": [self._negative_prompt] * rows} if self._guidance > 1 else {}
            return {"prompt": [prompt] * rows, **negative}
        return {name: value.repeat_interleave(rows, 0) for name, value in embeds.items()}

    def _arguments(self, prompts: list[str], generators: list[torch.Generator]) -> dict[str, Any]:
        return {
            **self._prompt_arguments(prompts[0], len(prompts)),
            "generator": generators,
            "num_inference_steps": self._steps,
            "guidance_scale": self._guidance,
            "output_type": self._output_type,
            "return_dict": False,
            **self._call_arguments,
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

    def rollout(self, batch: MicroBatch, observe: Observer, *, grad: bool) -> Tensor:
        episode = Episode(batch=batch, kernel=self.kernel, observe=observe, grad=grad)
        arguments = self._arguments([batch.prompt] * len(batch.samples), start_generators(batch))
        with self.scheduler.playing(episode):
            outputs = self._call_pipeline(self.pipe, arguments)
        self.decode_seconds += time.perf_counter() - self.scheduler.last_step_at
        assert outputs is not None
        return outputs

    def score(self, batch: MicroBatch, old: Transition) -> Transition:
        return self._replay(self.pipe, batch, old, grad=True)

    def reference(self, batch: MicroBatch, old: Transition) -> Transition:
        with nullcontext() if self._frozen is not None else adapters_off(self.module):
            return self._replay(self._reference_pipe, batch, old, grad=False)

    def _replay(self, pipe: DiffusionPipeline, batch: MicroBatch, old: Transition, *, grad: bool) -> Transition:
        scored: list[Transition] = []
        episode = Episode(batch=batch, kernel=self.kernel, observe=scored.append, grad=grad, replay=old)
        arguments = self._arguments([batch.prompt] * len(batch.samples), start_generators(batch))
        if self.way == "tail":
            arguments["latents"] = old.sample.clone()
        skippable = self._skippable(pipe) if self.way == "fast_forward" else nullcontext()
        outer, self._active = self._active, pipe.scheduler
        try:
            with pipe.scheduler.playing(episode, self.way), skippable:
                self._call_pipeline(pipe, arguments)
        finally:
            self._active = outer
        return scored[0]

    @contextmanager
    def _skippable(self, pipe: DiffusionPipeline) -> Iterator[None]:
        """While fast-forwarding, the model answers zeros instead of running; nobody uses them."""
        forward = pipe.transformer.forward

        def skip_or_run(*args: Any, **kwargs: Any) -> Any:
            if not pipe.scheduler.skipping:
                return forward(*args, **kwargs)
            rows = len(kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])
            return (self._answer.new_zeros(rows, *self._answer.shape[1:]),)

        pipe.transformer.forward = skip_or_run
        try:
            yield
        finally:
            del pipe.transformer.forward
