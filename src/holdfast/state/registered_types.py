"""The registry of users' types: functions that turn their objects into plain values or tensors, and back.

A checkpoint holds the name of a registration, never code. A load decodes with the functions that this process has
registered under that name.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np

from holdfast.errors import ConfigurationError, IncompatibleError, StateError
from holdfast.format.values import Undecoded
from holdfast.state.arrays import Array, array_as_tensor
from holdfast.wording import kind_of

if TYPE_CHECKING:  # a view decodes values without torch
    import torch
    from torch.distributed.tensor import DTensor

    from holdfast.frameworks.planes import PlanedTensor, PlanedType

T = TypeVar("T")
EncodedT = TypeVar("EncodedT")
TensorT = TypeVar("TensorT", bound="torch.Tensor")

_BUILT_IN = (type(None), bool, int, float, complex, str, bytes, dict, list, tuple, OrderedDict, Counter)
_TENSOR = ("torch", "Tensor")
_DTENSOR = ("torch.distributed.tensor", "DTensor")
_NEED_NO_PLANES = (
    _TENSOR,
    ("torch.nn.parameter", "Parameter"),
    ("torch.nn.parameter", "Buffer"),
    _DTENSOR,
)


@dataclass(frozen=True)
class Registration:
    """A registered type. `encode` returns plain values, or the planes of a tensor; `decode` is its inverse.

    Tensors of other libraries that consist of planes have one each, with `planed`: its name tells values of the tensor.
    """

    name: str
    kind: type
    encode: Callable[[object], object]
    decode: Callable[[object], object]
    planed: PlanedTensor | None = None


#: A checkpoint stores arrays as tensors, and a load makes arrays of them again. (A lazy tensor has `numpy` too.)
ARRAY = Registration(
    "numpy.ndarray",
    np.ndarray,
    lambda array: array_as_tensor(cast("Array", array)),
    lambda tensor: cast("torch.Tensor", tensor).numpy(),
)

_BY_TYPE: dict[type, Registration] = {ARRAY.kind: ARRAY}
_BY_NAME: dict[str, Registration] = {ARRAY.name: ARRAY}


def register_value(
    kind: type[T], encode: Callable[[T], EncodedT], decode: Callable[[EncodedT], T], *, name: str
) -> None:
    """Save objects of exactly the type `kind` as the result of `encode`, and load them with `decode`.

    `encode` returns values, tensors, and nested containers of them; `decode` gets equal ones, with tensors on the CPU.
    `name` is the type's name in checkpoints: keep it when the class moves. Register in every process, before saving and
    loading. A load replaces the object and does not change it. Raises `ConfigurationError` when the type or the name is
    registered with something else, and for types that need no registration; `TypeError` for arguments of other types.
    """
    _check_types(kind, name, encode=encode, decode=decode)
    if kind in _BUILT_IN or _is_tensor(kind):
        raise ConfigurationError(
            f"{kind.__qualname__} cannot be registered as a value.",
            code="config.registration",
            action="Register a type of your own; for tensors, use holdfast.register_tensor.",
        )
    there, back = cast("Callable[[object], object]", encode), cast("Callable[[object], object]", decode)
    _register(Registration(name, kind, there, back))


def register_tensor(
    kind: type[TensorT],
    planes: Callable[[TensorT], Mapping[str, torch.Tensor]],
    rebuild: Callable[[Mapping[str, torch.Tensor]], TensorT],
    *,
    name: str,
) -> None:
    """Save tensors of exactly the type `kind` as their planes: the plain tensors that they consist of.

    `planes` returns the live memory itself, not copies, under the same names every time: a load fills it in place, so
    the tensor keeps its identity. `rebuild` makes a tensor from loaded planes where there is no tensor to fill, as for
    the state of a fresh optimizer or for tensors in an object's ``state_dict()``. Put everything else that a tensor
    needs (a scheme, a block size) into planes too. `name` is the type's name in checkpoints. Raises what
    `register_value` raises.
    """
    _check_types(kind, name, planes=planes, rebuild=rebuild)
    if not _is_tensor(kind) or _full_name(kind) in _NEED_NO_PLANES:
        raise ConfigurationError(
            f"{kind.__qualname__} is not a subclass of torch.Tensor that needs planes.",
            code="config.registration",
            action="Register a tensor subclass; for other types, use holdfast.register_value.",
        )
    there, back = cast("Callable[[object], object]", planes), cast("Callable[[object], object]", rebuild)
    _register(Registration(name, kind, there, back))


def registered(item: object, *, name: str | None = None) -> Registration | None:
    """The registration of exactly the type of `item`; None if there is none. Tensors of other libraries that consist of
    planes have one, also where they are the local part of a DTensor.

    Raises:
        StateError: code ``state.planes``, for such a tensor whose planes cannot be read; the error has its `name`.
    """
    kind: type = type(item)
    known = _BY_TYPE.get(kind)
    if known is not None or not _may_be_planed(kind):
        return known
    part = item
    if _full_name(kind) == _DTENSOR:
        part = cast("DTensor", item)._local_tensor  # noqa: SLF001
        kind = type(part)
    rules = _rules_of(kind)
    if rules is None or kind in _BY_TYPE:
        return None
    from holdfast.frameworks.planes import planed

    found = planed(rules, cast("torch.Tensor", item), cast("torch.Tensor", part), name=name)
    planes = {key: plane.tensor for key, plane in found.planes.items()}
    rebuild = cast("Callable[[object], object]", found.rebuild)
    return Registration(found.name, kind, lambda _: planes, rebuild, found)


def any_registered(kinds: Iterable[type]) -> bool:
    """Whether tensors of one of these types may have a registration. A DTensor has that of its local part."""
    return not _BY_TYPE.keys().isdisjoint(kinds) or any(_rules_of(kind) is not None for kind in kinds)


@lru_cache(maxsize=1024)
def _may_be_planed(kind: type) -> bool:
    """Whether objects of this type may be tensors that consist of planes, or DTensors over such tensors."""
    return _full_name(kind) == _DTENSOR or _rules_of(kind) is not None


@lru_cache(maxsize=1024)
def _rules_of(kind: type) -> PlanedType | None:
    """The rules of a type of tensors that consist of planes; None for all others."""
    if not _is_tensor(kind) or _full_name(kind) in _NEED_NO_PLANES:
        return None
    from holdfast.frameworks.planes import planed_type

    return planed_type(kind)


def planes_of(name: str, tensor: torch.Tensor, registration: Registration) -> dict[str, torch.Tensor]:
    """The planes of a tensor, by name. Raises `StateError` when they are not live memory."""
    planes, again = registration.encode(tensor), _encoded_again(name, tensor, registration)
    problem = _problem_of(planes, again)
    if problem is not None:
        raise StateError(
            f"The planes function of {registration.name!r} {problem}, for tensor {name!r}.",
            code="state.planes",
            action="Return the tensors that the subclass holds, under fixed names.",
            tensor=name,
        )
    return dict(cast("Mapping[str, torch.Tensor]", planes))


def _encoded_again(name: str, tensor: torch.Tensor, registration: Registration) -> object:
    """The planes by a second call, to compare with those of the first one."""
    if registration.planed is None:
        return registration.encode(tensor)
    again = registered(tensor, name=name)
    assert again is not None
    return again.encode(tensor)


def _problem_of(planes: object, again: object) -> str | None:
    """The reason why a load could not fill a tensor through its planes, by the results of two calls of its planes
    function; None if it could."""
    if not isinstance(planes, Mapping) or not isinstance(again, Mapping):
        return f"returned {kind_of(planes)}, not a dict of planes"
    for key, plane in planes.items():
        if not isinstance(key, str) or not _is_tensor(type(plane)):
            return f"returned {kind_of(plane)} as {key!r}, not a tensor under a name"
    if not planes:
        return "returned no planes"
    if planes.keys() != again.keys():
        return "returned other planes on the second call"
    if any(plane.data_ptr() != again[key].data_ptr() for key, plane in planes.items()):
        return "returned copies: values that are loaded into them would be lost"
    return None


def check_registered(name: str, path: str) -> None:
    """Raise `IncompatibleError`, code ``incompatible.unregistered_value``, when nothing is registered as `name`."""
    if name not in _BY_NAME:
        is_planed = name.endswith("}") and "{" in name  # as `frameworks.planes` names types
        raise IncompatibleError(
            f"{path!r} was saved by a registration with the name {name!r}, which this process does not have.",
            code="incompatible.unregistered_value",
            action="Load it into a live tensor of that type, whose planes a load fills in place."
            if is_planed
            else f"Call holdfast.register_value or holdfast.register_tensor with name={name!r} before loading.",
            path=path,
        )


def decode(name: str, value: object) -> object:
    """Decode the object that was encoded as `value`; returns `Undecoded` when nothing is registered as `name`."""
    registration = _BY_NAME.get(name)
    return Undecoded(name, value) if registration is None else registration.decode(value)


def _check_types(kind: object, name: object, **functions: object) -> None:
    if not isinstance(kind, type):
        raise TypeError(f"the first argument must be a type to register, not {kind_of(kind)}")
    for what, function in functions.items():
        if not callable(function):
            raise TypeError(f"{what} must be a function, not {kind_of(function)}")
    if not isinstance(name, str) or not name:
        raise TypeError(f"name must be a string, the name of {kind.__qualname__} in checkpoints, not {name!r}")


def _register(new: Registration) -> None:
    for old in (_BY_TYPE.get(new.kind), _BY_NAME.get(new.name)):
        if old is not None and old != new:
            raise ConfigurationError(
                f"{new.kind.__qualname__} cannot be registered as {new.name!r}: {old.kind.__qualname__} is registered "
                f"as {old.name!r}, with other functions.",
                code="config.registration",
                action="Give each type one name and one pair of functions.",
            )
    _BY_TYPE[new.kind] = _BY_NAME[new.name] = new


def _is_tensor(kind: type) -> bool:
    return _TENSOR in map(_full_name, kind.__mro__)


def _full_name(kind: type) -> tuple[str, str]:
    return kind.__module__, kind.__qualname__
