"""Samples of weights that DeepSpeed's files hold twice: as master weights, and as copies in the module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from holdfast.format.dtypes import numpy_type
from holdfast.geometry import Int64s, Shape
from holdfast.interop.deepspeed_layout import FlatParts
from holdfast.interop.strided_parts import is_row_major
from holdfast.interop.torch_globals import PickledTensor

#: The most elements of a sample.
_MAX_NUMEL: Final = 256

#: The key of a file, a tensor in it, and the number of an element of that.
SamplePlace: TypeAlias = tuple[str, PickledTensor, int]


class WeightSample(NamedTuple):
    """Some master weights of a parameter, and the copies of the same elements: where the first of each lies, and how
    many they are."""

    name: str
    master: SamplePlace
    copy: SamplePlace
    numel: int


def sample_of(
    parameters: Sequence[tuple[str, Shape, FlatParts]],
    place: int,
    master: tuple[str, PickledTensor],
    copies: Mapping[str, tuple[str, PickledTensor]],
) -> WeightSample | None:
    """The first elements that the rank at `place` has of one of the `parameters` of its flat tensor `master`. `copies`
    are those of the module, by name, in the shapes of their parameters.

    It is the last of those with the most axes: a few steps change few weights of a norm in low precision. None where
    the rank has padding alone.
    """
    best: tuple[str, Shape, FlatParts, Int64s] | None = None
    for name, shape, pieces in parameters:
        if name not in copies or (best is not None and len(shape) < len(best[1])):
            continue
        copy = copies[name][1]
        mine = np.flatnonzero(pieces.ranks == place)
        if len(mine) and is_row_major(copy):
            best = name, shape, pieces, mine
    if best is None:
        return None
    name, shape, pieces, mine = best
    box = int(mine[0])
    first = int(np.ravel_multi_index(tuple(pieces.starts[box]), shape)) if shape else 0
    numel = min(int(pieces.sizes[box].prod()), _MAX_NUMEL)
    return WeightSample(name, (*master, int(pieces.firsts[box])), (*copies[name], first), numel)


def agrees(sample: WeightSample, read: Callable[[str, PickledTensor, int, int], bytes]) -> bool:
    """Whether copies are the casts of their master weights. `read` returns elements of a tensor: from a file, from the
    first one on, so many."""
    before, after = (numpy_type(each[1].dtype) for each in (sample.master, sample.copy))
    weights = np.frombuffer(read(*sample.master, sample.numel), before)
    copies = np.frombuffer(read(*sample.copy, sample.numel), after)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = weights.astype(after)
    both_nan = np.isnan(expected) & np.isnan(copies)  # it has several forms
    return bool(((expected == copies) | both_nan).all())
