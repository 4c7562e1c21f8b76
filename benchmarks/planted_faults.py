"""Plant faults into one tensor of an update's gradient and count what the checks catch; then count false alarms on sound settings.

    python benchmarks/planted_faults.py [--faults 100] [--sound 60] [--factors]

Each fault (`tests/planted.py`: a wrong factor, entry or row, a stale or missing gradient, events and trajectories missing, twice,
misweighed or exchanged) is planted into one tensor, small or large, of a float64 toy or a tiny pipeline of the real classes,
under retain and reweight. "pre-flight" runs before the first update, "recheck" in the middle of a run, with random advantages on
weights that have moved; each fault must be caught by the pre-flight, and named with its tensor. `--factors` adds the smallest
wrong factors that are caught.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import torch
from diffusers.utils.logging import disable_progress_bar
from torch import Tensor
from transformers.utils.logging import disable_progress_bar as disable_transformers_bar

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from onetake.core.coefficients import Coefficients
from onetake.core.noise import generator
from onetake.core.objectives import Grpo
from onetake.core.records import Rollout
from onetake.execution import Execution
from onetake.policies import Policy, leaves
from onetake.rollout.compare_gradients import Verdict
from onetake.rollout.preflight import PreflightError, preflight
from onetake.rollout.recheck import recheck
from onetake.rollout.sampling import sample
from planted import Fault, Faulty, Setting, factor, faults, targets

FAULTY = [
    Setting(case="toy"),
    Setting(case="toy", execution="retain", kl=True),
    Setting(case="toy", micro_batch=1, kl=True),
    *(Setting(case="sd3", dtype=dtype, micro_batch=4, guidance=3.0) for dtype in ("float32", "bfloat16")),
    *(Setting(case="flux", dtype=dtype, execution="retain", kl=True) for dtype in ("float32", "bfloat16")),
    *(Setting(case="wan-2.1", dtype=dtype, kl=True, guidance=3.0) for dtype in ("float32", "bfloat16")),
    Setting(case="wan-2.1", dtype="bfloat16", micro_batch=1),
    Setting(case="sd3", trainable="full", execution="reweight", micro_batch=2),
    Setting(case="sd3", trainable="full", execution="retain", micro_batch=4),
    Setting(case="flux", trainable="full", execution="reweight", micro_batch=1, kl=True),
    Setting(case="wan-2.1", trainable="full", execution="reweight", micro_batch=1),
]
_SMALL = ("sd3", "flux", "wan-2.1")
_DTYPES = ("float32", "bfloat16")
SOUND = [
    *(
        Setting(case=case, dtype=dtype, execution=execution, micro_batch=size, kl=kl, guidance=guidance)
        for case, dtype in itertools.product(_SMALL, _DTYPES)
        for execution, size, kl, guidance in (
            ("retain", 2, True, 1.0),
            ("reweight", 1, False, 1.0),
            ("reweight", 4, True, 1.0),
            ("reweight", 2, False, 3.0),
            ("reweight", 4, True, 3.0),
        )
    ),
    *(
        Setting(case=case, trainable="full", execution=execution, micro_batch=size, kl=kl, guidance=guidance)
        for case in _SMALL
        for execution, size, kl, guidance in (
            ("retain", 4, True, 1.0),
            ("reweight", 1, True, 3.0),
            ("reweight", 1, False, 1.0),
        )
    ),
    Setting(case="sd3", trainable="full", micro_batch=4),
    Setting(case="sd3", trainable="full", micro_batch=2, kl=True, guidance=3.0),
    *(
        Setting(case=case, dtype=dtype, micro_batch=2, kl=case < "l", guidance=3.0)
        for case in (
            "qwen-image",
            "chroma",
            "z-image",
            "auraflow",
            "lumina2",
            "ltx",
            "wan-2.2",
            "mochi",
            "hunyuan-video",
        )
        for dtype in _DTYPES
    ),
    Setting(case="toy", micro_batch=4, kl=True),
    Setting(case="toy", micro_batch=1),
]


@cache
def policy_of(setting: Setting, moved: bool) -> Policy:
    return setting.policy(moved=moved)


def checked_before(setting: Setting, execution: Execution, seed: int = 0) -> Verdict | None:
    """The pre-flight's worst verdict. Raises PreflightError."""
    policy = policy_of(setting, False)
    return preflight(policy, execution, Grpo(), setting.batches(policy, seed)).closest


def checked_later(setting: Setting, execution: Execution, seed: int = 0) -> Verdict | None:
    """The recheck's, on a rollout in the middle of a run. Raises PreflightError."""
    policy = policy_of(setting, True)
    rollout = _rolled(setting, policy, execution, seed)
    for leaf in leaves(policy).values():
        leaf.grad = None
    return recheck(policy, execution, rollout, Coefficients(Grpo(), rollout), Grpo())


def _rolled(setting: Setting, policy: Policy, execution: Execution, seed: int = 0) -> Rollout:
    rollout = sample(policy, execution, setting.batches(policy, seed))
    rollout.advantages = torch.randn(2, 4, generator=generator("advantages", seed), dtype=torch.float64)
    return rollout


CHECKS = {"pre-flight": checked_before, "recheck": checked_later}


@cache
def gradient(setting: Setting, seed: int = 0) -> dict[str, Tensor]:
    """Of an update of the moved policy, for targets and stale tensors."""
    policy, execution = policy_of(setting, True), setting.strategy
    rollout = _rolled(setting, policy, execution, seed)
    execution.accumulate(policy, rollout, Coefficients(Grpo(), rollout))
    found = {name: leaf.grad for name, leaf in leaves(policy).items() if leaf.grad is not None}
    for leaf in leaves(policy).values():
        leaf.grad = None
    return found


def planted(count: int, settings: Sequence[Setting] = FAULTY) -> Iterator[tuple[Setting, str, str, str, Fault]]:
    """`count` of (setting, the tensor's kind and name, the fault's name, the fault), all of them about equally often."""
    places = [(setting, kind, name) for setting in settings for kind, name in targets(gradient(setting)).items()]
    names = {setting: itertools.cycle(_rotated(list(faults(setting)), 5 * i)) for i, setting in enumerate(settings)}
    stride = next(n for n in range(int(len(places) * 0.38), len(places)) if math.gcd(n, len(places)) == 1)
    for number in range(count):
        setting, kind, name = places[number * stride % len(places)]
        fault = next(names[setting])
        yield setting, kind, name, fault, faults(setting)[fault]


def _rotated(values: list[str], by: int) -> list[str]:
    return values[by % len(values) :] + values[: by % len(values)]


def caught(check: str, setting: Setting, name: str, fault: Fault) -> tuple[bool, float, str]:
    """Whether it was, naming the tensor; the fault's size relative to the tensor's gradient; what was said."""
    faulty = Faulty(setting.strategy, name, fault, gradient(setting, 1)[name])
    try:
        CHECKS[check](setting, faulty)
    except PreflightError as error:
        return name in str(error), faulty.changed, str(error)
    return False, faulty.changed, "nothing"


def plant(count: int, settings: Sequence[Setting] = FAULTY) -> dict[str, int]:
    """Plant `count` faults; print every miss, and return how many each check caught."""
    found = dict.fromkeys(CHECKS, 0)
    for setting, kind, name, fault, function in planted(count, settings):
        for check in CHECKS:
            is_caught, size, said = caught(check, setting, name, function)
            found[check] += is_caught
            if not is_caught:
                print(
                    f"missed by the {check}: {fault} ({size:.1e}) in the {kind} {name} of {setting}; it said {said[:300]}",
                    flush=True,
                )
    return found


def sound(count: int) -> tuple[int, dict[str, float]]:
    """Run the first `count` sound settings; print every alarm; return their number and the checks' worst excess."""
    alarms, worst = 0, dict.fromkeys(CHECKS, 0.0)
    for setting in SOUND[:count]:
        for check, function in CHECKS.items():
            try:
                verdict = function(setting, setting.strategy)
            except PreflightError as error:
                alarms += 1
                print(f"false alarm of the {check}: {setting}: {error}", flush=True)
            else:
                worst[check] = max(worst[check], verdict.excess if verdict is not None else 0.0)
    return alarms, worst


def smallest(check: str, setting: Setting, name: str) -> str:
    """The smallest of the factors 1 + 1, 1 + 0.5, 1 + 0.2, 1 + 0.1, … from which on all are caught."""
    steps = [digit * 10.0**-power for power in range(9) for digit in (1, 0.5, 0.2)]
    least = "none"
    for step in steps:
        if not caught(check, setting, name, factor(1 + step))[0]:
            break
        least = f"1 + {step:.0e}"
    return least


def print_factors() -> None:
    print("| run | tensor | pre-flight | recheck |\n|---|---|---|---|")
    for setting in FAULTY:
        kinds = targets(gradient(setting))
        for kind in ("smallest", "largest", "weakest"):
            least = " | ".join(smallest(check, setting, kinds[kind]) for check in CHECKS)
            print(f"| {setting} | {kind}, {gradient(setting)[kinds[kind]].numel()} entries | {least} |", flush=True)


def quiet() -> None:
    """What the libraries say about tiny models and each other."""
    disable_progress_bar()
    disable_transformers_bar()
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--sound", type=int, default=len(SOUND))
    parser.add_argument("--factors", action="store_true")
    chosen = parser.parse_args()
    quiet()
    start = time.perf_counter()
    for check, number in plant(chosen.faults).items():
        print(f"{check}: {number} of {chosen.faults} planted faults caught, each with its tensor")
    alarms, worst = sound(chosen.sound)
    print(
        f"{alarms} false alarms on {min(chosen.sound, len(SOUND))} sound settings; the nearest to one was at "
        + ", ".join(f"{excess:.2f} of the limit ({check})" for check, excess in worst.items())
    )
    if chosen.factors:
        print_factors()
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
