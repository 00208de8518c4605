"""A rank's memory on its node: how a process opens it and gives it back."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Lock

from holdfast.checkpointer.save_errors import not_yet_given_back
from holdfast.node_memory.arena import Arena
from holdfast.node_memory.generations import give_up_generation
from holdfast.node_memory.keeper_lock import is_locked, open_lock
from holdfast.node_memory.node_folder import NodeFolder
from holdfast.node_memory.slots import Slot
from holdfast.store.base import Location
from holdfast.store.linux import is_on_disk
from holdfast.store.urls import text_of

_log = logging.getLogger(__name__)


class OpenMemory:
    """A rank's open folder and slots. Their contents outlive this object.

    Raises `ConfigurationError` where the folder is not this user's alone, and OSError.
    """

    def __init__(self, run: Location, node_dir: Path, *, rank: int, num_slots: int, reserves: bool) -> None:
        with ExitStack() as stack:
            self.folder = stack.enter_context(NodeFolder(text_of(run), node_dir=node_dir))
            # First, because the arena's claim keeps the folder from being removed, and creates it again if the keeper
            # of an ended job is removing it.
            self.arena = Arena(self.folder, rank=rank, num_slots=num_slots, reserves=reserves)
            stack.callback(self.arena.close)
            #: The file that the keeper locks. It shows whether the keeper is alive even when the file's name is gone.
            self._lock = open_lock(self.folder)
            stack.pop_all()

    @property
    def is_removed(self) -> bool:
        """Whether somebody has removed the folder from the node, so that no other process can find its slots."""
        return os.fstat(self._lock).st_nlink == 0

    @property
    def has_keeper(self) -> bool:
        """Whether a keeper is at work on the folder, and has its slots mapped."""
        return is_locked(self._lock)

    def close(self) -> None:
        """Close the slots and the folder; removes nothing."""
        self.arena.close()
        os.close(self._lock)
        self.folder.close()


class RankMemory:
    """The memory of one rank. It is opened at its first use, given back when it cannot be used, and opened again at the
    next use.

    `watched` returns the slots of saves whose end the watcher still waits for; these slots must stay. None stands for a
    save without a slot. Both the saving threads and the watcher's thread use this object, so its lock is held while
    memory is opened, given back or written to.
    """

    def __init__(
        self, run: Location, node_dir: Path, *, rank: int, watched: Callable[[], Collection[Slot | None]]
    ) -> None:
        self._run = run
        self._node_dir = node_dir
        self._rank = rank
        self._watched = watched
        self._lock = Lock()
        #: None before memory is opened, and after all of it was given back. Only a thread with the lock changes it.
        self._open: OpenMemory | None = None
        self._is_retired = False
        #: Whether snapshots of saves to memory alone stay when memory is given back: no newer checkpoint is durable.
        self._keeps_held = False
        self._has_warned = False

    def opened(self, *, num_slots: int, reserves: bool = False) -> OpenMemory:
        """Open the memory if it is not open, and return it. Unless it only `reserves` memory, this process counts as a
        trainer from now on. Raises `StorageError` while memory that is being given back is still needed, and what
        `OpenMemory` raises."""
        with self._lock:
            if self._is_retired and self._open is not None:
                if self._watched():
                    raise not_yet_given_back(self._open.folder.path)
                self._drop()
            if self._open is None:
                self._open = OpenMemory(
                    self._run, self._node_dir, rank=self._rank, num_slots=num_slots, reserves=reserves
                )
                self._is_retired = False
                self._warn_of_disk(self._open)
            if not reserves:
                self._open.arena.fill()
            return self._open

    def _warn_of_disk(self, memory: OpenMemory) -> None:
        if not self._has_warned and is_on_disk(memory.folder.fileno()):
            self._has_warned = True
            _log.warning(
                "node_dir '%s' is on a disk: each snapshot is written there, and then once more to storage. No action "
                "is needed if you chose that, for deadlines that storage cannot meet. Else give Memory(node_dir=...) a "
                "file system in memory, such as a tmpfs, or pass memory=None",
                self._node_dir,
            )

    @property
    def used(self) -> OpenMemory:
        """The memory, which must be open."""
        assert self._open is not None, "memory is opened before it is used"
        return self._open

    @property
    def current(self) -> OpenMemory | None:
        """The memory, if it is open. Another thread may close it at any time."""
        return self._open

    def retire(self) -> None:
        """Give the memory back: at once the slots that need not become durable any more, and the others in later calls
        of `give_back`, once they are durable. Snapshots of saves to memory alone stay until `release_held`."""
        self._is_retired = self._keeps_held = True
        self.give_back()

    def release_held(self) -> None:
        """If the memory is retired, give snapshots of saves to memory alone back too: a newer checkpoint is durable."""
        self._keeps_held = False
        self.give_back()

    def give_back(self) -> None:
        """If the memory is retired, remove the slots that have become durable, and close it after the last one."""
        with self._lock:
            if not self._is_retired or self._open is None:
                return
            watched = [slot for slot in self._watched() if slot is not None]
            if self._open.arena.give_back(watched=watched, keeps_held=self._keeps_held) and not self._watched():
                self._drop()

    def give_up(self, checkpoint_ids: set[str]) -> None:
        """Tell the keeper to free the slots of `checkpoint_ids`. Removes from the set each id that it has told; an id
        stays there if memory takes no file now."""
        with self._lock:
            if self._open is None or self._open.is_removed:
                checkpoint_ids.clear()  # none of their slots is there any more
                return
            for checkpoint_id in list(checkpoint_ids):
                with suppress(OSError):
                    give_up_generation(self._open.folder, checkpoint_id)
                    checkpoint_ids.discard(checkpoint_id)

    def close(self) -> None:
        """Give back retired memory as far as possible, and close the rest, which stays in place. Call it when no other
        thread uses this object any more."""
        self.give_back()
        self._drop()

    def _drop(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None
