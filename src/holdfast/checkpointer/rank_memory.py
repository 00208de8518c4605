"""A rank's part of the memory of its node, as a process opens it and gives it back."""

from __future__ import annotations

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


class OpenMemory:
    """The folder and the slots of a rank, while they are open. What is in them outlives this object.

    Raises `ConfigurationError` where the folder is not this user's alone, and OSError.
    """

    def __init__(self, run: Location, node_dir: Path, *, rank: int, num_slots: int) -> None:
        with ExitStack() as stack:
            self.folder = stack.enter_context(NodeFolder(run.url, node_dir=node_dir))
            # First: its claim keeps the folder, and makes it anew where the keeper of an ended job is removing it.
            self.arena = Arena(self.folder, rank=rank, num_slots=num_slots)
            stack.callback(self.arena.close)
            #: The file that the keeper locks. It tells whether that one is alive even when its name is gone.
            self._lock = open_lock(self.folder)
            stack.pop_all()

    @property
    def is_removed(self) -> bool:
        """Whether somebody has removed it from the node: a process that comes later finds nothing in it."""
        return os.fstat(self._lock).st_nlink == 0

    @property
    def has_keeper(self) -> bool:
        """Whether a keeper has it mapped."""
        return is_locked(self._lock)

    def close(self) -> None:
        """Close it; nothing is removed."""
        self.arena.close()
        os.close(self._lock)
        self.folder.close()


class RankMemory:
    """The memory of one rank: opened when it is first used, given back when it cannot be used, and opened again then.

    `watched` says which slots, of those that hold a save whose end is waited for, must stay; None stands for a save
    that has no slot. The threads of a save and of its watcher both come here, so a lock is held while memory is opened,
    given back or written to.
    """

    def __init__(
        self, run: Location, node_dir: Path, *, rank: int, watched: Callable[[], Collection[Slot | None]]
    ) -> None:
        self._run = run
        self._node_dir = node_dir
        self._rank = rank
        self._watched = watched
        self._lock = Lock()
        #: None before it is opened, and when all of it was given back. Whoever changes that has the lock.
        self._open: OpenMemory | None = None
        self._is_retired = False

    def opened(self, *, num_slots: int) -> OpenMemory:
        """The memory, opened if it is not. Raises `StorageError` while memory that is given back is still needed, and
        what `OpenMemory` raises."""
        with self._lock:
            if self._is_retired and self._open is not None:
                if self._watched():
                    raise not_yet_given_back(self._open.folder.path)
                self._drop()
            if self._open is None:
                self._open = OpenMemory(self._run, self._node_dir, rank=self._rank, num_slots=num_slots)
                self._is_retired = False
            return self._open

    @property
    def used(self) -> OpenMemory:
        """The memory, which is open."""
        assert self._open is not None, "memory is opened before it is used"
        return self._open

    @property
    def current(self) -> OpenMemory | None:
        """The memory, if it is open. Another thread may close it at any time."""
        return self._open

    def retire(self) -> None:
        """Give it back: what holds nothing that is still to become durable at once, the rest as `give_back` finds it
        done."""
        self._is_retired = True
        self.give_back()

    def give_back(self) -> None:
        """Where it is retired, remove the slots that became durable since, and close it after the last one."""
        with self._lock:
            if not self._is_retired or self._open is None:
                return
            watched = [slot for slot in self._watched() if slot is not None]
            if self._open.arena.give_back(watched=watched) and not self._watched():
                self._drop()

    def give_up(self, checkpoint_ids: set[str]) -> None:
        """Have the keeper free what it holds of `checkpoint_ids`, and take those out that it was told of: all but where
        memory takes no file now."""
        with self._lock:
            if self._open is None or self._open.is_removed:
                checkpoint_ids.clear()  # nothing of them is there any more
                return
            for checkpoint_id in list(checkpoint_ids):
                with suppress(OSError):
                    give_up_generation(self._open.folder, checkpoint_id)
                    checkpoint_ids.discard(checkpoint_id)

    def close(self) -> None:
        """Give back what is retired, and close the rest, which stays where it is. No other thread comes here any
        more."""
        self.give_back()
        self._drop()

    def _drop(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None
