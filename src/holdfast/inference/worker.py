"""The side of the inference engine: a worker that receives the parts it needs, and shows versions that are whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Protocol

import msgspec
import torch.distributed as dist
from torch import nn

from holdfast.control.channel import Channel
from holdfast.control.deadline import Deadline
from holdfast.control.store_group import StoreGroup
from holdfast.decoding import converted
from holdfast.errors import ConfigurationError, StorageError
from holdfast.format.patterns import Globs
from holdfast.geometry import Box
from holdfast.inference.engine_members import EngineMembers
from holdfast.inference.needs import EngineNeeds, LoadWeights, StagedVersion, discover, disjoint
from holdfast.inference.weights import LIVE, PublishedTensor, WeightTable
from holdfast.interop.stored_source import StoredSource
from holdfast.loading import load_over
from holdfast.loading.load_options import LoadOptions
from holdfast.phases import attempt, told
from holdfast.publishing import TransferSource, transfer_over
from holdfast.reports import LoadReport
from holdfast.run.paths import Selection, parse
from holdfast.wording import count


class UpdateStart(msgspec.Struct, frozen=True):
    """The message of a publisher with `init_weight_transfer_engine`: where to meet, and which weights it publishes.

    The trainer has the ranks `trainer_ranks`. `engine` is the number of this engine among those that are updated
    together, and `num_workers` the number of workers of each of them.
    """

    host: str
    port: int
    trainer_ranks: tuple[int, ...]
    engine: int
    num_workers: tuple[int, ...]
    weights: WeightTable
    timeout_s: float


class VersionUpdate(msgspec.Struct, frozen=True):
    """The message of a publisher with `update_weights`: the checkpoint to read, and the part of it with the weights.

    All workers must find the checkpoint that the trainer has found: `path` names its place in a run, and `identity` and
    `fingerprint` are its own. Without a path, the weights come from the trainer. With `drop`, nothing comes, and the
    open update shows nothing.
    """

    path: str | None = None
    under: str = ""
    identity: str = ""
    fingerprint: str = ""
    drop: bool = False


class WorkerNeeds(msgspec.Struct, frozen=True):
    """The message of one process before the first version: the boxes that it needs of each weight, by number; and
    whether it is in an update that another trainer began."""

    boxes: dict[int, tuple[Box, ...]]
    is_open: bool = False


class AgreedNeeds(msgspec.Struct, frozen=True):
    """The bytes that all workers need: together, and each once; the weights that no worker reads; and the ranks in the
    group that are in an update of another trainer."""

    needed_nbytes: int
    distinct_nbytes: int
    unread: tuple[str, ...]
    open_ranks: tuple[int, ...] = ()


class MovedBytes(msgspec.Struct, frozen=True):
    """The bytes that one process took out of the source, and those that it received."""

    sent: int
    received: int


class EngineModel(Protocol):
    """The model of one worker, as its engine loads it."""

    def discover(self, weights: Sequence[PublishedTensor]) -> EngineNeeds:
        """The parts of `weights` that this worker needs. Must change nothing that serves requests."""

    def apply(self, version: StagedVersion) -> None:
        """Load a whole version."""


class ModuleEngine:
    """An `EngineModel` of a module in its loading format: `load_weights` fills its parameters."""

    def __init__(self, model: nn.Module, load_weights: LoadWeights) -> None:
        self._model = model
        self._load_weights = load_weights

    def discover(self, weights: Sequence[PublishedTensor]) -> EngineNeeds:
        """As `EngineModel.discover`."""
        return discover(self._load_weights, weights, model=self._model)

    def apply(self, version: StagedVersion) -> None:
        """As `EngineModel.apply`."""
        version.apply(self._load_weights)


class InferenceWorker:
    """One worker of an inference engine. `index` is its number among the engine's workers, from 0 on, and `num_workers`
    their number, if the worker knows it: a `Publisher` that was told another one is then refused at once.

    Its methods are the four phases of vLLM's weight transfer: an engine calls them on all its workers when an
    `EngineClient` makes the call of that phase, with the mapping that the client got (`init_info`, `update_info`).
    `init` and `update` return when all workers have done the same, so they must run at the same time. `version` counts
    the versions that this worker has shown, and changes in `finish` alone, only where everything has arrived. Until
    then the model stays as it is, whatever dies. The worker needs no process group, and uses none.
    """

    def __init__(self, engine: EngineModel, *, index: int = 0, num_workers: int | None = None) -> None:
        self.version = 0
        self._engine = engine
        self._index = index
        self._num_workers = num_workers
        self._start: UpdateStart | None = None
        self._group: StoreGroup | None = None
        self._kept = TransferSource()
        self._staged: StagedVersion | None = None
        self._is_open = False

    def init(self, info: Mapping[str, object]) -> None:
        """Meet the trainer, and find out what this worker needs. Drops what an earlier trainer has sent."""
        start = converted(info, UpdateStart)
        store = _trainers_store(start)
        members = EngineMembers(len(start.trainer_ranks), start.num_workers)
        mine = members.ranks_of(start.engine)
        if self._index >= len(mine):
            store.set(excess_key(start.engine), "met")
            raise wrong_number(start.engine, len(mine), f"this is worker {self._index} of it")
        self._group = StoreGroup(store, rank=mine[self._index], world_size=members.world_size, members=members)
        self._start, self._kept, self._staged = start, TransferSource(), None
        needs: EngineNeeds | Exception
        if self._num_workers not in (None, len(mine)):
            needs = wrong_number(start.engine, len(mine), f"it has {self._num_workers}")
            members.given_up |= dict.fromkeys(mine[self._num_workers :], needs)
        else:
            needs = attempt(lambda: self._engine.discover(start.weights.weights()))
        agree_on_needs(self._group, told(needs, self._message), start.weights.weights(), start.timeout_s)
        if isinstance(needs, EngineNeeds):
            self._staged = StagedVersion(needs)

    def _message(self, needs: EngineNeeds) -> WorkerNeeds:
        numbered = enumerate(needs.weights)
        boxes = {number: needs.boxes[each.name] for number, each in numbered if each.name in needs.boxes}
        return WorkerNeeds(boxes, self._is_open)

    def start(self) -> None:
        """Begin a version; drops one that was not finished."""
        self._is_open = True
        if self._staged is not None:
            self._staged.is_whole = False

    def update(self, info: Mapping[str, object]) -> None:
        """Receive a version. Serves the last one meanwhile, and where this fails."""
        update = converted(info, VersionUpdate)
        if self._staged is None or self._start is None or self._group is None:
            raise ConfigurationError(
                "no trainer has initialised the weight transfer.",
                code="config.no_publisher",
                action="Make a holdfast.inference.Publisher first.",
            )
        staged, group, timeout_s = self._staged, self._group, self._start.timeout_s
        staged.is_whole = False
        if update.drop:
            return
        if update.path is not None:
            target = parse(update.path)
            loaded = attempt(lambda: self._loaded(staged, target, update, timeout_s))
            moved = told(loaded, lambda report: MovedBytes(report.read_nbytes, report.needed_nbytes))
            agree_on_bytes(group, moved, timeout_s)
        else:
            ranks = all_ranks(self._start.trainer_ranks, sum(self._start.num_workers))
            move(group, ranks, None, {LIVE: staged.target()}, timeout_s, self._kept)
        staged.is_whole = True

    def _loaded(self, staged: StagedVersion, target: Selection, update: VersionUpdate, timeout_s: float) -> LoadReport:
        """Load the parts of a checkpoint. Not collective: the job of a worker may have a process group with others."""
        alone = Channel(None, rank=0, world_size=1, label="load")
        options = LoadOptions(select=update.under or None, ignores_unexpected=not update.under)
        into = {update.under: staged.target()} if update.under else staged.target()
        report = load_over(alone, Deadline(timeout_s), target, into, options, ranks=(0,))
        # After the load: a checkpoint of another system that was replaced before it is another one now, too.
        StoredSource(target.location, target.place, update.identity, "", update.fingerprint).open().check_unchanged()
        return report

    def finish(self) -> None:
        """Show the version that has arrived whole; without one, keep the last."""
        self._is_open = False
        if self._staged is not None and self._staged.is_whole:
            self._engine.apply(self._staged)
            self._staged.is_whole = False
            self.version += 1


def _trainers_store(start: UpdateStart) -> dist.TCPStore:
    """A client of the store that the trainer serves."""
    timeout_s = start.timeout_s
    try:  # it has been there for a while, so the workers are still awaited when they give up
        store = dist.TCPStore(start.host, start.port, is_master=False, timeout=timedelta(seconds=timeout_s / 2))
    except dist.DistError as error:
        raise StorageError(
            f"a worker of engine {start.engine} does not reach the trainer at {start.host}:{start.port}: {error}.",
            code="storage.engine",
            action="Give Publisher the host= at which workers reach its first rank.",
        ) from error
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def excess_key(engine: int) -> str:
    """The key in the trainer's store that a worker sets whose number is too high for its engine."""
    return f"holdfast-excess-workers/{engine}"


def wrong_number(engine: int, number: int, why: str) -> ConfigurationError:
    """The error about an engine that has not the `number` of workers that its trainer gave."""
    return ConfigurationError(
        f"engine {engine} has {count(number, 'worker')} by num_workers, but {why}.",
        code="config.num_workers",
        action="Give Publisher the number of workers of each engine, in the order of the clients.",
    )


def all_ranks(trainer: tuple[int, ...], num_workers: int) -> tuple[int, ...]:
    """The numbers by which layouts call the ranks of a group: those of the trainer's job, then those of the workers."""
    first = max(trainer) + 1
    return (*trainer, *range(first, first + num_workers))


def move(
    group: StoreGroup,
    ranks: tuple[int, ...],
    source: Mapping[str, object] | None,
    target: Mapping[str, object] | None,
    timeout_s: float,
    kept: TransferSource,
) -> MovedBytes:
    """Transfer between a trainer and workers; returns the bytes of all of them."""
    deadline = Deadline(timeout_s)
    channel = group.channel("publishing", deadline=deadline)
    report = transfer_over(channel, ranks, source, target, select=Globs(LIVE), deadline=deadline, kept=kept)
    return agree_on_bytes(group, MovedBytes(report.moved_nbytes, report.received_nbytes), timeout_s)


def agree_on_bytes(group: StoreGroup, moved: MovedBytes | Exception, timeout_s: float) -> MovedBytes:
    """The bytes that all processes moved; raises where one failed."""
    deadline = Deadline(timeout_s)
    channel = group.channel("the end of publishing", deadline=deadline)

    def total(each: Sequence[MovedBytes]) -> MovedBytes:
        return MovedBytes(sum(one.sent for one in each), sum(one.received for one in each))

    answer = channel.exchange("moved", moved, total, deadline, takes=MovedBytes, gives=MovedBytes)
    channel.await_readers(deadline)
    return answer


def agree_on_needs(
    group: StoreGroup, needs: WorkerNeeds | Exception, weights: Sequence[PublishedTensor], timeout_s: float
) -> AgreedNeeds:
    """Tell every process what all workers need; raises where a worker could not find out."""
    deadline = Deadline(timeout_s)
    channel = group.channel("discovering what workers need", deadline=deadline)
    answer = channel.exchange(
        "needs", needs, lambda each: _united(each, weights), deadline, takes=WorkerNeeds, gives=AgreedNeeds
    )
    channel.await_readers(deadline)
    return answer


def _united(workers: Sequence[WorkerNeeds], weights: Sequence[PublishedTensor]) -> AgreedNeeds:
    needed, distinct, unread = 0, 0, []
    for number, weight in enumerate(weights):
        boxes = [box for worker in workers for box in worker.boxes.get(number, ())]
        needed += weight.dtype.itemsize * sum(box.numel for box in boxes)
        distinct += weight.dtype.itemsize * sum(box.numel for box in disjoint(boxes))
        if not boxes:
            unread.append(weight.name)
    open_ranks = tuple(rank for rank, worker in enumerate(workers) if worker.is_open)
    return AgreedNeeds(needed, distinct, tuple(unread), open_ranks)
