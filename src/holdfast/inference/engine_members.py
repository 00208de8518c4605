"""The ranks of a trainer and the workers of inference engines in one group, and what messages call them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from holdfast.control.channel_members import ChannelMembers, ranges
from holdfast.errors import HoldfastError, StorageError
from holdfast.wording import count


class EngineMembers(ChannelMembers):
    """The members of a group: the ranks of the trainer, then the workers of engine 0, of engine 1, and so on.
    `num_workers` has the number of workers of each engine."""

    def __init__(self, num_trainers: int, num_workers: Sequence[int]) -> None:
        super().__init__()
        self._num_trainers = num_trainers
        self._num_workers = tuple(num_workers)
        self.world_size = num_trainers + sum(num_workers)

    def ranks_of(self, engine: int) -> range:
        """The ranks of the workers of an engine."""
        first = self._num_trainers + sum(self._num_workers[:engine])
        return range(first, first + self._num_workers[engine])

    def names(self, ranks: Sequence[int]) -> str:
        """As `ChannelMembers.names`."""
        trainers = [rank for rank in ranks if rank < self._num_trainers]
        parts = [super().names(trainers)] if trainers else []
        workers = [self._worker(rank) for rank in ranks if rank >= self._num_trainers]
        for engine, each in groupby(workers, key=lambda worker: worker[0]):
            indices = [index for _, index in each]
            parts.append(f"{'worker' if len(indices) == 1 else 'workers'} {ranges(indices)} of engine {engine}")
        return " and ".join(parts)

    def advice(self, absent: Sequence[int]) -> str:
        """As `ChannelMembers.advice`."""
        engines = sorted({self._worker(rank)[0] for rank in absent if rank >= self._num_trainers})
        if not engines:
            return super().advice(absent)
        said = " and ".join(f"engine {each} has {count(self._num_workers[each], 'worker')}" for each in engines)
        return (
            f"By num_workers, {said}: correct that if it is wrong. Otherwise read the log of {self.names(absent)}; if "
            "workers are only slow, raise timeout_s."
        )

    def ended(self, rank: int) -> HoldfastError:
        """As `ChannelMembers.ended`."""
        if rank < self._num_trainers:
            return super().ended(rank)
        name = self.names([rank])
        return StorageError(
            f"the process of {name} has ended.",
            code="storage.engine",
            action=f"Read the log of {name} for the cause, restart the engine, and make a new Publisher.",
        )

    def _worker(self, rank: int) -> tuple[int, int]:
        """The number of the engine of a worker, and the worker's number in it."""
        index = rank - self._num_trainers
        for engine, number in enumerate(self._num_workers):
            if index < number:
                return engine, index
            index -= number
        raise AssertionError(f"rank {rank} is no worker")
