"""Tensors that are divided among ranks without DTensor: this rank's parts are flat ranges or boxes in any memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from math import prod
from operator import index
from typing import Literal, SupportsIndex

import torch
from torch import nn

from holdfast.frameworks.torch_dtypes import DTYPE_NAMES
from holdfast.geometry import Box, FlatRange, Shape, intersect
from holdfast.wording import count, kind_of


class Piecewise:
    """An entry of a state that stands for one logical tensor of global `shape`, of which this rank holds `pieces`.

    Each piece is a part of the tensor with the memory that holds it: ``(FlatRange(a, b), memory)`` for elements
    ``[a, b)`` of the row-major order, where `memory` has ``b - a`` elements and is contiguous or 1-d; or
    ``(Box(start, size), memory)`` with `memory` of shape `size` and any strides. All ranks hold one tensor in the same
    one of the two ways; the pieces of one rank are disjoint. A rank that holds nothing passes no pieces and the
    `dtype`.

    Save and load treat it as any tensor of that name, dtype and shape, and gather nothing. Together the ranks must hold
    every element (else `StateError`, code ``state.coverage``). A tensor that was saved in pieces loads into plain
    tensors, DTensors and other pieces on any number of ranks, and these load into pieces, whose memory is filled in
    place.

    Ranks may hold equal pieces, which are stored once; pieces that overlap otherwise are refused. With
    ``replicas="compare"`` the copies are compared, and copies that differ are refused (``state.diverged``);
    ``replicas="split"`` declares them equal, so that they are not compared and their holders share the writing.

    For example, under ZeRO-1 each rank holds elements ``[a, b)`` of the fp32 master weight of a parameter::

        master = torch.zeros(b - a)
        state = {"master": {"0.weight": holdfast.Piecewise((16, 8), [(holdfast.FlatRange(a, b), master)])}}

    Raises `ValueError` for parts that lie outside the shape, overlap, or differ in size from their memory, and for
    dtypes that differ or cannot be stored; `TypeError` for parts of both kinds, and for memory that is not a plain
    tensor.
    """

    def __init__(
        self,
        shape: Sequence[int],
        pieces: Sequence[tuple[FlatRange | Box, torch.Tensor]],
        *,
        dtype: torch.dtype | None = None,
        replicas: Literal["compare", "split"] = "compare",
    ) -> None:
        if replicas not in ("compare", "split"):
            raise ValueError(f'replicas must be "compare" or "split", not {replicas!r}')
        self.shape: Shape = _shape(shape)
        if any(extent < 0 for extent in self.shape):
            raise ValueError(f"shape {self.shape} has a negative extent")
        self.pieces = tuple(map(_piece, pieces))
        self.dtype = _dtype(self.pieces, dtype)
        self.replicas: Literal["compare", "split"] = replicas
        for part, memory in self.pieces:
            _check(part, memory, self.shape)
        _check_disjoint([part for part, _ in self.pieces])

    def __repr__(self) -> str:
        parts = ", ".join(str(part) for part, _ in self.pieces)
        return f"Piecewise({self.shape}, {self.dtype}, [{parts}])"


def _shape(shape: object) -> Shape:
    """The same shape in plain integers."""
    if isinstance(shape, Sequence) and all(isinstance(extent, SupportsIndex) for extent in shape):
        return tuple(map(index, shape))
    raise TypeError(f"the shape of a Piecewise is a sequence of whole numbers, not {shape!r}")


def _piece(piece: object) -> tuple[FlatRange | Box, torch.Tensor]:
    """A pair of a part and its memory; the part in plain integers."""
    if not isinstance(piece, tuple | list) or len(piece) != 2:
        raise TypeError(f"a piece is a pair, as (holdfast.FlatRange(0, 8), memory), not {kind_of(piece)}")
    part, memory = piece
    return _part(part), memory


def _part(part: FlatRange | Box) -> FlatRange | Box:
    """The same part in plain integers."""
    if type(part) is FlatRange:
        return FlatRange(index(part.start), index(part.stop))
    if type(part) is Box:
        return Box(tuple(map(index, part.start)), tuple(map(index, part.size)))
    raise TypeError(f"a part must be a holdfast.FlatRange or a holdfast.Box, not {kind_of(part)}")


def _dtype(pieces: Sequence[tuple[FlatRange | Box, torch.Tensor]], declared: torch.dtype | None) -> torch.dtype:
    """The dtype of all pieces. Refuses pieces of two kinds, and memory that is not a plain tensor."""
    if len({type(part) for part, _ in pieces}) > 1:
        raise TypeError("the pieces of a tensor must be all flat ranges, or all boxes")
    for part, memory in pieces:
        if type(memory) is not torch.Tensor and type(memory) is not nn.Parameter:
            raise TypeError(f"the memory of {part} must be a plain torch.Tensor, not {kind_of(memory)}")
    dtypes = {memory.dtype for _, memory in pieces} | ({declared} if declared is not None else set())
    if not dtypes:
        raise ValueError("without pieces, pass the dtype of the tensor: Piecewise(shape, [], dtype=...)")
    if len(dtypes) > 1:
        found = ", ".join(sorted(map(str, dtypes)))
        raise ValueError(f"all pieces of a tensor must have its dtype, not {found}")
    (dtype,) = dtypes
    if dtype not in DTYPE_NAMES:
        raise ValueError(f"tensors of dtype {dtype} cannot be stored")
    return dtype


def _check(part: FlatRange | Box, memory: torch.Tensor, shape: Shape) -> None:
    """Refuse a part outside the tensor, and memory that does not hold it."""
    if isinstance(part, FlatRange):
        inside = 0 <= part.start <= part.stop <= prod(shape)
        wanted = count(part.numel, "element")
    else:
        inside = len(part.start) == len(part.size) == len(shape) and all(
            start >= 0 and size >= 0 and start + size <= extent
            for start, size, extent in zip(part.start, part.size, shape, strict=True)
        )
        wanted = f"shape {part.size}"
    if not inside:
        raise ValueError(f"{part} lies outside a tensor of shape {shape}")
    if not fits(part, memory):
        raise ValueError(f"the memory of {part} has shape {tuple(memory.shape)}; it must have {wanted}")
    if memory.layout is not torch.strided or memory.is_meta or memory.is_neg() or memory.is_conj():
        raise ValueError(f"the memory of {part} is sparse, on the meta device, or a lazy view; give it dense memory")
    if isinstance(part, FlatRange) and memory.ndim > 1 and not memory.is_contiguous():
        raise ValueError(f"the memory of {part} is neither contiguous nor 1-d, but a flat range is in row-major order")


def fits(part: FlatRange | Box, memory: torch.Tensor) -> bool:
    """Whether `memory` has the elements of `part`."""
    if isinstance(part, FlatRange):
        return memory.numel() == part.numel
    return tuple(memory.shape) == tuple(part.size)


def _check_disjoint(parts: Sequence[FlatRange | Box]) -> None:
    boxes = sorted(
        (part if isinstance(part, Box) else Box((part.start,), (part.numel,)), part) for part in parts if part.numel
    )
    for at, (box, part) in enumerate(boxes):
        for other, other_part in islice(boxes, at + 1, None):
            if box.start and other.start[0] >= box.stop[0]:
                break  # all that follow start behind this box too
            if intersect(box, other) is not None:
                raise ValueError(f"{part} and {other_part} overlap, but the pieces of one rank must be disjoint")
