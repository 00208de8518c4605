"""The states of one save, and the events that its listeners hear."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from types import MappingProxyType
from typing import Final

from holdfast.checkpointer.events import (
    Listener,
    ProtectionDelayed,
    SaveBegun,
    SaveCommitted,
    SaveDelayed,
    SaveEvent,
    SaveFailed,
    SaveHeld,
    SaveMemoryReady,
    SavePlaced,
    SaveProtected,
    SaveReturned,
    SaveSealed,
    SaveSkipped,
    SaveStaged,
    SaveUnprotected,
    SaveUnwatched,
    SaveWaiting,
)
from holdfast.checkpointer.restore_report import Tier
from holdfast.errors import HoldfastError
from holdfast.format.records import Place


class SaveState(Enum):
    """The state of a save."""

    BEGUN = auto()
    STAGED = auto()
    SEALED = auto()
    COMMITTED = auto()
    #: The save stays in memory.
    HELD = auto()
    #: The save failed or was skipped, or this process no longer watches it.
    ENDED = auto()


#: The states that may follow each state.
_NEXT: Final = {
    SaveState.BEGUN: (SaveState.STAGED, SaveState.ENDED),
    SaveState.STAGED: (SaveState.SEALED, SaveState.HELD, SaveState.COMMITTED, SaveState.ENDED),
    SaveState.SEALED: (SaveState.COMMITTED, SaveState.ENDED),
    SaveState.COMMITTED: (),
    SaveState.HELD: (),
    SaveState.ENDED: (),
}


class SaveMachine:
    """One save on this rank, from its call to its end. Each method records an event and tells the listeners.

    A change that cannot follow the present state is ignored, so only the first end counts. There is no lock, and
    listeners hear of a state before it is recorded. If an exception comes between the two (Ctrl-C may raise one
    anywhere), a repeated call tells the listeners once more, and they never miss the end. Any thread may call this.
    """

    def __init__(self, step: int, *listeners: Listener, memory_only: bool = False) -> None:
        self.step = step
        #: Whether the save is to stay in memory.
        self.memory_only = memory_only
        self.state = SaveState.BEGUN
        #: The checkpoint's place in the history of the run; None before all ranks have agreed on it.
        self.place: Place | None = None
        #: Why the last try to make the checkpoint durable failed; "" if none failed.
        self.trouble = ""
        #: Whether it is known if copies on other nodes protect the checkpoint. This may come after the end of the save.
        self.is_protection_over = False
        self._protection_trouble = ""
        self._listeners = listeners

    @property
    def is_over(self) -> bool:
        """Whether the save has ended, so that only `SaveReturned` may follow."""
        return not _NEXT[self.state]

    def begin(self, tier: Tier, *, is_first_rank: bool) -> None:
        """The save starts on `tier`."""
        self._tell(SaveBegun(self.step, tier, is_first_rank, self.memory_only))

    def wait_for_slot(self, why: str) -> None:
        """The save has waited for a slot for some seconds, and goes on to wait."""
        self._tell(SaveWaiting(self.step, why))

    def have_memory(self, waited_s: float) -> None:
        """The memory for a new plan is ready."""
        self._tell(SaveMemoryReady(self.step, waited_s))

    def put(self, place: Place) -> None:
        """All ranks have agreed on `place`."""
        self.place = place
        self._tell(SavePlaced(self.step, place))

    def stage(self, nbytes: int) -> None:
        """This rank's part is copied."""
        self._advance(SaveState.STAGED, SaveStaged(self.step, nbytes))

    def seal(self) -> None:
        """The keeper has sealed this rank's part."""
        self._advance(SaveState.SEALED, SaveSealed(self.step))

    def protect(self) -> None:
        """All files of the checkpoint have their copies on other nodes."""
        if not self.is_protection_over:
            self._tell(SaveProtected(self.step))
            self.is_protection_over = True

    def delay_protection(self, trouble: str) -> None:
        """A try to protect the checkpoint has failed."""
        if trouble != self._protection_trouble and not self.is_protection_over:
            self._protection_trouble = trouble
            self._tell(ProtectionDelayed(self.step, trouble))

    def leave_unprotected(self, error: HoldfastError) -> None:
        """The checkpoint will not be protected."""
        if not self.is_protection_over:
            self._tell(SaveUnprotected(self.step, error))
            self.is_protection_over = True

    def hold(self, nbytes: int) -> None:
        """The keeper has sealed this rank's part of a save to memory alone."""
        self._advance(SaveState.HELD, SaveHeld(self.step, nbytes))

    def delay(self, trouble: str) -> None:
        """A try to make the checkpoint durable has failed."""
        if trouble != self.trouble and not self.is_over:
            self.trouble = trouble
            self._tell(SaveDelayed(self.step, trouble))

    def commit(
        self, nbytes: int = 0, *, seconds: Mapping[str, float] = MappingProxyType({}), referenced_nbytes: int = 0
    ) -> None:
        """The checkpoint is committed."""
        self._advance(SaveState.COMMITTED, SaveCommitted(self.step, nbytes, seconds, referenced_nbytes))

    def skip(self, error: HoldfastError) -> None:
        """The save was skipped."""
        self._advance(SaveState.ENDED, SaveSkipped(self.step, error))

    def leave(self, error: HoldfastError) -> None:
        """This process stops watching the save."""
        self._advance(SaveState.ENDED, SaveUnwatched(self.step, error))

    def fail(self, error: HoldfastError, *, is_raised: bool = False, cause: BaseException | None = None) -> None:
        """The save has failed."""
        self._advance(SaveState.ENDED, SaveFailed(self.step, error, is_raised, cause))

    def give_back(self, blocked_s: float) -> None:
        """The call of `save` returns after ``blocked_s``. This may come after the end of the save."""
        self._tell(SaveReturned(self.step, blocked_s))

    def _advance(self, state: SaveState, event: SaveEvent) -> None:
        if state in _NEXT[self.state]:
            self._tell(event)
            self.state = state

    def _tell(self, event: SaveEvent) -> None:
        for listener in self._listeners:
            listener(event)
