"""All tiny pipelines: importing the modules that build them fills `CASES`."""

from __future__ import annotations

import tiny_images  # noqa: F401
import tiny_videos  # noqa: F401
from tiny_parts import CASES, Case, tiny

__all__ = ["CASES", "Case", "tiny"]
