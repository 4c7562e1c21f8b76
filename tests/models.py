"""Tiny decoders and diffusion transformers of the real classes with random weights, and gradients of a loss on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers as library
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from onetake.activations.attach import Attachment
from onetake.activations.capture import Capture
from onetake.activations.plan import Action
from onetake.activations.region import Region

diffusers: Any = library  # exports lazily, which a type checker does not follow
DECODERS = ["Llama", "Qwen2", "Qwen3", "Phi3", "Gemma", "Mistral"]
TRANSFORMERS = ["SD3", "Flux", "Wan", "QwenImage"]


def decoder(family: str = "Llama", *, layers: int = 4, dtype: torch.dtype = torch.float32, dropout: float = 0.0) -> Any:
    """Width 32, MLP 88, vocabulary 64, grouped keys, attention dropout; in training mode."""
    config = getattr(transformers, f"{family}Config")(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=88,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        attention_dropout=dropout,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return getattr(transformers, f"{family}ForCausalLM")(config).to(dtype).train()


def plant_wrong_replays(patch: pytest.MonkeyPatch) -> None:
    """Whatever E, A, P and L make again is off by a hundredth."""
    right = Region.make
    patch.setattr(Region, "make", lambda region, made: right(region, made) * 1.01)


def tokens(rows: int = 2, length: int = 17) -> Tensor:
    return torch.randint(3, 64, (rows, length), generator=torch.Generator().manual_seed(1))


def transformer(family: str, dtype: torch.dtype = torch.float32) -> tuple[Any, dict[str, Any]]:
    """The model, three or four blocks of width 16 to 32, and arguments for one call."""
    common: dict[str, Any] = {"num_attention_heads": 2, "num_layers": 3}
    random = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(dtype)

    with torch.random.fork_rng():
        torch.manual_seed(0)
        if family == "SD3":
            sizes = {"sample_size": 4, "patch_size": 1, "in_channels": 4, "attention_head_dim": 8, "out_channels": 4}
            widths = {"joint_attention_dim": 16, "caption_projection_dim": 16, "pooled_projection_dim": 16}
            more = {"pos_embed_max_size": 8, "qk_norm": "rms_norm"}
            model = diffusers.SD3Transformer2DModel(**common, **sizes, **widths, **more)
            arguments = {"hidden_states": noise(2, 4, 4, 4), "pooled_projections": noise(2, 16)}
        elif family == "Flux":
            sizes = {"patch_size": 1, "in_channels": 4, "attention_head_dim": 16, "axes_dims_rope": (4, 4, 8)}
            widths = {"joint_attention_dim": 16, "pooled_projection_dim": 16, "num_single_layers": 1}
            model = diffusers.FluxTransformer2DModel(**common, **sizes, **widths)
            arguments = {"hidden_states": noise(2, 16, 4), "pooled_projections": noise(2, 16)}
            arguments |= {"img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(5, 3)}
        elif family == "Wan":
            sizes = {"patch_size": (1, 2, 2), "in_channels": 4, "out_channels": 4, "attention_head_dim": 12}
            widths = {"text_dim": 16, "freq_dim": 16, "ffn_dim": 32, "cross_attn_norm": True, "rope_max_seq_len": 32}
            model = diffusers.WanTransformer3DModel(**common, **sizes, **widths)
            arguments = {"hidden_states": noise(2, 4, 2, 8, 8)}
        else:
            sizes = {"patch_size": 2, "in_channels": 16, "out_channels": 4, "attention_head_dim": 16}
            widths = {"joint_attention_dim": 16, "axes_dims_rope": (8, 4, 4)}
            model = diffusers.QwenImageTransformer2DModel(**common, **sizes, **widths)
            arguments = {"hidden_states": noise(2, 16, 16), "img_shapes": [[(1, 4, 4)]] * 2}
            arguments["encoder_hidden_states_mask"] = torch.ones(2, 5, dtype=torch.long)
    arguments |= {"encoder_hidden_states": noise(2, 5, 16), "timestep": torch.tensor([0.3, 0.5]), "return_dict": False}
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model, arguments


def planned(model: Any, actions: str) -> Attachment:
    """Attached, with one letter per unit; `replan` changes them."""
    plan: dict[str, Action] = {}
    attachment = Attachment(model, Capture(lambda unit, _: plan[unit.name]))
    attachment.capture.plan = plan  # type: ignore[attr-defined]
    replan(attachment, actions)
    return attachment


def replan(attachment: Attachment, actions: str) -> None:
    names = [unit.name for unit in attachment.units]
    attachment.capture.plan.update(zip(names, map(Action, actions), strict=True))  # type: ignore[attr-defined]


def gradients(model: nn.Module, loss: Callable[[], Tensor]) -> dict[str, Tensor]:
    """By name, and the loss under its own; dropout is drawn from the same state every time."""
    model.zero_grad(set_to_none=True)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        value = loss()
        value.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return found | {"loss": value.detach()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Bit for bit, and neither empty nor all zero."""
    assert one.keys() == other.keys()
    assert sum(bool(tensor.any()) for tensor in one.values()) > len(one) // 2
    return all(torch.equal(one[name], other[name]) for name in one)


class Alive(TorchDispatchMode):
    """Watches every block of memory that is made inside, however it is viewed; an oracle that knows nothing of units."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[
            int, tuple[StorageWeakRef, int]
        ] = {}  # by address, which a weak reference keeps from being reused

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in given:
                storage = StorageWeakRef(tensor.untyped_storage())
                self._made[storage.cdata] = storage, tensor.untyped_storage().nbytes()
        return out

    @property
    def bytes(self) -> int:
        return sum(size for storage, size in self._made.values() if not storage.expired())
