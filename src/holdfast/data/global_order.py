"""`GlobalOrder`: one order of samples for the whole job, and how far the job has trained in it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, TypeVar

import numpy as np

from holdfast.data.permutation import MAX_LENGTH, keys_of, permuted
from holdfast.errors import ConfigurationError, IncompatibleError
from holdfast.options import checked_number

T = TypeVar("T")

#: Names the algorithm of the order in states. The order of one version never changes.
VERSION: Final = 1
#: Samples whose numbers are computed at once: a batch alone would be too few to pay for the calls.
_AT_ONCE: Final = 8192


class GlobalOrder:
    """An endless order of the samples of a dataset with `length` samples, cut into global batches; and a position.

    Each epoch has every sample once, in an order of its own that follows from `seed` and the number of the epoch. A
    batch may begin in one epoch and end in the next: no sample is dropped, and none is added. Each rank trains on an
    equal part of each global batch, so `global_batch_size` must be a multiple of `world_size`.

    It is a batch sampler: ``DataLoader(dataset, batch_sampler=order, num_workers=4)`` gives this rank's batches from
    the position on. The state is the position after the last batch that was trained on, however many batches workers
    have loaded ahead: take batches from ``order.follow(loader)``, or call `advance` after each step. The state is equal
    on all ranks and continues on any number of ranks and workers, and with another `global_batch_size`.

    `fingerprint` is a text that says which samples the dataset has, such as a digest of its files. A load raises
    `IncompatibleError` if it, `length` or `seed` is not that of the save (code ``incompatible.dataset``).
    """

    def __init__(
        self,
        length: int,
        *,
        global_batch_size: int,
        rank: int,
        world_size: int,
        seed: int = 0,
        fingerprint: str = "",
    ) -> None:
        self._length = checked_number("length", length, least=1, reason="an order needs a sample")
        if self._length > MAX_LENGTH:
            raise ValueError(f"length is {length}, but an order has at most {MAX_LENGTH} samples")
        self._batch_size = checked_number(
            "global_batch_size", global_batch_size, least=1, reason="a batch needs a sample"
        )
        self._world_size = checked_number("world_size", world_size, least=1, reason="a job has at least one rank")
        self._rank = checked_number("rank", rank, least=0, reason="ranks are counted from 0")
        if self._rank >= self._world_size:
            raise ValueError(f"rank is {rank}, but it must be less than world_size, {world_size}")
        if self._batch_size % self._world_size:
            raise ValueError(
                f"global_batch_size is {global_batch_size}, no multiple of {world_size} ranks, so their parts would "
                f"differ; {self._batch_size - self._batch_size % self._world_size or self._world_size} is one"
            )
        self._identity: dict[str, int | str] = {
            "version": VERSION,
            "length": self._length,
            "seed": checked_number("seed", seed, least=0, reason="seeds are not negative"),
            "fingerprint": fingerprint,
        }
        self._position = 0
        #: Positions after the batches that were drawn and not yet trained on, oldest first.
        self._drawn: deque[int] = deque()

    @property
    def position(self) -> int:
        """The number of samples that the job has trained on, over all ranks and epochs."""
        return self._position

    @property
    def epoch(self) -> int:
        """The epoch of the sample that the job trains on next, from 0 on."""
        return self._position // self._length

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's batches from the position on, without end. An iteration that began earlier is not followed any
        more."""
        self._drawn = drawn = deque[int]()
        return self._batches(self._position, drawn)

    def _batches(self, position: int, drawn: deque[int]) -> Iterator[list[int]]:
        part = self._batch_size // self._world_size
        num_batches = -(-_AT_ONCE // part)
        within = np.arange(self._rank * part, (self._rank + 1) * part, dtype=np.uint64)
        starts = np.arange(num_batches, dtype=np.uint64)[:, None] * np.uint64(self._batch_size)
        while True:
            places = (np.uint64(position) + starts + within).ravel()
            for batch in self._samples(places).reshape(num_batches, part):
                position += self._batch_size
                drawn.append(position)
                yield batch.tolist()

    def _samples(
        self, places: np.ndarray[tuple[int, ...], np.dtype[np.uint64]]
    ) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
        """The samples at these places of the endless order, which ascend."""
        epochs, numbers = np.divmod(places, np.uint64(self._length))
        first, last = int(epochs[0]), int(epochs[-1])
        keys = keys_of(int(self._identity["seed"]), np.arange(first, last + 1, dtype=np.uint64))
        return permuted(numbers, self._length, keys if keys.size == 1 else keys[epochs - np.uint64(first)])

    def advance(self) -> None:
        """Say that the next batch was trained on: the oldest one that was drawn.

        Raises:
            ConfigurationError: no batch was drawn since the last load or start (code ``config.batch``).
        """
        if not self._drawn:
            raise ConfigurationError(
                "A batch was trained on that this order did not give since its state was loaded.",
                code="config.batch",
                action="Start a new iteration of the loader after each load.",
            )
        self._position = self._drawn.popleft()

    def follow(self, loader: Iterable[T]) -> Iterator[T]:
        """The batches of `loader`, whose batch sampler this order is. Each counts as trained on when it is given.

        `loader` must give its batches in order, as loaders do by default. With a loader that passes batches on ahead,
        say to a GPU, take the batches from that one and call `advance` after each step instead.
        """
        for batch in loader:
            self.advance()
            yield batch

    def state_dict(self) -> dict[str, int | str]:
        """The position, and what the order follows from. Equal on all ranks."""
        return {**self._identity, "position": self._position}

    def load_state_dict(self, state: Mapping[str, int | str]) -> None:
        """Go on from the position of a state that `state_dict` returned. Start a new iteration afterwards.

        Raises:
            IncompatibleError: the state is of another dataset, or order (code ``incompatible.dataset``).
        """
        differing = [
            f"{name}: {state.get(name)!r} in the checkpoint, {here!r} here"
            for name, here in self._identity.items()
            if state.get(name) != here
        ]
        if differing:
            raise IncompatibleError(
                "The dataset or the order of its samples is not that of the checkpoint, so a position in it has "
                "another meaning.",
                code="incompatible.dataset",
                action="Train on the dataset of the checkpoint with its seed, or leave the order out of the load to "
                "begin this dataset at its start.",
                details=tuple(differing),
            )
        self._position = int(state["position"])
        self._drawn = deque()
