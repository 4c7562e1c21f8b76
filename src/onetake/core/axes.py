"""Keys of a recipe that anyone can add a choice to: one of ours by its name, one of yours as ``package.module:Class``."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler, SerializationInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema
from typing_extensions import get_protocol_members

from onetake.core.records import Config, nearest


@dataclass(frozen=True)
class Axis:
    """Annotates a protocol, ``Annotated[Protocol, Axis((A, B))]``: what `read` returns has all that the protocol names.

    ``kind`` says which it is, and the other keys are the fields of its class. A class of yours is a `Config` like ours; it needs
    no ``kind`` of its own, and one that it inherits is not its name. `default` is the kind of a mapping that has none.
    """

    ours: tuple[type[Config], ...]
    default: str | None = None

    @property
    def names(self) -> list[str]:
        return [_name(one) for one in self.ours]

    def read(self, value: Any, protocol: type) -> Config:
        """The strategy object that the recipe's `value` describes; one that is already built is taken as it is."""
        if isinstance(value, Config):
            _check(type(value), protocol)
            return value
        chosen = self.chosen(value, protocol)
        tree = value if isinstance(value, dict) else {}
        return chosen.model_validate({key: entry for key, entry in tree.items() if key != "kind"})

    def chosen(self, value: Any, protocol: type) -> type[Config]:
        """The class that `value` names, by itself or as its ``kind``."""
        kind = value.get("kind", self.default) if isinstance(value, dict) else value
        if kind in self.names:
            return self.ours[self.names.index(kind)]
        known = f"{', '.join(map(repr, self.names))}, %s package.module:Class of your own"
        if kind is None:
            raise _problem(f"needs a kind: {known % 'or'}")
        if not (isinstance(kind, str) and ":" in kind):
            raise _problem(f"{kind!r} is none of {known % 'nor'}{nearest(str(kind), self.names)}")
        try:
            found = imported(kind)
        except ValueError as error:
            raise _problem(str(error)) from error
        _check(found, protocol)
        return found

    def __get_pydantic_core_schema__(self, source: type, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            lambda value: self.read(value, source),
            serialization=core_schema.plain_serializer_function_ser_schema(_written, info_arg=True),
        )


def imported(name: str) -> Any:
    """What ``package.module:name`` is. Raises ValueError that says what is not there."""
    module, _, attribute = name.partition(":")
    try:
        return vars(importlib.import_module(module))[attribute]
    except ImportError as error:
        raise ValueError(f"{name!r} cannot be imported: {error}") from error
    except KeyError:
        raise ValueError(f"module {module!r} has no {attribute!r}") from None


def kind_of(choice: Any) -> str:
    """How a recipe names the class of a strategy object."""
    return _name(type(choice))


def _name(choice: type[Config]) -> str:
    if choice.__module__.partition(".")[0] == __name__.partition(".")[0]:
        return choice.model_fields["kind"].default
    return f"{choice.__module__}:{choice.__qualname__}"


def _check(choice: Any, protocol: type) -> None:
    if not (isinstance(choice, type) and issubclass(choice, Config)):
        raise _problem(f"{choice!r} is not a subclass of onetake's Config")
    if missing := sorted(get_protocol_members(protocol) - set(dir(choice)) - choice.model_fields.keys()):
        told = f"{protocol.__module__}.{protocol.__name__} says what it needs"
        raise _problem(f"{choice.__name__} has no {', '.join(missing)}; {told}")


def _written(value: Config, info: SerializationInfo) -> dict[str, Any]:
    """What `Axis.read` reads back to an equal object."""
    tree = value.model_dump(mode=info.mode)
    return tree | {"kind": kind_of(value)}


def _problem(said: str) -> PydanticCustomError:
    return PydanticCustomError("axis", "{said}", {"said": said})
