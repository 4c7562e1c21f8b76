"""Whether a forward changes anything but its result: a unit that does must never run again, neither to be measured nor in backward.

`Survey` looks at one forward from three sides: memory from before that an operation wrote to, also behind ``.data``
(`trace.Watch`); tensors' contents and Python's own state before and after, as far as it can be reached from the unit's modules,
their hooks and the functions that make up their forward; and random numbers that do not come from torch's global generators,
which alone a replay draws again. What cannot be reached, such as files or another library's C state, is left to the values of
each replay, which are compared with those of the forward (`region`).
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from onetake.activations.trace import Watch, storage_key

PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device)
LIBRARIES = ("torch", "transformers", "diffusers", "peft", "accelerate", "onetake", "functools", "typing", "builtins")
"""Where their classes and functions keep state, it is the module's or torch's own."""
ENOUGH = 5_000  # objects looked at; a closure may reach the whole program


class Survey:
    """Of one forward of `module` with these arguments: made before it, asked after it."""

    def __init__(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        self.watch = Watch()
        self._module, self._arguments = module, arguments
        self._before = _state(module, arguments)

    def changes(self) -> str:
        """What the forward changed, in words; empty if nothing."""
        if self.watch.written:
            return f"writes to {', '.join(sorted({self._name(tensor) for tensor in self.watch.written}))}"
        if self.watch.generators:
            return "draws from a torch.Generator of its own"
        after = _state(self._module, self._arguments)
        for path in {**self._before, **after}:
            if path not in self._before or path not in after or not _same(self._before[path], after[path]):
                return f"changes {path}"
        return ""

    def _name(self, tensor: Tensor) -> str:
        named = [*self._module.named_parameters(), *self._module.named_buffers()]
        known = [name for name, of in named if storage_key(of) == storage_key(tensor)]
        if known:
            return known[0]
        given = any(
            isinstance(a, Tensor) and storage_key(tensor) == storage_key(a) for a in tree_leaves(self._arguments)
        )
        return "its input, in place" if given else f"a {tuple(tensor.shape)} tensor from before it"


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and bool(equal(one, other))
    return type(one) is type(other) and bool(one is other or one == other or one != one)


def equal(one: Tensor, other: Tensor) -> bool:
    """Element by element, NaN equal to itself."""
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())


def _state(module: nn.Module, arguments: tuple[Any, ...]) -> dict[str, Any]:
    """Path → value of everything found: plain values, identities of other objects, copies of tensors that are no parameters."""
    found: dict[str, Any] = {
        "Python's random numbers": random.getstate(),
        "NumPy's random numbers": repr(np.random.get_state(legacy=False)),
    }
    seen: set[int] = set()
    open_: deque[tuple[str, Any]] = deque([("", module), (" (arguments)", arguments)])
    with torch.no_grad():
        while open_ and len(seen) < ENOUGH:
            path, value = open_.popleft()
            if isinstance(value, PLAIN):
                found[path] = value
                continue
            if id(value) in seen:
                found[path] = id(value)
                continue
            seen.add(id(value))
            found[path], inner = _look(value)
            open_ += [(f"{path}{step}", member) for step, member in inner]
    return found


def _look(value: Any) -> tuple[Any, list[tuple[str, Any]]]:
    """What is compared of an object, and what is looked at in turn."""
    if isinstance(value, Tensor):
        if value.requires_grad or type(value) is not Tensor:  # parameters, and what is on the way through
            return (id(value), value._version), []
        return value.clone(), []
    if isinstance(value, torch.Generator):
        return value.get_state(), []
    if isinstance(value, np.ndarray):
        return (value.shape, value.tobytes()), []
    if isinstance(value, random.Random):
        return value.getstate(), []
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state), []
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state(legacy=False)), []
    if isinstance(value, dict):
        return len(value), [(f"[{key!r}]", member) for key, member in value.items()]
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return len(value), [(f"[{place}]", member) for place, member in enumerate(value)]
    if isinstance(value, partial):
        return id(value), [("()", value.func), ("()", value.args), ("()", value.keywords)]
    if isinstance(value, FunctionType):
        return id(value), _of_function(value)
    if isinstance(value, nn.Module):
        return id(value), [*_of_module(value), *_of_class(type(value))]
    if _is_foreign(type(value)) or isinstance(value, type):
        return id(value), []
    return id(value), [(f".{name}", member) for name, member in _attributes(value).items()]


def _attributes(value: Any) -> dict[str, Any]:
    try:
        return dict(vars(value))
    except TypeError:  # no __dict__
        return {}


def _of_module(module: nn.Module) -> list[tuple[str, Any]]:
    """Its tensors, its parts, and all other attributes, but for how it is checkpointed, which the package itself sets."""
    inner: list[tuple[str, Any]] = []
    for name, value in vars(module).items():
        if name in ("_parameters", "_buffers", "_modules"):
            inner += [(f".{key}", member) for key, member in value.items()]
        elif name != "_gradient_checkpointing_func":
            inner.append((f".{name}", value))
    return inner


def _of_class(kind: type) -> list[tuple[str, Any]]:
    """Attributes and functions of classes outside of known libraries."""
    own = [base for base in kind.__mro__ if not _is_foreign(base)]
    return [
        (f" ({base.__name__}.{name})", value)
        for base in own
        for name, value in vars(base).items()
        if not name.startswith("__") and (isinstance(value, FunctionType) or not isinstance(value, Callable))
    ]


def _of_function(function: FunctionType) -> list[tuple[str, Any]]:
    """What it closes over, and the globals it names, unless they are modules, classes or functions."""
    if function.__module__ is None or function.__module__.partition(".")[0] in LIBRARIES:
        return []
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    names = [n for n in function.__code__.co_names if n in function.__globals__]
    named = [(n, function.__globals__[n]) for n in names]
    module = type(sys)
    return [
        *[(f" (closed over by {function.__qualname__})", value) for value in cells],
        *[
            (f" (global {name})", value)
            for name, value in named
            if not isinstance(value, (module, type)) and not callable(value)
        ],
    ]


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # not assigned yet
        return False


def _is_foreign(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in LIBRARIES
