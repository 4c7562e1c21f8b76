"""What one forward of a unit computes, seen operation by operation below autograd, and proven against a template.

There casts, views and fused kernels are single calls. A `Sign` says of an operation all that its result depends on: which
block of memory each argument lies in and how it is read, every constant, and the same of what it returned. Two forwards
whose operations have equal signs have the same dataflow, whatever branch, attribute or list in Python led to it; names of
operations, of classes or of attributes prove nothing.

The first forward of a shape is recorded in full (`Tracer`) and holds the unit's whole state until it ends; later ones
(`Follower`) hold only what the `Template` names, and only as long as every sign is the template's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

DETACH = torch.ops.aten.detach.default
"""Not recorded: autograd detaches a result or not depending on who else holds it, which recording changes. It reads the same
memory in the same way, so whatever reads its result is known by that."""

Sign = tuple[Any, ...]

_PLAIN: Any = Tensor

CONSTANTS = (int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class Unfollowable(Exception):
    """An argument about which no sign can say enough; the message names it."""


def is_plain(tensor: Tensor) -> bool:
    """Whether its values lie in one block of memory and are all there is to it."""
    kind: Any = type(tensor)
    return kind.__torch_dispatch__ is _PLAIN.__torch_dispatch__ and tensor.layout is torch.strided


class Names:
    """Numbers blocks of memory in the order in which they come by.

    A block that first comes by as an argument was there before; one that first comes by as a result was made here. Weak
    references keep the address of a block that has died from naming another one.
    """

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._references: list[StorageWeakRef] = []

    def number(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        known = self._numbers.get(storage._cdata)
        if known is None:
            known = self._numbers[storage._cdata] = len(self._numbers)
            self._references.append(StorageWeakRef(storage))
        return known

    def __len__(self) -> int:
        return len(self._numbers)

    def tensor(self, tensor: Tensor) -> Sign:
        """Equal for tensors that read the same memory in the same way."""
        if not is_plain(tensor):
            raise Unfollowable(f"a {type(tensor).__name__} ({tensor.layout})")
        number, offset = self.number(tensor), tensor.storage_offset()
        return number, offset, tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()

    def value(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.tensor(value)
        if isinstance(value, CONSTANTS):
            return value
        if isinstance(value, (list, tuple)):
            return tuple([self.value(member) for member in value])
        if isinstance(value, torch.Generator):
            return torch.Generator  # what it draws is never drawn again
        raise Unfollowable(f"an argument of type {type(value).__name__}")

    def operation(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Sign:
        """To be asked after the operation ran."""
        value = self.value
        return (
            func,
            tuple([value(argument) for argument in args]),
            tuple([(name, value(argument)) for name, argument in kwargs.items()]) if kwargs else (),
            tuple([value(member) for member in outputs(out)]),
        )


class Argument(NamedTuple):
    """One of an operation, by place or name, or a member of one that is a list."""

    name: int | str
    member: int | None = None


class Made(NamedTuple):
    """The tensor that the op-th operation of a region returned at this place."""

    op: int
    place: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One operation of a template, and what of it a region holds: outputs, and what it takes to run it again."""

    sign: Sign
    leaves: tuple[Made, ...] = ()  # outputs to hold
    again: bool = False  # whether it may run again; then:
    sources: tuple[tuple[Argument, Made], ...] = ()  # arguments that were made in the region, and by whom
    follows: tuple[Made, ...] = ()  # those of them that are no leaves
    outs: tuple[Made, ...] = ()  # outputs that anybody reads, leaves aside

    @property
    def func(self) -> OpOverload:
        return self.sign[0]


@dataclass(frozen=True, kw_only=True)
class Template:
    """What E, L, A or P keep of a region with this dataflow."""

    steps: tuple[Step, ...]  # what runs, in order
    saved: tuple[Sign, ...]  # what autograd saves, in order
    again: dict[int, Made]  # by place among the saved tensors: who makes it again; the others are kept
    wide: frozenset[Made]  # leaves wider than the residual stream, which L may compress
    reads: dict[Made, int]  # how often one backward reads what is made again


NOTHING = Template(steps=(), saved=(), again={}, wide=frozenset(), reads={})
"""H and R make nothing again operation by operation."""


@dataclass(kw_only=True)
class Call:
    """One recorded operation, its tensors alive."""

    func: OpOverload
    args: Sequence[Any]
    kwargs: dict[str, Any]
    outs: Sequence[Any]
    sign: Sign

    @property
    def arguments(self) -> dict[int | str, Any]:
        return dict(enumerate(self.args)) | self.kwargs

    def tensors(self) -> dict[Argument, Tensor]:
        single = {Argument(name): a for name, a in self.arguments.items() if isinstance(a, Tensor)}
        lists = [(name, a) for name, a in self.arguments.items() if isinstance(a, list)]
        members = {Argument(name, i): m for name, a in lists for i, m in enumerate(a) if isinstance(m, Tensor)}
        return single | members


class Again(NamedTuple):
    """What it takes to run an operation again: its arguments with gaps, and the tensors among them with their versions.

    Tuples, since each container that waits for backward costs Python's garbage collector time, but those of plain values do not.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    beside: tuple[tuple[Tensor, int], ...]

    def run(self, step: Step, value: Callable[[Made], Tensor]) -> Sequence[Any]:
        """The operation's outputs."""
        args, kwargs = _filled(step, self.args, self.kwargs, value)
        return outputs(step.func(*args, **kwargs))


class Held:
    """What a region holds to make tensors again: leaves, and operations to run by their place."""

    def __init__(self) -> None:
        self.leaves: dict[Made, Tensor] = {}
        self.calls: dict[int, Again] = {}

    def take(self, index: int, step: Step, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        """Hold of operation `index` what the template names."""
        if step.leaves:
            outs = outputs(out)
            self.leaves.update((made, outs[made.place]) for made in step.leaves)
        if step.again:
            held, named = _filled(step, args, kwargs, _gap)
            flat = [m for a in (*held, *named.values()) for m in (a if isinstance(a, list) else (a,))]
            beside = [(m, m._version) for m in flat if isinstance(m, Tensor)]
            self.calls[index] = Again(tuple(held), named, tuple(beside))


class Recorder(TorchDispatchMode):
    """What `Tracer` and `Follower` share. While `paused`, operations are the package's own and go unseen."""

    def __init__(self) -> None:
        super().__init__()
        self.names = Names()
        self.paused = False
        self.saved: list[Sign] = []
        self.problem: str | None = None  # why this forward cannot be told from others, or is another

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is not DETACH and self.problem is None and not self.paused:
            try:
                self.see(func, args, kwargs, out, self.names.operation(func, args, kwargs, out))
            except Unfollowable as error:
                self.problem = f"{func} has {error}"
        return out

    def see(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], out: Any, sign: Sign) -> None:
        raise NotImplementedError

    def forget(self) -> None:
        """Let go of all tensors."""
        self.names, self.saved = Names(), []

    def save(self, tensor: Tensor) -> None:
        """Autograd saves a tensor."""
        if self.problem is None:
            try:
                self.saved.append(self.names.tensor(tensor))
            except Unfollowable as error:
                self.problem = f"autograd saves {error}"


class Tracer(Recorder):
    """Records everything."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def see(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], out: Any, sign: Sign) -> None:
        self.calls.append(Call(func=func, args=args, kwargs=kwargs, outs=outputs(out), sign=sign))

    def forget(self) -> None:
        super().forget()
        self.calls = []

    def held(self, template: Template) -> Held:
        held = Held()
        for index, (step, call) in enumerate(zip(template.steps, self.calls, strict=True)):
            held.take(index, step, call.args, call.kwargs, call.outs)
        return held


class Follower(Recorder):
    """Holds what the template names, as long as every operation's sign, and that of every saved tensor, is the template's."""

    def __init__(self, template: Template) -> None:
        super().__init__()
        self.template = template
        self.held = Held()
        self._coming = enumerate(template.steps)

    def see(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], out: Any, sign: Sign) -> None:
        index, step = next(self._coming, (0, None))
        if step is None or step.sign != sign:
            self.problem = f"{func} came where the template has {step and step.func}, or with other arguments"
        elif step.again or step.leaves:
            self.held.take(index, step, args, kwargs, out)

    def save(self, tensor: Tensor) -> None:
        super().save(tensor)
        place = len(self.saved) - 1
        if self.problem is None and self.template.saved[place : place + 1] != (self.saved[-1],):
            self.problem = f"autograd saves another tensor ({tuple(tensor.shape)})"

    def forget(self) -> None:
        super().forget()
        self.held = Held()

    def end(self) -> None:
        """Whatever has not come by until now is missing."""
        if self.problem is None and (next(self._coming, None) or len(self.saved) != len(self.template.saved)):
            self.problem = "it ended before the template does"


class Watch(TorchDispatchMode):
    """Sees what a forward changes of the memory that was there before it, and whether it draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[Tensor] = []  # that were there before
        self.generators = 0  # draws
        self._names = Names()
        self._before: set[int] = set()

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [(name, tensor) for name, tensor in _tensors(func, args, kwargs) if is_plain(tensor)]
        for _, tensor in tensors:
            count = len(self._names)
            if self._names.number(tensor) == count:
                self._before.add(count)
        if func._schema.is_mutable:
            writes = {a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
            self.written += [t for name, t in tensors if name in writes and self._names.number(t) in self._before]
        self.generators += any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values()))
        out = func(*args, **kwargs)
        for tensor in outputs(out):
            if isinstance(tensor, Tensor) and is_plain(tensor):
                self._names.number(tensor)
        return out


def _tensors(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """Every tensor among the arguments, with the schema's name of its argument."""
    named = [(a.name, value) for a, value in zip(func._schema.arguments, args, strict=False)] + [*kwargs.items()]
    return [
        (name, member)
        for name, value in named
        for member in (value if isinstance(value, (list, tuple)) else (value,))
        if isinstance(member, Tensor)
    ]


def _gap(made: Made) -> None:
    return None


def _filled(
    step: Step, args: Sequence[Any], kwargs: dict[str, Any], value: Callable[[Made], Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Copies of an operation's arguments with these values where they are made in the region."""
    args, kwargs = [*args], {**kwargs}
    for (name, member), made in step.sources:
        into: Any = args if isinstance(name, int) else kwargs
        if member is None:
            into[name] = value(made)
        else:
            into[name] = [*into[name]]
            into[name][member] = value(made)
    return args, kwargs


def outputs(out: Any) -> Sequence[Any]:
    return out if isinstance(out, (tuple, list)) else (out,)


def storage_key(tensor: Tensor) -> int:
    """Names a tensor's block of memory, as long as it is alive."""
    return tensor.untyped_storage()._cdata
