"""Entries of a state that hear of its saves: a position in data notices that it never moves."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from holdfast.state.identity import entries_of


@runtime_checkable
class WatchedPosition(Protocol):
    """A position that wants to hear of the saves that store it."""

    def note_saved_position(self) -> None:
        """A save of the state with this position begins."""


def note_saved_positions(state: object, *, is_first_rank: bool) -> None:
    """Tell the positions in a `state` that is about to be saved; only on the first rank, so that a job warns once."""
    if is_first_rank:
        for item in entries_of(state):
            if isinstance(item, WatchedPosition):
                item.note_saved_position()
