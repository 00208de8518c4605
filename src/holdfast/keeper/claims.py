"""Which process has a rank's slots now: an empty file whose name says so, since slots are the keeper's own at times.

(Slots say who filled them. A rank that was restarted has those of its predecessor, before it has filled any.)
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Final

from holdfast.keeper.node_folder import NodeFolder
from holdfast.keeper.process import Process

_PREFIX: Final = "claim."


def claim(folder: NodeFolder, rank: int) -> None:
    """Say that this process has the slots of `rank`. It does until it ends. (Takes no memory: there may be none.)"""
    process = Process.current()
    with suppress(FileExistsError):
        os.close(folder.create(f"{_PREFIX}{rank}.{process.pid}.{process.started}.{process.boot_id}"))


def is_claimed(folder: NodeFolder, rank: int) -> bool:
    """Whether a living process has the slots of `rank`."""
    return any(_process(name).is_alive() for name in folder.names() if name.startswith(f"{_PREFIX}{rank}."))


def remove_stale_claims(folder: NodeFolder) -> None:
    """Remove what processes have said that are no more."""
    for name in folder.names():
        if name.startswith(_PREFIX) and not _process(name).is_alive():
            folder.remove(name)


def _process(name: str) -> Process:
    _, _, pid, started, boot_id = name.split(".")
    return Process(int(pid), int(started), boot_id)
