"""Captions of the `motion` task: "a red circle moving left", "a blue square moving up then stopping"."""

from dataclasses import dataclass
from itertools import product

from onetake.tasks.shapes.captions import COLOURS, SHAPES, in_split

DIRECTIONS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
"""(y, x) of each; y grows downwards."""
PACES = ("", "slowly", "quickly", "then stopping")
"""How it moves; without a word, evenly at any speed."""


@dataclass(frozen=True)
class Motion:
    """What a clip must show. Raises ValueError when no caption of the task describes it."""

    colour: str
    shape: str
    direction: str
    pace: str = ""

    def __post_init__(self) -> None:
        for kind, value, known in (
            ("colour", self.colour, COLOURS),
            ("shape", self.shape, SHAPES),
            ("direction", self.direction, DIRECTIONS),
            ("pace", self.pace, PACES),
        ):
            if value not in known:
                raise ValueError(
                    f'"{value}" is not a {kind} of this task; choose from {", ".join(filter(None, known))}'
                )


def caption(motion: Motion) -> str:
    """The one caption of `motion`; `parse` inverts it."""
    return f"a {motion.colour} {motion.shape} moving {motion.direction} {motion.pace}".rstrip()


def parse(text: str) -> Motion:
    """The motion that `text` describes. Raises ValueError when it is not a caption of this task."""
    words = text.split(" ", 5)
    if len(words) < 5 or words[0] != "a" or words[3] != "moving":
        raise ValueError(
            f'the caption "{text}" is not "a COLOUR SHAPE moving DIRECTION [PACE]", as "a blue square moving up then stopping"'
        )
    return Motion(words[1], words[2], words[4], *words[5:])


def motions() -> list[Motion]:
    """Every motion, in a fixed order."""
    return [Motion(*choice) for choice in product(COLOURS, SHAPES, DIRECTIONS, PACES)]


def prompts(split: str) -> list[str]:
    """The captions of "train" or "held_out", in a fixed order; held-out ones are kept from base training too."""
    return in_split([caption(motion) for motion in motions()], split)
