"""Does a clip show what its caption says? The objects of every frame, by image analysis, and the one object's track."""

import numpy as np

from onetake.tasks.motion.captions import DIRECTIONS, Motion, parse
from onetake.tasks.motion.render import TRAVEL, progress
from onetake.tasks.shapes.verify import Found, Verdict, analyse

SLACK = 0.75  # px of travel allowed beyond what the renderer draws
MIN_FORMED = 0.5  # share of the frames in which the shape must be well formed; in the others it may be malformed
MAX_DRIFT = 0.3  # distance across the direction, as a share of the travel
MAX_ERROR = 0.6  # px, root mean square distance of the track from the path that the caption describes
MAX_JUMP = 2.5  # px between two frames
PARTIAL = 0.9  # the most that a constraint earns which nearly holds


def verify(clip: np.ndarray, text: str) -> Verdict:
    """Judge a clip by its caption. The score is the mean over constraints of 1, or of how nearly one holds: 1 if all hold.

    The constraints are: the object's colour in every frame; its shape in that colour in at
    least half of them and another in none; nothing else in any frame; the
    direction of the whole way; its length, which is the speed; and a track close to the even path (that ends halfway for
    "then stopping"), without jumps.

    Args:
        clip: uint8 (frames, H, W, 3), RGB, as many frames as the renderer draws.
        text: a caption of this task.

    Raises:
        ValueError: `clip` has another form, or `text` is not a caption of this task.
    """
    motion = parse(text)
    if clip.ndim != 4 or len(clip) != len(progress(motion.pace)):
        raise ValueError(f"the verifier takes ({len(progress(motion.pace))}, H, W, 3) clips, not {clip.shape}")
    credits = _credits([analyse(frame) for frame in clip], motion)
    met = {name: credit == 1 for name, credit in credits.items()}
    return Verdict(sum(credits.values()) / len(credits), all(met.values()), met)


def _credits(frames: list[list[Found]], motion: Motion) -> dict[str, float]:
    """1 for every constraint that holds, less for one that does not."""
    coloured = [[item for item in found if item.colour == motion.colour] for found in frames]
    shapes = [item.shape for items in coloured for item in items if item.shape is not None]
    right = shapes.count(motion.shape) / (MIN_FORMED * len(frames))
    return {
        motion.colour: sum(map(bool, coloured)) / len(frames),
        f"{motion.colour} {motion.shape}": _credit(right >= 1 and set(shapes) == {motion.shape}, right),
        "nothing else": sum(len(found) <= 1 for found in frames) / len(frames),
        **_walk(coloured, motion),
    }


def _walk(coloured: list[list[Found]], motion: Motion) -> dict[str, float]:
    """Direction, pace and smoothness of the one object's track; nothing if a frame has none of it, or two."""
    names = f"moving {motion.direction}", motion.pace or "going on", "smoothly"
    if any(len(items) != 1 for items in coloured):
        return dict.fromkeys(names, 0.0)
    track = np.array([(items[0].y, items[0].x) for items in coloured])
    direction = np.array(DIRECTIONS[motion.direction])
    way = track[-1] - track[0]
    travel, aside = way @ direction, abs(way @ direction[::-1])
    least, most = TRAVEL[motion.pace]
    missed = max(least - SLACK - travel, travel - most - SLACK, 0.0)
    excess = _roughness(track, progress(motion.pace))
    return {
        names[0]: _credit(travel > 1 and aside <= MAX_DRIFT * travel, travel / (travel**2 + aside**2 + 1) ** 0.5),
        names[1]: _credit(missed == 0, np.exp(-missed / 2)),
        names[2]: _credit(excess <= 0, np.exp(-excess)),
    }


def _credit(holds: bool, nearly: float) -> float:
    return 1.0 if holds else PARTIAL * float(np.clip(nearly, 0, 1))


def _roughness(track: np.ndarray, done: np.ndarray) -> float:
    """px by which the (frames, 2) track is too far from a straight line walked as `done` says, or its jumps too wide."""
    basis = np.stack([np.ones_like(done), done], 1)
    path = basis @ np.linalg.lstsq(basis, track, rcond=None)[0]
    error = np.sqrt(np.square(track - path).sum(1).mean())
    jump = np.linalg.norm(np.diff(track, axis=0), axis=1).max()
    return float(max(error - MAX_ERROR, jump - MAX_JUMP))
