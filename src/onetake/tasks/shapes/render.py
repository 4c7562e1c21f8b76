"""Pictures of scenes: anti-aliased coloured shapes at random places on a plain ground."""

import math

import numpy as np

from onetake.tasks.shapes.captions import Scene

GROUND = (248, 246, 240)
PALETTE = {"red": (222, 48, 56), "green": (40, 166, 72), "blue": (44, 88, 214), "yellow": (245, 190, 30)}
MARGIN = 1.0  # px between a shape and the picture's edge
GAP = 2.5  # px between the bounding boxes of two shapes
AREAS = {1: (60.0, 112.0), 2: (50.0, 92.0), 3: (40.0, 64.0), 4: (36.0, 50.0)}  # px² at 32 px, by number of objects
REFERENCE_SIZE = 32
LEAD = 4.0  # px by which a relation's own axis must dominate the other one
MAX_TRIES = 10_000


def coverage(shape: str, dy: np.ndarray, dx: np.ndarray, area: np.ndarray | float) -> np.ndarray:
    """Share of each pixel that a "circle", an upright "square" or an equilateral "triangle", pointing up, covers, in [0, 1].

    `dy` and `dx` are the pixel's centre minus the shape's centroid, px, y growing downwards; they and `area`, px², broadcast.
    Equal areas make the three shapes look equally large.
    """
    if shape == "circle":
        inside = np.sqrt(area / math.pi) - np.sqrt(dy * dy + dx * dx)
    elif shape == "square":
        inside = np.sqrt(area) / 2 - np.maximum(np.abs(dy), np.abs(dx))
    else:
        inradius = np.sqrt(area / (3 * math.sqrt(3)))
        inside = inradius - np.maximum(dy, math.sqrt(3) / 2 * np.abs(dx) - dy / 2)
    return np.clip(inside + 0.5, 0.0, 1.0)


def extent(shape: str, area: float) -> tuple[float, float, float]:
    """(up, down, sideways): how far a shape of `area` px² reaches from its centroid, px."""
    if shape == "circle":
        radius = math.sqrt(area / math.pi)
        return radius, radius, radius
    if shape == "square":
        half = math.sqrt(area) / 2
        return half, half, half
    inradius = math.sqrt(area / (3 * math.sqrt(3)))
    return 2 * inradius, inradius, math.sqrt(3) * inradius


def render(scene: Scene, rng: np.random.Generator, size: int = REFERENCE_SIZE) -> np.ndarray:
    """A random picture of `scene`: uint8 (size, size, 3), RGB; `rng` draws places and sizes of the objects, which grow with `size`.

    Objects lie apart, and the scene's relation holds clearly.
    """
    scale = size / REFERENCE_SIZE
    places = _place(scene, rng, scale, size)
    ys, xs = np.mgrid[0:size, 0:size]
    image = np.empty((size, size, 3))
    image[:] = GROUND
    for (colour, shape), (y, x, area) in zip(scene.objects, places, strict=True):
        alpha = coverage(shape, ys - y, xs - x, area)[..., None]
        image = (1 - alpha) * image + alpha * np.array(PALETTE[colour], float)
    return np.rint(image).astype(np.uint8)


def _place(scene: Scene, rng: np.random.Generator, scale: float, size: int) -> list[tuple[float, float, float]]:
    """(y, x, area) of every object, by rejection: all objects are drawn anew until they fit."""
    low, high = AREAS[len(scene.objects)]
    for _ in range(MAX_TRIES):
        places, boxes = [], []
        for _, shape in scene.objects:
            area = rng.uniform(low, high) * scale**2
            up, down, side = extent(shape, area)
            edge = MARGIN * scale - 0.5
            y = rng.uniform(edge + up, size - 1 - edge - down)
            x = rng.uniform(edge + side, size - 1 - edge - side)
            box = (y - up, y + down, x - side, x + side)
            if any(_close(box, other, GAP * scale) for other in boxes):
                break
            places.append((y, x, area))
            boxes.append(box)
        else:
            if scene.relation is None or holds(scene.relation, places[0], places[1], LEAD * scale):
                return places
    raise RuntimeError(f"no room for {scene} in {size} px after {MAX_TRIES} tries")


def _close(one: tuple[float, ...], other: tuple[float, ...], gap: float) -> bool:
    apart_y = max(one[0], other[0]) - min(one[1], other[1])
    apart_x = max(one[2], other[2]) - min(one[3], other[3])
    return max(apart_y, apart_x) < gap


def holds(relation: str, first: tuple[float, ...], second: tuple[float, ...], lead: float) -> bool:
    """Whether `first` (y, x, …) is `relation` `second`, its distance on that axis exceeding the other's by `lead`."""
    dy, dx = first[0] - second[0], first[1] - second[1]
    along = {"left of": -dx, "right of": dx, "above": -dy, "below": dy}[relation]
    across = abs(dx) if relation in ("above", "below") else abs(dy)
    return along - across >= lead
