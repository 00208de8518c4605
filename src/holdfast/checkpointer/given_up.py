"""Checkpoints that can never be whole, because the copy of some rank failed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from holdfast.checkpointer.rank_memory import RankMemory

#: How many failed checkpoints a rank tells of, and how many that it has heard of it remembers.
_NUM_TOLD: Final = 8
_NUM_HEARD: Final = 4096


class GivenUp:
    """What one rank tells the others and its keeper of checkpoints that can never be whole."""

    def __init__(self, memory: RankMemory) -> None:
        self._memory = memory
        #: Checkpoints whose copy failed here. Each save tells all ranks of the last ones, not only the next one, since
        #: the exchange that told it may have failed on some rank.
        self._failed: deque[str] = deque(maxlen=_NUM_TOLD)
        self._heard: deque[str] = deque(maxlen=_NUM_HEARD)
        #: Checkpoints that all ranks gave up, and the keeper of this node was not told of yet.
        self._untold: set[str] = set()

    @property
    def failed(self) -> tuple[str, ...]:
        """Ids of the checkpoints whose copy failed on this rank, for the other ranks."""
        return tuple(self._failed)

    def fail(self, checkpoint_id: str) -> None:
        """Have all ranks hear with the next saves that the copy of `checkpoint_id` failed here."""
        if checkpoint_id not in self._failed:
            self._failed.append(checkpoint_id)

    def hear(self, checkpoint_ids: Sequence[str]) -> list[str]:
        """Note what all ranks have given up. Returns what of it is news; the keeper is still to be told of that."""
        news = [each for each in checkpoint_ids if each not in self._heard]
        self._heard.extend(news)
        self._untold.update(news)
        return news

    @property
    def is_told(self) -> bool:
        """Whether the keeper knows of all of it."""
        return not self._untold

    def tell_keeper(self) -> None:
        """Have the keeper free what it holds of them. Where memory takes no file now, the next call tries it again."""
        self._memory.give_up(self._untold)
