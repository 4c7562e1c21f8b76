"""Stock video pipelines, tiny and randomly initialised, of the real classes: registered as cases of `test_families`."""

from __future__ import annotations

from typing import Any

from diffusers import (
    AutoencoderKLHunyuanVideo,
    AutoencoderKLHunyuanVideo15,
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    AutoencoderKLLTXVideo,
    AutoencoderKLMochi,
    ClassifierFreeGuidance,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
    HunyuanVideoImageToVideoPipeline,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
    LTX2Pipeline,
    LTX2VideoTransformer3DModel,
    LTXConditionPipeline,
    LTXImageToVideoPipeline,
    LTXPipeline,
    LTXVideoTransformer3DModel,
    MochiPipeline,
    MochiTransformer3DModel,
    SanaVideoPipeline,
    SanaVideoTransformer3DModel,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from diffusers.pipelines.ltx2 import LTX2TextConnectors
from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder
from transformers import (
    ByT5Tokenizer,
    CLIPVisionConfig,
    CLIPVisionModel,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaModel,
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLTextModel,
    SiglipVisionConfig,
)

from tiny_parts import (
    DECODER,
    LARGER_PICTURE,
    TEXT,
    VISION,
    case,
    clip,
    clip_pictures,
    gemma,
    llava,
    t5,
    umt5,
    wan_vae,
    word_tokenizer,
)

CLIP = {"height": 16, "width": 16, "num_frames": 5}


def wan_transformer(in_channels: int = 4, *, heads: int = 2, layers: int = 2, **image: int) -> WanTransformer3DModel:
    return WanTransformer3DModel(
        num_attention_heads=heads,
        attention_head_dim=8,
        in_channels=in_channels,
        out_channels=4,
        text_dim=TEXT,
        freq_dim=16,
        ffn_dim=8 * heads,
        num_layers=layers,
        rope_max_seq_len=16,
        **image,
    )


def unipc() -> UniPCMultistepScheduler:
    """As Wan ships it."""
    return UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)


@case("wan-2.1", call=CLIP | {"max_sequence_length": 8})
def wan(**size: int) -> WanPipeline:
    return WanPipeline(**umt5(), vae=wan_vae(), scheduler=unipc(), transformer=wan_transformer(**size))


@case("wan-2.2", call=CLIP | {"max_sequence_length": 8})
def wan22() -> WanPipeline:
    """Two transformers, the second for noise levels below 0.8: the third event of four."""
    return WanPipeline(
        **umt5(),
        vae=wan_vae(),
        scheduler=unipc(),
        transformer=wan_transformer(),
        transformer_2=wan_transformer(),
        boundary_ratio=0.8,
    )


@case("wan-2.2-5b", call=CLIP | {"max_sequence_length": 8})
def wan5b() -> WanPipeline:
    """Every token has its own timestep."""
    return WanPipeline(**umt5(), vae=wan_vae(), scheduler=unipc(), transformer=wan_transformer(), expand_timesteps=True)


@case(
    "wan-2.1-i2v",
    call=CLIP | {"max_sequence_length": 8},
    pictures=(LARGER_PICTURE,),
    needs=("ftfy",),
    no_copies=True,
)
def wan_i2v() -> WanImageToVideoPipeline:
    """The picture goes through an image encoder, and through the VAE beside the latents."""
    return WanImageToVideoPipeline(
        **umt5(),
        vae=wan_vae(),
        scheduler=unipc(),
        transformer=wan_transformer(in_channels=12, image_dim=16, added_kv_proj_dim=16),
        image_encoder=CLIPVisionModel(CLIPVisionConfig(**VISION)),
        image_processor=clip_pictures(),
    )


@case("wan-2.2-5b-i2v", call=CLIP | {"max_sequence_length": 8}, pictures=(LARGER_PICTURE,), needs=("ftfy",))
def wan5b_i2v() -> WanImageToVideoPipeline:
    """The first latent frame is the picture's: it is overwritten before every model call."""
    return WanImageToVideoPipeline(
        **umt5(), vae=wan_vae(), scheduler=unipc(), transformer=wan_transformer(), expand_timesteps=True
    )


TEMPLATE = {"template": "{}", "crop_start": 0}


@case("hunyuan-video", call=CLIP | {"max_sequence_length": 8, "prompt_template": TEMPLATE})
@case(
    "hunyuan-video-true-cfg",
    call=CLIP | {"max_sequence_length": 8, "prompt_template": TEMPLATE, "true_cfg_scale": 2.0},
    slow=True,
)
def hunyuan_video() -> HunyuanVideoPipeline:
    return HunyuanVideoPipeline(
        text_encoder=LlamaModel(LlamaConfig(**DECODER)), tokenizer=word_tokenizer(), **hunyuan_parts(in_channels=4)
    )


def hunyuan_parts(**transformer: Any) -> dict[str, Any]:
    return clip("text_encoder_2", length=77) | {
        "vae": AutoencoderKLHunyuanVideo(
            latent_channels=4,
            down_block_types=("HunyuanVideoDownBlock3D",) * 3,
            up_block_types=("HunyuanVideoUpBlock3D",) * 3,
            block_out_channels=(8, 8, 8),
            layers_per_block=1,
            norm_num_groups=4,
            spatial_compression_ratio=4,
            temporal_compression_ratio=4,
            mid_block_add_attention=False,
        ),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=7.0),
        "transformer": HunyuanVideoTransformer3DModel(
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=8,
            num_layers=1,
            num_single_layers=1,
            num_refiner_layers=1,
            mlp_ratio=1.0,
            text_embed_dim=TEXT,
            pooled_projection_dim=8,
            rope_axes_dim=(2, 2, 4),
            **transformer,
        ),
    }


HEADED = {
    "template": "<image> <|end_header_id|> <|end_header_id|> {} . . . <|end_header_id|>",
    "crop_start": 4,
    "image_emb_len": 4,
    "image_emb_start": 1,
    "image_emb_end": 5,
}
HUNYUAN_I2V = CLIP | {"max_sequence_length": 8, "prompt_template": HEADED}
EXPECTED_I2V = {"call": HUNYUAN_I2V, "pictures": (LARGER_PICTURE,), "way": "fast_forward", "no_copies": True}


@case("hunyuan-video-i2v", **EXPECTED_I2V)
def hunyuan_i2v() -> HunyuanVideoImageToVideoPipeline:
    """The picture replaces the first latent frame: steps see the others."""
    parts = hunyuan_parts(in_channels=4, image_condition_type="token_replace")
    return HunyuanVideoImageToVideoPipeline(**llava(), **parts)


@case("hunyuan-video-i2v-concat", **EXPECTED_I2V)
def hunyuan_i2v_concat() -> HunyuanVideoImageToVideoPipeline:
    """The picture lies beside the latents, with a mask."""
    parts = hunyuan_parts(in_channels=9, image_condition_type="latent_concat")
    return HunyuanVideoImageToVideoPipeline(**llava(), **parts)


LTX = CLIP | {"height": 32, "width": 32, "max_sequence_length": 8}


@case("ltx", call=LTX)
def ltx() -> LTXPipeline:
    return LTXPipeline(
        **t5(),
        vae=AutoencoderKLLTXVideo(
            latent_channels=4,
            block_out_channels=(8, 8),
            decoder_block_out_channels=(8, 8),
            layers_per_block=(1, 1, 1),
            decoder_layers_per_block=(1, 1, 1),
            spatio_temporal_scaling=(True, False),
            decoder_spatio_temporal_scaling=(True, False),
            decoder_inject_noise=(False, False, False),
            downsample_type=("conv", "conv"),
            upsample_residual=(False, False),
            upsample_factor=(1, 1),
            patch_size=4,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift_terminal=0.1),
        transformer=LTXVideoTransformer3DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=8,
            cross_attention_dim=16,
            num_layers=1,
            caption_channels=TEXT,
        ),
    )


@case("ltx-i2v", call=LTX, pictures=(LARGER_PICTURE,), way="fast_forward", no_copies=True)
def ltx_i2v() -> LTXImageToVideoPipeline:
    return LTXImageToVideoPipeline(**ltx().components)


@case("ltx-condition", call=LTX, pictures=(LARGER_PICTURE,), way="fast_forward")
@case("ltx-condition, half", call=LTX | {"strength": 0.5}, pictures=(LARGER_PICTURE,), way="fast_forward")
@case("ltx-condition, text", call=LTX, way="fast_forward")
def ltx_condition() -> LTXConditionPipeline:
    """With a picture whose tokens are given, or join when the noise has fallen to half, or without one."""
    return LTXConditionPipeline(**ltx().components | {"scheduler": FlowMatchEulerDiscreteScheduler()})


@case(
    "sana-video",
    call={"height": 32, "width": 32, "frames": 5, "max_sequence_length": 8, "complex_human_instruction": None},
    slow=True,
)
def sana_video() -> SanaVideoPipeline:
    return SanaVideoPipeline(
        **gemma(),
        vae=wan_vae(),
        scheduler=DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
        transformer=SanaVideoTransformer3DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=12,
            num_layers=1,
            num_cross_attention_heads=2,
            cross_attention_head_dim=12,
            cross_attention_dim=24,
            caption_channels=TEXT,
            sample_size=8,
            rope_max_seq_len=16,
        ),
    )


@case("mochi", call=CLIP | {"num_frames": 7, "max_sequence_length": 16})
def mochi() -> MochiPipeline:
    """Its sigmas rise from 0 to 1 and its velocity points to the data."""
    return MochiPipeline(
        **t5(),
        vae=AutoencoderKLMochi(
            latent_channels=12,
            encoder_block_out_channels=(32, 32, 32, 32),
            decoder_block_out_channels=(32, 32, 32, 32),
            layers_per_block=(1, 1, 1, 1, 1),
            latents_mean=[0.1] * 12,
            latents_std=[1.5] * 12,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(invert_sigmas=True),
        transformer=MochiTransformer3DModel(
            patch_size=2,
            num_attention_heads=2,
            attention_head_dim=8,
            num_layers=2,
            pooled_projection_dim=16,
            in_channels=12,
            text_embed_dim=TEXT,
            time_embed_dim=4,
            max_sequence_length=16,
        ),
    )


# the pipeline cuts off the first 108 tokens
LONG = "{{ messages[0]['content'] }} {{ messages[0]['content'] }} {{ messages[1]['content'] }}"


@case("hunyuan-video-1.5", call=CLIP, way="fast_forward", no_copies=True, slow=True)
def hunyuan_video15() -> HunyuanVideo15Pipeline:
    """Guidance is a component of the pipeline."""
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    return HunyuanVideo15Pipeline(
        text_encoder=Qwen2_5_VLTextModel(Qwen2_5_VLTextConfig(**DECODER, rope_parameters=rope)),
        tokenizer=word_tokenizer(chat_template=LONG),
        text_encoder_2=t5()["text_encoder"],
        tokenizer_2=ByT5Tokenizer(extra_ids=0),
        vae=AutoencoderKLHunyuanVideo15(
            latent_channels=4,
            block_out_channels=(32, 32, 32),
            layers_per_block=1,
            spatial_compression_ratio=4,
            temporal_compression_ratio=4,
        ),
        guider=ClassifierFreeGuidance(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
        transformer=HunyuanVideo15Transformer3DModel(
            in_channels=9,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=8,
            num_layers=2,
            num_refiner_layers=1,
            mlp_ratio=1.0,
            text_embed_dim=TEXT,
            text_embed_2_dim=TEXT,
            image_embed_dim=8,
            rope_axes_dim=(2, 2, 4),
            target_size=16,
            task_type="t2v",
        ),
    )


@case(
    "ltx-2",
    call={
        "height": 32,
        "width": 32,
        "num_frames": 5,
        "max_sequence_length": 16,
        "spatio_temporal_guidance_blocks": [0],
    },
    way="fast_forward",
)
def ltx2() -> LTX2Pipeline:
    """Video and audio are denoised side by side, each with a scheduler of its own."""
    width = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1, "num_learnable_registers": None}
    audio_vae = AutoencoderKLLTX2Audio(
        base_channels=4, ch_mult=(1,), num_res_blocks=1, resolution=16, latent_channels=2, mel_bins=8
    )
    return LTX2Pipeline(
        text_encoder=Gemma3ForConditionalGeneration(
            Gemma3Config(
                text_config=Gemma3TextConfig(**DECODER, head_dim=8),
                vision_config=SiglipVisionConfig(
                    hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28
                ),
            )
        ),
        tokenizer=word_tokenizer(padding_side="left"),
        connectors=LTX2TextConnectors(
            caption_channels=TEXT,
            text_proj_in_factor=DECODER["num_hidden_layers"] + 1,
            **{f"{stream}_connector_{key}": value for key, value in width.items() for stream in ("video", "audio")},
            connector_rope_base_seq_len=32,
        ),
        vae=AutoencoderKLLTX2Video(
            latent_channels=4,
            block_out_channels=(8,),
            decoder_block_out_channels=(8,),
            layers_per_block=(1,),
            decoder_layers_per_block=(1, 1),
            spatio_temporal_scaling=(True,),
            decoder_spatio_temporal_scaling=(True,),
            decoder_inject_noise=(False, False),
            downsample_type=("spatial",),
            upsample_type=("spatiotemporal",),
            upsample_residual=(False,),
            upsample_factor=(1,),
            patch_size=4,
        ),
        audio_vae=audio_vae,
        vocoder=LTX2Vocoder(
            in_channels=audio_vae.config.output_channels * audio_vae.config.mel_bins,
            hidden_channels=8,
            upsample_kernel_sizes=[4, 4],
            upsample_factors=[2, 2],
            resnet_kernel_sizes=[3],
            resnet_dilations=[[1]],
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift_terminal=0.1),
        transformer=LTX2VideoTransformer3DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=8,
            cross_attention_dim=16,
            audio_in_channels=4,
            audio_out_channels=4,
            audio_num_attention_heads=2,
            audio_attention_head_dim=4,
            audio_cross_attention_dim=8,
            num_layers=2,
            caption_channels=TEXT,
        ),
    )
