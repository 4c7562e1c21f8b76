"""The door: give a model's update the memory there is, and it recomputes no more than it must.

    recovery = Recovery(model, memory="1.10x")
    recovery.attach(trainer)                      # TRL's GRPOTrainer, or any transformers Trainer
    with recovery.step():                         # or one's own loop: around forward and backward
        loss(model(batch)).backward()

With exact actions (all but L), the default, gradients have the bits of no checkpointing; `lossy` adds L within an error budget.
"""

from __future__ import annotations

from typing import Any

from onetake.activations import trainers
from onetake.activations.steps import Steps


class Recovery(Steps):
    """`Steps`, by hand or by a trainer."""

    def attach(self, trainer: Any) -> Recovery:
        """Go along with the trainer's steps, and into its log (see `trainers.attach`)."""
        trainers.attach(self, trainer)
        return self
