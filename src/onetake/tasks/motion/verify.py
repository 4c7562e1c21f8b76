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


def verify(clip: np.ndarray, text: str) -> Verdict:
    """Judge a clip, uint8 (frames, H, W, 3), RGB, of as many frames as the renderer draws, by its caption.

    The constraints are: the object's colour in every frame; its shape in that colour in at least half of them and another in
    none; nothing else in any frame; the direction of the whole way; its length, which is the speed; and a track close to the
    even path (that ends halfway for "then stopping"), without jumps. Raises ValueError for another form of clip, or if `text`
    is not a caption of this task.
    """
    motion = parse(text)
    if clip.ndim != 4 or len(clip) != len(progress(motion.pace)):
        raise ValueError(f"the verifier takes ({len(progress(motion.pace))}, H, W, 3) clips, not {clip.shape}")
    met = _constraints([analyse(frame) for frame in clip], motion)
    return Verdict(sum(met.values()) / len(met), all(met.values()), met)


def _constraints(frames: list[list[Found]], motion: Motion) -> dict[str, bool]:
    coloured = [[item for item in found if item.colour == motion.colour] for found in frames]
    alone = all(len(items) == 1 for items in coloured)
    shapes = [item.shape for items in coloured for item in items if item.shape is not None]
    met = {
        motion.colour: all(coloured),
        f"{motion.colour} {motion.shape}": set(shapes) == {motion.shape} and len(shapes) >= MIN_FORMED * len(frames),
        "nothing else": all(len(found) <= 1 for found in frames),
        f"moving {motion.direction}": False,
        motion.pace or "going on": False,
        "smoothly": False,
    }
    if not alone:
        return met
    track = np.array([(items[0].y, items[0].x) for items in coloured])
    direction = np.array(DIRECTIONS[motion.direction])
    along, across = track @ direction, track @ np.abs(direction[::-1])
    travel = along[-1] - along[0]
    least, most = TRAVEL[motion.pace]
    met[f"moving {motion.direction}"] = bool(travel > 1 and abs(across[-1] - across[0]) <= MAX_DRIFT * travel)
    met[motion.pace or "going on"] = bool(least - SLACK <= travel <= most + SLACK)
    met["smoothly"] = _smooth(track, progress(motion.pace))
    return met


def _smooth(track: np.ndarray, done: np.ndarray) -> bool:
    """Whether the (frames, 2) track is, but for `MAX_ERROR`, a straight line walked as `done` says."""
    basis = np.stack([np.ones_like(done), done], 1)
    path = basis @ np.linalg.lstsq(basis, track, rcond=None)[0]
    error = np.sqrt(np.square(track - path).sum(1).mean())
    jump = np.linalg.norm(np.diff(track, axis=0), axis=1).max()
    return bool(error <= MAX_ERROR and jump <= MAX_JUMP)
