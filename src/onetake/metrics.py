"""Metrics: what each logged number means, where it is written, and the stopwatch behind the times."""

from __future__ import annotations

import json
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PHASES = ("sampling", "decoding", "reward", "backward", "optimizer")

METRICS: dict[str, str] = {
    "kind": "`update` for one optimizer step, `evaluation` for one pass over held-out prompts",
    "update": "optimizer steps taken when the line was written; evaluation 0 is before training",
    "wall_s": "wall-clock seconds of training so far, evaluations and checkpoints included, over all resumed sessions",
    "cpu_s": "and CPU seconds of the process (of rank 0), which other load on the machine does not stretch",
    "forwards": "rows of transformer forward calls spent on training so far (guidance doubles the rows; evaluation excluded)",
    "saved_forwards": "rows of second forward calls that native recomputation would have spent on top, so far",
    "score_mean": "mean reward over the trajectories (update), or images or completions (evaluation)",
    "score_spread": "mean over groups of the population std of the reward inside the group",
    "success_rate": "share of images whose reward reaches `task.success_at`, or of completions that are right",
    "rewards": "mean of each reward by its name, before its weight",
    "dead_groups": "groups whose advantages are all zero, after any re-sampling; they contribute no gradient",
    "dead_by_rounding": "those of them whose rewards differ, but by no more than rounding (docs/methods.md)",
    "resampled_groups": "groups that were drawn again because their rewards were all equal, up to rounding",
    "kl": "mean over events of the scaled KL to the reference, as `kl.scale` says; there if `kl.beta` is above 0",
    "kl_beta": "β of this update's KL; moves if `kl.target` is set",
    "sampling_s": "seconds of denoising in the update; under retain and reweight with the graph, under reweight with its backward",
    "decoding_s": "seconds between the last denoising step and the decoded images",
    "reward_s": "seconds of reward and advantages; of what is scored in the background, of waiting for it",
    "backward_s": "seconds of accumulating the gradient (under recompute with the second forward) and of summing it over the ranks",
    "optimizer_s": "seconds of clipping and the optimizer step",
    "execution": "the execution that produced this update's gradient (later updates on a rollout are `recompute`)",
    "skipped": "1 if no optimizer step was made: every group was dead and there is no KL term, or the gradient was zero, below "
    "rounding beside recent ones, or abnormal; else 0",
    "loss": "value of the objective at the update's log-probs",
    "ratio_mean": "mean of exp(s·(ℓ − ℓ_old)) over events; exactly 1 on the first update of a rollout",
    "ratio_min": "smallest such ratio",
    "ratio_max": "largest such ratio",
    "clip_fraction": "share of events whose gradient the clip removes",
    "approx_kl": "mean of r − 1 − ln r over events, with the objective's scale s inside r",
    "log_prob_shift": "largest |ℓ − ℓ_old| of an event, nats; 0 where the first update of a rollout did not re-score it",
    "events": "indices of this update's events; the `event_…` lists follow it",
    "event_ratio_mean": "`ratio_mean` of each event",
    "event_ratio_min": "`ratio_min` of each event",
    "event_ratio_max": "`ratio_max` of each event",
    "event_clip_fraction": "`clip_fraction` of each event",
    "event_approx_kl": "`approx_kl` of each event",
    "event_log_prob_shift": "`log_prob_shift` of each event",
    "grad_norm": "global L2 norm of the gradient before clipping",
    "grad_norm_clipped": "and after; 0 if the update was skipped",
    "step_norm": "L2 norm of the change of the trainable parameters by this update",
    "learning_rate": "learning rate of this update",
    "peak_rss_mib": "highest resident memory of the process so far, MiB (of rank 0)",
    "completion_tokens": "mean length of an update's completions, tokens",
    "recovery": "what an activation plan did, by name (docs/activations.md): of the last pass with gradients; for language the "
    "mean over the update's micro-batches, of peaks the highest",
    "ranks": "on several ranks, of each: `peak_mib` so far (the GPU allocator's, else as above) and seconds, waiting included",
    "n": "images or completions in the evaluation",
    "stderr": "standard error of success_rate, √(p(1−p)/n)",
    "diversity": "mean over prompts of the mean pairwise RMS pixel difference between the prompt's images, pixels in [0, 1]",
    "evaluation_s": "seconds of the evaluation",
}


class Log:
    """``metrics.jsonl``: one JSON object a line, every key defined in `METRICS`, flushed as it is written."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, **values: Any) -> None:
        unknown = set(values) - set(METRICS)
        assert not unknown, f"metrics without a definition: {unknown}"
        with self.path.open("a") as file:
            file.write(json.dumps(values) + "\n")

    def rewind(self, update: int) -> None:
        """Forget lines written after `update` (a resumed run writes them again)."""
        kept = [line for line in self.read() if line["update"] <= update]
        aside = self.path.with_suffix(".partial")
        aside.write_text("".join(json.dumps(line) + "\n" for line in kept))
        aside.replace(self.path)  # a kill here leaves the old log or the new one

    def read(self) -> list[dict[str, Any]]:
        """All complete lines; a last line cut short by a kill is left out."""
        if not self.path.exists():
            return []
        lines = self.path.read_text().split("\n")
        return [json.loads(line) for line in lines[:-1]]


class Stopwatch:
    """Seconds per phase of one update."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    def columns(self) -> dict[str, float]:
        return {f"{name}_s": round(value, 6) for name, value in self.seconds.items()}


class Elapsed:
    """Seconds since it was made, on the wall and on the CPU, after those of earlier sessions."""

    def __init__(self, wall_s: float = 0.0, cpu_s: float = 0.0) -> None:
        self._wall, self._cpu = time.perf_counter() - wall_s, time.process_time() - cpu_s

    def columns(self) -> dict[str, float]:
        return {"wall_s": time.perf_counter() - self._wall, "cpu_s": time.process_time() - self._cpu}
