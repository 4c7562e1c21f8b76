"""What every action on one decoder layer costs, and what plans over 30 such layers save: bytes, FLOPs and paired seconds.

    python benchmarks/units.py [--rows 8] [--length 256] [--dtype bfloat16] [--rounds 7]

A layer of SmolLM2-135M's shape (width 576, MLP 1536, 9 heads, 3 of keys) with random weights, on which neither bytes nor
seconds depend, and float32 LoRA r16 on every linear layer; one thread. Seconds are process CPU time of forward and backward of
the layer alone, the least over rounds, and what an action saves is told against R. `again` counts the matrix
products that backward runs a second time. `error` is L's, relative to the gradient of a random loss on the layer's LoRA.
"""

from __future__ import annotations

import time

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from onetake.activations.attach import Attachment
from onetake.activations.capture import Capture
from onetake.activations.measure import Probe
from onetake.activations.plan import MIB, Action, UnitOptions
from onetake.activations.solve import solve
from recovery import begin, sized

LAYERS = 30


def main() -> None:
    arguments = sized(__doc__, 7).parse_args()
    begin()
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=1,
        num_attention_heads=9,
        num_key_value_heads=3,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).to(getattr(torch, arguments.dtype))
    lora = LoraConfig(r=16, target_modules="all-linear", exclude_modules=["lm_head"], init_lora_weights=False)
    model = get_peft_model(model, lora).train()
    ids = torch.randint(0, 64, (arguments.rows, arguments.length))
    weight = torch.randn(arguments.rows, arguments.length, 576)

    action = Action.RECOMPUTE
    attachment = Attachment(model, Capture(lambda *_: action))
    probe = Probe(list(Action), attachment.capture.known.templates, rounds=arguments.rounds, per_kind=1)
    attachment.capture.probe = probe
    hidden = model.get_base_model().model
    hidden(ids)
    attachment.capture.probe = None
    (options,) = probe.options().values()

    def run() -> tuple[torch.Tensor, float]:
        """The LoRA gradient, and GFLOP of matrix products in backward."""
        model.zero_grad()
        loss = (hidden(ids).last_hidden_state.float() * weight).sum()
        with FlopCounterMode(display=False) as count:
            loss.backward()
        return torch.cat(
            [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        ), count.get_total_flops() / 1e9

    found = {}
    for action in Action:
        found[action] = run()
    exact, least = found[Action.STORE]
    whole = next(option.bytes for option in options if option.action == Action.STORE)
    print(f"{'action':<7}{'MiB':>8}{'of H':>8}{'again GFLOP':>13}{'ms saved':>10}{'error':>10}")
    for option in [*options, *UnitOptions(name="", options=()).all]:
        gradient, flops = found[option.action]
        error = float((gradient - exact).norm() / exact.norm())
        numbers = (
            f"{option.bytes / MIB:8.2f}{option.bytes / whole:8.1%}{flops - least:13.2f}{option.seconds * 1e3:10.1f}"
        )
        print(f"{option.action:<7}{numbers}{error:10.2e}")

    print(
        f"\n{LAYERS} such layers: seconds saved of the {LAYERS * max(o.seconds for o in options):.2f} that storing all saves"
    )
    print(f"{'MiB':>8}{'of all H':>9}{'H E A P R':>12}{'plan':>10}{'H and R':>9}{'plan':>10}{'solving ms':>12}")
    for share in (0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 1.0):
        memory = round(share * LAYERS * whole)
        line = f"{memory / MIB:8.0f}{share:9.0%}"
        for allowed in ("HEAP", "H"):
            kept = tuple(option for option in options if option.action in allowed)
            started = time.process_time()
            plan = solve([UnitOptions(name=str(i), options=kept) for i in range(LAYERS)], memory=memory)
            took = time.process_time() - started
            counts = "".join(f"{plan.actions.count(a)}{a}" for a in Action if plan.actions.count(a))
            line += f"{plan.seconds:{12 if allowed == 'HEAP' else 9}.2f}{counts:>10}"
        print(f"{line}{took * 1e3:12.1f}")


if __name__ == "__main__":
    main()
