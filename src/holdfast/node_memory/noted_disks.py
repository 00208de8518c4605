"""Notes in a run's folder in memory of the folders on disks of this node that may hold parts of its checkpoints.

Trainers, restores and `holdfast keeper --local` leave them, so that a keeper knows where to look for what it still has
to bring to the run, even when no slot names it any more. Memory forgets them when the node goes down; then the next job
notes its disk again.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
import xxhash

from holdfast.decoding import decode_msgpack
from holdfast.errors import ConfigurationError
from holdfast.node_memory.node_folder import NodeFolder

_PREFIX: Final = "disk-"


class NotedDisk(msgspec.Struct, frozen=True, array_like=True):
    """The folder `root` on a disk, in which parts of checkpoints of the run at `run` may lie."""

    root: str
    run: str

    @property
    def path(self) -> Path:
        """The folder."""
        return Path(self.root)


def is_noted(folder: NodeFolder, disk: NotedDisk) -> bool:
    """Whether `folder` notes `disk`."""
    return _name(disk) in folder.names()


def note_disk(folder: NodeFolder, disk: NotedDisk) -> None:
    """Note `disk` in `folder`, which is made again if it was removed."""
    if folder.is_removed:
        folder.remake()
    folder.write(_name(disk), msgspec.msgpack.encode(disk))


def noted_disks(folder: NodeFolder) -> list[NotedDisk]:
    """All disks that `folder` notes. Skips a damaged note: the next job makes a new one."""
    found = []
    for name in folder.names():
        if name.startswith(_PREFIX):
            with suppress(FileNotFoundError, ConfigurationError, msgspec.DecodeError):
                found.append(_read(folder, name))
    return found


def _name(disk: NotedDisk) -> str:
    return _PREFIX + xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode(disk))


def _read(folder: NodeFolder, name: str) -> NotedDisk:
    with os.fdopen(folder.open(name), "rb") as file:
        return decode_msgpack(file.read(), NotedDisk)


def forget_disks(folder: NodeFolder) -> None:
    """Remove all notes, before the folder itself is removed. Only for its keeper."""
    for name in folder.names():
        if name.startswith(_PREFIX):
            folder.discard(name)
