"""Checkpoints that can never be whole, because the copy of some rank failed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from holdfast.checkpointer.rank_memory import RankMemory

#: Number of its last failed checkpoints that a rank reports, and of reported ones that it remembers.
_NUM_TOLD: Final = 8
_NUM_HEARD: Final = 4096


class GivenUp:
    """The checkpoints that can never be whole, as one rank reports them to the other ranks and to its keeper."""

    def __init__(self, memory: RankMemory) -> None:
        self._memory = memory
        #: Checkpoints whose copy failed here. Every save reports the last ones to all ranks, and not just the next one
        #: does, because the exchange that reported a failure may have failed on some rank.
        self._failed: deque[str] = deque(maxlen=_NUM_TOLD)
        self._heard: deque[str] = deque(maxlen=_NUM_HEARD)
        #: Checkpoints that all ranks gave up, but of which this node's keeper was not told yet.
        self._untold: set[str] = set()

    @property
    def failed(self) -> tuple[str, ...]:
        """Ids of the checkpoints whose copy failed on this rank, for the other ranks."""
        return tuple(self._failed)

    def has(self, checkpoint_id: str) -> bool:
        """Whether a checkpoint was given up, here or by all ranks."""
        return checkpoint_id in self._failed or checkpoint_id in self._heard

    def fail(self, checkpoint_id: str) -> None:
        """Report to all ranks, with the next saves, that the copy of `checkpoint_id` failed here."""
        if checkpoint_id not in self._failed:
            self._failed.append(checkpoint_id)

    def hear(self, checkpoint_ids: Sequence[str]) -> list[str]:
        """Record the checkpoints that all ranks have given up. Returns the new ones; call `tell_keeper` for them."""
        news = [each for each in checkpoint_ids if each not in self._heard]
        self._heard.extend(news)
        self._untold.update(news)
        return news

    @property
    def is_told(self) -> bool:
        """Whether the keeper was told of all of them."""
        return not self._untold

    def tell_keeper(self) -> None:
        """Tell the keeper to free the slots of the checkpoints that all ranks gave up. If memory takes no file now, the
        next call tries again."""
        self._memory.give_up(self._untold)
