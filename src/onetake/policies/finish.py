"""How the deterministic steps after a group's last stochastic event are taken: on, or faster by a higher-order solver."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from diffusers.schedulers.scheduling_dpmsolver_multistep import DPMSolverMultistepScheduler
from pydantic import Field
from torch import Tensor

from onetake.core.records import NAMED, Config


class Euler(Config):
    """As all other deterministic steps."""

    kind: Literal["euler"] = "euler"


class DpmSolver(Config):
    """diffusers' multistep DPM-Solver++ on a `share` of the remaining steps (MixGRPO-Flash, arXiv 2507.21802)."""

    kind: Literal["dpm-solver++"] = "dpm-solver++"
    order: Literal[1, 2, 3] = 2
    share: float = Field(default=0.4, gt=0, le=1)

    def kept(self, first: int, steps: int) -> list[int]:
        """Indices into the schedule that remain of [first, steps], both ends among them, evenly spaced."""
        rest = steps - first
        count = max(1, int(rest * self.share))
        return [first + round(i * rest / count) for i in range(count + 1)]

    def solver(self, sigmas: list[float], timesteps: Tensor) -> DPMSolverMultistepScheduler:
        """A fresh solver on the noise levels `sigmas` (n+1), whose `step` takes ε − x₀ as velocity."""
        solver = DPMSolverMultistepScheduler(
            algorithm_type="dpmsolver++",
            prediction_type="flow_prediction",
            use_flow_sigmas=True,
            solver_order=self.order,
            final_sigmas_type="zero",
        )
        solver.sigmas, solver.timesteps = torch.tensor(sigmas), timesteps
        solver.num_inference_steps = len(timesteps)
        solver.set_begin_index(0)
        return solver


Finish = Annotated[Euler | DpmSolver, Field(discriminator="kind"), NAMED]
