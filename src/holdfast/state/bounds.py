"""The check that targets of a load are not in memory mapped for reading only: a write there kills the process."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from holdfast.errors import StateError
from holdfast.state.overlap import TargetMemory

_MAPS = Path("/proc/self/maps")
#: The start and the end in a line of a mapping that may not be written to.
_READ_ONLY = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) .-", re.MULTILINE)


def check_writable(memory: TargetMemory) -> None:
    """Refuse targets whose memory is mapped for reading only, such as that of a mapped file.

    Raises:
        StateError: code ``state.read_only``; the error names the tensor.
    """
    targets, parts, addresses, _ = memory
    maps = np.asarray([(0, 0), *_read_only_maps()], np.uint64)
    stops = maps[np.searchsorted(maps[:, 0], addresses, side="right") - 1, 1]
    # Addresses on a device, and of empty tensors, mean nothing here.
    inside = [number for number in np.flatnonzero(addresses < stops).tolist() if _is_on_host(parts[number])]
    if inside:
        names = [target.name for target in targets for _ in target.local.memory]
        raise _read_only(names[inside[0]])


def _is_on_host(part: torch.Tensor) -> bool:
    return part.is_cpu and part.numel() > 0


def _read_only_maps() -> list[tuple[int, int]]:
    """The start and the end of each mapping that this process must not write to, sorted."""
    text = ""
    with suppress(OSError):  # a system without /proc does not tell
        text = _MAPS.read_text()
    return [(int(start, 16), int(stop, 16)) for start, stop in _READ_ONLY.findall(text)]


def _read_only(name: str) -> StateError:
    return StateError(
        f"The memory of tensor {name!r} is mapped read-only, so nothing can be loaded into it.",
        code="state.read_only",
        action="Give the tensor memory of its own (tensor.clone()), or map its file for writing.",
        tensor=name,
    )
