"""TRL's GRPOTrainer, two updates: with recovery its weights are the stock trainer's, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import DistributedType
from peft import LoraConfig

from models import decoder, tokens
from onetake.activations.lossy import Lossy
from onetake.activations.measure import Bucket, Profile, fingerprint
from onetake.activations.plan import MIB, Action, Option
from onetake.activations.recovery import Recovery
from onetake.memory import LiveBytes, peak_rss_mib, storage_bytes
from onetake.parallel import World
from ranks import on_ranks

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # TRL and what it imports warn of each other
trl = pytest.importorskip("trl", reason="pip install trl")
grpo_trainer = pytest.importorskip("trl.trainer.grpo_trainer")


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


def trainer(
    path: Path,
    *,
    lora: bool,
    dtype: torch.dtype,
    loss: str,
    checkpointing: bool,
    reward: Any = mostly_even,
    **more: Any,
) -> Any:
    from datasets import Dataset

    config = trl.GRPOConfig(
        output_dir=str(path),
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=12,
        max_steps=more.pop("max_steps", 2),
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        gradient_checkpointing=checkpointing,
        loss_type=loss,
        use_cpu=True,
        bf16=False,
        beta=more.pop("beta", 0.0),
        report_to=[],
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        seed=3,
        **more,
    )
    if config.fsdp:  # accelerate shards what runs on GPUs only: ranks on CPUs would be data parallel, without a word
        config.distributed_state.distributed_type = DistributedType.MULTI_GPU
    return trl.GRPOTrainer(
        model=decoder(dtype=dtype, dropout=0.1),
        reward_funcs=reward,
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


def only(path: Path, model: Any, action: Action) -> Path:
    """A profile in which this action is all that pays, for memory that all units have."""
    bare = Recovery(model, memory=0)
    bare.detach()
    options = {unit.name: [Option(action=action, bytes=1, seconds=0.001)] for unit in bare.units}
    bucket = Bucket(shape=(64, 64), peak=0, options=options)
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
    path = only(tmp_path / "p.json", ours.model, Action.COMPRESS)
    kappa = dict.fromkeys([f"model.layers.{i}" for i in range(4)], 1e-9)
    lossy = Lossy(0.9, micro_batches=2, sensitivity=kappa, by="coefficients")
    recovery = Recovery(ours.model, memory=10, profile=path, lossy=lossy).attach(ours)
    ours.train()
    logged = [entry for entry in ours.state.log_history if "recovery/exposure" in entry]
    assert [entry["recovery/units_L"] for entry in logged] == [0.0, 4.0]
    assert [unit.replays for unit in recovery.units] == [2] * 4
    assert all(entry["recovery/exposure"] > 0 for entry in logged)
    assert logged[1]["recovery/risk"] > 0


def test_calibration_beside_the_run_changes_nothing_of_it_and_then_compresses(tmp_path):
    """16 micro-batches calibrate, from the second of the updates of two on: the tenth is the first that may compress."""
    settings: dict[str, Any] = {"lora": True, "dtype": torch.float32, "loss": "dapo", "max_steps": 11}
    stock = trainer(tmp_path / "stock", checkpointing=False, **settings)
    stock.train()
    for target, compressed in ((1e-9, 0), (0.9, 4)):
        ours = trainer(tmp_path / str(target), checkpointing=True, **settings)
        path = only(tmp_path / f"{target}.json", ours.model, Action.COMPRESS)
        recovery = Recovery(ours.model, memory=10, profile=path, lossy=Lossy(target, micro_batches=2)).attach(ours)
        ours.train()
        assert len(recovery.profile.sensitivity) == 4
        logged = [entry for entry in ours.state.log_history if "recovery/units_L" in entry]
        assert [entry["recovery/units_L"] for entry in logged] == [0] * 9 + [compressed] * 2
        told = [[(e["loss"], e["grad_norm"]) for e in t.state.log_history[:9]] for t in (ours, stock)]
        assert told[0] == told[1]
        same = [torch.equal(p, q) for p, q in zip(ours.model.parameters(), stock.model.parameters(), strict=True)]
        assert all(same) == (not compressed)


class DeadGroups:
    """Rewards that differ inside a group only where `alive` says so, one entry for each group of the run."""

    __name__ = "dead_groups"

    def __init__(self, alive: str) -> None:
        self.alive = [letter == "1" for letter in alive]

    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        groups = [self.alive.pop(0) for _ in range(len(completions) // 4)]
        return [float(alive and i % 2) for alive in groups for i in range(4)]


@pytest.mark.parametrize(
    ("more", "skipped"), [({}, 4), ({"entropy_coef": 0.01}, 0), ({"beta": 0.1}, 0)], ids=["", "entropy bonus", "kl"]
)
@pytest.mark.parametrize("lossy", [False, True], ids=["exact", "lossy"])
def test_dead_micro_batches_skip_their_backward_and_nothing_else_changes(tmp_path, monkeypatch, lossy, more, skipped):
    """A group to a micro-batch, two of them to an update; Adam moves the weights in the update that is all dead, too."""
    monkeypatch.setattr(grpo_trainer, "shuffle_sequence_dict", lambda rows: rows)  # else a micro-batch mixes the groups
    settings = {"lora": True, "dtype": torch.float32, "loss": "dapo", "max_steps": 4, "shuffle_dataset": False, **more}
    stock = trainer(tmp_path / "stock", checkpointing=False, reward=DeadGroups("10000111"), **settings)
    stock.train()

    ours = trainer(tmp_path / "ours", checkpointing=True, reward=DeadGroups("10000111"), **settings)
    backwards: list[torch.Tensor] = []
    layer = next(p for p in ours.model.parameters() if p.requires_grad)
    layer.register_post_accumulate_grad_hook(backwards.append)
    kappa = dict.fromkeys([f"model.layers.{i}" for i in range(4)], 1.0)
    loss = Lossy(1e-9, micro_batches=2, sensitivity=kappa) if lossy else None  # which accepts nothing
    recovery = Recovery(ours.model, memory=1024, profile=profile(tmp_path / "p.json", ours.model), lossy=loss).attach(
        ours
    )
    ours.train()

    end = dict(stock.model.named_parameters())
    assert all(torch.equal(p, end[name]) for name, p in ours.model.named_parameters())
    assert len(backwards) == 8 - skipped
    assert [unit.forwards for unit in recovery.units] == [8] * 4
    assert [unit.replays for unit in recovery.units] == [8 - skipped, 0, 8 - skipped, 0]
    logged = [entry for entry in ours.state.log_history if "recovery/skipped" in entry]
    assert sum(2 * entry["recovery/skipped"] for entry in logged) == skipped
    assert [entry["loss"] for entry in logged] == [entry["loss"] for entry in stock.state.log_history[:-1]]
    if skipped:
        assert [entry["recovery/exposure"] > 0 for entry in logged] == [True, False, True, True]


def trained_twice(world: World, folder: Path, alive: list[str]) -> tuple[bool, list[float], list[int]]:
    """Whether recovery gave the stock trainer's weights on this rank, the share it skipped of each update, and replays."""
    grpo_trainer.shuffle_sequence_dict = lambda rows: rows
    settings: dict[str, Any] = {"lora": True, "dtype": torch.float32, "loss": "grpo", "max_steps": 5}

    def made(name: str) -> Any:
        reward, out = DeadGroups(alive[world.rank]), folder / f"{name}{world.rank}"
        return trainer(out, checkpointing=name == "ours", reward=reward, shuffle_dataset=False, **settings)

    stock = made("stock")
    stock.train()
    ours = made("ours")
    path = profile(folder / f"{world.rank}.json", ours.model)
    recovery = Recovery(ours.model, memory=1024, profile=path).attach(ours)
    ours.train()
    end = stock.model.state_dict()
    equal = all(torch.equal(value, end[name]) for name, value in ours.model.state_dict().items())
    logged = [entry["recovery/skipped"] for entry in ours.state.log_history if "recovery/skipped" in entry]
    return equal, logged, [unit.replays for unit in recovery.units]


def test_ranks_skip_alike_and_only_what_leaves_their_sums_alone(tmp_path):
    """Data parallel. The second micro-batch of the third update is dead, but its backward sums what the first one left."""
    alive = ["1000000111", "1100100011"]
    found = on_ranks(2, tmp_path / "ranks", trained_twice, tmp_path, alive)
    assert found == [(True, [0.0, 1.0, 0.0, 0.5, 0.0], [7, 0, 7, 0])] * 2


def test_foretold_and_measured_peak_are_the_forwards_and_backwards(tmp_path):
    """TRL generates and rewards inside the training step of every other micro-batch; this reward takes 128 MiB for a moment."""

    def hungry(completions: list[str], **_: Any) -> list[float]:
        torch.ones(128 * MIB // 4)
        return mostly_even(completions)

    ours = trainer(tmp_path, lora=True, dtype=torch.float32, loss="dapo", checkpointing=True, reward=hungry)
    recovery = Recovery(ours.model, memory="100%").attach(ours)
    ours.train()
    last = recovery.report()  # its micro-batch did not generate, the one that was measured did
    assert last["peak_mib"] == pytest.approx(last["predicted_peak_mib"], abs=32)
    logged = [entry["recovery/peak_mib"] for entry in ours.state.log_history if "recovery/peak_mib" in entry]
    assert max(logged) < peak_rss_mib() - 64


class Counted:
    """The peak by tensors instead of resident memory, which is too coarse for a tiny model."""

    free = 0

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        self.live = LiveBytes()
        self.live.now = storage_bytes(known)

    def restart(self) -> bool:
        self.live.restart()
        return True

    @property
    def used(self) -> int:
        return self.live.now

    @property
    def bytes(self) -> int:
        return self.live.peak


def test_gradients_and_optimizer_state_are_in_the_peak_foretold(tmp_path):
    """They come after the micro-batch that is measured; foretold is to the percent at which a new plan is made."""
    ours = trainer(tmp_path, lora=False, dtype=torch.float32, loss="dapo", checkpointing=True, max_steps=3)
    recovery = Recovery(ours.model, memory="1.5x")
    counted: Any = Counted(ours.model.parameters())
    recovery.peak = counted
    recovery.attach(ours)
    with counted.live:
        ours.train()
    last = recovery.report()
    assert last["kept_mib"] > 0
    assert last["peak_mib"] == pytest.approx(last["predicted_peak_mib"], rel=0.01)


def trained_sharded(world: World, folder: Path) -> dict[str, Any]:
    """Under FSDP2, by weights and dtype: whether recovery gave the stock trainer's shards, whether they moved, and replays."""
    found: dict[str, Any] = {}
    for lora, dtype in product((True, False), (torch.float32, torch.bfloat16)):
        settings: dict[str, Any] = {"lora": lora, "dtype": dtype, "loss": "dapo", "fsdp": True}
        stock = trainer(folder / "stock", checkpointing=False, **settings)
        start = {n: p.detach().clone() for n, p in stock.model.named_parameters()}
        stock.train()
        ours = trainer(folder / "ours", checkpointing=True, **settings)
        if lora:
            path = profile(folder / f"{dtype} {world.rank}.json", ours.model)
            recovery = Recovery(ours.model, memory=1024, profile=path)
        else:
            recovery, ids = Recovery(ours.model, memory="100%"), tokens(4, 15)
            with torch.random.fork_rng(), recovery.step():
                ours.model(ids, labels=ids).loss.backward()
            ours.model.zero_grad()
        recovery.attach(ours)
        ours.train()
        end = dict(stock.model.named_parameters())
        equal = all(torch.equal(p.to_local(), end[n].to_local()) for n, p in ours.model.named_parameters())
        moved = any(not torch.equal(p.full_tensor(), start[n]) for n, p in end.items())
        found[f"{'lora' if lora else 'full'} {dtype}"] = equal, moved, [unit.replays for unit in recovery.units]
    return found


def test_sharded_weights_are_the_stock_trainers_bit_for_bit(tmp_path):
    """The profile is from before sharding, written for LoRA, measured for full weights (a replay each). Of two micro-batches to an
    update FSDP2 keeps the first one's gradients to itself.
    """
    found = on_ranks(2, tmp_path / "ranks", trained_sharded, tmp_path)
    planned = {"lora": [4, 0, 4, 0], "full": [1] * 4}
    names = [f"{weights} torch.{dtype}" for weights in planned for dtype in ("float32", "bfloat16")]
    assert found == [{name: (True, True, planned[name[:4]]) for name in names}] * 2
