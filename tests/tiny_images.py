"""Stock image pipelines, tiny and randomly initialised, of the real classes: registered as cases of `test_families`."""

from __future__ import annotations

from typing import Any

from diffusers import (
    AuraFlowPipeline,
    AuraFlowTransformer2DModel,
    AutoencoderDC,
    AutoencoderKLFlux2,
    ChromaPipeline,
    ChromaTransformer2DModel,
    CogView4Pipeline,
    CogView4Transformer2DModel,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Pipeline,
    Flux2Transformer2DModel,
    FluxKontextPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
    Lumina2Pipeline,
    Lumina2Transformer2DModel,
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SanaPipeline,
    SanaTransformer2DModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from transformers import (
    GlmConfig,
    GlmModel,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    PixtralVisionConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
)

from tiny import tiny_sd3
from tiny_parts import (
    DECODER,
    OTHER_PICTURE,
    PICTURE,
    TEXT,
    case,
    clip,
    gemma,
    image_vae,
    qwen_vae,
    qwen_vl,
    qwen_vl_with_pictures,
    t5,
    umt5,
    word_tokenizer,
)

SQUARE = {"height": 8, "width": 8}
CONTENT = "{{ messages[-1]['content'] }}"  # a chat template
LARGER = {"height": 16, "width": 16}

case("sd3", call={"max_sequence_length": 8})(tiny_sd3)
case(
    "sd3-skip-layer",
    call={
        "max_sequence_length": 8,
        "skip_guidance_layers": [0],
        "skip_layer_guidance_start": 0.2,
        "skip_layer_guidance_stop": 0.6,
    },
    way="fast_forward",
)(tiny_sd3)


@case("flux", call=SQUARE | {"max_sequence_length": 8})
@case("flux-true-cfg", call=SQUARE | {"max_sequence_length": 8, "true_cfg_scale": 2.0})
def flux(heads: int = 2, layers: int = 1) -> FluxPipeline:
    return FluxPipeline(
        **clip(),
        **t5("text_encoder_2"),
        vae=image_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        transformer=FluxTransformer2DModel(
            in_channels=16,
            num_layers=layers,
            num_single_layers=layers,
            attention_head_dim=8,
            num_attention_heads=heads,
            joint_attention_dim=TEXT,
            pooled_projection_dim=8,
            guidance_embeds=True,
            axes_dims_rope=(2, 2, 4),
        ),
    )


def qwen_parts() -> dict[str, Any]:
    return {
        "vae": qwen_vae(),
        "scheduler": FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift_terminal=0.02),
        "transformer": QwenImageTransformer2DModel(
            in_channels=16,
            out_channels=4,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=TEXT,
            axes_dims_rope=(2, 2, 4),
        ),
    }


@case("qwen-image", call=SQUARE)
def qwen() -> QwenImagePipeline:
    return QwenImagePipeline(**qwen_vl(), **qwen_parts())


@case("qwen-image-edit", call=SQUARE, pictures=(PICTURE,))
def qwen_edit() -> QwenImageEditPipeline:
    return QwenImageEditPipeline(**qwen_vl_with_pictures(), **qwen_parts())


@case("qwen-image-edit-plus", call=SQUARE, pictures=(PICTURE, OTHER_PICTURE))
def qwen_edit_plus() -> QwenImageEditPlusPipeline:
    return QwenImageEditPlusPipeline(**qwen_vl_with_pictures(), **qwen_parts())


def flux_transformer(**settings: Any) -> FluxTransformer2DModel:
    return FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=TEXT,
        pooled_projection_dim=8,
        guidance_embeds=True,
        axes_dims_rope=(2, 2, 4),
    )


@case(
    "flux-kontext", call=SQUARE | {"max_sequence_length": 8, "max_area": 64, "_auto_resize": False}, pictures=(PICTURE,)
)
def kontext() -> FluxKontextPipeline:
    return FluxKontextPipeline(
        **clip(),
        **t5("text_encoder_2"),
        vae=image_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        transformer=flux_transformer(),
    )


@case("chroma", call=SQUARE | {"max_sequence_length": 8})
def chroma() -> ChromaPipeline:
    return ChromaPipeline(
        **t5(),
        vae=image_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        transformer=ChromaTransformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=TEXT,
            axes_dims_rope=(2, 2, 4),
            approximator_num_channels=8,
            approximator_hidden_dim=16,
            approximator_layers=1,
        ),
    )


@case("z-image", call=SQUARE | {"max_sequence_length": 8})
def z_image() -> ZImagePipeline:
    return ZImagePipeline(
        text_encoder=Qwen3Model(Qwen3Config(**DECODER, head_dim=8)),
        tokenizer=word_tokenizer(chat_template=CONTENT),
        vae=image_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        transformer=ZImageTransformer2DModel(
            in_channels=4,
            dim=16,
            n_layers=1,
            n_refiner_layers=1,
            n_heads=2,
            n_kv_heads=2,
            cap_feat_dim=TEXT,
            axes_dims=[4, 2, 2],
            axes_lens=[64, 16, 16],
        ),
    )


@case(
    "sana",
    call={"height": 32, "width": 32, "max_sequence_length": 8, "complex_human_instruction": None},
    reweight=3e-5,  # the gradients of the text's keys cancel; in float64 the error is 5e-8
)
def sana() -> SanaPipeline:
    return SanaPipeline(
        **gemma(),
        vae=AutoencoderDC(
            latent_channels=4,
            attention_head_dim=2,
            encoder_block_types=("ResBlock",) * 4,
            decoder_block_types=("ResBlock",) * 4,
            encoder_block_out_channels=(8,) * 4,
            decoder_block_out_channels=(8,) * 4,
            encoder_layers_per_block=(1,) * 4,
            decoder_layers_per_block=(1,) * 4,
            encoder_qkv_multiscales=((),) * 4,
            decoder_qkv_multiscales=((),) * 4,
        ),
        scheduler=DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
        transformer=SanaTransformer2DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=8,
            num_layers=1,
            num_cross_attention_heads=2,
            cross_attention_head_dim=8,
            cross_attention_dim=16,
            caption_channels=TEXT,
            sample_size=4,
        ),
    )


@case("lumina2", call=LARGER | {"max_sequence_length": 8, "system_prompt": "a"})
@case(
    "lumina2-truncated",
    call=LARGER | {"max_sequence_length": 8, "system_prompt": "a", "cfg_trunc_ratio": 0.6},
    way="fast_forward",
    slow=True,
)
def lumina2() -> Lumina2Pipeline:
    return Lumina2Pipeline(
        **gemma(),
        vae=image_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        transformer=Lumina2Transformer2DModel(
            sample_size=4,
            in_channels=4,
            hidden_size=16,
            num_layers=1,
            num_refiner_layers=1,
            num_attention_heads=2,
            num_kv_heads=1,
            multiple_of=16,
            axes_dim_rope=(4, 2, 2),
            axes_lens=(64, 16, 16),
            cap_feat_dim=TEXT,
        ),
    )


@case("auraflow", call=SQUARE | {"max_sequence_length": 8})
def auraflow() -> AuraFlowPipeline:
    return AuraFlowPipeline(
        **umt5(),
        vae=image_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.73),
        transformer=AuraFlowTransformer2DModel(
            sample_size=4,
            in_channels=4,
            num_mmdit_layers=1,
            num_single_dit_layers=1,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=TEXT,
            caption_projection_dim=16,
            pos_embed_max_size=16,
        ),
    )


@case("cogview4", call=LARGER | {"max_sequence_length": 16})
def cogview4() -> CogView4Pipeline:
    return CogView4Pipeline(
        text_encoder=GlmModel(GlmConfig(**DECODER, head_dim=8)),
        tokenizer=word_tokenizer(padding_side="left"),
        vae=image_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, time_shift_type="linear"),
        transformer=CogView4Transformer2DModel(
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=2,
            text_embed_dim=TEXT,
            time_embed_dim=8,
            condition_dim=4,
            pos_embed_max_size=8,
            sample_size=4,
            rope_axes_dim=(8, 8),
        ),
    )


def flux2_parts(*, guidance_embeds: bool) -> dict[str, Any]:
    return {
        "vae": AutoencoderKLFlux2(
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            block_out_channels=(8, 8),
            layers_per_block=1,
            latent_channels=4,
            norm_num_groups=4,
        ),
        "scheduler": FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        "transformer": Flux2Transformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=2 * TEXT,
            timestep_guidance_channels=8,
            axes_dims_rope=(2, 2, 2, 2),
            guidance_embeds=guidance_embeds,
        ),
    }


FLUX2 = SQUARE | {"max_sequence_length": 8, "text_encoder_out_layers": (1, 2)}


@case("flux2", call=FLUX2, way="fast_forward")
def flux2() -> Flux2Pipeline:
    config = Mistral3Config(
        text_config=MistralConfig(**DECODER, head_dim=8),
        vision_config=PixtralVisionConfig(
            hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28
        ),
    )
    return Flux2Pipeline(
        text_encoder=Mistral3ForConditionalGeneration(config),
        tokenizer=word_tokenizer(chat_template="{{ messages[-1]['content'][0]['text'] }}"),
        **flux2_parts(guidance_embeds=True),
    )


@case("flux2-klein", call=FLUX2, way="fast_forward")
def klein() -> Flux2KleinPipeline:
    return Flux2KleinPipeline(
        text_encoder=Qwen3ForCausalLM(Qwen3Config(**DECODER, head_dim=8)),
        tokenizer=word_tokenizer(chat_template=CONTENT),
        **flux2_parts(guidance_embeds=False),
    )
