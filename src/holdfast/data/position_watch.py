"""`PositionWatch`: notices a position that is saved again and again while training takes batches."""

from __future__ import annotations

import logging

_log = logging.getLogger(__name__)


class PositionWatch:
    """A watch over one position: it warns, once, of two saves between which batches were drawn and the position stayed.

    Workers draw batches ahead before the first one is given. So batches that were drawn before the first of the two
    saves say nothing; further draws between two saves follow batches that the loader gave. `item` names the class of
    the object with the position, and `remedy` says how the position moves.
    """

    def __init__(self, item: str, remedy: str) -> None:
        self._item = item
        self._remedy = remedy
        self._num_drawn = 0
        self._num_drawn_at_save = 0
        self._is_quiet = False

    def draw(self) -> None:
        """A batch is drawn."""
        self._num_drawn += 1

    def move(self) -> None:
        """The position moves, or is set anew."""
        self._num_drawn = self._num_drawn_at_save = 0

    def save(self, position: int) -> None:
        """A save of the `position` begins."""
        if 0 < self._num_drawn_at_save < self._num_drawn and not self._is_quiet:
            self._is_quiet = True
            _log.warning(
                "batches were taken from the %s in the state, but its position is still %d, so a job that resumes "
                "trains on the same batches again: %s. If it is not trained on, leave it out of the state",
                self._item,
                position,
                self._remedy,
            )
        self._num_drawn_at_save = self._num_drawn
