"""A checkpoint looked at lazily: metadata without data, any slice of any tensor by ranged reads."""

from __future__ import annotations

import difflib
import operator
import os
from collections.abc import Mapping, Sequence
from types import EllipsisType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from holdfast.errors import NotFoundError
from holdfast.format import values as value_codec
from holdfast.format.dtypes import CARRIERS, DTYPES
from holdfast.geometry import Box, Shape
from holdfast.plan.load import Want
from holdfast.run.checkpoint import Checkpoint
from holdfast.run.history import resolve
from holdfast.run.paths import parse, some
from holdfast.state import registry
from holdfast.storage.base import Bytes

if TYPE_CHECKING:
    import torch

#: What a lazy tensor can be indexed with.
Index = int | slice | EllipsisType


class LazyTensor:
    """A stored tensor. Indexing reads just what it needs, verified; nothing is kept."""

    def __init__(self, checkpoint: Checkpoint, number: int, *, verify: bool) -> None:
        self._checkpoint = checkpoint
        self._number = number
        self._verify = verify

    @property
    def name(self) -> str:
        """Canonical name."""
        return self._checkpoint.manifest.body.names[self._number]

    @property
    def shape(self) -> Shape:
        """Global shape."""
        return self._checkpoint.manifest.shape(self._number)

    @property
    def dtype(self) -> str:
        """Logical dtype, as torch names it."""
        return self._checkpoint.manifest.dtype(self._number)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return int(np.prod(self.shape, dtype=np.int64)) * DTYPES[self.dtype].itemsize

    def __repr__(self) -> str:
        return f"LazyTensor({self.name!r}, dtype={self.dtype}, shape={list(self.shape)})"

    def __getitem__(self, index: Index | tuple[Index, ...]) -> torch.Tensor:
        """Integers, slices (also with steps) and ``...``, as numpy understands them; gives a torch tensor on the CPU.

        Blocking. Raises `CorruptError` when bytes that were read are damaged.
        """
        import torch

        elements = self._read(index)
        return torch.from_numpy(elements).view(getattr(torch, self.dtype))

    def numpy(self) -> npt.NDArray[Any]:
        """The whole tensor as a numpy array, without torch; bf16 and fp8 have the dtypes of ``ml_dtypes``."""
        elements = self._read(...)
        return elements.view(_numpy_dtype(self.dtype))

    def _read(self, index: Index | tuple[Index, ...]) -> npt.NDArray[Any]:
        box, rest = _normalize(index, self.shape)
        out = np.empty(box.size, CARRIERS[DTYPES[self.dtype].itemsize])
        self._checkpoint.read([Want(self._number, box)], _Whole(out), verify=self._verify)
        if all(isinstance(item, slice) and item.step in (None, 1) for item in rest):
            return out
        return np.array(out[rest])  # contiguous; an array also where every axis is gone


class _Whole:
    """One array as the target of the only want."""

    def __init__(self, out: npt.NDArray[Any]) -> None:
        self._out = out

    def put(self, want: int, at: Box, elements: npt.NDArray[Any]) -> None:
        self._out[at.slices()] = elements

    def fill(self, wants: Sequence[int], data: Bytes) -> None:
        self._out[...] = data.view(self._out.dtype).reshape(self._out.shape)


class View:
    """A checkpoint, opened for reading. Needs no process group, opens no epoch, changes nothing; safe for threads."""

    def __init__(self, checkpoint: Checkpoint, *, verify: bool) -> None:
        self._checkpoint = checkpoint
        self._verify = verify

    @property
    def step(self) -> int:
        """The step it was saved at."""
        return self._checkpoint.seal.step

    @property
    def place(self) -> str:
        """Its place in the run's history, such as ``3.12``."""
        return str(self._checkpoint.seal.place)

    @property
    def path(self) -> str:
        """The checkpoint's folder."""
        return self._checkpoint.folder

    @property
    def in_history(self) -> bool:
        """Whether it was found through a run, rather than as a folder outside any history."""
        return self._checkpoint.located.commit is not None

    @property
    def aliases(self) -> Mapping[str, str]:
        """Other names of tied tensors, and the names they are stored under."""
        return self._checkpoint.manifest.body.aliases

    @property
    def diverged(self) -> tuple[str, ...]:
        """Names of tensors of which several ranks held copies that differed when it was saved; one copy was stored."""
        return self._checkpoint.manifest.body.diverged

    def names(self) -> list[str]:
        """Names of all stored tensors, sorted."""
        return list(self._checkpoint.manifest.body.names)

    def value_names(self) -> list[str]:
        """Names of all values, sorted."""
        return sorted(
            path
            for path, node in self._checkpoint.nodes.items()
            if isinstance(value_codec.bare(node), value_codec.Leaf)
        )

    def value(self, name: str) -> object:
        """One value, or the values and lazy tensors below a name, in the containers they were saved in.

        What a registered type encoded is decoded where the type is registered, else given as it was encoded, with the
        name. A `PerRank` is the list of all ranks' parts.
        """
        return value_codec.rebuild(self._checkpoint.nodes, name, tensors=self.__getitem__, decode=registry.decode)

    def __getitem__(self, name: str) -> LazyTensor:
        """The tensor of that name or alias. Raises `NotFoundError`, which names close matches."""
        number = self._numbers.get(self.aliases.get(name, name))
        if number is None:
            close = difflib.get_close_matches(name, self._numbers, n=3)
            raise NotFoundError(
                f"{self.path} holds no tensor {name!r}.",
                code="not_found.tensor",
                action=f"Did you mean {some(close)}?" if close else "List its names with view.names().",
                tensor=name,
                path=self.path,
            )
        return LazyTensor(self._checkpoint, number, verify=self._verify)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.aliases.get(name, name) in self._numbers

    @property
    def _numbers(self) -> Mapping[str, int]:
        return self._checkpoint.numbers


def open(path: str | os.PathLike[str], *, verify: bool = True) -> View:  # noqa: A001
    """Open a checkpoint for lazy reading: a run (its head), ``RUN@step=700``, ``RUN@3.12``, or a checkpoint folder.

    Reads metadata only. ``verify=False`` skips the digests of what is read later.

    Raises:
        NotFoundError: nothing is there; says what is near.
        CorruptError: the records or the manifest are damaged.
    """
    return View(Checkpoint(resolve(parse(path))), verify=verify)


def _normalize(index: Index | tuple[Index, ...], shape: Shape) -> tuple[Box, tuple[int | slice, ...]]:
    """The smallest box that holds what `index` selects, and the index to apply to it."""
    items: tuple[Index, ...] = index if isinstance(index, tuple) else (index,)
    num_ellipses = sum(item is Ellipsis for item in items)
    if num_ellipses > 1 or len(items) - num_ellipses > len(shape):
        raise IndexError(f"cannot index a tensor of shape {list(shape)} with {index!r}")
    at = next((i for i, item in enumerate(items) if item is Ellipsis), len(items))
    fill = (slice(None),) * (len(shape) - len(items) + num_ellipses)
    full = (*items[:at], *fill, *items[at + num_ellipses :])
    start: list[int] = []
    size: list[int] = []
    rest: list[int | slice] = []
    for item, extent in zip(full, shape, strict=True):
        if isinstance(item, slice):
            picked = range(*item.indices(extent))
            low = min(picked[0], picked[-1]) if picked else 0
            start.append(low)
            size.append(max(picked[0], picked[-1]) + 1 - low if picked else 0)
            rest.append(slice(None, None, item.step) if picked else slice(0, 0))
        else:
            number = operator.index(item)  # type: ignore[arg-type]  # not an Ellipsis: those were filled in
            if not -extent <= number < extent:
                raise IndexError(f"index {number} is out of range for an axis of {extent}")
            start.append(number % extent)
            size.append(1)
            rest.append(0)
    return Box(tuple(start), tuple(size)), tuple(rest)


def _numpy_dtype(name: str) -> npt.DTypeLike:
    if name.startswith(("bfloat16", "float8", "float4")):
        import ml_dtypes

        kind = getattr(ml_dtypes, name, None)
        if kind is not None:
            dtype: npt.DTypeLike = np.dtype(kind)
            return dtype
    elif name != "complex32":
        return np.dtype(name)
    raise TypeError(f"numpy has no dtype {name}: index the tensor instead, which gives a torch tensor")
