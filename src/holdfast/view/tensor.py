"""A stored tensor that reads only the elements that an index selects; and conversions to numpy and torch."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, Final, NoReturn

import numpy as np
import numpy.typing as npt

from holdfast.format.dtypes import DTYPES, numpy_type
from holdfast.geometry import Shape
from holdfast.plan.load import ReadRequest
from holdfast.view.index import Index, independent, select
from holdfast.view.source import Array, ViewSource

if TYPE_CHECKING:
    import torch

_READ_FIRST: Final = "read its elements first, with view[name][...] into torch, or view[name].numpy()"


class LazyTensor:
    """A stored tensor. Indexing reads only the blocks that it needs, verifies them (by default), and keeps nothing.
    ``np.asarray`` reads all of it. Safe for several threads."""

    def __init__(self, source: ViewSource, number: int) -> None:
        self._source = source
        #: Its number in the manifest.
        self.number = number

    @property
    def name(self) -> str:
        """Canonical name."""
        return self._source.checkpoint.manifest.body.names[self.number]

    @property
    def shape(self) -> Shape:
        """Global shape."""
        return self._source.checkpoint.manifest.shape(self.number)

    @property
    def dtype(self) -> str:
        """Logical dtype, as torch names it."""
        return self._source.checkpoint.manifest.dtype(self.number)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * DTYPES[self.dtype].itemsize

    def __repr__(self) -> str:
        return f"LazyTensor({self.name!r}, dtype={self.dtype}, shape={list(self.shape)})"

    def __getitem__(self, index: Index | tuple[Index, ...]) -> torch.Tensor:
        """Read the elements that `index` selects into a torch tensor on the CPU. An index has integers, slices (also
        with steps) and ``...``, by numpy's rules.

        Blocking. Reads the blocks of 1 MiB that hold selected elements, in little memory besides the result. Raises
        `CorruptError` if a block that it reads is damaged.
        """
        return as_torch(self._read(index, private=True), self.dtype)

    def numpy(self, index: Index | tuple[Index, ...] = ...) -> npt.NDArray[Any]:
        """Read the same elements into a numpy array, without torch; bf16 and fp8 have the dtypes of ``ml_dtypes``.

        If the view was opened with ``verify=False``, the array is read-only. If its elements also lie in one piece in a
        local file, it is a mapping of that file, which is not read before the array is used.

        Raises `TypeError` for dtypes that numpy does not have.
        """
        dtype = numpy_dtype(self.dtype)
        return as_numpy(self._read(index, private=False), dtype, writeable=self._source.verify)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """Read all elements for numpy, as in ``np.asarray(view[name])``; see `numpy`."""
        array = self.numpy()
        return array.astype(array.dtype if dtype is None else dtype, copy=bool(copy))

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a stored tensor has no attribute {name!r}: {_READ_FIRST}", name=name, obj=self)

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError(f"a stored tensor is not computed with: {_READ_FIRST}")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __matmul__ = __rmatmul__ = __neg__ = __float__ = __len__ = _refuse

    def __bool__(self) -> bool:
        return True  # as of any object: `__len__` would refuse it

    def _read(self, index: Index | tuple[Index, ...], *, private: bool) -> Array:
        lattice, flipped, shape = select(index, self.shape)
        (array,) = self._source.mapped([ReadRequest(self.number, lattice.box)], private=private)
        if array is not None:
            array = _at(array, tuple(slice(None, None, step) for step in lattice.step))
        else:
            array = np.empty(lattice.count, self._source.carrier(self.number))
            parts = independent(lattice, array.itemsize)
            self._source.read([(self.number, part, _at(array, to)) for part, to in parts])
        return np.flip(array.reshape(shape), flipped) if flipped else array.reshape(shape)


def _at(array: Array, index: tuple[slice, ...]) -> Array:
    """A view of a part of `array`. It is an array even without axes, where numpy would return a scalar."""
    part: Array = array[index] if index else array
    return part


def as_torch(elements: Array, dtype: str) -> torch.Tensor:
    """Carriers as a torch tensor over the same memory, or over a copy if torch cannot express their strides."""
    import torch

    if any(stride < 0 for stride in elements.strides):
        elements = elements.copy()
    return torch.from_numpy(elements).view(getattr(torch, dtype))


def as_numpy(elements: Array, dtype: npt.DTypeLike, *, writeable: bool) -> npt.NDArray[Any]:
    """Carriers as an array of `dtype` over the same memory."""
    array: npt.NDArray[Any] = elements.view(dtype)
    array.flags.writeable = writeable
    return array


def numpy_dtype(name: str) -> npt.DTypeLike:
    """The numpy dtype of a logical dtype. Raises `TypeError` if there is none."""
    dtype = numpy_type(name)
    if dtype is None:
        raise TypeError(f"numpy has no dtype {name}: index the tensor instead, which returns a torch tensor")
    return dtype
