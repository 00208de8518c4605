"""The check that targets of a load are not in memory mapped for reading only: a write there kills the process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from holdfast.errors import StateError
from holdfast.state.match import BoundTensor

_MAPS = Path("/proc/self/maps")


def check_writable(targets: Sequence[BoundTensor]) -> None:
    """Refuse targets in memory that is mapped for reading only, such as that of a mapped file.

    Raises:
        StateError: code ``state.read_only``; the error names the tensor.
    """
    names = [target.name for target in targets for part in target.local.memory if part.is_cpu and part.numel()]
    parts = [part for target in targets for part in target.local.memory if part.is_cpu and part.numel()]
    addresses = np.fromiter((part.data_ptr() for part in parts), np.uint64, len(parts))
    maps = np.asarray([(0, 0), *_read_only_maps()], np.uint64)
    stops = maps[np.searchsorted(maps[:, 0], addresses, side="right") - 1, 1]
    inside = np.flatnonzero(addresses < stops)
    if len(inside):
        raise _read_only(names[inside[0]])


def _read_only_maps() -> list[tuple[int, int]]:
    """The start and the end of each mapping that this process must not write to, sorted."""
    lines: Iterable[str] = ()
    with suppress(OSError):  # a system without /proc does not tell
        lines = _MAPS.read_text().splitlines()
    fields = (line.split(maxsplit=2) for line in lines)
    return [
        (int(start, 16), int(stop, 16))
        for (start, _, stop), access in ((span.partition("-"), access) for span, access, _ in fields)
        if "w" not in access
    ]


def _read_only(name: str) -> StateError:
    return StateError(
        f"The memory of tensor {name!r} is mapped read-only, so nothing can be loaded into it.",
        code="state.read_only",
        action="Give the tensor memory of its own (tensor.clone()), or map its file for writing.",
        tensor=name,
    )
