"""`ShardedStream`: samples that only come one after another, in a fixed number of shards that ranks share out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Final, Protocol, TypeVar

from torch.utils.data import IterableDataset, default_collate, get_worker_info

from holdfast.data.batch_order import refuse_out_of_order
from holdfast.data.batch_share import batch_share
from holdfast.data.data_identity import VERSION, StateValue, check_identity, checked_fingerprint
from holdfast.data.loader_workers import keep_random_state, keep_workers
from holdfast.data.position_watch import PositionWatch
from holdfast.data.sent_states import received, sent
from holdfast.errors import ConfigurationError
from holdfast.options import checked_number

T = TypeVar("T")
S_co = TypeVar("S_co", covariant=True)

#: The state of a shard that no sample was trained on yet.
_UNOPENED: Final = None


class ShardSource(Protocol[S_co]):
    """The samples of one shard, one after another and without end: it begins its next epoch by itself."""

    def __next__(self) -> S_co:
        """The next sample."""

    def state_dict(self) -> object:
        """The state after the last sample, as values and tensors that do not change afterwards."""

    def load_state_dict(self, state: Any, /) -> object:
        """Go on from a state that `state_dict` returned."""


class ShardProgress:
    """The state of one shard after the last sample that was trained on: an entry of a state."""

    def __init__(self) -> None:
        self.state: object = _UNOPENED

    def state_dict(self) -> dict[str, object]:
        """The state of the shard's source after the last sample that was trained on."""
        return {"source": self.state}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Take over a state that `state_dict` returned."""
        self.state = state["source"]


@dataclass(frozen=True)
class _Drawn:
    """The place of a batch's first sample, and the states of the shards after it. It rides with the batch."""

    start: int
    states: Mapping[int, object]

    def __reduce__(self) -> tuple[Callable[[int, Mapping[int, object]], _Drawn], tuple[int, Mapping[int, object]]]:
        return _received, (self.start, {shard: sent(state) for shard, state in self.states.items()})


def _received(start: int, states: Mapping[int, object]) -> _Drawn:
    return _Drawn(start, {shard: received(state) for shard, state in states.items()})


class StreamPosition:
    """The number of samples that the job has trained on, over all ranks: an entry of a state."""

    def __init__(self, identity: Mapping[str, StateValue]) -> None:
        self._identity = identity
        self.position = 0
        #: Counts the loads, each of which ends all iterations that began earlier.
        self.num_loads = 0
        #: Of the batches that are drawn in this process, not in workers.
        self.watch = PositionWatch("ShardedStream", "take them from stream.follow(loader)")

    def note_saved_position(self) -> None:
        """A save stores the position. Warns, once, if batches were drawn since the last one and none was trained on."""
        self.watch.save(self.position)

    def state_dict(self) -> dict[str, StateValue]:
        """The position, and the identity of the stream. Equal on all ranks."""
        return {**self._identity, "position": self.position}

    def load_state_dict(self, state: Mapping[str, StateValue]) -> None:
        """Go on from a state that `state_dict` returned.

        Raises:
            IncompatibleError: the state is of another stream (code ``incompatible.dataset``).
        """
        self.position = check_identity(self._identity, state)
        self.num_loads += 1
        self.watch.move()


class ShardedStream(IterableDataset[tuple[object, _Drawn]]):
    """An endless stream of samples from a fixed number of shards, cut into global batches; and how far the job has
    trained on each shard.

    ``open_shard(number)`` opens the source of a shard, from 0 on, such as a `PackedTokens`. Sample ``j`` of the job is
    the next one of shard ``j % num_shards``. `num_shards` stays for the whole run; it is a multiple of
    `global_batch_size`, and that of the number of ranks. Ranks share the shards out: rank ``r`` reads those whose
    number is ``r``, counted in steps of the number of ranks, with whatever they have buffered. So any number of ranks
    goes on with the same samples in the same batches. Without `rank` and `world_size`, all ranks of the job share them.

    It is a dataset of whole batches, made by `collate_fn`: ``DataLoader(stream, batch_size=None, num_workers=4)``, if
    ``num_shards / global_batch_size`` is a multiple of the number of workers. Take batches from
    ``stream.follow(loader)``, and put ``stream.state`` into the state: ``{"model": model, "data": stream.state}``.

    `fingerprint` is a text that says which samples the shards have. A load raises `IncompatibleError` if it is not
    that of the save (code ``incompatible.dataset``), or `num_shards` is not (``incompatible.names``).
    """

    def __init__(
        self,
        open_shard: Callable[[int], ShardSource[T]],
        *,
        num_shards: int,
        global_batch_size: int,
        collate_fn: Callable[[list[T]], object] = default_collate,
        fingerprint: str = "",
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self._share = batch_share(global_batch_size, rank, world_size)
        self._num_shards = checked_number("num_shards", num_shards, least=1, reason="a stream needs a shard")
        if self._num_shards % self._share.global_batch_size:
            raise ValueError(
                f"num_shards is {num_shards}, no multiple of global_batch_size, {global_batch_size}: a batch takes "
                "each of its samples from another shard"
            )
        self._open_shard = open_shard
        self._collate_fn: Callable[[list[Any]], object] = collate_fn
        self._position = StreamPosition(
            {"version": VERSION, "num_shards": self._num_shards, "fingerprint": checked_fingerprint(fingerprint)}
        )
        own = range(self._share.rank, self._num_shards, self._share.world_size)
        self._shards = {shard: ShardProgress() for shard in own}

    @property
    def position(self) -> int:
        """The number of samples that the job has trained on, over all ranks."""
        return self._position.position

    @property
    def state(self) -> dict[str, object]:
        """The entry for the state of the job. Each rank has the shards that it reads."""
        return {"position": self._position, "shards": self._shards}

    def __iter__(self) -> Iterator[tuple[object, _Drawn]]:
        """This rank's batches from the position on, without end; in a worker of a loader, those of this worker."""
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        rounds = self._num_shards // self._share.global_batch_size
        if rounds % num_workers:
            raise ConfigurationError(
                f"{num_workers} workers cannot share {self._num_shards} shards in batches of "
                f"{self._share.global_batch_size}: two of them would read one shard.",
                code="config.shards",
                action=f"Make the loader with a number of workers that divides {rounds}, or with num_workers=0.",
            )
        return self._batches(self.position, worker, num_workers)

    def _batches(self, position: int, worker: int, num_workers: int) -> Iterator[tuple[object, _Drawn]]:
        batch, rank, world_size = self._share
        sources: dict[int, ShardSource[object]] = {}
        for number in count(worker, num_workers):
            start = position + number * batch
            samples: list[object] = []
            states: dict[int, object] = {}
            for place in range(start + (rank - start) % world_size, start + batch, world_size):
                shard = place % self._num_shards
                source = sources.get(shard)
                if source is None:
                    source = sources[shard] = self._opened(shard)
                samples.append(_next_of(source, shard))
                states[shard] = source.state_dict()
            self._position.watch.draw()
            yield self._collate_fn(samples), _Drawn(start, states)

    def _opened(self, shard: int) -> ShardSource[object]:
        source = self._open_shard(shard)
        if self._shards[shard].state is not _UNOPENED:
            source.load_state_dict(self._shards[shard].state)
        return source

    def follow(self, loader: Iterable[Sequence[object]]) -> Iterator[object]:
        """The batches of `loader`, whose dataset this stream is. Each counts as trained on when it is given.

        After a load, the iterator goes on at the loaded position, with a new iteration of `loader`.

        Raises:
            ValueError: `loader` has another dataset, makes batches itself, keeps its workers, or may give batches out
                of order.
            ConfigurationError: `loader` gave a batch that is not the next one (code ``config.batch``).
        """
        refuse_out_of_order(loader)
        if getattr(loader, "dataset", self) is not self or getattr(loader, "batch_size", None) is not None:
            raise ValueError(
                "the loader does not give the batches of this stream as they are; make it with DataLoader(stream, "
                "batch_size=None)"
            )
        if getattr(loader, "persistent_workers", False):
            raise ValueError(
                "workers that outlive an iteration would go on where they are after a load; make the loader with "
                "persistent_workers=False"
            )
        keep_workers(loader)
        keep_random_state(loader, seed=self.position)
        return self._follow(loader)

    def _follow(self, loader: Iterable[Sequence[object]]) -> Iterator[object]:
        while True:
            num_loads = self._position.num_loads
            for batch, drawn in loader:
                self._advance(drawn)
                yield batch
                if self._position.num_loads != num_loads:
                    break
            else:
                return

    def _advance(self, drawn: object) -> None:
        if not isinstance(drawn, _Drawn) or drawn.start != self.position:
            raise ConfigurationError(
                "The loader gave a batch that is not the next one of this stream.",
                code="config.batch",
                action="Give `follow` the loader itself, and start a new iteration after each load.",
            )
        for shard, state in drawn.states.items():
            self._shards[shard].state = state
        self._position.position += self._share.global_batch_size
        self._position.watch.move()


def _next_of(source: ShardSource[object], shard: int) -> object:
    try:
        return next(source)
    except StopIteration:
        raise ConfigurationError(
            f"Shard {shard} of the stream ended, and the next sample was to come from it.",
            code="config.shards",
            action="Have each shard begin its next epoch by itself.",
        ) from None
