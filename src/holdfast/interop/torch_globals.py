"""The meanings of the globals in torch's pickles: plain values, and descriptions of tensors without their bytes."""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from holdfast.format.dtypes import DTYPES
from holdfast.format.manifest import MAX_AXES, MAX_NUMEL
from holdfast.format.values import TorchValue
from holdfast.geometry import Shape
from holdfast.interop.pickle_machine import (
    Callee,
    Globals,
    PickledObject,
    PickleError,
    UnreadTensorError,
    is_large_key,
    pickled_objects,
)
from holdfast.wording import count

#: The dtypes of torch's typed storages; other dtypes are in untyped ones.
_STORAGES: Final[Mapping[str, str]] = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
}


#: What ``torch.Tensor`` stands for where a pickle names it as the class of a tensor.
_TENSOR_TYPE: Final = "torch.Tensor"
#: The names that ``torch.device`` takes.
_DEVICE: Final = re.compile(
    r"(?:cpu|cuda|hip|xpu|mps|hpu|xla|meta|privateuseone|mtia|ipu|ve|vulkan|npu|maia|fpga|lazy|ort|mkldnn|opengl|opencl"
    r"|ideep)(?::[0-9]{1,3})?"
)
_MAX_DEVICES: Final = 128
#: The dtypes of numpy's numbers.
_NUMBER: Final = re.compile(r"[biufc][0-9]{1,2}")


class StorageType(NamedTuple):
    """The type of a storage; no dtype where it is untyped."""

    dtype: str | None


class StorageRef(NamedTuple):
    """A storage beside a pickle: the dtype of its type, and the name of its entry in the archive."""

    dtype: str | None
    key: str


class PickledTensor(NamedTuple):
    """A tensor of a pickle: where its elements lie in which storage."""

    storage: StorageRef
    dtype: str
    first: int
    shape: Shape
    strides: Shape


class TorchSize(tuple[int, ...]):
    """A ``torch.Size``."""

    __slots__ = ()


def persistent(identity: object) -> StorageRef:
    """The storage that torch's pickles refer to by `identity`."""
    if not (isinstance(identity, tuple) and len(identity) == 5 and identity[0] == "storage"):
        raise PickleError("it refers to something that is no storage")
    _, kind, key, _, _ = identity
    if not (isinstance(kind, StorageType) and isinstance(key, str)):
        raise PickleError("it refers to a storage of no known type")
    return StorageRef(kind.dtype, key)


def shape_of(numbers: object) -> Shape:
    """A shape or the like from a pickle. Raises `PickleError` for anything but a tuple of counts."""
    # The message does not show them: tuples that share their parts have a text without an end.
    if not isinstance(numbers, tuple):
        raise PickleError(f"a shape is of type {type(numbers).__name__}")
    if len(numbers) > MAX_AXES:
        raise PickleError(f"a shape has {count(len(numbers), 'item')}")
    if not all(type(number) is int and 0 <= number <= MAX_NUMEL for number in numbers):
        raise PickleError("a tuple of other items than counts is no shape")
    return tuple(numbers)


def _size(args: tuple[Any, ...]) -> TorchSize:
    (numbers,) = args
    return TorchSize(shape_of(tuple(numbers) if isinstance(numbers, list) else numbers))


def _typed(args: tuple[Any, ...]) -> PickledTensor:
    storage, first, shape, strides = args[:4]
    if not isinstance(storage, StorageRef) or storage.dtype is None:
        raise PickleError("a tensor has no typed storage")
    _check_plain(args[6:7])
    return _tensor(storage, storage.dtype, first, shape, strides)


def _untyped(args: tuple[Any, ...]) -> PickledTensor:
    storage, first, shape, strides, _, _, dtype = args[:7]
    if not isinstance(storage, StorageRef) or not isinstance(dtype, TorchValue) or dtype.text not in DTYPES:
        raise PickleError("a tensor has no storage of a known dtype")
    _check_plain(args[7:8])
    return _tensor(storage, dtype.text, first, shape, strides)


def _with_attributes(args: tuple[Any, ...]) -> PickledTensor:
    """A tensor that had Python attributes; they are left out."""
    named, kind, inner, _ = args
    if not (isinstance(named, Callee) and named.make in (_typed, _untyped) and kind == _TENSOR_TYPE):
        raise PickleError("a tensor is of a class that is no plain tensor")
    return _typed(inner) if named.make is _typed else _untyped(inner)


def _tensor(storage: StorageRef, dtype: str, first: object, shape: object, strides: object) -> PickledTensor:
    (first,) = shape_of((first,))
    return PickledTensor(storage, dtype, first, shape_of(shape), shape_of(strides))


def _check_plain(marks: tuple[object, ...]) -> None:
    """Refuse a view whose elements are other ones than those in its storage: conjugates or negatives."""
    if any(marks):
        what = "a tensor is a conjugate or negative view, which holds other elements than its storage"
        raise UnreadTensorError(what)


def _parameter(args: tuple[Any, ...]) -> PickledTensor:
    """The tensor of a parameter. Attributes of the parameter object are left out."""
    if not (args and isinstance(args[0], PickledTensor)):
        raise PickleError("a parameter is made of something else than a tensor")
    return args[0]


def _counter(args: tuple[Any, ...]) -> Counter[object]:
    counts = args[0] if args else {}
    if not isinstance(counts, dict) or not all(isinstance(key, str | int | float | None) for key in counts):
        raise PickleError("a Counter is made of something else than a dict")
    return Counter(counts)


def _ordered(args: tuple[Any, ...]) -> OrderedDict[object, object]:
    pairs = args[0] if args else []
    if not isinstance(pairs, list) or not all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs):
        raise PickleError("an OrderedDict is made of something else than pairs")
    if not all(isinstance(key, str | int | float | bytes | None) for key, _ in pairs):
        raise PickleError("an OrderedDict has a key that is no plain value")
    if any(is_large_key(key) for key, _ in pairs):
        raise PickleError("an OrderedDict has a large number as a key")
    return OrderedDict(pairs)


def _encoded(args: tuple[Any, ...]) -> bytes:
    text, encoding = args
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise PickleError("it encodes a text in another way than bytes are pickled")
    return text.encode("latin-1")


def _empty(args: tuple[Any, ...]) -> bytes:
    if args:
        raise PickleError("bytes are made of something else than a text")
    return b""


def _complex(args: tuple[Any, ...]) -> complex:
    real, imaginary = args
    if not (isinstance(real, float | int) and isinstance(imaginary, float | int)):
        raise PickleError("a complex number is made of something else than numbers")
    return complex(real, imaginary)


def _device(args: tuple[Any, ...]) -> TorchValue:
    kind, *index = args[:2]
    if not (isinstance(kind, str) and all(type(part) is int and 0 <= part < _MAX_DEVICES for part in index)):
        raise PickleError("a device has no name")
    name = ":".join(map(str, (kind, *index)))
    if not _DEVICE.fullmatch(name):
        raise PickleError(f"{kind!r:.40} is no device")
    return TorchValue("device", name)


def _numpy_scalar(args: tuple[Any, ...]) -> np.generic:
    dtype, data = args
    text = dtype.args[0] if isinstance(dtype, PickledObject) and dtype.args else None
    if not (isinstance(text, str) and _NUMBER.fullmatch(text) and isinstance(data, bytes)):
        raise PickleError("a numpy scalar is no number")
    kind = np.dtype(text)
    if dtype.state is not None and isinstance(dtype.state, tuple) and dtype.state[1:2] == (">",):
        kind = kind.newbyteorder(">")
    if len(data) != kind.itemsize:
        raise PickleError("a numpy scalar has the wrong number of bytes")
    scalar: np.generic = np.frombuffer(data, kind)[0]
    return scalar


#: The constants and sizes that metadata and values have.
PLAIN_GLOBALS: Final[Globals] = {
    **{f"torch {name}": TorchValue("dtype", name) for name in DTYPES},
    "torch Size": _size,
    "torch device": _device,
    "collections OrderedDict": _ordered,
}
#: The class of files in memory, in which Megatron has the extra states of modules.
BYTES_FILE: Final = "_io BytesIO"
#: Classes without a plain value that files of training often have beside tensors. Their objects stay descriptions.
_NO_VALUES: Final = (
    *(f"{module} {name}" for module in ("builtins", "__builtin__") for name in ("bytearray", "frozenset", "set")),
    *(
        f"{module} {name}"
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath")
    ),
    "argparse Namespace",
    BYTES_FILE,
    "numpy ndarray",
    "numpy._core.multiarray _reconstruct",
    "numpy.core.multiarray _reconstruct",
)
#: The globals of the pickles in archives of ``torch.save``.
ARCHIVE_GLOBALS: Final[Globals] = {
    **PLAIN_GLOBALS,
    **{f"torch {name}": StorageType(dtype) for name, dtype in _STORAGES.items()},
    "torch.storage UntypedStorage": StorageType(None),
    "torch._utils _rebuild_tensor_v2": _typed,
    "torch._utils _rebuild_tensor_v3": _untyped,
    "torch._utils _rebuild_parameter": _parameter,
    "torch._utils _rebuild_parameter_with_state": _parameter,
    "collections Counter": _counter,
    "torch._tensor _rebuild_from_type_v2": _with_attributes,
    "torch Tensor": _TENSOR_TYPE,
    "_codecs encode": _encoded,
    "__builtin__ bytes": _empty,
    "__builtin__ complex": _complex,
    "builtins complex": _complex,
    "numpy._core.multiarray scalar": _numpy_scalar,
    "numpy.core.multiarray scalar": _numpy_scalar,
    **pickled_objects("numpy dtype", *_NO_VALUES),
}
