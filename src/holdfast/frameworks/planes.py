"""Tensor subclasses that consist of several plain tensors, their planes: codes, scales, a table of values.

The planes of a type are those that its ``__tensor_flatten__`` names, as torchao's types have. One table, by the names
of types, has the rules that this does not tell. It imports none of these libraries.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from functools import lru_cache
from math import prod
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeAlias, cast

import torch

from holdfast.errors import StateError
from holdfast.frameworks.known_types import type_of
from holdfast.wording import kind_of

#: How a plane is divided where its tensor is. It has one entry for so many consecutive elements of the tensor in
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
    `min_numel`, or a part that does not consist of whole blocks, holds them in a plain tensor.
    """

    name: str
    planes: Mapping[str, Plane]
    rebuild: Callable[[Mapping[str, torch.Tensor]], torch.Tensor]
    min_numel: int = 0


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
        return PlanedTensor(_name(type(tensor), values), cuts, lambda filled: _unflattened(tensor, filled, ""))

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
        values = {"block_size": block} | ({"signed": bool(tensor.signed)} if self.is_signed_or_not else {})
        return PlanedTensor(
            _name(type(tensor), values),
            {key: Plane(plane, cuts[key]) for key, plane in planes.items()},
            lambda filled: _unflattened(tensor, filled, ""),
            self.min_numel,
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

        return PlanedTensor(_name(type(tensor), values), cuts, rebuild)

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


def with_outer(planed: PlanedTensor, tensor: torch.Tensor, part: torch.Tensor) -> PlanedTensor:
    """The planes of `part`, which is `tensor` or the local part of it, under a name that also tells the dtype and the
    shape of the whole tensor, and the order of its axes in memory: the planes alone need not tell these."""
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
    module, _, kind = text.rpartition(".")
    known = _KNOWN.get((module, kind))
    if known is None or module not in sys.modules:
        return None
    try:
        found = json.loads("{" + values)
    except ValueError:
        return None
    return known.blank(found | {"type": getattr(sys.modules[module], kind)}, like)


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


def _inner(tensor: Any) -> tuple[dict[str, torch.Tensor], object]:
    """The planes of a tensor with ``__tensor_flatten__`` by name, and all values in it; an inner tensor that has planes
    itself gives those, as ``inner.codes``."""
    names, context = tensor.__tensor_flatten__()
    planes: dict[str, torch.Tensor] = {}
    below: dict[str, object] = {}
    for name in names:
        inner = getattr(tensor, name)
        if planed_type(type_of(inner)) is _FLATTENED:
            deeper, values = _inner(inner)
            planes |= {f"{name}.{key}": plane for key, plane in deeper.items()}
            below[name] = [f"{type(inner).__module__}.{type(inner).__qualname__}", values, str(inner.dtype)]
        else:
            planes[name] = inner
    return planes, {"context": context, "inner": below} if below else context


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


def _name(kind: type, values: object) -> str:
    """The name of a type in checkpoints: that of the type, and the values as JSON, in braces."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    described = _plain(name, values)
    described = described if isinstance(described, dict) else {"": described}
    return name + json.dumps(described, sort_keys=True, separators=(",", ":"))


def _plain(name: str, value: object) -> object:
    """A value of a tensor as JSON has it. It is compared, and never turned back."""
    if isinstance(value, Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.dtype | torch.device):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(name, each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(name, each) for each in value]
    if is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: _plain(name, getattr(value, field.name)) for field in fields(value)}
        return {type(value).__qualname__: parts}
    raise StateError(
        f"A tensor of type {name} holds {kind_of(value)} beside its tensors, which no checkpoint can describe.",
        code="state.planes",
        action="Register the type with holdfast.register_tensor, and put what it needs into planes.",
    )
