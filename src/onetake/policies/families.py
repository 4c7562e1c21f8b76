"""What a pipeline family needs beyond the scheduler seam: one row each. New families go here.

A pipeline without a row works with the defaults of a row (prompts passed as text, LoRA on attention, re-scoring by
fast-forward) if the pre-flight check proves that its re-scored events equal its sampled ones. Pipelines whose update could not
be right, or could be wrong without anything showing it, are refused by name.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from diffusers.models.cache_utils import CacheMixin
from PIL.Image import Image
from torch import Tensor, nn

from onetake.core.records import Prompt

ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
"""Names that diffusers gives to the linear layers of attention, image side and text side."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One row. Every default is what is assumed of a pipeline without a row."""

    embeds: tuple[str, ...] = ()
    """Call arguments that ``encode_prompt`` returns, in its order. Empty: prompts are passed as text, at every call."""
    negative_apart: bool = False
    """The negative prompt is embedded by a second ``encode_prompt``, into the same arguments with ``negative_`` before them."""
    guidance: str | None = "guidance_scale"
    """Call argument that ``policy.guidance`` sets. None: it belongs to the pipeline's ``guider`` component."""
    negative: str | None = "guidance_scale"
    """Call argument that turns the negative prompt on, above 1. None: the pipeline knows no negative prompt."""
    pictures: tuple[int, int | None] = (0, 0)
    """Fewest and most pictures that a prompt brings, for the call's ``image``; None: any number, as a list."""
    picture_each: bool = False
    """``image`` is a list with the prompt's picture once for every output."""
    copies: bool = False
    """The call takes a single prompt; several outputs of it are its ``num_images_per_prompt``."""
    ways: tuple[str, ...] = ("tail", "fast_forward")
    """Ways to re-score that may hold; a ``latents`` argument that is rescaled, blended or ignored rules ``tail`` out."""
    indexed: tuple[str, ...] = ()
    """Call arguments that, when given, let guidance depend on the step's index or number: ``tail`` is then ruled out."""
    lora_targets: tuple[str, ...] = ATTENTION
    """Suffixes of the linear layers that LoRA attaches to by default, where the model has them."""
    unused: str = r"(?!)"
    """Pattern of parameter names that no output depends on; ``{last}`` is the last of ``transformer_blocks``. Never trained."""
    no_checkpointing: str | None = None
    """Why diffusers' own gradient checkpointing of this transformer computes something else, if it does."""
    overwritten: Callable[[Any, Tensor], Tensor] | None = None
    """(pipeline, latent of one sample) → True where the pipeline puts a condition over whatever was drawn: not an action."""
    decode_one_by_one: bool = False
    """The VAE decodes samples one at a time."""
    call: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the call."""

    def image(self, pictures: list[Image], rows: int) -> dict[str, Any]:
        """The pictures of one prompt as the call takes them, for `rows` outputs."""
        if not pictures:
            return {}
        if self.picture_each:
            return {"image": pictures * rows}
        return {"image": pictures if self.pictures[1] is None else pictures[0]}


def _picture_frame(pipe: Any, latent: Tensor) -> Tensor:
    """The first latent frame of Wan 2.2 5B holds the picture; the other Wan models get it beside the latents."""
    overwritten = torch.zeros(latent.shape, dtype=torch.bool, device=latent.device)  # (C, F, h, w)
    overwritten[:, 0] = pipe.config.expand_timesteps
    return overwritten


_PROMPTS = ("prompt_embeds", "negative_prompt_embeds")
_MASKED_PROMPTS = (
    "prompt_embeds",
    "prompt_attention_mask",
    "negative_prompt_embeds",
    "negative_prompt_attention_mask",
)
_FLUX = Family(
    embeds=("prompt_embeds", "pooled_prompt_embeds", "text_ids"), negative_apart=True, negative="true_cfg_scale"
)

# the default negative prompt is a text, refused beside embeddings
_SANA = Family(embeds=_MASKED_PROMPTS, call={"negative_prompt": None, "use_resolution_binning": False})
_FLUX2_TARGETS = (*ATTENTION, "attn.to_qkv_mlp_proj", "attn.to_out")
_NO_LATENTS = ("fast_forward",)  # the call takes latents in another layout than steps see
# the last block's text is thrown away: its queries, their normalisation, its output and its feed-forward
_LAST_TEXT = (
    r"transformer_blocks\.{last}\.(attn\.(to_add_out|add_q_proj|norm_added_q)|txt_mlp|ff_context|norm2_context)\..*"
)
_QWEN = Family(
    embeds=("prompt_embeds", "prompt_embeds_mask"),
    negative_apart=True,
    guidance="true_cfg_scale",
    negative="true_cfg_scale",
    unused=_LAST_TEXT,
)
_HUNYUAN = Family(
    embeds=("prompt_embeds", "pooled_prompt_embeds", "prompt_attention_mask"),
    negative_apart=True,
    negative="true_cfg_scale",
)

FAMILIES: dict[str, Family] = {
    "StableDiffusion3Pipeline": Family(
        embeds=("prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "negative_pooled_prompt_embeds"),
        indexed=("skip_guidance_layers",),  # on between two shares of the number of steps
    ),
    "FluxPipeline": _FLUX,
    "WanPipeline": Family(embeds=_PROMPTS),
    "QwenImagePipeline": _QWEN,
    "QwenImageEditPipeline": replace(_QWEN, pictures=(1, 1)),
    "QwenImageEditPlusPipeline": replace(_QWEN, pictures=(1, None), copies=True),
    "WanImageToVideoPipeline": Family(embeds=_PROMPTS, pictures=(1, 1), overwritten=_picture_frame),
    "HunyuanVideoPipeline": _HUNYUAN,
    "HunyuanVideoImageToVideoPipeline": replace(
        _HUNYUAN,
        pictures=(1, 1),
        picture_each=True,
        ways=("fast_forward",),  # latents are blended with the picture's, or steps see the frames after it
    ),
    "LTXPipeline": Family(embeds=_MASKED_PROMPTS),
    "LTXImageToVideoPipeline": Family(
        embeds=_MASKED_PROMPTS,
        pictures=(1, 1),
        picture_each=True,
        ways=("fast_forward",),  # steps see the frames after the picture's
    ),
    "LTXConditionPipeline": Family(
        embeds=_MASKED_PROMPTS,
        pictures=(0, 1),
        ways=("fast_forward",),  # latents are ignored, or get the picture's tokens before them
    ),
    "ZImagePipeline": Family(embeds=_PROMPTS),
    "SanaPipeline": _SANA,
    "SanaVideoPipeline": _SANA,
    "Lumina2Pipeline": Family(
        embeds=_MASKED_PROMPTS,
        indexed=("cfg_trunc_ratio",),  # a share of the number of steps
    ),
    "AuraFlowPipeline": Family(embeds=_MASKED_PROMPTS),
    "ChromaPipeline": Family(
        embeds=(
            "prompt_embeds",
            "text_ids",
            "prompt_attention_mask",
            "negative_prompt_embeds",
            "negative_text_ids",
            "negative_prompt_attention_mask",
        ),
        no_checkpointing="diffusers runs its single blocks without their attention mask then",
    ),
    "CogView4Pipeline": Family(embeds=_PROMPTS),
    "FluxKontextPipeline": replace(_FLUX, pictures=(0, 1)),
    "Flux2Pipeline": Family(
        embeds=("prompt_embeds", "text_ids"),
        negative_apart=True,
        negative=None,
        ways=_NO_LATENTS,
        lora_targets=_FLUX2_TARGETS,
    ),
    "Flux2KleinPipeline": Family(
        embeds=("prompt_embeds", "text_ids"), negative_apart=True, ways=_NO_LATENTS, lora_targets=_FLUX2_TARGETS
    ),
    "HunyuanVideo15Pipeline": Family(
        embeds=("prompt_embeds", "prompt_embeds_mask", "prompt_embeds_2", "prompt_embeds_mask_2"),
        negative_apart=True,
        guidance=None,
        ways=("fast_forward",),  # guiders may start and stop at shares of the number of steps
        unused=_LAST_TEXT,
        decode_one_by_one=True,  # diffusers' decoder gets its attention mask's shape wrong for more
    ),
    "LTX2Pipeline": Family(
        embeds=_MASKED_PROMPTS,
        ways=("fast_forward",),  # audio latents are normalised on entry
        call={"audio_guidance_scale": None},  # takes the video's
    ),
    "MochiPipeline": Family(embeds=_MASKED_PROMPTS),
}

_NOT_FLOW = "it predicts noise or v on a diffusion schedule, and the kernels are those of flow matching"
_ABOVE_ONE = "its noise levels reach 80 (EDM), and flow matching has them in [0, 1]"
_CACHE = "it keeps keys and values of the first step for later ones, which an event re-scored by itself does not have"
REFUSED: dict[str, str] = {
    "CogVideoX": _NOT_FLOW,
    "CosmosTextToWorld": _ABOVE_ONE,
    "CosmosVideoToWorld": _ABOVE_ONE,
    "Cosmos2TextToImage": _ABOVE_ONE,
    "Cosmos2VideoToWorld": _ABOVE_ONE,
    "Flux2KleinKV": _CACHE,
    "HiDream": (
        "in evaluation mode its routed experts run without gradients: log-probs would be right and the gradient silently wrong"
    ),
}
"""Beginning of a pipeline's class name → why it is not trained."""


def refuse(pipe: Any, family: Family, call: Mapping[str, Any]) -> None:
    """Raises ValueError if this pipeline cannot be a policy, or not with these call arguments, naming the cause."""
    name = type(pipe).__name__
    for beginning, reason in REFUSED.items():
        if name.startswith(beginning):
            raise ValueError(f"policy.pipeline: {name} cannot be trained: {reason}")
    guider = pipe.components.get("guider")
    if guider is not None and guider.config.get("adaptive_projected_guidance_momentum") is not None:
        raise ValueError(
            f"policy.pipeline: the guider of {name} has momentum, so the velocity of an event depends on the events before it; "
            "set its adaptive_projected_guidance_momentum to null"
        )
    for component, model in transformers_of(pipe).items():
        if isinstance(model, CacheMixin) and model.is_cache_enabled:
            raise ValueError(
                f"policy.pipeline: {component} has a cache on, so the velocity of an event depends on the events before it; "
                "call disable_cache()"
            )
    accepted = inspect.signature(pipe.__call__).parameters
    needed = {"num_inference_steps", "generator", "output_type", "return_dict", *family.embeds[:1]}
    needed |= {"prompt"} if not family.embeds else set()
    needed |= {"latents"} if "tail" in family.ways else set()
    needed |= {family.guidance} if family.guidance else set()
    if missing := sorted(needed - accepted.keys()):
        raise ValueError(
            f"policy.pipeline: the call of {name} has no argument {', '.join(missing)}, which sampling sets"
        )
    if unknown := sorted(call.keys() - accepted.keys()):
        raise ValueError(f"policy.call: {name} takes no argument {', '.join(unknown)}; it takes {', '.join(accepted)}")
    if family.guidance in call:
        raise ValueError(f"policy.call.{family.guidance}: is what policy.guidance sets for {name}; use that")


def refuse_prompts(
    pipe: Any, family: Family, call: Mapping[str, Any], prompts: Iterable[Prompt], *, guided: bool
) -> None:
    """Raises ValueError if the pipeline could not be called with each of these prompts, naming the first."""
    name, accepted = type(pipe).__name__, inspect.signature(pipe.__call__).parameters
    fewest, most = family.pictures
    takes: dict[tuple[int, int | None], str] = {
        (0, 0): "no picture",
        (0, 1): "at most one picture",
        (1, 1): "one picture",
    }
    free = [
        side for side in ("height", "width") if side in accepted and (call.get(side) or accepted[side].default) is None
    ]
    for prompt in prompts:
        brings = len(prompt.images)
        if brings < fewest or (most is not None and brings > most):
            raise ValueError(
                f"task: {name} takes {takes.get(family.pictures, 'one or more pictures')} for a prompt, and {prompt.text!r} "
                f"brings {brings or 'none'} (image: in its line of a .jsonl file, --image of onetake sample)"
            )
        if prompt.negative and not guided:
            raise ValueError(f"task: the negative prompt of {prompt.text!r}: {unused_negative(pipe)}")
        if prompt.images and free:
            raise ValueError(
                f"policy.call.{free[0]}: {name} would take it from each prompt's picture, and the outputs of a run have one "
                "size; set height and width"
            )


def unused_negative(pipe: Any) -> str:
    """The end of a message about a negative prompt that would be ignored."""
    return (
        f"{type(pipe).__name__} would not use it as it is called here; leave it out, or turn it on as the table in "
        "docs/families.md says"
    )


def family_of(pipe: Any) -> Family:
    """The pipeline's row, or the defaults of one: then nothing is known that would make ``tail`` safe."""
    known = FAMILIES.get(type(pipe).__name__)
    if known is not None:
        return known
    image = inspect.signature(pipe.__call__).parameters.get("image")
    pictures = (0, 0) if image is None else (int(image.default is inspect.Parameter.empty), 1)
    return Family(ways=("fast_forward",), pictures=pictures)


def transformers_of(pipe: Any) -> dict[str, nn.Module]:
    """Component name → denoising transformer: one, or two that share the noise levels (Wan 2.2).

    Raises ValueError if the pipeline has none.
    """
    found = {
        name: module
        for name, module in pipe.components.items()
        if name in ("transformer", "transformer_2") and module is not None
    }
    if not found:
        raise ValueError(
            f"policy.pipeline: {type(pipe).__name__} has no component named transformer, the only kind that is trained; "
            f"its components are {', '.join(pipe.components)}"
        )
    return found


def unused_parameters(model: nn.Module, family: Family) -> re.Pattern[str]:
    """Matches the names of parameters that no output of the model depends on."""
    blocks = [int(n) for name, _ in model.named_parameters() for n in re.findall(r"^transformer_blocks\.(\d+)\.", name)]
    return re.compile(family.unused.replace("{last}", str(max(blocks, default=0))))


def embeddings(pipe: Any, family: Family, made: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Call arguments that replace the prompt's text, one row each, from what ``encode_prompt`` returned, call by call."""
    values = dict(zip(family.embeds, made[0], strict=True))
    if family.negative_apart:
        values |= {
            f"negative_{name}": value for other in made[1:] for name, value in zip(family.embeds, other, strict=True)
        }
    for name, value in values.items():
        if value is None and name.endswith("_embeds_mask"):  # nothing is padded; the call would warn without a mask
            embeds: Tensor = values[name.removesuffix("_mask")]
            values[name] = torch.ones(embeds.shape[:2], dtype=torch.long, device=embeds.device)
    accepted = inspect.signature(pipe.__call__).parameters
    return {name: value for name, value in values.items() if name in accepted and _is_given(value)}


def _is_given(value: Any) -> bool:
    return isinstance(value, Tensor) or bool(value)
