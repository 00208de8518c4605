"""The states of one save, and what its listeners are told of each."""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

from holdfast.checkpointer.events import (
    Listener,
    SaveBegun,
    SaveCommitted,
    SaveDelayed,
    SaveEvent,
    SaveFailed,
    SavePlaced,
    SaveSealed,
    SaveSkipped,
    SaveStaged,
    SaveUnwatched,
)
from holdfast.checkpointer.restore_report import Tier
from holdfast.errors import HoldfastError
from holdfast.format.records import Place


class SaveState(Enum):
    """How far a save is."""

    BEGUN = auto()
    STAGED = auto()
    SEALED = auto()
    COMMITTED = auto()
    #: Nothing will come of it, or nobody looks any more.
    ENDED = auto()


#: What each state may become.
_NEXT: Final = {
    SaveState.BEGUN: (SaveState.STAGED, SaveState.ENDED),
    SaveState.STAGED: (SaveState.SEALED, SaveState.COMMITTED, SaveState.ENDED),
    SaveState.SEALED: (SaveState.COMMITTED, SaveState.ENDED),
    SaveState.COMMITTED: (),
    SaveState.ENDED: (),
}


class SaveMachine:
    """One save on this rank, from its call to its end. Each method notes what has happened, and tells the listeners.

    What cannot follow the state is ignored: the first end counts. Listeners hear of a state before it is noted, and
    there is no lock: an exception between the two, which Ctrl-C raises anywhere, has whoever repeats the note tell them
    once more, and never leaves them without an end. For any thread.
    """

    def __init__(self, step: int, *listeners: Listener) -> None:
        self.step = step
        self.state = SaveState.BEGUN
        #: Its place in the history of the run; None before all ranks have agreed on it.
        self.place: Place | None = None
        #: Why the last try to make it durable failed; "" where none did.
        self.trouble = ""
        self._listeners = listeners

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be heard of it."""
        return not _NEXT[self.state]

    def begin(self, tier: Tier, *, is_first_rank: bool) -> None:
        """The save goes to `tier`."""
        self._tell(SaveBegun(self.step, tier, is_first_rank))

    def put(self, place: Place) -> None:
        """All ranks have agreed on `place`."""
        self.place = place
        self._tell(SavePlaced(self.step, place))

    def stage(self, nbytes: int) -> None:
        """The part of this rank is copied."""
        self._advance(SaveState.STAGED, SaveStaged(self.step, nbytes))

    def seal(self) -> None:
        """The keeper has sealed the part of this rank."""
        self._advance(SaveState.SEALED, SaveSealed(self.step))

    def delay(self, trouble: str) -> None:
        """A try to make it durable has failed."""
        if trouble != self.trouble and not self.is_over:
            self.trouble = trouble
            self._tell(SaveDelayed(self.step, trouble))

    def commit(self, nbytes: int = 0) -> None:
        """It is committed."""
        self._advance(SaveState.COMMITTED, SaveCommitted(self.step, nbytes))

    def skip(self, error: HoldfastError) -> None:
        """It was skipped."""
        self._advance(SaveState.ENDED, SaveSkipped(self.step, error))

    def leave(self, error: HoldfastError) -> None:
        """Nobody looks any more what becomes of it."""
        self._advance(SaveState.ENDED, SaveUnwatched(self.step, error))

    def fail(self, error: HoldfastError, *, is_raised: bool = False, cause: BaseException | None = None) -> None:
        """Nothing will come of it."""
        self._advance(SaveState.ENDED, SaveFailed(self.step, error, is_raised, cause))

    def _advance(self, state: SaveState, event: SaveEvent) -> None:
        if state in _NEXT[self.state]:
            self._tell(event)
            self.state = state

    def _tell(self, event: SaveEvent) -> None:
        for listener in self._listeners:
            listener(event)
