"""A toy policy: a small velocity network on vectors, sampled by the same kernels as the real pipelines.

It exists so that every claim can be checked in float64 against plain autograd, and so that docs can run in a second.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from onetake.core.noise import generator, start_generators
from onetake.core.records import Entry, MicroBatch, Transition
from onetake.core.transitions import Kernel
from onetake.policies import Observer
from onetake.policies.episode import Episode


class ToyVelocity(nn.Module):
    """v(x, σ, prompt): two linear layers around a normalisation with a trainable scale, conditioned on the prompt's index."""

    def __init__(self, dims: int, width: int, prompts: int, seed: int) -> None:
        super().__init__()
        self.inner = nn.Linear(dims + 1 + prompts, width, dtype=torch.float64)
        self.norm = nn.LayerNorm(width, dtype=torch.float64)
        self.outer = nn.Linear(width, dims, dtype=torch.float64)
        self.prompts = prompts
        random = generator(seed, "toy weights")
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=random, dtype=torch.float64))

    def forward(self, x: Tensor, sigma: float, prompt: int) -> Tensor:
        """x (B, D), σ and the prompt's index → velocity (B, D)."""
        condition = x.new_zeros(len(x), 1 + self.prompts)
        condition[:, 0], condition[:, 1 + prompt] = sigma, 1.0
        return self.outer(torch.tanh(self.norm(self.inner(torch.cat([x, condition], 1)))))


class ToyPolicy:
    """Float64 policy on D-dimensional vectors with a linear schedule σ_k = 1 − k/T."""

    ways: tuple[str, ...] = ("direct",)
    way = "direct"

    def __init__(
        self, kernel: Kernel, *, dims: int = 4, steps: int = 5, width: int = 8, prompts: int = 3, seed: int = 0
    ):
        self.kernel = kernel
        self.dims = dims
        self.module = ToyVelocity(dims, width, prompts, seed)
        self._reference = ToyVelocity(dims, width, prompts, seed).requires_grad_(False)
        self.sigmas = [1 - k / steps for k in range(steps + 1)]
        self.version = self.calls = self.forwards = self.trained_forwards = 0
        self.gathered: dict[str, nn.Parameter] = {}

    def _velocity(self, module: ToyVelocity, x: Tensor, index: int, batch: MicroBatch) -> Tensor:
        self.calls += 1
        self.forwards += len(x)
        self.trained_forwards += len(x) * torch.is_grad_enabled()
        return module(x, self.sigmas[index], batch.prompt_index)

    def rollout(self, batch: MicroBatch, observe: Observer, *, grad: bool, entry: Entry | None = None) -> Tensor:
        episode = Episode(batch=batch, kernel=self.kernel, observe=observe, grad=grad, entry=entry)
        return self._steps(episode, len(self.sigmas) - 1)

    def prefix(self, batch: MicroBatch) -> Entry:
        episode = Episode(batch=batch.alone(), kernel=self.kernel, observe=lambda event: None, grad=False)
        return Entry(index=batch.first, sample=self._steps(episode, batch.first))

    def _steps(self, episode: Episode, stop: int) -> Tensor:
        batch, entry = episode.batch, episode.entry
        if entry is None:
            x = torch.stack([torch.randn(self.dims, generator=g, dtype=torch.float64) for g in start_generators(batch)])
        else:
            x = entry.sample.expand(len(batch.samples), self.dims)
        for k in range(0 if entry is None else entry.index, stop):
            with torch.set_grad_enabled(episode.wants_grad(k)):
                velocity = self._velocity(self.module, x, k, batch)
                if episode.stochastic(k):
                    x = episode.transition(k, x, velocity, self.sigmas)
                else:
                    x = x + (self.sigmas[k + 1] - self.sigmas[k]) * velocity
        return x

    def score(self, batch: MicroBatch, old: Transition) -> Transition:
        return self._replay(self.module, batch, old, grad=True)

    def reference(self, batch: MicroBatch, old: Transition) -> Transition:
        return self._replay(self._reference, batch, old, grad=False)

    def _replay(self, module: ToyVelocity, batch: MicroBatch, old: Transition, *, grad: bool) -> Transition:
        scored: list[Transition] = []
        episode = Episode(batch=batch, kernel=self.kernel, observe=scored.append, grad=grad, replay=old)
        with torch.set_grad_enabled(grad):
            velocity = self._velocity(module, old.sample, old.index, batch)
            episode.transition(old.index, old.sample, velocity, self.sigmas)
        return scored[0]
