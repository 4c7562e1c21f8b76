"""Which pipeline is trained and how: the recipe's part, and the pipeline loaded as it says."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from diffusers import DiffusionPipeline
from diffusers.utils.logging import disable_progress_bar
from pydantic import Field
from torch import nn

from onetake.core.records import Config
from onetake.core.transitions import Flow, StochasticKernel
from onetake.policies.adapters import Lora, Trainable
from onetake.policies.families import transformers_of
from onetake.policies.finish import Euler, Finish
from onetake.policies.switches import SWITCH, Compile, Vae, attention_problem, use_attention

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
    vae: Vae = Vae()
    attention: str | None = Field(default=None, description="diffusers' attention backend; None leaves it torch's")
    compile: Annotated[Compile | None, SWITCH] = None
    offload_text_encoders: bool = Field(
        default=False, description="keep text encoders in CPU memory but for the prompts that are not embedded yet"
    )

    def problems(self) -> list[str]:
        """Everything that can be said before the pipeline loads."""
        taken = {
            "prompt",
            "negative_prompt",
            "image",
            "guidance_scale",
            "num_inference_steps",
            "generator",
            "latents",
            "output_type",
        }
        found = [f"policy.call.{key}: is set by onetake itself; remove it" for key in sorted(taken & set(self.call))]
        switches = [self.compile and self.compile.problem(), self.attention and attention_problem(self.attention)]
        found += [problem for problem in switches if problem]
        if self.dtype != "float32" and self.trainable.kind == "full":
            found.append(
                f"policy.trainable: full trains float32 weights, but policy.dtype: {self.dtype} would round them; "
                "use trainable: lora (float32 adapters on a bfloat16 base) or dtype: float32"
            )
        return found


def load_pipeline(
    source: str, config: PolicyConfig, kind: type[DiffusionPipeline] = DiffusionPipeline, **components: nn.Module
) -> DiffusionPipeline:
    """Load a diffusers folder or hub repository, its scheduler changed as `config` says. Raises ValueError if it cannot be.

    Given `components` are used as they are, and no file of theirs is opened; `kind` is the pipeline's own class then, since
    `DiffusionPipeline` overlooks some.
    """
    disable_progress_bar()  # of loading; ours is the only bar
    try:
        pipe = kind.from_pretrained(source, dtype=DTYPES[config.dtype], **components)
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
    config.vae.apply(pipe.vae)
    if config.attention is not None:
        for model in transformers_of(pipe).values():
            use_attention(model, config.attention)
    return pipe
