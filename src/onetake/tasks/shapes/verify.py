"""Does a picture show what its caption says? An exact, strict verifier by image analysis.

Every pixel is split into a palette colour and its coverage: on the line from the ground to a palette colour, coverage
is the position and the distance from the line is an error. Connected pixels of one colour make an object, and its
shape is the ideal shape of the same area and centroid that overlaps it best, if that overlap is good enough.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from onetake.tasks.shapes.captions import SHAPES, Scene, parse
from onetake.tasks.shapes.render import GROUND, PALETTE, coverage, holds

MIN_OVERLAP = 0.88  # soft intersection over union with the ideal shape; circle and square of one area reach 0.83
MIN_MARGIN = 0.02  # by which the best shape must beat the second
MIN_AREA = 16.0  # px², smaller objects have no shape
MIN_SPECK = 4  # px, smaller specks are noise
MAX_PIXEL_ERROR = 60.0  # RGB distance from a palette colour's line, beyond which a pixel is not of that colour
MAX_OBJECT_ERROR = 26.0  # the same, mean over an object
SOLID = (0.86, 1.12)  # mean coverage of an object's inner pixels
GHOST = 48.0  # RGB distance from the ground of a pixel that is not ground
MIN_LEAD = 1.0  # px, see `render.holds`

_GROUND = np.array(GROUND, np.float32)
_AXES = np.array(list(PALETTE.values()), np.float32) - _GROUND
_LENGTHS2 = (_AXES**2).sum(1)
_PROJECT = _AXES / _LENGTHS2[:, None]
_COLOURS = tuple(PALETTE)


@dataclass(frozen=True)
class Found:
    """One object in a picture: centroid (y, x) in px, area in px².

    `colour` is None when the object has no palette colour, `shape` is None when it is malformed.
    """

    colour: str | None
    shape: str | None
    y: float
    x: float
    area: float


@dataclass(frozen=True)
class Verdict:
    """`score` is the share of `constraints` that hold; `success` means that all do."""

    score: float
    success: bool
    constraints: dict[str, bool]


def verify(image: np.ndarray, text: str) -> Verdict:
    """Judge a picture, uint8 (H, W, 3), RGB, by its caption.

    The constraints are, per wanted object, its colour and its shape in that colour; per group, the exact count; for
    the picture, that nothing else is there; and the relation, if the caption has one. Raises ValueError for another form
    of picture, or if `text` is not a caption of this task.
    """
    constraints = _constraints(analyse(image), parse(text))
    return Verdict(sum(constraints.values()) / len(constraints), all(constraints.values()), constraints)


def _constraints(found: list[Found], scene: Scene) -> dict[str, bool]:
    met: dict[str, bool] = {}
    for colour in dict.fromkeys(group.colour for group in scene.groups):
        wanted = sum(group.count for group in scene.groups if group.colour == colour)
        there = sum(item.colour == colour for item in found)
        met |= {f"{colour} object {i}": there >= i for i in range(1, wanted + 1)}
    for group in scene.groups:
        there = sum((item.colour, item.shape) == group.kind for item in found)
        name = f"{group.colour} {group.shape}"
        met |= {f"{name} {i}": there >= i for i in range(1, group.count + 1)}
        met[f"exactly {group.count} {name}"] = there == group.count
    kinds = {group.kind for group in scene.groups}
    met["nothing else"] = all((item.colour, item.shape) in kinds for item in found)
    if scene.relation is not None:
        met[scene.relation] = _related(found, scene)
    return met


def _related(found: list[Found], scene: Scene) -> bool:
    """The relation, judged only when each of its two objects is there exactly once."""
    assert scene.relation is not None
    first, second = ([(item.y, item.x) for item in found if (item.colour, item.shape) == g.kind] for g in scene.groups)
    if len(first) != 1 or len(second) != 1:
        return False
    return holds(scene.relation, first[0], second[0], MIN_LEAD)


def analyse(image: np.ndarray) -> list[Found]:
    """The objects in a picture, uint8 (H, W, 3): well-formed ones first by colour, then stray marks of no colour.

    Raises ValueError for another form of picture.
    """
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise ValueError(f"the verifier takes uint8 (H, W, 3) images, not {image.dtype} {image.shape}")
    grid = _grid(*image.shape[:2])
    offset = image.reshape(-1, 3).T.astype(np.float32) - _GROUND[:, None]
    alpha = _PROJECT @ offset
    norm2 = (offset * offset).sum(0)
    error2 = norm2 - alpha * alpha * _LENGTHS2[:, None]
    solid = (alpha >= 0.5) & (error2 <= np.minimum(error2.min(0), MAX_PIXEL_ERROR**2))
    alpha, error2, solid = (plane.reshape(-1, *image.shape[:2]) for plane in (alpha, error2, solid))

    parts = [
        (colour, bits)
        for colour in range(len(_COLOURS))
        for bits in grid.components(grid.pack(solid[colour]))
        if bits.bit_count() >= MIN_SPECK
    ]
    near = 0
    for _, bits in parts:
        near |= grid.dilate(bits)
    stray = grid.pack((norm2 > GHOST**2).reshape(image.shape[:2])) & ~near
    strays = [bits for bits in grid.components(stray) if bits.bit_count() >= MIN_SPECK]
    marks = [Found(None, None, *_centre(grid.unpack(bits))) for bits in strays]
    if not parts:
        return marks
    return _measure(grid, parts, alpha, error2) + marks


def _measure(grid: "_BitGrid", parts: list[tuple[int, int]], alpha: np.ndarray, error2: np.ndarray) -> list[Found]:
    """Colour, shape and place of every connected part; n parts are measured at once as (n, H, W) arrays."""
    colours = np.array([colour for colour, _ in parts])
    core = np.stack([grid.unpack(bits) for _, bits in parts])
    inner = np.stack([grid.unpack(grid.erode(bits)) for _, bits in parts])
    reach = np.stack([grid.unpack(grid.dilate(bits)) for _, bits in parts])
    raw, error = alpha[colours], np.sqrt(np.maximum(error2[colours], 0))
    cover = np.clip(raw, 0, 1) * reach
    area = cover.sum((1, 2))
    y = (cover.sum(2) @ grid.ys) / area
    x = (cover.sum(1) @ grid.xs) / area
    depth = (raw * inner).sum((1, 2)) / np.maximum(inner.sum((1, 2)), 1)
    pure = (error * core).sum((1, 2)) / core.sum((1, 2)) <= MAX_OBJECT_ERROR
    true_colour = pure & (depth >= SOLID[0]) & (depth <= SOLID[1])
    overlaps = _overlaps(grid, cover, y, x, area)
    best = overlaps.argmax(0)
    _, second, first = np.sort(overlaps, axis=0)
    formed = (first >= MIN_OVERLAP) & (first - second >= MIN_MARGIN) & (area >= MIN_AREA)
    return [
        Found(
            _COLOURS[colours[i]] if true_colour[i] else None,
            SHAPES[best[i]] if formed[i] else None,
            float(y[i]),
            float(x[i]),
            float(area[i]),
        )
        for i in range(len(parts))
    ]


def _overlaps(grid: "_BitGrid", cover: np.ndarray, y: np.ndarray, x: np.ndarray, area: np.ndarray) -> np.ndarray:
    """Soft intersection over union (shapes, n) of each part with the ideal shapes of its area and centroid."""
    dy = grid.ys[None, :, None] - y[:, None, None]
    dx = grid.xs[None, None, :] - x[:, None, None]
    ideals = np.stack([coverage(shape, dy, dx, area[:, None, None]) for shape in SHAPES])
    both = np.minimum(ideals, cover).sum((2, 3))
    return both / (ideals.sum((2, 3)) + area - both)


def _centre(mask: np.ndarray) -> tuple[float, float, float]:
    ys, xs = np.nonzero(mask)
    return float(ys.mean()), float(xs.mean()), float(len(ys))


class _BitGrid:
    """Masks of one size as Python integers, one bit a pixel: a flood fill is a few shifts, far faster than arrays.

    Each row carries one padding bit, so that a shift to the side never reaches the next row.
    """

    def __init__(self, height: int, width: int) -> None:
        self.height, self.width, self.row = height, width, width + 1
        self.ys, self.xs = np.arange(height, dtype=np.float32), np.arange(width, dtype=np.float32)
        self.all = self.pack(np.ones((height, width), bool))

    def pack(self, mask: np.ndarray) -> int:
        padded = np.zeros((self.height, self.row), bool)
        padded[:, : self.width] = mask
        return int.from_bytes(np.packbits(padded, bitorder="little").tobytes(), "little")

    def unpack(self, bits: int) -> np.ndarray:
        n = self.height * self.row
        raw = np.frombuffer(bits.to_bytes((n + 7) // 8, "little"), np.uint8)
        return np.unpackbits(raw, count=n, bitorder="little").reshape(self.height, self.row)[:, : self.width]

    def dilate(self, bits: int) -> int:
        """The pixels in `bits` and their eight neighbours."""
        wide = bits | bits << 1 | bits >> 1
        return (wide | wide << self.row | wide >> self.row) & self.all

    def erode(self, bits: int) -> int:
        """The pixels whose eight neighbours are all in `bits`; the picture's edge does not erode."""
        return self.all & ~self.dilate(self.all & ~bits)

    def components(self, bits: int) -> list[int]:
        """The connected components (four neighbours) of `bits`."""
        parts = []
        while bits:
            part, grown = 0, bits & -bits
            while grown != part:
                part = grown
                grown |= (part << 1 | part >> 1 | part << self.row | part >> self.row) & bits
            parts.append(part)
            bits &= ~part
        return parts


@lru_cache(maxsize=8)
def _grid(height: int, width: int) -> _BitGrid:
    return _BitGrid(height, width)
