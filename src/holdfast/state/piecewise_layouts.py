"""The layouts and the memory of tensors that a state gives in pieces; see `holdfast.frameworks.piecewise`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from holdfast.errors import StateError
from holdfast.format.names import own_part
from holdfast.frameworks.piecewise import Piecewise, fits
from holdfast.frameworks.torch_dtypes import DTYPE_NAMES
from holdfast.geometry import Box, FlatRange
from holdfast.plan.layout import Pieces, TensorLayout
from holdfast.state.collect import LocalTensor, check_shape, reaches_beyond


class DescribedPieces(NamedTuple):
    """A tensor given in pieces, and its names; the first one is canonical."""

    names: list[str]
    local: LocalTensor


def describe(items: Mapping[str, Piecewise]) -> Iterator[DescribedPieces]:
    """The layout and memory of all `items`, sorted by name.

    One object under several names is one tensor. The same memory in several objects is not, since each object says
    which tensor it is a part of. Raises `StateError` where an item lies in a `PerRank`, or its memory was released or
    resized.
    """
    names: dict[int, list[str]] = {}
    for name in sorted(items):
        if own_part(name):
            raise _in_per_rank(name)
        names.setdefault(id(items[name]), []).append(name)
    for aliases in names.values():
        item = items[aliases[0]]
        check_shape(aliases[0], item.shape)
        held = [(part, memory.detach()) for part, memory in item.pieces if part.numel]
        for part, memory in held:
            if not memory.data_ptr() or reaches_beyond(memory):
                raise _released(aliases[0], part)
            if not fits(part, memory):
                raise _resized(aliases[0], part, memory)
        spec = Pieces(tuple(part for part, _ in held), item.replicas)
        layout = TensorLayout(aliases[0], DTYPE_NAMES[item.dtype], item.shape, spec)
        yield DescribedPieces(aliases, LocalTensor(layout, tuple(memory for _, memory in held)))


def _in_per_rank(name: str) -> StateError:
    return StateError(
        f"Tensor {name!r} has parts on several ranks, but is in a PerRank.",
        code="state.per_rank",
        action="Take it out of the PerRank, or put plain tensors into the PerRank.",
        tensor=name,
    )


def _released(name: str, part: FlatRange | Box) -> StateError:
    return StateError(
        f"Tensor {name!r} cannot be stored: the memory of {part} was released, or made smaller.",
        code="state.unsupported_tensor",
        action="Save while the memory exists, or make a new Piecewise from the memory that holds the elements now.",
        tensor=name,
    )


def _resized(name: str, part: FlatRange | Box, memory: torch.Tensor) -> StateError:
    return StateError(
        f"The memory of {part} of tensor {name!r} was resized: its shape is now {list(memory.shape)}.",
        code="state.local_shape",
        action="Make a new Piecewise from the memory that holds the elements now.",
        tensor=name,
    )
