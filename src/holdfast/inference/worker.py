"""The side of the inference engine: a worker that receives the parts it needs, and shows versions that are whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Protocol

import msgspec
import torch.distributed as dist
from torch import nn

from holdfast.control.deadline import Deadline
from holdfast.control.store_group import StoreGroup
from holdfast.decoding import converted
from holdfast.errors import ConfigurationError
from holdfast.format.patterns import Globs
from holdfast.geometry import Box
from holdfast.inference.needs import EngineNeeds, LoadWeights, StagedVersion, discover, disjoint
from holdfast.inference.weights import LIVE, PublishedTensor, WeightTable
from holdfast.loading import load
from holdfast.phases import attempt, told
from holdfast.publishing import TransferSource, transfer_over


class UpdateStart(msgspec.Struct, frozen=True):
    """The message of a publisher with `init_weight_transfer_engine`: where to meet, and which weights it publishes.

    The trainer has the ranks `trainer_ranks`; the workers of this engine come after them, from `first_worker` on.
    """

    host: str
    port: int
    trainer_ranks: tuple[int, ...]
    first_worker: int
    num_workers: int
    weights: WeightTable
    timeout_s: float


class VersionUpdate(msgspec.Struct, frozen=True):
    """The message of a publisher with `update_weights`: the checkpoint to read, and the part of it with the weights.

    Without a path, the weights come from the trainer. With `drop`, nothing comes, and the open update shows nothing.
    """

    path: str | None = None
    under: str = ""
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
    """One worker of an inference engine, as number `index` of those that are updated together.

    Its methods are the four phases of vLLM's weight transfer. `version` counts the versions that it has shown, and
    changes in `finish` alone, only where everything has arrived. Until then the model stays as it is, whatever dies.
    """

    def __init__(self, engine: EngineModel, *, index: int = 0) -> None:
        self.version = 0
        self._engine = engine
        self._index = index
        self._start: UpdateStart | None = None
        self._group: StoreGroup | None = None
        self._kept = TransferSource()
        self._staged: StagedVersion | None = None
        self._is_open = False

    def init(self, info: Mapping[str, object]) -> None:
        """Meet the trainer, and find out what this worker needs. Drops what an earlier trainer has sent."""
        start = converted(info, UpdateStart)
        store = dist.TCPStore(start.host, start.port, is_master=False, timeout=timedelta(seconds=start.timeout_s))
        world_size = len(start.trainer_ranks) + start.num_workers
        rank = len(start.trainer_ranks) + start.first_worker + self._index
        self._group = StoreGroup(store, rank=rank, world_size=world_size)
        self._start, self._kept, self._staged = start, TransferSource(), None
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
            loaded = attempt(lambda: load(update.path or "", {update.under: staged.target()}, select=update.under))
            moved = told(loaded, lambda report: MovedBytes(report.read_nbytes, report.needed_nbytes))
            agree_on_bytes(group, moved, timeout_s)
        else:
            ranks = all_ranks(self._start.trainer_ranks, self._start.num_workers)
            move(group, ranks, None, {LIVE: staged.target()}, timeout_s, self._kept)
        staged.is_whole = True

    def finish(self) -> None:
        """Show the version that has arrived whole; without one, keep the last."""
        self._is_open = False
        if self._staged is not None and self._staged.is_whole:
            self._engine.apply(self._staged)
            self._staged.is_whole = False
            self.version += 1


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
