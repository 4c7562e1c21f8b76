"""GRPO post-training for diffusion, video and language models in which no forward pass is computed twice."""

__version__ = "0.1.0"
