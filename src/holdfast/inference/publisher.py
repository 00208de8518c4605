"""The side of the trainer: `Publisher` sends versions of the weights to inference engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Final, TypeVar

import msgspec
import torch.distributed as dist
from torch.distributed import ProcessGroup

from holdfast.control.channel import Channel
from holdfast.control.deadline import Deadline
from holdfast.control.envelopes import error_wire
from holdfast.control.store_group import StoreGroup
from holdfast.control.torch_store import default_channel, group_ranks
from holdfast.cooperative.network import own_host
from holdfast.errors import ConfigurationError, DeadlineError, ErrorWire, HoldfastError, from_wire
from holdfast.inference.clients import EngineClient
from holdfast.inference.engine_calls import EngineCall, run_beside
from holdfast.inference.engine_members import EngineMembers
from holdfast.inference.weights import LIVE, PublishedTensor, StoredWeights, Weights, WeightTable, live_table
from holdfast.inference.worker import (
    AgreedNeeds,
    MovedBytes,
    UpdateStart,
    VersionUpdate,
    WorkerNeeds,
    agree_on_bytes,
    agree_on_needs,
    all_ranks,
    excess_key,
    move,
    wrong_number,
)
from holdfast.interop.formats import find_state
from holdfast.interop.stored_source import StoredSource
from holdfast.phases import attempt, done, told
from holdfast.publishing import TransferSource
from holdfast.run.leases import leased
from holdfast.run.paths import parse
from holdfast.wording import count

T = TypeVar("T")

_LABEL: Final = "publishing to inference engines"


class _Address(msgspec.Struct, frozen=True):
    """The address at which rank 0 of the trainer serves the store that all meet at, and the number of workers of each
    engine; empty in the messages of the other ranks."""

    host: str = ""
    port: int = 0
    num_workers: tuple[int, ...] = ()


class _Ended(msgspec.Struct, frozen=True):
    """The message of a rank of the trainer after its part of an operation: the error of the operation, if any."""

    error: ErrorWire | None = None

    @staticmethod
    def first(ranks: Sequence[_Ended]) -> _Ended:
        """The first error. The first rank knows most, since it has called the engines."""
        return next((rank for rank in ranks if rank.error is not None), _Ended())


@dataclass(frozen=True)
class PublishReport:
    """A version that all engines show.

    ``sent_nbytes`` are the bytes that the trainer's ranks took out of their memory (or the workers out of the
    checkpoint), ``needed_nbytes`` those that the workers together need, ``distinct_nbytes`` the same with each byte
    counted once. `unread` are the weights that no engine reads.
    """

    version: str | None
    sent_nbytes: int
    received_nbytes: int
    needed_nbytes: int
    distinct_nbytes: int
    unread: tuple[str, ...]


class Publisher:
    """Publishes `weights` to inference engines, version after version. Collective over `group` (default: the job).

    `weights` is a module, or a dict of tensors by name, in any layout that `save` takes, with the names that the
    engines' `load_weights` takes; or `StoredWeights` of a checkpoint, which the workers read themselves. `clients` are
    the engines, and `num_workers` the number of workers of each. They matter on the first rank, and may be empty on the
    others. `host` is the address at which workers reach the first rank (default: found by its route).

    The constructor has the engines discover what each worker needs, by running its own `load_weights` on tensors that
    have no elements. `publish` then sends each worker exactly these parts; no tensor is gathered anywhere.

    Raises:
        IncompatibleError: an engine's loader cannot be followed (``incompatible.loader`` names the operation).
        ConfigurationError: an engine has another number of workers (``config.num_workers``).
        StorageError: an engine does not answer, failed, or lost a worker (``storage.engine``).
        DeadlineError: a process did not answer in `timeout_s`. In `absent`, workers follow the ranks of the trainer.
    """

    def __init__(
        self,
        weights: Weights,
        clients: Sequence[EngineClient] = (),
        num_workers: Sequence[int] = (),
        *,
        host: str | None = None,
        group: ProcessGroup | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        self._weights = weights
        self._clients = tuple(clients)
        self._group = group
        self._timeout_s = timeout_s
        self._ranks = group_ranks(group)
        self._kept = TransferSource()
        deadline = Deadline(timeout_s)
        channel = default_channel(_LABEL, group, deadline=deadline)
        self._rank = channel.rank
        mine = attempt(lambda: _offered(host, clients, num_workers) if channel.rank == 0 else (_Address(), None))
        address = channel.exchange(
            "meet", told(mine, lambda pair: pair[0]), lambda each: each[0], deadline, takes=_Address, gives=_Address
        )
        self._num_workers = address.num_workers
        members = EngineMembers(channel.world_size, self._num_workers)
        joined = attempt(lambda: self._joined(done(mine)[1], address, members))
        channel.confirm("join", joined, deadline)
        self._store, self._meeting, table = done(joined)
        self._members = members
        shown = WeightTable.of(table)
        calls = [
            EngineCall(engine, "init_weight_transfer_engine", _with(client.init_weight_transfer_engine, start))
            for engine, client in enumerate(self._clients if self._rank == 0 else ())
            for start in [
                UpdateStart(address.host, address.port, self._ranks, engine, self._num_workers, shown, timeout_s)
            ]
        ]
        self.needs: AgreedNeeds = self._beside(
            calls, lambda: agree_on_needs(self._meeting, WorkerNeeds({}), table, timeout_s), channel, deadline
        )
        #: For each engine, whether it is in an update that was not finished, of this trainer or one that died.
        self._is_open = [
            any(rank in self.needs.open_ranks for rank in members.ranks_of(engine))
            for engine in range(len(self._num_workers))
        ]

    def _joined(
        self, store: dist.TCPStore | None, address: _Address, members: EngineMembers
    ) -> tuple[dist.TCPStore, StoreGroup, list[PublishedTensor]]:
        """The store and the group of this trainer and the workers, and the table of the weights."""
        weights, num_trainers = self._weights, len(self._ranks)
        table = (
            weights.table()
            if isinstance(weights, StoredWeights)
            else live_table(weights, rank=self._rank, world_size=num_trainers)
        )
        if store is None:
            timeout = timedelta(seconds=self._timeout_s)
            store = dist.TCPStore(address.host, address.port, is_master=False, timeout=timeout)
        return store, StoreGroup(store, rank=self._rank, world_size=members.world_size, members=members), table

    def publish(self, version: str | None = None) -> PublishReport:
        """Send the weights as they are now, and return when every engine shows them. Collective; do not change the
        weights before it returns.

        `version` is the label that the engines give it. Of a run in `StoredWeights`, all workers read the checkpoint
        that is its head when this is called. An engine shows a version only when all its workers have all of
        it: where the trainer, a worker or the network fails before, the engine goes on with the last version.
        """
        deadline = Deadline(self._timeout_s)
        channel = default_channel(_LABEL, self._group, deadline=deadline)
        with ExitStack() as held:
            started = attempt(lambda: self._start(held))
            channel.confirm("start", started, deadline)
            update = done(started)
            calls = [
                EngineCall(engine, "update_weights", _with(client.update_weights, update))
                for engine, client in enumerate(self._clients if self._rank == 0 else ())
            ]
            moved = self._beside(calls, self._move, channel, deadline)
        channel.confirm("finish", attempt(lambda: self._finish(version)), deadline)
        needs = self.needs
        return PublishReport(
            version, moved.sent, moved.received, needs.needed_nbytes, needs.distinct_nbytes, needs.unread
        )

    def _move(self) -> MovedBytes:
        if isinstance(self._weights, StoredWeights):
            return agree_on_bytes(self._meeting, MovedBytes(0, 0), self._timeout_s)
        ranks = all_ranks(self._ranks, sum(self._num_workers))
        return move(self._meeting, ranks, {LIVE: self._weights}, None, self._timeout_s, self._kept)

    def _start(self, held: ExitStack) -> VersionUpdate:
        """Have all engines begin a version. Returns the update for their workers. `held` keeps its checkpoint."""
        if self._rank != 0:
            return VersionUpdate()
        update = _stored_update(self._weights, held) if isinstance(self._weights, StoredWeights) else VersionUpdate()
        for engine, client in enumerate(self._clients):
            if self._is_open[engine]:
                EngineCall(engine, "update_weights", _with(client.update_weights, VersionUpdate(drop=True))).check()
                EngineCall(engine, "finish_weight_update", client.finish_weight_update).check()
                self._is_open[engine] = False
            EngineCall(engine, "start_weight_update", client.start_weight_update).check()
            self._is_open[engine] = True
        return update

    def _finish(self, version: str | None) -> None:
        if self._rank == 0:
            for engine, client in enumerate(self._clients):
                EngineCall(engine, "finish_weight_update", partial(client.finish_weight_update, version)).check()
                self._is_open[engine] = False

    def _beside(self, calls: Sequence[EngineCall], work: Callable[[], T], channel: Channel, deadline: Deadline) -> T:
        """The result of `work`, while `calls` to engines run, which return when their part of it is done. The trainer's
        ranks then agree on `channel` whether both have succeeded, and raise the same error."""
        members = self._members
        given_up: dict[int, Exception] = {}
        members.given_up = given_up  # another one for each operation: late calls add to that of theirs

        def failed(call: EngineCall, error: HoldfastError) -> None:
            given_up.update(dict.fromkeys(members.ranks_of(call.engine), error))

        result, errors = run_beside(calls, work, deadline, failed)
        error = _first(result, errors, given_up)
        if error is None and self._rank == 0:
            error = self._excess()
        wire = None if error is None else error_wire(error)
        ended = channel.exchange("engines", _Ended(wire), _Ended.first, deadline, takes=_Ended, gives=_Ended)
        if ended.error is not None:
            if error is not None and wire == ended.error:
                raise error
            raise from_wire(ended.error) from error
        return done(result)

    def _excess(self) -> HoldfastError | None:
        """The error where an engine has more workers than it should have."""
        for engine, number in enumerate(self._num_workers):
            if self._store.check([excess_key(engine)]):
                return wrong_number(engine, number, f"its worker {number} met the trainer too")
        return None


def _offered(
    host: str | None, clients: Sequence[EngineClient], num_workers: Sequence[int]
) -> tuple[_Address, dist.TCPStore]:
    """The store that all meet at, which this process serves from now on, and its address."""
    if len(clients) != len(num_workers) or any(number < 1 for number in num_workers):
        raise ConfigurationError(
            f"num_workers is {list(num_workers)} for {count(len(clients), 'client')}.",
            code="config.num_workers",
            action="Give the number of workers of each engine, in the order of the clients.",
        )
    store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)  # noqa: S104 - workers are on other machines
    return _Address(host or own_host(), store.port, tuple(num_workers)), store


def _stored_update(weights: StoredWeights, held: ExitStack) -> VersionUpdate:
    """The update that has all workers read the checkpoint that `weights` names now, which stays until `held` ends."""
    found = find_state(parse(weights.path))
    lease = None if found.located is None else leased(found.located)
    if lease is not None:
        held.callback(lease.end)
    source = StoredSource.of(found.state)
    return VersionUpdate(source.path, weights.under, source.identity, source.shared_fingerprint)


def _first(result: object, errors: Sequence[HoldfastError], given_up: Mapping[int, Exception]) -> Exception | None:
    """The error to raise of those of a trainer's work and of its calls: the cause of the others, as far as known."""
    if not isinstance(result, Exception):
        return errors[0] if errors else None
    if not errors:
        return result
    absent = result.absent if isinstance(result, DeadlineError) else ()
    if absent and given_up.keys() >= set(absent):
        return errors[0]
    if isinstance(result, HoldfastError) and result.message.endswith(errors[0].message):
        return errors[0]
    result.__cause__ = errors[0]
    return result


def _with(call: Callable[[dict[str, object]], None], info: msgspec.Struct) -> Callable[[], None]:
    return partial(call, msgspec.to_builtins(info))
