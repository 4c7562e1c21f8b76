"""What recovery itself costs of an update: its plan, decisions, hooks and notes, without the kernels that it saves or runs.

    python benchmarks/overhead.py [--rounds 30] [--rows 8] [--length 256] [--dtype bfloat16]

None of that work depends on widths, so it is timed where there is little else: a decoder of SmolLM2-135M's 30 layers with LoRA on
every linear layer, 18 wide, on 16 tokens. Each action on all units, as a plan inside `Recovery.step`, against the same update
without recovery and without checkpointing, and against torch's checkpointing, whose replay has a price like this too. E and L pay
here for every small operation that they run again. Seconds are process CPU time, one thread; medians over rounds that interleave
all of them. Shares are of one update of the real model without checkpointing, the fastest. Of what `lossy` does, the norm of the
gradient grows with the trained parameters, and is small here.
"""

from __future__ import annotations

import statistics
import time
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from onetake.activations.exposure import exposure
from onetake.activations.lossy import Lossy
from onetake.activations.measure import Bucket
from onetake.activations.plan import Action, Option
from onetake.activations.recovery import Recovery
from recovery import begin, load, log_probs, sized, update

SHAPE = 2, 8
BASES = "none", "checkpointing"


def small(dtype: str) -> Any:
    """The layers of SmolLM2-135M, narrow, in training mode with LoRA."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=18,
        intermediate_size=48,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        use_cache=False,
    )
    lora = LoraConfig(r=16, target_modules="all-linear", exclude_modules=["lm_head"])
    return get_peft_model(LlamaForCausalLM(config).to(getattr(torch, dtype)), lora).train()


def under(action: Action, dtype: str) -> tuple[Any, Recovery]:
    """A model whose recovery has a plan with this action for every unit."""
    model = small(dtype)
    lossy = Lossy(0.5) if action == Action.COMPRESS else None
    recovery = Recovery(model, memory="100%", lossy=lossy)
    names = [unit.name for unit in recovery.units]
    if lossy is not None:
        lossy.sensitivity = dict.fromkeys(names, 1e-6)
    options = [] if action == Action.RECOMPUTE else [Option(action=action, bytes=1, seconds=1.0)]
    recovery.profile.buckets.append(Bucket(shape=SHAPE, options=dict.fromkeys(names, options)))
    return model, recovery


def seconds(model: Any, recovery: Recovery | None, ids: Tensor, advantages: Tensor) -> float:
    """Of one update's forward and backward, with all that an attached trainer's has."""
    model.zero_grad()
    started = time.process_time()
    with nullcontext() if recovery is None else recovery.step():
        scored = log_probs(model, ids)
        loss = ((scored - scored.detach()).exp() * advantages[:, None]).mean()
        if recovery is not None:
            exposure(loss, [scored])
        loss.backward()
    return time.process_time() - started


def main() -> None:
    arguments = sized(__doc__, 30).parse_args()
    begin()

    real = load(arguments.dtype)
    ids = torch.randint(0, real.config.vocab_size, (arguments.rows, arguments.length))
    started = time.process_time()
    update(real, ids, torch.randn(arguments.rows))
    whole = time.process_time() - started
    del real

    checkpointed = small(arguments.dtype)
    checkpointed.get_base_model()._set_gradient_checkpointing(True, partial(checkpoint, use_reentrant=False))
    plain: list[tuple[Any, None]] = [(small(arguments.dtype), None), (checkpointed, None)]
    cases = dict(zip(BASES, plain, strict=True)) | {a: under(a, arguments.dtype) for a in Action}
    given = torch.randint(0, 64, SHAPE), torch.randn(SHAPE[0])
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(arguments.rounds + 3):
        for name, case in cases.items():
            took = seconds(*case, *given)
            if turn >= 3:  # before, templates are recorded, and the gradient's norm becomes known
                taken[name].append(took)

    print(f"one update of the real model, without checkpointing: {whole:.2f} s")
    print(f"{'all units':<12}" + "".join(f"{f'ms more than {base}':>27}{'share':>8}" for base in BASES))
    for action in Action:
        line = f"{action:<12}"
        for base in BASES:
            more = statistics.median(a - b for a, b in zip(taken[action], taken[base], strict=True))
            line += f"{more * 1e3:27.1f}{more / whole:8.2%}"
        print(line)
        assert all(unit.executed == action for unit in cases[action][1].units)


if __name__ == "__main__":
    main()
