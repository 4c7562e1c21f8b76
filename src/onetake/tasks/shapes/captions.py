"""Captions of the `shapes` task: what a scene contains, in words and back.

Three families of prompts: `single` ("a red circle"), `count` ("three blue squares", "two red circles and one green
square") and `relation` ("a blue square left of a green triangle").
"""

import hashlib
from dataclasses import dataclass
from itertools import combinations, permutations, product

COLOURS = ("red", "green", "blue", "yellow")
SHAPES = ("circle", "square", "triangle")
RELATIONS = ("left of", "right of", "above", "below")
FAMILIES = ("single", "count", "relation")
NUMBERS = ("one", "two", "three")
MAX_OBJECTS = 4
HELD_OUT_SHARE = 0.14
SPLIT_SEED = 0

_FORMS = (
    'Forms that work: "a red circle", "three blue squares", "two red circles and one green square", '
    f'"a blue square left of a green triangle"; colours {", ".join(COLOURS)}; shapes {", ".join(SHAPES)}; '
    f"numbers {', '.join(NUMBERS)}; relations {', '.join(RELATIONS)}."
)


@dataclass(frozen=True)
class Group:
    """`count` objects of one colour and one shape."""

    count: int
    colour: str
    shape: str

    @property
    def kind(self) -> tuple[str, str]:
        return self.colour, self.shape


@dataclass(frozen=True)
class Scene:
    """What a picture must show: one or two groups, and with `relation` the first object's place seen from the second.

    Raises ValueError when no caption of the task describes the scene.
    """

    groups: tuple[Group, ...]
    relation: str | None = None

    def __post_init__(self) -> None:
        problem = _problem(self)
        if problem:
            raise ValueError(f"{problem}. {_FORMS}")

    @property
    def objects(self) -> list[tuple[str, str]]:
        """(colour, shape) of every object, in the caption's order."""
        return [group.kind for group in self.groups for _ in range(group.count)]


def _problem(scene: Scene) -> str | None:
    for group in scene.groups:
        if group.colour not in COLOURS:
            return f'"{group.colour}" is not a colour of this task'
        if group.shape not in SHAPES:
            return f'"{group.shape}" is not a shape of this task'
        if not 1 <= group.count <= len(NUMBERS):
            return f"a group has 1 to {len(NUMBERS)} objects, not {group.count}"
    if len(scene.groups) not in (1, 2):
        return f"a scene has one or two groups, not {len(scene.groups)}"
    if len({group.kind for group in scene.groups}) < len(scene.groups):
        return "two groups must differ in colour or shape"
    if sum(group.count for group in scene.groups) > MAX_OBJECTS:
        return f"a scene has at most {MAX_OBJECTS} objects"
    if scene.relation is None:
        return None
    if scene.relation not in RELATIONS:
        return f'"{scene.relation}" is not a relation of this task'
    if [group.count for group in scene.groups] != [1, 1]:
        return "a relation holds between exactly two single objects"
    return None


def caption(scene: Scene) -> str:
    """The one caption of `scene`; `parse` inverts it."""
    if scene.relation is not None:
        first, second = (f"a {group.colour} {group.shape}" for group in scene.groups)
        return f"{first} {scene.relation} {second}"
    if len(scene.groups) == 1 and scene.groups[0].count == 1:
        return f"a {scene.groups[0].colour} {scene.groups[0].shape}"
    return " and ".join(
        f"{NUMBERS[group.count - 1]} {group.colour} {group.shape}{'s' if group.count > 1 else ''}"
        for group in scene.groups
    )


def parse(text: str) -> Scene:
    """The scene that `text` describes. Raises ValueError, with the forms that work, if it is not a caption of this task."""
    for relation in RELATIONS:
        first, found, second = text.partition(f" {relation} ")
        if found:
            return _checked(Scene((_parse_group(first, text), _parse_group(second, text)), relation), text)
    return _checked(Scene(tuple(_parse_group(part, text) for part in text.split(" and "))), text)


def _parse_group(part: str, text: str) -> Group:
    words = part.split(" ")
    if len(words) != 3:
        raise ValueError(f'"{part}" in the caption "{text}" is not "number colour shape". {_FORMS}')
    number, colour, shape = words
    if number not in ("a", *NUMBERS):
        raise ValueError(f'"{number}" in the caption "{text}" is not a number of this task. {_FORMS}')
    count = 1 if number == "a" else NUMBERS.index(number) + 1
    return Group(count, colour, shape.removesuffix("s") if count > 1 else shape)


def _checked(scene: Scene, text: str) -> Scene:
    if caption(scene) != text:
        raise ValueError(f'the caption "{text}" should read "{caption(scene)}". {_FORMS}')
    return scene


def scenes(family: str) -> list[Scene]:
    """Every scene of one family, in a fixed order. Raises ValueError if there is no such family."""
    kinds = list(product(COLOURS, SHAPES))
    if family == "single":
        return [Scene((Group(1, *kind),)) for kind in kinds]
    if family == "count":
        same = [Scene((Group(count, *kind),)) for kind in kinds for count in (2, 3)]
        pairs = product(combinations(kinds, 2), product((1, 2), (1, 2)))
        return same + [Scene((Group(m, *one), Group(n, *other))) for (one, other), (m, n) in pairs]
    if family == "relation":
        pairs = product(permutations(kinds, 2), RELATIONS)
        return [Scene((Group(1, *one), Group(1, *other)), relation) for (one, other), relation in pairs]
    raise ValueError(f'"{family}" is not a family of prompts; choose from {", ".join(FAMILIES)}')


def prompts(family: str, split: str) -> list[str]:
    """The captions of one of `FAMILIES` in "train" or "held_out", in a fixed order. Raises ValueError if there is no such one."""
    return in_split([caption(scene) for scene in scenes(family)], split)


def in_split(texts: list[str], split: str) -> list[str]:
    """Those of `texts` in "train" or "held_out", in their order. Raises ValueError if `split` is neither.

    The split ranks captions by a seeded hash: `HELD_OUT_SHARE` of them is held out, from base training too.
    """
    if split not in ("train", "held_out"):
        raise ValueError(f'"{split}" is not a split; choose "train" or "held_out"')
    ranked = sorted(texts, key=lambda text: hashlib.sha256(f"{SPLIT_SEED} {text}".encode()).digest())
    held_out = set(ranked[: round(HELD_OUT_SHARE * len(ranked))])
    return [text for text in texts if (text in held_out) == (split == "held_out")]
