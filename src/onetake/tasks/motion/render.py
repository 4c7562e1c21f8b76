"""Clips of motions: an anti-aliased coloured shape that crosses a plain ground."""

import numpy as np

from onetake.tasks.motion.captions import DIRECTIONS, Motion
from onetake.tasks.shapes.render import GROUND, MARGIN, PALETTE, coverage, extent

SIZE = 32  # px, height and width
FRAMES = 9
AREA = (40.0, 56.0)  # px²
TRAVEL = {"": (3.0, 10.5), "slowly": (3.0, 4.5), "quickly": (8.0, 10.5), "then stopping": (4.5, 7.5)}
"""px from the first frame to the last, by pace."""
MOVING = FRAMES // 2  # frames after the first that "then stopping" moves in


def progress(pace: str) -> np.ndarray:
    """(FRAMES,) share of the way that is done at each frame."""
    frames = np.arange(FRAMES)
    return np.minimum(frames / (MOVING if pace == "then stopping" else FRAMES - 1), 1.0)


def render(motion: Motion, rng: np.random.Generator, size: int = SIZE) -> np.ndarray:
    """A random clip of `motion`: uint8 (FRAMES, size, size, 3), RGB; `rng` draws the shape's place, area and way."""
    area = rng.uniform(*AREA)
    up, down, side = extent(motion.shape, area)
    way = rng.uniform(*TRAVEL[motion.pace]) * np.array(DIRECTIONS[motion.direction])
    low = np.array([up, side]) + MARGIN - 0.5 - np.minimum(way, 0)
    high = size - 1 - np.array([down, side]) - MARGIN + 0.5 - np.maximum(way, 0)
    start = rng.uniform(low, high)
    ys, xs = np.mgrid[0:size, 0:size]
    frames = []
    for done in progress(motion.pace):
        y, x = start + done * way
        alpha = coverage(motion.shape, ys - y, xs - x, area)[..., None]
        frames.append((1 - alpha) * np.array(GROUND, float) + alpha * np.array(PALETTE[motion.colour], float))
    return np.rint(frames).astype(np.uint8)
