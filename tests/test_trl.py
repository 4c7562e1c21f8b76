"""TRL's GRPOTrainer, two updates: with recovery its weights are the stock trainer's, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from models import decoder
from onetake.activations.lossy import Lossy
from onetake.activations.measure import Bucket, Profile, fingerprint
from onetake.activations.plan import Action, Option
from onetake.activations.recovery import Recovery

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # TRL and what it imports warn of each other
trl = pytest.importorskip("trl", reason="pip install trl")


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<bos>", "<eos>", *[f"w{i}" for i in range(61)]]
    core = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    core.pre_tokenizer = Whitespace()  # type: ignore[assignment]
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    return PreTrainedTokenizerFast(tokenizer_object=core, **special)


def mostly_even(completions: list[str], **_: Any) -> list[float]:
    words = [completion.split() for completion in completions]
    return [sum(int(w[1:]) % 2 == 0 for w in some if w[0] == "w") / max(len(some), 1) for some in words]


def trainer(path: Path, *, lora: bool, dtype: torch.dtype, loss: str, checkpointing: bool) -> Any:
    from datasets import Dataset

    config = trl.GRPOConfig(
        output_dir=str(path),
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=12,
        max_steps=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        gradient_checkpointing=checkpointing,
        loss_type=loss,
        use_cpu=True,
        bf16=False,
        beta=0.0,
        report_to=[],
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        seed=3,
    )
    return trl.GRPOTrainer(
        model=decoder(dtype=dtype, dropout=0.1),
        reward_funcs=mostly_even,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": f"w{i} w{i + 1} w{i + 2}"} for i in range(8)]),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1) if lora else None,
    )


def profile(path: Path, model: torch.nn.Module) -> Path:
    """In which a budget of 24 bytes buys one H, one E, and nothing for two units."""
    bare = Recovery(model, memory=0)
    bare.detach()
    costs = [(99, 99), (99, 14), (99, 99), (10, 9)]
    options = {
        unit.name: [
            Option(action=Action.STORE, bytes=h, seconds=0.002),
            Option(action=Action.ELEMENTWISE, bytes=e, seconds=0.001),
        ]
        for unit, (h, e) in zip(bare.units, costs, strict=True)
    }
    bucket = Bucket(shape=(64, 64), peak=1000, options=options)
    Profile(fingerprint=fingerprint(model, bare.units), buckets=[bucket]).save(path)
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("lora", "loss"), [(True, "dapo"), (False, "grpo")], ids=["lora-dapo", "full-grpo"])
def test_two_updates_are_the_stock_trainers_bit_for_bit(tmp_path, lora, dtype, loss):
    stock = trainer(tmp_path / "stock", lora=lora, dtype=dtype, loss=loss, checkpointing=False)
    start = {name: p.detach().clone() for name, p in stock.model.named_parameters()}
    stock.train()

    ours = trainer(tmp_path / "ours", lora=lora, dtype=dtype, loss=loss, checkpointing=True)
    recovery = Recovery(ours.model, memory=1024, profile=profile(tmp_path / "p.json", ours.model)).attach(ours)
    ours.train()

    end = dict(stock.model.named_parameters())
    assert all(torch.equal(p, end[name]) for name, p in ours.model.named_parameters())
    assert not all(torch.equal(p, start[name]) for name, p in end.items())
    assert [unit.executed for unit in recovery.units] == list("RERH")
    assert [unit.forwards for unit in recovery.units] == [4] * 4  # two updates of two micro-batches; none in generation
    assert [unit.replays for unit in recovery.units] == [4, 0, 4, 0]
    logged = [entry for entry in ours.state.log_history if "recovery/replays" in entry]
    assert [entry["recovery/replays"] for entry in logged] == [2.0, 2.0]


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"])
def test_the_coefficients_of_every_loss_are_read(tmp_path, loss):
    """With all risk acceptable and only L worth its bytes: the first update compresses nothing, the second everything."""
    ours = trainer(tmp_path, lora=True, dtype=torch.float32, loss=loss, checkpointing=True)
    bare = Recovery(ours.model, memory=0)
    bare.detach()
    options = {unit.name: [Option(action=Action.COMPRESS, bytes=1, seconds=0.001)] for unit in bare.units}
    bucket = Bucket(shape=(64, 64), peak=0, options=options)
    Profile(fingerprint=fingerprint(ours.model, bare.units), buckets=[bucket]).save(tmp_path / "p.json")
    lossy = Lossy(0.9, micro_batches=2, sensitivity=dict.fromkeys(options, 1e-9))
    recovery = Recovery(ours.model, memory=10, profile=tmp_path / "p.json", lossy=lossy).attach(ours)
    ours.train()
    logged = [entry for entry in ours.state.log_history if "recovery/exposure" in entry]
    assert [entry["recovery/units_L"] for entry in logged] == [0.0, 4.0]
    assert [unit.replays for unit in recovery.units] == [2] * 4
    assert all(entry["recovery/exposure"] > 0 for entry in logged)
    assert logged[1]["recovery/risk"] > 0
