"""Foreign files with changed bytes: holdfast refuses them or reads them, and raises no other error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hypothesis import strategies as st

import holdfast

#: The outcomes that a read of foreign files with changed bytes may have.
SOUND = frozenset({"read", "corrupt", "incompatible", "not_found"})


@contextmanager
def changed_bytes(file: Path, data: st.DataObject, *, spots: tuple[range, ...] = ()) -> Iterator[None]:
    """Change some bytes of `file`, anywhere or at one of the `spots`, and sometimes cut it off, while a ``with`` block
    runs."""
    whole = file.read_bytes()
    changed, places = bytearray(whole), st.integers(0, len(whole) - 1)
    for spot in spots:
        places |= st.integers(spot.start, spot.stop - 1)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(places)] = data.draw(st.integers(0, 255))
    file.write_bytes(changed[: data.draw(st.integers(len(whole) // 2, len(whole)) | st.just(len(whole)))])
    try:
        yield
    finally:
        file.write_bytes(whole)


def outcome(path: Path) -> str:
    """Read everything at `path`: "read", or the first part of the code of the error with which holdfast refuses it."""
    try:
        view = holdfast.open(path)
        for name in view.names():
            view[name][...]
        view.tree()
    except holdfast.HoldfastError as error:
        return error.code.partition(".")[0]
    return "read"
