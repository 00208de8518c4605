"""`transfer`: from one live layout to another. A save whose files are the memory of its ranks, and a load of it.

1. *describe*, *plan*: as in a save. The manifest is told to all ranks, and stored nowhere; so are the values.
2. *match*: as in a load, for the target.
3. *move*: as in a load whose data files can be read by the ranks that own them, and by no others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec
import numpy as np
from torch.distributed import ProcessGroup

from holdfast.agreement.assignment import sources_of
from holdfast.agreement.coordinator import PlanMemory
from holdfast.agreement.local import Local
from holdfast.agreement.messages import Compare, Questions
from holdfast.checkpoint.reading import Checkpoint
from holdfast.control.channel import Channel, Deadline
from holdfast.control.torch_store import default_channel, group_ranks
from holdfast.cooperative.reading import Together
from holdfast.decoding import decode_msgpack
from holdfast.errors import IncompatibleError
from holdfast.format import manifest as fmt
from holdfast.format import values as value_codec
from holdfast.format.container import FileLayout
from holdfast.format.patterns import Globs
from holdfast.loading.filling import Filling
from holdfast.loading.names import Names, compared
from holdfast.mapping.parts import stored_tensors
from holdfast.phases import Stopwatch, attempt
from holdfast.publishing.live import NAME, LiveFile, live_checkpoint
from holdfast.publishing.overlap import to_fill
from holdfast.publishing.planner import Announced, Answer, Planner, Told
from holdfast.reports import TransferReport
from holdfast.state.bind import bind
from holdfast.state.binding import Binding
from holdfast.state.flatten import FlatState, flatten
from holdfast.state.gather import Remembered
from holdfast.state.match import Terms
from holdfast.store.memory import FilesInMemory
from holdfast.store.timed import TimedStore


def transfer(
    source_state: Mapping[str, object] | None,
    target_state: Mapping[str, object] | None,
    *,
    select: str | Sequence[str] | None = None,
    group: ProcessGroup | None = None,
    timeout_s: float = 600.0,
) -> TransferReport:
    """Fill `target_state` from `source_state`, however each of them is laid out over the ranks, through no file.

    Blocking and collective over `group` (default: the job). A rank passes its part of both states, or None for a state
    of which it holds nothing: the ranks of source and target may be the same, some the same, or others. When it
    returns, all targets are filled, and the sources may be changed again. Extra memory is 16 MiB per rank; data between
    ranks of one node goes through shared memory, and between nodes over TCP, once to each node that needs it.

    Names, dtypes and shapes must be the same on both sides, as in a strict `load`. The target is filled as in a load:
    tensors in place, entries of dicts and lists replaced in place, tuples rebuilt (``report.state``). `select` are
    globs of names of the target: what they do not match is neither filled, nor needed in it.

    Plain tensors that several ranks hold under one name in the source are compared, as at a first `save`. While the
    source keeps its layout, later transfers in the group make no new plan of it.

    Source and target must not share memory, except where a rank holds one part of a tensor as both: that stays as it
    is. Memory that one process shares with another is not recognised. An error after names were compared leaves targets
    partly filled, on every rank; sources never change.

    Raises:
        StateError: a state could not be saved truthfully, ranks disagree about it, or tensors of the target have memory
            in common, with each other or with the source (``state.overlap``).
        IncompatibleError: names, dtypes or shapes differ; lists them. Globs that match nothing.
        DeadlineError: ranks named in the message died, or did not answer within `timeout_s`.
        StorageError: a network or the store of the process group failed.
    """
    globs = None if select is None else Globs(select)
    deadline = Deadline(timeout_s)
    channel = default_channel("transfer", group, deadline=deadline)
    live = FilesInMemory(NAME)
    with TimedStore(live, timeout_s=deadline.for_storage_s) as storage:
        operation = _Transfer(channel, deadline, group_ranks(group), live, storage)
        return operation.run(_given(source_state), _given(target_state), globs)


@dataclass(frozen=True)
class _Plan:
    """What a rank knows of the last transfer in a group: the source, the data file that it owns, and, on rank 0, of
    all ranks. Holds for every transfer by one plan, and keeps no memory of a state alive."""

    plan_id: str
    checkpoint: Checkpoint
    layout: FileLayout | None
    walk: Sequence[Remembered]
    memory: PlanMemory | None


#: By the ranks of a group.
_plans: dict[tuple[int, ...], _Plan] = {}


class _Bound(NamedTuple):
    """The target of one rank, bound to the source."""

    binding: Binding
    filling: Filling


class _Transfer:
    """One transfer on one rank. `ranks` are the global ranks of the group, in its order; `live` is in `storage`."""

    def __init__(
        self, channel: Channel, deadline: Deadline, ranks: tuple[int, ...], live: FilesInMemory, storage: TimedStore
    ) -> None:
        self._channel = channel
        self._deadline = deadline
        self._ranks = ranks
        self._rank = ranks[channel.rank]
        self._live = live
        self._storage = storage
        self._planner: Planner | None = None
        self._watch = Stopwatch()

    def run(self, source: Mapping[str, object], target: Mapping[str, object], select: Globs | None) -> TransferReport:
        """Transfer and report."""
        last = _plans.get(self._ranks)
        local: list[Local] = []
        with self._watch.phase("describe"):
            described = attempt(lambda: self._describe(source, last, local))
            answer = self._channel.exchange(
                "describe", described, lambda told: self._ask(told, local[0]), self._deadline
            )
        mine = local[0]
        with self._watch.phase("plan"):
            announced = self._announced(answer, mine)
        bound: list[_Bound] = []
        with self._watch.phase("match"):
            matched = attempt(lambda: self._match(announced, last, mine.flat, target, select, bound))
            self._channel.exchange(
                "match", matched, lambda payloads: self._compare(payloads, announced), self._deadline
            )
        plan, (binding, filling) = _plans[self._ranks], bound[0]
        with self._watch.phase("move"):
            cost = self._together(plan.checkpoint).read(filling.plan)
        state: list[object] = []
        with self._watch.phase("finish"):
            self._channel.collect("finish", attempt(lambda: _finish(filling, state)), self._deadline)
        return TransferReport(
            loaded=tuple(binding.loaded),
            moved_nbytes=cost.read_nbytes,
            received_nbytes=filling.needed_nbytes,
            seconds=self._watch.seconds,
            state=state[0],
        )

    def _describe(self, source: Mapping[str, object], last: _Plan | None, local: list[Local]) -> bytes:
        number, world_size = self._channel.rank, self._channel.world_size
        walk = () if last is None else last.walk
        flat = flatten(source, rank=number, world_size=world_size, last=walk)
        mine = Local.of(flat, number=number, rank=self._rank)
        local.append(mine)
        described = mine.describe(None, alone=world_size == 1)
        return msgspec.msgpack.encode(Told(described, "" if last is None else last.plan_id))

    def _ask(self, payloads: Sequence[bytes], mine: Local) -> bytes:
        """On rank 0: the answer to what all ranks told. A plan is used again where all of them know it."""
        told = [decode_msgpack(payload, Told) for payload in payloads]
        last = _plans.get(self._ranks)
        known = last is not None and all(rank.plan_id == last.plan_id for rank in told)
        memory = last.memory if last is not None and known else None
        self._planner = Planner(self._storage, self._ranks, memory, mine.flat.nodes)
        return self._planner.ask([rank.described for rank in told])

    def _announced(self, answer: bytes, mine: Local) -> Announced:
        """Answer what rank 0 asks until it has announced the plan. All ranks follow the same answers."""
        while not isinstance(asked := decode_msgpack(answer, Answer), Announced):
            answer = self._replied(asked, mine)
        return asked

    def _replied(self, asked: Questions | Compare, mine: Local) -> bytes:
        phase = "compare" if isinstance(asked, Compare) else "plan"
        reply = attempt(lambda: mine.compare(asked) if isinstance(asked, Compare) else mine.answer(asked))
        return self._channel.exchange(phase, reply, lambda replies: self._go_on(asked, mine, replies), self._deadline)

    def _go_on(self, asked: Questions | Compare, mine: Local, replies: Sequence[bytes]) -> bytes:
        """On rank 0: what follows from the ranks' replies."""
        assert self._planner is not None, "rank 0 was told by all ranks before"
        return (
            self._planner.compare(replies) if isinstance(asked, Compare) else self._planner.plan(asked, mine, replies)
        )

    def _match(
        self,
        announced: Announced,
        last: _Plan | None,
        flat: FlatState,
        target: Mapping[str, object],
        select: Globs | None,
        bound: list[_Bound],
    ) -> bytes:
        """Learn the plan, show the data file of this rank, and match names. Changes no state."""
        plan = self._learn(announced, last, flat)
        if plan.layout is not None:
            self._show(plan.checkpoint, plan.layout, flat)
        with _in_words_of_transfer():
            binding = bind(
                target,
                stored_tensors(plan.checkpoint.manifest),
                plan.checkpoint.manifest.body.aliases,
                {**value_codec.decode(announced.values), **flat.own_nodes},
                strict=False,
                rank=self._channel.rank,
                world_size=self._channel.world_size,
                terms=Terms(select),
            )
        names = Names.of(binding, {"select": select})
        binding = replace(binding, targets=to_fill(flat.tensors, binding.targets, self._rank))
        bound.append(_Bound(binding, Filling(plan.checkpoint, binding, {}, self._rank, self._deadline)))
        return msgspec.msgpack.encode(names)

    def _learn(self, announced: Announced, last: _Plan | None, flat: FlatState) -> _Plan:
        memory = None if self._planner is None else self._planner.memory
        if last is not None and last.plan_id == announced.plan_id:
            plan = replace(last, walk=flat.remembered, memory=memory)
        else:
            checkpoint = live_checkpoint(announced.manifest)
            owners = checkpoint.manifest.sequence(checkpoint.manifest.body.writers).tolist()
            layout = checkpoint.files.layout(owners.index(self._rank)) if self._rank in owners else None
            plan = _Plan(announced.plan_id, checkpoint, layout, flat.remembered, memory)
        _plans[self._ranks] = plan
        return plan

    def _show(self, checkpoint: Checkpoint, layout: FileLayout, flat: FlatState) -> None:
        sources = sources_of(checkpoint.manifest, layout, flat, self._rank)
        nbytes = layout.data_start + layout.data_nbytes
        self._live.add(fmt.file_name(layout.index), LiveFile(sources, data_start=layout.data_start, nbytes=nbytes))

    def _compare(self, payloads: Sequence[bytes], announced: Announced) -> bytes:
        ranks = [decode_msgpack(payload, Names) for payload in payloads]
        stored, nodes = stored_tensors(_plans[self._ranks].checkpoint.manifest), value_codec.decode(announced.values)
        with _in_words_of_transfer():
            compared(ranks, stored, nodes, strict=True)
        return b""

    def _together(self, checkpoint: Checkpoint) -> Together:
        writers = checkpoint.manifest.sequence(checkpoint.manifest.body.writers)
        order = np.argsort(self._ranks)
        owners = order[np.searchsorted(self._ranks, writers, sorter=order)].tolist()
        return Together(checkpoint, self._storage, self._channel, self._deadline, verify=False, owners=owners)


def _given(state: Mapping[str, object] | None) -> Mapping[str, object]:
    return {} if state is None else state


@contextmanager
def _in_words_of_transfer() -> Iterator[None]:
    """Say in errors about what differs what it is here."""
    try:
        yield
    except IncompatibleError as error:
        error.message = f"Source and target differ (the checkpoint is the source here). {error.message}"
        if error.code != "incompatible.select":
            error.action = "Give both states the same names, dtypes and shapes, or say with select= what to transfer."
        raise


def _finish(filling: Filling, state: list[object]) -> bytes:
    state.append(filling.finish())
    return b""
