"""The switch: it survives trainers' toggles, refuses what cannot be built upon, and gives the model back as it was."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from models import decoder, equal, gradients, planned, replan, tokens, transformer
from onetake.activations.attach import Attachment
from onetake.activations.capture import Capture
from onetake.activations.plan import Action
from onetake.activations.units import CaptureError

IDS = tokens()


def switch(model: nn.Module, on: bool, **kwargs) -> None:
    """As trainers do, under the name that the installed transformers uses."""
    new = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    if on:
        getattr(model, f"{new}_checkpointing_enable")(kwargs or None)
    else:
        getattr(model, f"{new}_checkpointing_disable")()


def test_15_survives_a_trainer_switching_checkpointing_off_and_on():
    model = decoder(dropout=0.2)

    def loss():
        return model(IDS, labels=IDS).loss

    plain = gradients(model, loss)
    attachment = planned(model, "HERE")
    switch(model, False)
    with torch.no_grad():
        model(IDS)
    assert equal(gradients(model, loss), plain)
    assert [unit.forwards for unit in attachment.units] == [0] * 4  # off is off
    switch(model, True, use_reentrant=False)
    assert equal(gradients(model, loss), plain)
    assert [unit.executed for unit in attachment.units] == list("HERE")
    assert [unit.replays for unit in attachment.units] == [0, 0, 1, 0]


def test_survives_a_diffusion_models_toggles():
    model, arguments = transformer("SD3")
    attachment = planned(model, "HER")
    model.disable_gradient_checkpointing()
    model(**arguments)[0].sum().backward()
    assert [unit.forwards for unit in attachment.units] == [0] * 3
    model.enable_gradient_checkpointing()
    model(**arguments)[0].sum().backward()
    assert [unit.executed for unit in attachment.units] == list("HER")


def test_composes_with_a_checkpointing_function_that_takes_torchs_arguments():
    """Such as transformers' offloading of the inputs."""
    seen = []

    def counting(function, *args, **kwargs):
        seen.append(kwargs["use_reentrant"])
        return checkpoint(function, *args, **kwargs)

    model = decoder()
    attachment = planned(model, "HERE")
    model._set_gradient_checkpointing(True, partial(counting, use_reentrant=False))
    model(IDS, labels=IDS).loss.backward()
    assert seen == [False] * 4
    assert [unit.executed for unit in attachment.units] == list("HERE")


@pytest.mark.parametrize("actions", ["HHHH", "EEEE", "RRRR"])
def test_17_no_cache_is_filled_inside_units(actions, caplog):
    """A cache filled again by the replay would double the keys."""
    model = decoder()
    plain = gradients(model, lambda: model(IDS, labels=IDS).loss)
    planned(model, actions)
    assert equal(gradients(model, lambda: model(IDS, labels=IDS, use_cache=True).loss), plain)


def test_detach_gives_back_what_was():
    model = decoder()
    attachment = planned(model, "RRRR")
    attachment.detach()
    assert "_set_gradient_checkpointing" not in vars(model)
    model(IDS, labels=IDS).loss.backward()
    switch(model, True)
    model(IDS, labels=IDS).loss.backward()
    assert [unit.forwards for unit in attachment.units] == [0] * 4
    attachment = planned(model, "HHHH")
    attachment.detach()
    assert model.model.layers[0].gradient_checkpointing  # it was on
    model(IDS, labels=IDS).loss.backward()
    assert [unit.forwards for unit in attachment.units] == [0] * 4


def test_refuses_reentrant_checkpointing():
    model = decoder()
    switch(model, True, use_reentrant=True)
    with pytest.raises(ValueError, match=r'Set gradient_checkpointing_kwargs=\{"use_reentrant": False\}'):
        planned(model, "RRRR")
    switch(model, False)
    attachment = planned(model, "RRRR")
    with pytest.raises(ValueError, match="use_reentrant: true replays blocks outside of autograd's hooks"):
        switch(model, True, use_reentrant=True)
    attachment.detach()


def test_refuses_what_it_would_have_to_replace():
    model, _ = transformer("SD3")
    planned(model, "RRR")
    with pytest.raises(ValueError, match="would have to replace; use the library's default checkpointing function"):
        model.enable_gradient_checkpointing(lambda module, *args: module(*args))
    with pytest.raises(ValueError, match="without context_fn"):
        model.enable_gradient_checkpointing(partial(checkpoint, use_reentrant=False, context_fn=noop_context_fn))
    decoder_ = decoder()
    planned(decoder_, "RRRR")
    with pytest.raises(ValueError, match="every_n_layers: 2 and recovery both choose the layers"):
        decoder_._set_gradient_checkpointing(True, checkpoint, every_n_layers=2)
    with pytest.raises(ValueError, match="attached to this model already; call detach"):
        planned(decoder_, "RRRR")


def test_refuses_models_without_a_switch_and_without_units():
    capture = Capture(lambda *_: Action.RECOMPUTE)
    with pytest.raises(ValueError, match="Linear is neither a transformers model nor a diffusers one"):
        Attachment(nn.Linear(2, 2), capture)
    model, _ = transformer("SD3")
    model.transformer_blocks = nn.Sequential(*model.transformer_blocks)
    with pytest.raises(ValueError, match="SD3Transformer2DModel has no units"):
        Attachment(model, capture)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of the compiler itself
def test_refuses_compile_around_units():
    model = decoder()
    with pytest.raises(ValueError, match=r"torch\.compile must stay inside units\. Attach recovery first"):
        planned(torch.compile(model, backend="eager"), "RRRR")
    planned(model, "HERE")
    with pytest.raises(CaptureError, match=r"model\.layers\.0 is being compiled together with its recovery"):
        torch.compile(model, backend="eager")(IDS)


def test_says_so_where_torch_hides_the_hooks(monkeypatch):
    model = decoder()
    attachment = planned(model, "HERE")
    for top_hooks in (None, lambda _: None):
        monkeypatch.setattr("onetake.activations.region._top_hooks", top_hooks)
        with pytest.raises(CaptureError, match=r"2\.11 to 2\.15 are known to work.*or the actions R only"):
            model(IDS)
    replan(attachment, "RRRR")
    model(IDS, labels=IDS).loss.backward()
    assert [unit.replays for unit in attachment.units] == [1] * 4


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
def test_compile_inside_units_works():
    model = decoder()
    for layer in model.model.layers:
        layer.mlp.forward = torch.compile(layer.mlp.forward, backend="aot_eager")

    def loss():
        return model(IDS, labels=IDS).loss

    plain = gradients(model, loss)
    attachment = planned(model, "HERE")
    for _ in range(2):
        found = gradients(model, loss)
        assert torch.equal(found.pop("loss"), plain["loss"])
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, plain[name])
    assert [unit.executed for unit in attachment.units] == list("HERE")
