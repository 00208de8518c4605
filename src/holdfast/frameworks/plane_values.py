"""The values of a tensor that its planes do not hold, as JSON: they are compared, and never turned back.

Two tensors get one text only if their values are equal, but for what is no content: where a tensor lies, and whether it
requires a gradient. A list, a tuple and a ``torch.Size`` of the same items count as equal, because the operations of a
type turn them into one another.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from math import isfinite
from typing import Final, cast

import torch

from holdfast.errors import StateError
from holdfast.format.names import component
from holdfast.wording import kind_of

#: Attributes of the tensor itself that some types repeat among their values, and that are no part of its content.
_REPEATED: Final[Mapping[str, Callable[[torch.Tensor], object]]] = {
    "requires_grad": lambda tensor: tensor.requires_grad,
    "storage_offset": torch.Tensor.storage_offset,
}
#: Depth of containers, and of planes inside planes, beyond which they probably contain themselves.
MAX_DEPTH: Final = 16


class UnreadableError(Exception):
    """The planes or the values of a tensor cannot be read; the message says why, as the end of a sentence."""


def text_of(values: object) -> str:
    """Values that `plain` gave, as one JSON object."""
    described = values if isinstance(values, dict) else {"": values}
    return json.dumps(described, sort_keys=True, separators=(",", ":"))


def plain(value: object, tensor: torch.Tensor, depth: int = 0) -> object:
    """A value of `tensor` as JSON has it. Keys are components of names, and everything that JSON lacks is an object
    with one key that begins with ``%``, which no component of a string does.

    Raises:
        UnreadableError: JSON cannot describe it.
    """
    if depth > MAX_DEPTH:
        raise UnreadableError(f"its values contain themselves, or are nested more than {MAX_DEPTH} deep")
    if (tagged := _tagged(value, tensor)) is not None:
        return tagged
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {_key(key): _entry(key, each, tensor, depth) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each, tensor, depth + 1) for each in value]
    if is_dataclass(value) and not isinstance(value, type):
        named = {field.name: getattr(value, field.name) for field in fields(value)}
        parts = {key: _entry(key, each, tensor, depth) for key, each in named.items()}
        return {"%class": [type(value).__qualname__, parts]}
    raise UnreadableError(f"it holds {kind_of(value)} beside its tensors, which no checkpoint can describe")


def _tagged(value: object, tensor: torch.Tensor) -> dict[str, object] | None:
    """A value that JSON lacks and that has no parts; None for others. Devices are all alike, and so are the shapes of
    the tensor itself, which may be a part of the whole one."""
    if isinstance(value, Enum):
        return {"%enum": f"{type(value).__qualname__}.{value.name}"}
    if isinstance(value, torch.device):
        return {"%own": "device"}
    if isinstance(value, torch.Size) and value == tensor.shape:
        return {"%own": "shape"}
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return {f"%{type(value).__name__}": str(value)}
    if isinstance(value, float) and not isfinite(value):
        return {"%float": str(value)}
    return None


def _entry(key: object, value: object, tensor: torch.Tensor, depth: int) -> object:
    """The value under a key. One that repeats an attribute of the tensor itself is left out."""
    is_repeated = key in _REPEATED and value == _REPEATED[cast("str", key)](tensor)
    return {"%own": key} if is_repeated else plain(value, tensor, depth + 1)


def _key(key: object) -> str:
    try:
        return component(key)
    except StateError as error:
        raise UnreadableError(f"its values have the key {key!r:.80}, which no checkpoint can describe") from error
