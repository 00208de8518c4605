"""The functions `ls`, `pin`, `unpin` and `remove`: what the command line does to checkpoints, for programs."""

from __future__ import annotations

import os

from holdfast.run.by_path import checkpoint_at, open_run, selected_checkpoint
from holdfast.run.leases import await_ended_reads
from holdfast.run.listing import HistoryReader, ListedCheckpoint
from holdfast.run.pins import pin_checkpoint, unpin_checkpoint
from holdfast.run.removal import remove_checkpoint
from holdfast.store.base import Location


def ls(run: str | os.PathLike[str] | Location) -> list[ListedCheckpoint]:
    """The checkpoints of `run`: the head and its ancestors, newest first, then abandoned ones (``abandoned`` says why).

    Blocking; one small read for each checkpoint. Changes nothing. Raises `NotFoundError` where there is no run, and
    `CorruptError` where a record cannot be read; ``holdfast ls`` then lists the others.
    """
    reader = HistoryReader(open_run(run))
    found = [*reader.lineage(), *reader.others()]
    for fault in reader.faults:
        raise fault
    return found


def pin(path: str | os.PathLike[str] | Location) -> bool:
    """Keep a checkpoint from being deleted, durably, until `unpin`. A run stands for its head.

    No policy and no ``remove`` deletes it then. Returns False where it was pinned already. Raises `NotFoundError` where
    there is no such checkpoint, or where it was deleted at the same moment (``not_found.removed``).
    """
    run, commit = checkpoint_at(path)
    return pin_checkpoint(run, commit)


def unpin(path: str | os.PathLike[str] | Location) -> bool:
    """Take back the pin of a checkpoint, durably. Returns False where it was not pinned. Raises `NotFoundError` where
    there is no such checkpoint."""
    run, commit = checkpoint_at(path)
    return unpin_checkpoint(run, commit.place)


def remove(path: str | os.PathLike[str] | Location) -> None:
    """Delete one checkpoint for good; durable on return, and invisible to readers from its first change on.

    Raises:
        ConfigurationError: `path` names no single checkpoint (``config.path``); the checkpoint is the head
            (``config.needed``), it is pinned (``config.pinned``), or a reader uses it (``config.in_use``).
        NotFoundError: there is no such checkpoint.
    """
    run, commit = selected_checkpoint(path)
    await_ended_reads()
    remove_checkpoint(run, commit)
