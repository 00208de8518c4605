"""The side of the trainer: `Publisher` sends versions of the weights to inference engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec
import torch.distributed as dist
from torch.distributed import ProcessGroup

from holdfast.control.deadline import Deadline
from holdfast.control.store_group import StoreGroup
from holdfast.control.torch_store import default_channel, group_ranks
from holdfast.cooperative.network import own_host
from holdfast.inference.clients import EngineClient
from holdfast.inference.weights import LIVE, StoredWeights, Weights, WeightTable, live_table
from holdfast.inference.worker import (
    AgreedNeeds,
    MovedBytes,
    UpdateStart,
    VersionUpdate,
    WorkerNeeds,
    agree_on_bytes,
    agree_on_needs,
    all_ranks,
    move,
)
from holdfast.phases import attempt
from holdfast.publishing import TransferSource

T = TypeVar("T")

_LABEL: Final = "publishing to inference engines"


class _Address(msgspec.Struct, frozen=True):
    """The address at which rank 0 of the trainer serves the store that all meet at, and the number of workers of all
    engines; empty in the messages of the other ranks."""

    host: str = ""
    port: int = 0
    num_workers: int = 0


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
        StorageError: an engine failed (``storage.engine``). DeadlineError: a process did not answer in `timeout_s`.
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
        if len(clients) != len(num_workers):
            raise ValueError("num_workers has a number for each of clients")
        self._weights = weights
        self._clients = tuple(clients)
        self._group = group
        self._timeout_s = timeout_s
        self._ranks = group_ranks(group)
        self._kept = TransferSource()
        deadline = Deadline(timeout_s)
        channel = default_channel(_LABEL, group, deadline=deadline)
        self._rank = channel.rank
        store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False) if self._rank == 0 else None  # noqa: S104 - workers are on other machines
        mine = _Address() if store is None else _Address(host or own_host(), store.port, sum(num_workers))
        address = channel.exchange("meet", mine, lambda each: each[0], deadline, takes=_Address, gives=_Address)
        self._num_workers = total = address.num_workers
        if store is None:
            store = dist.TCPStore(address.host, address.port, is_master=False)
        self._meeting = StoreGroup(store, rank=self._rank, world_size=channel.world_size + total)
        table = (
            weights.table()
            if isinstance(weights, StoredWeights)
            else live_table(weights, rank=self._rank, world_size=channel.world_size)
        )
        infos = []
        first = 0
        for number in num_workers:
            start = UpdateStart(address.host, address.port, self._ranks, first, total, WeightTable.of(table), timeout_s)
            infos.append(msgspec.to_builtins(start))
            first += number
        self.needs: AgreedNeeds = self._beside(
            [_call(client.init_weight_transfer_engine, info) for client, info in zip(self._clients, infos, strict=True)]
            if self._rank == 0
            else [],
            lambda: agree_on_needs(self._meeting, WorkerNeeds({}), table, timeout_s),
        )

        first_ranks = [len(self._ranks) + sum(num_workers[:number]) for number in range(len(num_workers))]
        #: For each engine, whether it is in an update that was not finished, of this trainer or one that died.
        self._is_open = [
            any(rank in self.needs.open_ranks for rank in range(first, first + number))
            for first, number in zip(first_ranks, num_workers, strict=True)
        ]

    def publish(self, version: str | None = None) -> PublishReport:
        """Send the weights as they are now, and return when every engine shows them. Collective; do not change the
        weights before it returns.

        `version` is the label that the engines give it. An engine shows a version only when all its workers have all of
        it: where the trainer, a worker or the network fails before, the engine goes on with the last version.
        """
        deadline = Deadline(self._timeout_s)
        channel = default_channel(_LABEL, self._group, deadline=deadline)
        channel.confirm("start", attempt(self._start), deadline)
        stored = self._weights if isinstance(self._weights, StoredWeights) else None
        update = VersionUpdate() if stored is None else VersionUpdate(str(stored.path), stored.under)
        info = msgspec.to_builtins(update)
        calls = [_call(client.update_weights, info) for client in self._clients] if self._rank == 0 else []
        moved = self._beside(calls, self._move)
        channel.confirm("finish", attempt(lambda: self._finish(version)), deadline)
        needs = self.needs
        return PublishReport(
            version, moved.sent, moved.received, needs.needed_nbytes, needs.distinct_nbytes, needs.unread
        )

    def _move(self) -> MovedBytes:
        if isinstance(self._weights, StoredWeights):
            return agree_on_bytes(self._meeting, MovedBytes(0, 0), self._timeout_s)
        ranks = all_ranks(self._ranks, self._num_workers)
        return move(self._meeting, ranks, {LIVE: self._weights}, None, self._timeout_s, self._kept)

    def _start(self) -> None:
        if self._rank != 0:
            return
        for number, client in enumerate(self._clients):
            if self._is_open[number]:
                client.update_weights(msgspec.to_builtins(VersionUpdate(drop=True)))
                client.finish_weight_update()
                self._is_open[number] = False
            client.start_weight_update()
            self._is_open[number] = True

    def _finish(self, version: str | None) -> None:
        if self._rank == 0:
            for number, client in enumerate(self._clients):
                client.finish_weight_update(version)
                self._is_open[number] = False

    def _beside(self, calls: Sequence[Callable[[], None]], work: Callable[[], T]) -> T:
        """The result of `work`, while `calls` to engines run, which return when their part of it is done."""
        with ThreadPoolExecutor(max_workers=max(len(calls), 1), thread_name_prefix="holdfast-engine") as pool:
            futures = [pool.submit(call) for call in calls]
            result = attempt(work)
            failed = [error for each in futures if (error := each.exception()) is not None]
        if isinstance(result, Exception):
            raise result from (failed[0] if failed else None)
        if failed:
            raise failed[0]
        return result


def _call(function: Callable[[dict[str, object]], None], info: dict[str, object]) -> Callable[[], None]:
    return lambda: function(info)
