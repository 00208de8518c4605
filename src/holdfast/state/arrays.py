"""numpy arrays in a live state, as tensors over the same memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from holdfast.errors import StateError

if TYPE_CHECKING:  # a view gives arrays without torch
    import torch

Array = npt.NDArray[Any]

#: The advice for an array whose dtype torch does not have, by the kind of the dtype.
_ACTIONS: Final = {
    "S": "Put array.tolist() into the state.",
    "U": "Put array.tolist() into the state.",
    "O": "Put array.tolist() into the state, if that holds plain values.",
    "M": "Put array.view(numpy.int64) into the state, and view it as dates again after a load.",
    "m": "Put array.view(numpy.int64) into the state, and view it as time spans again after a load.",
    "V": "Put its fields into the state: {name: array[name] for name in array.dtype.names}.",
    "f": "Put array.astype(numpy.float64) into the state, if that is exact enough.",
    "c": "Put array.astype(numpy.complex128) into the state, if that is exact enough.",
}


def check_array(path: str, array: Array) -> None:
    """Refuse the array at `path` if torch does not have its dtype.

    Raises:
        StateError: code ``state.unsupported_leaf``; it says how to turn the array into something that can be saved.
    """
    dtype = array.dtype
    if _has_torch(dtype):
        return
    if dtype.isnative:
        what, action = "which torch does not have", _ACTIONS.get(dtype.kind, "Take it out of the state.")
    else:
        what, action = "of the other byte order", "Put array.astype(array.dtype.newbyteorder('=')) into the state."
    raise StateError(
        f"{path!r} is a numpy array of dtype {dtype}, {what}.",
        code="state.unsupported_leaf",
        action=action,
        path=path,
    )


def _has_torch(dtype: np.dtype[Any]) -> bool:
    import torch

    try:
        torch.from_numpy(np.empty(0, dtype))
    except (TypeError, ValueError):  # for a missing dtype, and for the other byte order
        return False
    return True


def array_as_tensor(array: Array) -> torch.Tensor:
    """A tensor over the memory of `array`, or over a copy where torch cannot use that memory directly."""
    import torch

    return torch.from_numpy(array if is_shareable(array) else array.copy())


def is_shareable(array: Array) -> bool:
    """Whether torch can use the memory of `array` directly, and write to it."""
    return array.flags.writeable and all(stride >= 0 for stride in array.strides) and _has_torch(array.dtype)
