"""Memory that a process would die of touching: beyond the end of a storage, or mapped for reading only."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from holdfast.errors import StateError
from holdfast.state.match import Target

_MAPS = Path("/proc/self/maps")


def check_writable(targets: Sequence[Target]) -> None:
    """Refuse targets in memory that is mapped for reading only, such as a file that somebody mapped.

    Raises:
        StateError: code ``state.read_only``; names the tensor.
    """
    read_only = _read_only_maps()
    starts = [start for start, _ in read_only]
    for target in targets:
        for part in target.local.memory:
            if part.is_cpu and part.numel():
                address = part.data_ptr()
                at = bisect_right(starts, address) - 1
                if at >= 0 and address < read_only[at][1]:
                    raise _read_only(target.name)


def _read_only_maps() -> list[tuple[int, int]]:
    """The first address of each mapping that this process must not write to, and the one behind its last; sorted."""
    lines: Iterable[str] = ()
    with suppress(OSError):  # a system without /proc cannot say it
        lines = _MAPS.read_text().splitlines()
    fields = (line.split(maxsplit=2) for line in lines)
    return [
        (int(start, 16), int(stop, 16))
        for (start, _, stop), access in ((span.partition("-"), access) for span, access, _ in fields)
        if "w" not in access
    ]


def _read_only(name: str) -> StateError:
    return StateError(
        f"The memory of tensor {name!r} is mapped for reading only, so nothing can be loaded into it.",
        code="state.read_only",
        action="Give the tensor memory of its own (tensor.clone()), or map its file for writing.",
        tensor=name,
    )
