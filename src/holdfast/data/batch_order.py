"""`BatchOrder`: a computed order of samples for the whole job, cut into batches, and how far the job has trained."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Final, TypeVar

import numpy as np

from holdfast.data.batch_share import BatchShare
from holdfast.data.data_identity import StateValue, check_identity
from holdfast.data.loader_workers import keep_random_state, keep_workers
from holdfast.data.permutation import Numbers
from holdfast.data.position_watch import PositionWatch
from holdfast.errors import ConfigurationError
from holdfast.wording import count, kind_of

T = TypeVar("T")

#: Samples whose numbers are computed at once: a batch alone would be too few to pay for the calls.
_AT_ONCE: Final = 8192


class BatchOrder(ABC):
    """An endless order of samples, cut into global batches, and the position after the last one that was trained on.

    Subclasses compute the samples at given places of the order. See `GlobalOrder` for how to use one.
    """

    def __init__(self, identity: Mapping[str, StateValue], num_samples: int, share: BatchShare) -> None:
        self._identity = identity
        self._num_samples = num_samples
        self._share = share
        self._position = 0
        #: Positions after the batches that were drawn and not yet trained on, oldest first.
        self._drawn: deque[int] = deque()
        #: Counts the times that the position was set anew, which ends all iterations that began earlier.
        self._num_starts = 0
        remedy = "take them from order.follow(loader), or call order.advance() after each step"
        self._watch = PositionWatch(type(self).__name__, remedy)

    @property
    def position(self) -> int:
        """The number of samples that the job has trained on, over all ranks and epochs."""
        return self._position

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's batches from the position on, without end. Iterations that began earlier do not count any
        more."""
        self._drawn = drawn = deque[int]()
        return self._batches(self._position, drawn)

    def _batches(self, position: int, drawn: deque[int]) -> Iterator[list[int]]:
        batch, rank, _ = self._share
        size = self._share.size
        num_batches = -(-_AT_ONCE // size)
        within = np.arange(rank * size, (rank + 1) * size, dtype=np.uint64)
        starts = np.arange(num_batches, dtype=np.uint64)[:, None] * np.uint64(batch)
        while True:
            places = (np.uint64(position) + starts + within).ravel()
            for samples in self._samples(places).reshape(num_batches, size):
                position += batch
                drawn.append(position)
                self._watch.draw()
                yield samples.tolist()

    @abstractmethod
    def _samples(self, places: Numbers) -> Numbers:
        """The samples at these places of the order, which ascend."""

    def advance(self) -> None:
        """Say that the next batch was trained on: the oldest one that was drawn.

        Raises:
            ConfigurationError: no such batch was drawn since the last iteration or load began (code ``config.batch``).
        """
        if not self._drawn:
            raise _not_drawn()
        self._position = self._drawn.popleft()
        self._watch.move()

    def follow(self, loader: Iterable[T]) -> Iterator[T]:
        """The batches of `loader`, whose batch sampler this order is. Each counts as trained on when it is given.

        After a load, the iterator goes on at the loaded position, with a new iteration of `loader`. With a loader that
        passes batches on ahead, say to a GPU, take the batches from that one and call `advance` after each step
        instead.

        Raises:
            ValueError: `loader` has another batch sampler, its dataset has another length, or it may give batches out
                of order.
            ConfigurationError: another iteration began before this one ended (code ``config.batch``).
        """
        if not isinstance(loader, Iterable):
            raise TypeError(f"follow takes a DataLoader whose batch_sampler is this order, not {kind_of(loader)}")
        refuse_out_of_order(loader)
        if getattr(loader, "batch_sampler", self) is not self:
            raise ValueError(
                "the batch_sampler of the loader is not this order; make it with DataLoader(dataset, "
                "batch_sampler=order), and keep libraries from replacing its sampler"
            )
        dataset = getattr(loader, "dataset", None)
        if isinstance(dataset, Sized) and len(dataset) != self._num_samples:
            raise ValueError(
                f"the dataset of the loader has {count(len(dataset), 'sample')}, but the order has "
                f"{self._num_samples:,}; make the order with the length of the dataset"
            )
        keep_workers(loader)
        keep_random_state(loader, seed=self.position)
        return self._follow(loader)

    def _follow(self, loader: Iterable[T]) -> Iterator[T]:
        while True:
            start, drawn = self._num_starts, None
            for batch in loader:
                if drawn is not None and self._drawn is not drawn:
                    raise _not_drawn()
                drawn = self._drawn
                self.advance()
                yield batch
                if self._num_starts != start:
                    break
            else:
                return

    def _restart(self) -> None:
        """Make iterations that began earlier invalid."""
        self._drawn = deque()
        self._num_starts += 1
        self._watch.move()

    def note_saved_position(self) -> None:
        """A save stores the position. Warns, once, if batches were drawn since the last one and none was trained on."""
        self._watch.save(self._position)

    def state_dict(self) -> dict[str, StateValue]:
        """The position, and what the order follows from. Equal on all ranks."""
        return {**self._identity, "position": self._position}

    def load_state_dict(self, state: Mapping[str, StateValue]) -> None:
        """Go on from the position of a state that `state_dict` returned.

        Raises:
            IncompatibleError: the state is of another dataset, or order (code ``incompatible.dataset``).
        """
        self._position = check_identity(self._identity, state)
        self._restart()


def _not_drawn() -> ConfigurationError:
    return ConfigurationError(
        "A batch was trained on that is not one of those that this order gave since its last iteration or load began.",
        code="config.batch",
        action="Iterate over one loader at a time, call advance() once for each batch, and start a new iteration after "
        "each load.",
    )


def refuse_out_of_order(loader: object) -> None:
    """Raise `ValueError` if `loader` may give batches in another order than they were drawn in."""
    if getattr(loader, "in_order", True) is False:
        raise ValueError(
            "a loader with in_order=False gives batches in any order, so no position says which were trained on; "
            "make the loader with in_order=True"
        )
