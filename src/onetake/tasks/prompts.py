"""Files of prompts: a text a line, or in a ``.jsonl`` file an object a line that may bring pictures and more."""

from __future__ import annotations

import reprlib
from pathlib import Path
from typing import Annotated, Any

from PIL import Image, UnidentifiedImageError
from pydantic import BeforeValidator, Field, StringConstraints, ValidationError

from onetake.core.records import Config, Prompt, nearest

TOLD = 10
"""Problems of a file that are told one by one."""


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class Line(Config):
    """One line of a ``.jsonl`` file. Pictures are paths from the file's folder, one or a list of them."""

    prompt: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
    image: Annotated[list[str], BeforeValidator(_listed)] = Field(default=[])
    negative_prompt: str | None = None
    metadata: dict[str, Any] = Field(default={})


def read(path: Path) -> tuple[list[Prompt], list[str]]:
    """The file's prompts in their order, blank lines left out, and what is wrong with it, by file and line.

    Pictures are looked at, not loaded: a prompt holds their paths.
    """
    prompts: list[Prompt] = []
    wrong: list[str] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                prompts.append(_parsed(line, path))
            except ValidationError as error:
                wrong += [f"{path}:{number}: {_explain(detail)}" for detail in error.errors()]
            except ValueError as error:
                wrong += [f"{path}:{number}: {problem}" for problem in str(error).splitlines()]
    if len(wrong) > TOLD:
        wrong[TOLD:] = [f"{path}: and {len(wrong) - TOLD} problems more"]
    return prompts, wrong


def _parsed(line: bytes, path: Path) -> Prompt:
    """Raises ValueError with a problem a line."""
    if path.suffix != ".jsonl":
        return Prompt(line.decode().strip())
    found = Line.model_validate_json(line)
    images = tuple(path.parent / name for name in found.image)
    if problems := [f"image: {problem}" for image in images if (problem := _unreadable(image))]:
        raise ValueError("\n".join(problems))
    return Prompt(found.prompt, images, found.negative_prompt, found.metadata)


def _unreadable(image: Path) -> str | None:
    try:
        Image.open(image).close()  # reads its header
    except UnidentifiedImageError:
        return f"{image} is not an image that Pillow reads"
    except OSError as error:
        return f"{image} cannot be opened ({error.strerror})"
    return None


def _explain(detail: Any) -> str:
    """One validation error in the line's spelling."""
    key = ".".join(map(str, detail["loc"]))
    if detail["type"] == "json_invalid":
        return f"is not JSON: {detail['ctx']['error'].replace('at line 1 column', 'at column')}"
    if detail["type"] == "extra_forbidden":
        return f"{key}: is not a key of a prompt{nearest(key, list(Line.model_fields))}"
    if detail["type"] == "missing":
        return f"{key}: is missing"
    return f"{key or 'the line'}: {detail['msg']} (got {reprlib.repr(detail['input'])})"
