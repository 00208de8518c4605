"""Logical dtypes and how data files store each.

A logical dtype has torch's name. Data files are safetensors files: a dtype that every safetensors reader knows keeps
its own code. Tensors of any other dtype are stored as bytes (``U8``), and the manifest names their logical dtype,
because one unknown code makes a whole file unreadable to other readers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt


class DType(NamedTuple):
    """One logical dtype: torch's name, bytes per element, safetensors code of its file entries."""

    name: str
    itemsize: int
    code: str

    @property
    def native(self) -> bool:
        """Whether file entries carry the logical dtype itself rather than bytes."""
        return self.code != "U8" or self.name == "uint8"


DTYPES: dict[str, DType] = {
    name: DType(name, itemsize, code)
    for name, itemsize, code in (
        ("bool", 1, "BOOL"),
        ("uint8", 1, "U8"),
        ("int8", 1, "I8"),
        ("uint16", 2, "U16"),
        ("int16", 2, "I16"),
        ("uint32", 4, "U32"),
        ("int32", 4, "I32"),
        ("uint64", 8, "U64"),
        ("int64", 8, "I64"),
        ("float16", 2, "F16"),
        ("bfloat16", 2, "BF16"),
        ("float32", 4, "F32"),
        ("float64", 8, "F64"),
        ("float8_e4m3fn", 1, "F8_E4M3"),
        ("float8_e5m2", 1, "F8_E5M2"),
        ("float8_e4m3fnuz", 1, "U8"),
        ("float8_e5m2fnuz", 1, "U8"),
        ("float8_e8m0fnu", 1, "U8"),
        ("float4_e2m1fn_x2", 1, "U8"),
        ("complex32", 4, "U8"),
        ("complex64", 8, "U8"),
        ("complex128", 16, "U8"),
    )
}

#: Other names that users write for a dtype. Torch has the last ones itself.
_MEANT: dict[str, str] = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "f16": "float16",
    "fp32": "float32",
    "f32": "float32",
    "fp64": "float64",
    "f64": "float64",
    "fp8": "float8_e4m3fn",
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "short": "int16",
    "int": "int32",
    "long": "int64",
}


def no_dtype(name: str) -> str:
    """The text of an error about a `name` that is not a dtype. It names the dtype that was meant, or all."""
    word = name.lower().removeprefix("torch.")
    meant = word if word in DTYPES else _MEANT.get(word)
    if meant is not None:
        return f"{name!r} is not a dtype: did you mean {meant!r}?"
    return f"{name!r} is not a dtype; use one of {', '.join(DTYPES)}"


#: The numpy type that carries elements of each size where elements are only moved and never interpreted. Torch has
#: the same types.
CARRIERS: dict[int, npt.DTypeLike] = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64, 16: np.complex128}


def numpy_type(name: str) -> np.dtype[Any] | None:
    """The numpy dtype of a logical dtype; None where numpy has none, not even with ``ml_dtypes``."""
    if name.startswith(("bfloat16", "float8", "float4")):
        import ml_dtypes

        kind = getattr(ml_dtypes, name, None)
        return None if kind is None else np.dtype(kind)
    return None if name == "complex32" else np.dtype(name)
