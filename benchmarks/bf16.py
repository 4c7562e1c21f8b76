"""How far bfloat16 moves an update's gradient, on tiny FLUX.1 and Wan 2.1 pipelines of the real classes.

    python benchmarks/bf16.py [--heads 8] [--layers 4] [--updates 4]

The float32 policy holds the very weights of the bfloat16 one, so that only arithmetic and stored latents differ; both train
float32 LoRA, and draw the same noise (torch 2.11 draws other noise in bfloat16: FLUX.1's cosines mean nothing there). Each policy
samples its own trajectories. "cosine" compares the gradient under an execution with float32's native one; "relative L2" compares
it with the native one in bfloat16. Printed is the worst update.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from diffusers.utils.logging import disable_progress_bar
from torch import Tensor

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from helpers import gradient_of, move, relative_error
from onetake.execution import EXECUTIONS
from onetake.policies.adapters import Lora
from onetake.policies.diffusion import DiffusionPolicy
from onetake.policies.loading import PolicyConfig
from onetake.rollout.sampling import RolloutConfig
from tiny_families import CASES, tiny

CHOSEN = [("flux", 4.0), ("flux", 3.5), ("wan-2.1", 4.5)]
"""Tiny pipeline, guidance. FLUX.1 embeds 1000 · guidance in its own dtype: bfloat16 holds 4000, and rounds 3500 to 3504."""
SIZE = RolloutConfig(groups=2, group_size=4, micro_batch=2)


def policies(case: str, guidance: float, folder: Path, *, heads: int, layers: int) -> dict[str, DiffusionPolicy]:
    """The same weights, rounded to bfloat16, computed with in either dtype."""
    disable_progress_bar()
    tiny(case, heads=heads, layers=layers).save_pretrained(folder)
    made = {}
    for dtype in ("bfloat16", "float32"):
        settings = {"guidance": guidance, "call": CASES[case].call, "trainable": Lora(rank=4)}
        config = PolicyConfig(pipeline=str(folder), steps=6, dtype=dtype, **settings)
        made[dtype] = DiffusionPolicy.from_config(config, str(folder), seed=0)
        move(made[dtype])  # a fresh adapter is the identity, half of whose gradient is zero
    for name, component in made["float32"].pipe.components.items():
        if isinstance(component, torch.nn.Module):
            component.load_state_dict(made["bfloat16"].pipe.components[name].state_dict())
    return made


def measure(case: str, guidance: float, *, heads: int, layers: int, updates: int) -> dict[str, tuple[float, float]]:
    """Execution → (smallest cosine with native float32, largest relative L2 from native bfloat16)."""
    found = {name: (1.0, 0.0) for name in EXECUTIONS}
    with tempfile.TemporaryDirectory() as folder:
        made = policies(case, guidance, Path(folder), heads=heads, layers=layers)
        for update in range(updates):
            exact = gradient_of(made["float32"], "recompute", config=SIZE, update=update)
            gradients = {name: gradient_of(made["bfloat16"], name, config=SIZE, update=update) for name in EXECUTIONS}
            for name, gradient in gradients.items():
                cosine, distance = cosine_of(gradient, exact), relative_error(gradient, gradients["recompute"])
                found[name] = min(found[name][0], cosine), max(found[name][1], distance)
    return found


def cosine_of(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    a, b = (torch.cat([gradient.double().flatten() for gradient in each.values()]) for each in (one, other))
    return float(torch.nn.functional.cosine_similarity(a, b, dim=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"heads": 8, "layers": 4, "updates": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    arguments = vars(parser.parse_args())
    print(
        "| tiny pipeline | execution | cosine with native float32 | relative L2 from native bfloat16 |\n|---|---|---|---|"
    )
    for case, guidance in CHOSEN:
        for execution, (cosine, distance) in measure(case, guidance, **arguments).items():
            print(f"| {case}, guidance {guidance} | `{execution}` | {cosine:.4f} | {distance:.1e} |", flush=True)


if __name__ == "__main__":
    main()
