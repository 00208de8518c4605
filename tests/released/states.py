"""The states that released versions saved.

Every tensor's bits follow from a seed and its name (see `tests.support.models`).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any, NamedTuple

import numpy as np
import torch

import holdfast
from tests.jobs.layout_cells import Cell
from tests.support.models import Bits, full, write

#: One job in all kinds of layouts; the run of each is named after its cell. The seed is the number in the list.
CELLS = (
    Cell("plain", (1,)),
    Cell("ddp", (2,)),
    Cell("fsdp", (3,)),
    Cell("hsdp", (2, 2)),
    Cell("tp", (2,)),
    Cell("fsdp_tp", (2, 2)),
    Cell("pp_fsdp", (2, 2)),
    Cell("ep_fsdp", (2, 2)),
)
DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.float8_e4m3fnuz, torch.float8_e8m0fnu, torch.complex32, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    torch.bool,
)
SHAPES = {"scalar": (), "empty": (0, 3), "matrix": (3, 5)}

FLAT_SHAPE = (7, 5)
#: The parts of a tensor that each of three ranks holds: in flat ranges as ZeRO cuts them, and in boxes.
FLAT_RANGES = ((0, 11), (11, 12), (12, 35))
BOXES = (((0, 0), (7, 2)), ((0, 2), (3, 3)), ((3, 2), (4, 3)))


class Point(NamedTuple):
    x: object
    y: object


def values() -> dict[str, object]:
    """A value of every kind."""
    return {
        "none": None,
        "bools": [True, False],
        "ints": (0, -1, 2**62, -(2**63), 2**64, -(2**200)),
        "floats": [0.5, float("inf"), -0.0, 5e-324],
        "complex": complex(1.5, -0.0),
        "text": "a/b%c@d \N{SNOWMAN} \ud800",
        "bytes": b"\x00\xff",
        "ordered": OrderedDict([("z", 1), ("a", 2)]),
        "counter": Counter("aab"),
        "keys": {1: "int", None: "none", False: "bool", b"k": "bytes", 0.5: "float", "a/b": "text"},
        "point": Point(1, [2, (3,)]),
        "empty": [{}, [], ()],
        "numpy": [np.float32(1.5), np.int16(-2), np.bool_(True), np.datetime64(5, "us"), np.str_("t"), np.bytes_(b"b")],
        "torch": [torch.bfloat16, torch.device("cpu"), torch.Size([2, 3])],
    }


def zoo() -> dict[str, Any]:
    """Tensors of every dtype and of odd shapes, and every kind of value."""
    tensors: dict[str, object] = {}
    for dtype in DTYPES:
        for shape_name, shape in SHAPES.items():
            name = f"{str(dtype).removeprefix('torch.')}-{shape_name}"
            tensors[name] = filled_tensor(f"tensors/{name}", torch.empty(shape, dtype=dtype))
    tied = filled_tensor("tied", torch.empty(4, 2))
    return {"tensors": tensors, "tied": {"a": tied, "b": tied}, "values": values()}


def filled_tensor(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, with the bits that belong to its name."""
    write(tensor, whole(name, tensor))
    return tensor


def whole(name: str, tensor: torch.Tensor) -> Bits:
    """The bits of a whole tensor; of a bool 0 and 1 alone."""
    found = full(0, name, tensor)
    return found & np.uint8(1) if tensor.dtype == torch.bool else found


def pieces(rank: int) -> dict[str, object]:
    """The parts of one of three ranks: of a tensor in flat ranges, of one in boxes, and its own."""
    truth = filled_tensor("flat", torch.empty(FLAT_SHAPE)).reshape(-1)
    start, stop = FLAT_RANGES[rank]
    begin, size = BOXES[rank]
    matrix = filled_tensor("boxes", torch.empty(FLAT_SHAPE))
    part = matrix[begin[0] : begin[0] + size[0], begin[1] : begin[1] + size[1]].contiguous()
    return {
        "flat": holdfast.Piecewise(FLAT_SHAPE, [(holdfast.FlatRange(start, stop), truth[start:stop].clone())]),
        "boxes": holdfast.Piecewise(FLAT_SHAPE, [(holdfast.Box(begin, size), part)]),
        "own": holdfast.PerRank({"rank": rank, "noise": torch.full((2,), float(rank))}),
    }
