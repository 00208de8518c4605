"""Files of `torch.save`, taken apart and put together in other ways."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

#: Changes the directory of an archive before it is written.
ChangeEntry = Callable[[zipfile.ZipInfo], None]


def rewrite(
    path: Path,
    contents: dict[str, bytes] | None = None,
    *,
    compressed: str = "",
    twice: str = "",
    change: tuple[str, ChangeEntry] | None = None,
) -> None:
    """Write the archive at `path` again, with other `contents` of some entries, by the ends of their names."""
    with zipfile.ZipFile(path) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    for ending, data in (contents or {}).items():
        held[_one(held, ending)] = data
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, data in held.items():
            archive.writestr(name, data, zipfile.ZIP_DEFLATED if compressed and name.endswith(compressed) else None)
        if twice:
            archive.writestr(_one(held, twice), b"")
        if change is not None:
            change[1](archive.getinfo(_one(held, change[0])))


def _one(names: dict[str, bytes], ending: str) -> str:
    (found,) = (name for name in names if name.endswith(ending))
    return found
