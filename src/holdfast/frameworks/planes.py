"""Tensor subclasses that consist of several plain tensors, their planes: codes, scales, a table of values.

The planes of a type are those that its ``__tensor_flatten__`` names, as torchao's types have. One table, by the names
of types, has the rules that this does not tell. It imports none of these libraries.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeAlias, cast

import torch

from holdfast.errors import StateError
from holdfast.format.names import component
from holdfast.frameworks.known_types import type_of
from holdfast.frameworks.plane_values import MAX_DEPTH, UnreadableError, plain, text_of
from holdfast.wording import kind_of

#: The division of a plane if its tensor is divided. It has one entry for so many consecutive elements of the tensor in
#: row-major order; or its rows are those of the tensor, which may then be divided by rows; or all ranks have the same.
Cut: TypeAlias = int | Literal["rows", "whole"]


class Plane(NamedTuple):
    """One of the plain tensors that make up a tensor, in live memory, and how it is divided."""

    tensor: torch.Tensor
    cut: Cut


@dataclass(frozen=True)
class PlanedTensor:
    """A live tensor by its planes.

    `name` is the name of its type in checkpoints, with the values that the planes do not hold, but none that depend on
    the layout of the ranks. `rebuild` makes a tensor like it from other planes. A rank that holds fewer elements than
    `min_numel`, or a part that does not consist of whole blocks, holds them in a plain tensor. With `can_be_made`, a
    load can make one as a slot of an optimizer that has none yet (see `blank`).
    """

    name: str
    planes: Mapping[str, Plane]
    rebuild: Callable[[Mapping[str, torch.Tensor]], torch.Tensor]
    min_numel: int = 0
    can_be_made: bool = False


class PlanedType(Protocol):
    """The rules of one type of tensors."""

    def read(self, tensor: Any) -> PlanedTensor:
        """The planes of a tensor of this type."""

    def blank(self, values: Mapping[str, Any], like: torch.Tensor) -> torch.Tensor | None:
        """A new tensor of this type with the shape of `like`, to be filled; None where it cannot hold so many elements.
        `values` are those of the name."""


@dataclass(frozen=True)
class _Flattened:
    """A type with ``__tensor_flatten__``. Its planes are divided by rows alone."""

    def read(self, tensor: Any) -> PlanedTensor:
        """As `PlanedType.read`."""
        planes, values = _inner(tensor)
        cuts = {key: Plane(plane, "rows") for key, plane in planes.items()}
        return PlanedTensor(_name(tensor, values), cuts, lambda filled: _unflattened(tensor, filled, ""))

    def blank(self, values: Mapping[str, Any], like: torch.Tensor) -> torch.Tensor | None:
        """As `PlanedType.blank`. The values need not be enough to make one."""
        return None


@dataclass(frozen=True)
class _QuantisedSlot:
    """A slot of torchao's optimizers: codes, one scale for each block of elements in row-major order, and mostly a
    table of values. They quantise no part of fewer than 4,096 elements."""

    codes_per_byte: int
    is_signed_or_not: bool
    min_numel: int = 4096

    def read(self, tensor: Any) -> PlanedTensor:
        """As `PlanedType.read`."""
        block = int(tensor.block_size)
        cuts: dict[str, Cut] = {"codes": self.codes_per_byte, "scale": block, "qmap": "whole"}
        planes, _ = _inner(tensor)
        if unknown := sorted(planes.keys() - cuts.keys()):
            raise UnreadableError(f"this version of Holdfast does not know its planes {', '.join(unknown)}")
        values = {"block_size": block} | ({"signed": bool(tensor.signed)} if self.is_signed_or_not else {})
        return PlanedTensor(
            _name(tensor, plain(values, tensor)),
            {key: Plane(plane, cuts[key]) for key, plane in planes.items()},
            lambda filled: _unflattened(tensor, filled, ""),
            self.min_numel,
            can_be_made=True,
        )

    def blank(self, values: Mapping[str, Any], like: torch.Tensor) -> torch.Tensor | None:
        """As `PlanedType.blank`."""
        kind, block = values["type"], values.get("block_size")
        signed = {"signed": values.get("signed")} if self.is_signed_or_not else {}
        if type(block) is not int or block < 1 or any(type(each) is not bool for each in signed.values()):
            return None  # no name that this version gives
        if like.numel() < self.min_numel or like.numel() % block:
            return None
        return cast(
            "torch.Tensor",
            kind.zeros(like.shape, block_size=block, device=like.device, dtype=like.dtype, **signed),
        )


@dataclass(frozen=True)
class _Packed4Bits:
    """A weight of bitsandbytes: packed codes in the memory of the parameter, and its scales in a `QuantState`."""

    def read(self, tensor: Any) -> PlanedTensor:
        """As `PlanedType.read`."""
        state = tensor.quant_state
        planes = {"data": tensor.detach().as_subclass(torch.Tensor)}
        values: dict[str, object] = {"quantised": state is not None}
        if state is not None:
            planes |= {"absmax": state.absmax, "code": state.code}
            values |= {"blocksize": state.blocksize, "dtype": state.dtype, "shape": tuple(state.shape)}
            values["quant_type"] = state.quant_type
            if state.nested:
                planes |= {"offset": state.offset, "nested_absmax": state.state2.absmax}
                planes["nested_code"] = state.state2.code
                values["nested_blocksize"] = state.state2.blocksize
        cuts = {key: Plane(plane, "rows") for key, plane in planes.items()}  # so it must not be divided

        def rebuild(_: Mapping[str, torch.Tensor]) -> torch.Tensor:
            raise TypeError("4-bit weights cannot be made from their planes; quantise the model first")

        return PlanedTensor(_name(tensor, plain(values, tensor)), cuts, rebuild)

    def blank(self, values: Mapping[str, Any], like: torch.Tensor) -> torch.Tensor | None:
        """As `PlanedType.blank`."""
        return None


_FLATTENED: Final = _Flattened()
_KNOWN: Final[Mapping[tuple[str, str], PlanedType]] = {
    ("torchao.optim.subclass_8bit", "OptimState8bit"): _QuantisedSlot(1, is_signed_or_not=True),
    ("torchao.optim.subclass_4bit", "OptimState4bit"): _QuantisedSlot(2, is_signed_or_not=True),
    ("torchao.optim.subclass_fp8", "OptimStateFp8"): _QuantisedSlot(1, is_signed_or_not=False),
    ("bitsandbytes.nn.modules", "Params4bit"): _Packed4Bits(),
}


@lru_cache(maxsize=1024)
def planed_type(kind: type) -> PlanedType | None:
    """The rules of exactly this type; None for types that do not consist of planes, and for torch's own."""
    known = _KNOWN.get((kind.__module__, kind.__qualname__))
    if known is not None or kind.__module__.partition(".")[0] == "torch":
        return known
    return _FLATTENED if hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__") else None


def planed(rules: PlanedType, tensor: torch.Tensor, part: torch.Tensor, *, name: str | None) -> PlanedTensor:
    """The planes of `part`, which is `tensor` or the local part of it. `name` is that of the tensor, if it is known.

    Raises:
        StateError: code ``state.planes``, for a type whose planes or values cannot be read.
    """
    try:
        return _with_outer(rules.read(part), tensor, part)
    except UnreadableError as error:
        raise _unreadable(name, part, str(error)) from error
    except Exception as error:  # the code of the type
        raise _unreadable(name, part, f"reading them raised {type(error).__name__}: {error!s:.300}") from error


def _unreadable(name: str | None, part: torch.Tensor, problem: str) -> StateError:
    kind = f"{type(part).__module__}.{type(part).__qualname__}"
    named = f"tensor {name!r} of type {kind}" if name is not None else f"a tensor of type {kind}"
    return StateError(
        f"The planes of {named} cannot be read: {problem}.",
        code="state.planes",
        action="Correct the type's __tensor_flatten__, or register the type with holdfast.register_tensor, and put all "
        "that it needs into planes.",
        tensor=name,
    )


def _with_outer(planed: PlanedTensor, tensor: torch.Tensor, part: torch.Tensor) -> PlanedTensor:
    """The planes of `part`, under a name that also tells the dtype and the shape of the whole tensor, and the order of
    its axes in memory: the planes alone need not tell these."""
    outer: dict[str, object] = {"dtype": str(tensor.dtype), "shape": list(tensor.shape)}
    strides = part.stride()
    axes = [axis for axis, size in enumerate(part.shape) if size > 1]
    order = sorted(axes, key=lambda axis: -strides[axis])
    if order != axes:
        outer["order"] = order
    text = json.dumps({"outer": outer}, sort_keys=True, separators=(",", ":"))
    return replace(planed, name=f"{planed.name[:-1]}{'' if planed.name.endswith('{}') else ','}{text[1:]}")


def is_name_of_planed(name: str) -> bool:
    """Whether a name of a type in a checkpoint is one of `PlanedTensor`, and not of a user's registration."""
    return name.endswith("}") and "{" in name


def blank(name: str, like: torch.Tensor) -> torch.Tensor | None:
    """A new tensor of the type that `name` names, with the shape of `like`, to be filled. None where that type cannot
    hold so many elements, or cannot be made from its name."""
    text, _, values = name.partition("{")
    known, kind = _KNOWN.get(_split(text)), _imported(text)
    if known is None or kind is None:
        return None
    try:
        found = json.loads("{" + values)
    except ValueError:
        return None
    return known.blank(found | {"type": kind}, like)


def can_be_made(name: str) -> bool:
    """Whether `blank` can make tensors of the type that `name` names, if they have whole blocks: its library is
    imported here."""
    text = name.partition("{")[0]
    return isinstance(_KNOWN.get(_split(text)), _QuantisedSlot) and _imported(text) is not None


def _split(text: str) -> tuple[str, str]:
    """The module and the qualified name of a type."""
    module, _, kind = text.rpartition(".")
    return module, kind


def _imported(text: str) -> object:
    """The type of this name, if its module is imported; else None."""
    module, kind = _split(text)
    return getattr(sys.modules.get(module), kind, None)


def blocks_fit(planed: PlanedTensor, numel: int) -> bool:
    """Whether a part of `numel` elements would be a tensor of this type too."""
    blocks = [plane.cut for plane in planed.planes.values() if isinstance(plane.cut, int)]
    return numel >= planed.min_numel and not any(numel % block for block in blocks)


def block_shape(shape: tuple[int, ...], block: int) -> tuple[int, tuple[int, ...]] | None:
    """The shape of a plane with one entry for each `block` elements of a tensor of `shape`: its leading axes are those
    of the tensor, and its last one takes the place of the others. The number of leading axes, and the shape. None where
    the elements are not whole blocks."""
    for axis in reversed(range(len(shape))):
        rest = prod(shape[axis:])
        if rest % block == 0:
            return axis, (*shape[:axis], rest // block)
    return None


def _inner(tensor: Any, depth: int = 0) -> tuple[dict[str, torch.Tensor], object]:
    """The planes of a tensor with ``__tensor_flatten__`` by name, and all values in it as JSON has them; an inner
    tensor that has planes itself gives those, as ``inner.codes``."""
    if depth > MAX_DEPTH:
        raise UnreadableError("its planes contain themselves")
    names, context = _flattened(tensor)
    planes: dict[str, torch.Tensor] = {}
    below: dict[str, object] = {}
    for name in names:
        inner = getattr(tensor, name)
        if not isinstance(inner, torch.Tensor):
            raise UnreadableError(f"its __tensor_flatten__ names {name!r}, which is {kind_of(inner)} and no tensor")
        if planed_type(type_of(inner)) is _FLATTENED:
            deeper, values = _inner(inner, depth + 1)
            added = {f"{name}.{key}": plane for key, plane in deeper.items()}
            below[component(name)] = [f"{type(inner).__module__}.{type(inner).__qualname__}", values, str(inner.dtype)]
        else:
            added = {name: inner}
        if twice := planes.keys() & added.keys():
            raise UnreadableError(f"two of its planes have the name {min(twice)!r}")
        planes |= added
    described = plain(context, tensor)
    return planes, {"%context": described, "%inner": below} if below else described


def _flattened(tensor: Any) -> tuple[list[str], object]:
    """The names of the inner tensors of `tensor`, and all else that it needs, from its ``__tensor_flatten__``."""
    found = tensor.__tensor_flatten__()
    if not isinstance(found, tuple) or len(found) != 2:
        raise UnreadableError(f"its __tensor_flatten__ returned {kind_of(found)}, not names and a context")
    names, context = found
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise UnreadableError(f"its __tensor_flatten__ returned {kind_of(names)} that is no list of names")
    if not names:
        raise UnreadableError("its __tensor_flatten__ names no tensors")
    return list(dict.fromkeys(names)), context


def _unflattened(tensor: Any, planes: Mapping[str, torch.Tensor], prefix: str) -> torch.Tensor:
    """A tensor like `tensor` from other planes, whose names have this prefix."""
    names, context = tensor.__tensor_flatten__()
    inner = {}
    for name in names:
        live = getattr(tensor, name)
        if planed_type(type_of(live)) is _FLATTENED:
            inner[name] = _unflattened(live, planes, f"{prefix}{name}.")
        else:
            inner[name] = planes[prefix + name].view(live.shape)
    shape, stride = tensor.shape, tensor.stride()
    return cast("torch.Tensor", type(tensor).__tensor_unflatten__(inner, context, shape, stride))


def _name(tensor: torch.Tensor, values: object) -> str:
    """The name of a tensor's type in checkpoints: that of the type, and the values as JSON, in braces."""
    return f"{type(tensor).__module__}.{type(tensor).__qualname__}{text_of(values)}"
