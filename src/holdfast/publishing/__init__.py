"""`transfer`: from one live layout to another. It is a save whose files are the memory of its ranks, and a load of it.

1. *describe*, *plan*: as in a save. Rank 0 sends the table of the state and the values to all ranks, and stores them
   nowhere.
2. *match*: as in a load, for the target.
3. *move*: as in a load in which each data file can be read only by the rank that holds it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from torch.distributed import ProcessGroup

from holdfast.agreement.assignment import WriteAssignment, sources_of
from holdfast.agreement.planner import Planner
from holdfast.agreement.planning import PlanCache, Planning
from holdfast.calls import PLAIN, TRANSFER, outer, refuse_nested
from holdfast.checkpoint.data_files import DataFiles
from holdfast.control.channel import Channel
from holdfast.control.deadline import Deadline
from holdfast.control.torch_store import default_channel, group_ranks
from holdfast.cooperative.reading import CooperativeReading
from holdfast.errors import IncompatibleError
from holdfast.format import manifest as fmt
from holdfast.format import values as value_codec
from holdfast.format.container import FileLayout
from holdfast.format.manifest import DecodedTable
from holdfast.format.patterns import Globs
from holdfast.loading.compared_names import Names, compared
from holdfast.loading.filled import note_refilled, partly_filled_on_errors
from holdfast.loading.filling import Filling, outside_inference_mode
from holdfast.mapping.parts import stored_tensors
from holdfast.phases import Stopwatch, attempt, done, told
from holdfast.publishing.announcing import ANSWERS, Announced, Announcing
from holdfast.publishing.distinct_memory import to_fill
from holdfast.publishing.live import NAME, LiveFile, live_files
from holdfast.reports import TransferReport
from holdfast.state.bind import bind
from holdfast.state.binding import Binding
from holdfast.state.flatten import FlatState, flatten
from holdfast.state.match import Terms
from holdfast.store.memory import FilesInMemory
from holdfast.store.timed import TimeLimit


@outer(TRANSFER)
def transfer(
    source_state: Mapping[str, object] | None,
    target_state: Mapping[str, object] | None,
    *,
    select: str | Sequence[str] | None = None,
    group: ProcessGroup | None = None,
    timeout_s: float = 600.0,
) -> TransferReport:
    """Fill `target_state` from `source_state` without files, whatever layouts the two have over the ranks.

    Blocking and collective over `group` (default: the job). A rank passes its part of both states, or None for a state
    of which it holds nothing: source and target may be on the same ranks, on other ranks, or overlap. On return, all
    targets are filled, and the sources may be changed again. Extra memory is 16 MiB per rank; data between ranks of one
    node goes through shared memory, and between nodes over TCP, once to each node that needs it.

    Names, dtypes and shapes must be the same on both sides, as in a strict `load`. The target is filled as in a load:
    tensors in place, entries of dicts and lists replaced in place, tuples rebuilt (``report.state``). `select` are
    globs of names of the target: names that they do not match are not filled, and the target need not have them.

    Plain tensors that several ranks hold under one name in the source are compared, as at a first `save`. While the
    source keeps its layout, later transfers in the group make no new plan for it.

    Source and target must not share memory, except where a rank passes the same part of a tensor in both: nothing is
    done for that part. Memory that one process shares with another is not recognised. An error after the comparison of
    names leaves targets partly filled, on every rank: no save takes them before a transfer or a load has filled them
    whole (``config.partly_filled``). Sources never change.

    Raises:
        StateError: a state could not be saved truthfully, ranks disagree about it, or tensors of the target share
            memory with each other or with the source (``state.overlap``).
        IncompatibleError: names, dtypes or shapes differ; the error lists them. Or globs match nothing.
        DeadlineError: ranks named in the message died, or did not answer within `timeout_s`.
        StorageError: a network or the store of the process group failed.
        ConfigurationError: code ``config.nested``: this thread is inside a call of a `Checkpointer`.
    """
    refuse_nested(TRANSFER, allowed=PLAIN)
    globs = None if select is None else Globs(select)
    deadline = Deadline(timeout_s)
    channel = default_channel("transfer", group, deadline=deadline)
    ranks = group_ranks(group)
    kept = _sources.setdefault(ranks, TransferSource())
    return transfer_over(channel, ranks, source_state, target_state, select=globs, deadline=deadline, kept=kept)


def transfer_over(
    channel: Channel,
    ranks: tuple[int, ...],
    source_state: Mapping[str, object] | None,
    target_state: Mapping[str, object] | None,
    *,
    select: Globs | None,
    deadline: Deadline,
    kept: TransferSource,
) -> TransferReport:
    """As `transfer`, between the ranks of `channel`, which layouts call by the numbers `ranks`. `kept` belongs to this
    group of ranks, and goes with its transfers."""
    with TimeLimit(deadline.for_storage_s) as limit:
        operation = _Transfer(channel, deadline, ranks, limit, kept)
        report = operation.run(_given(source_state), _given(target_state), select)
    channel.await_readers(deadline)
    return report


@dataclass
class TransferSource:
    """A rank's memory of the last transfer in a group: the plan of the source, and its data files. It is valid for
    every transfer by that plan. `live` has this rank's file only during a transfer, so that no memory of a state is
    kept alive."""

    known: PlanCache[DecodedTable] = field(default_factory=PlanCache)
    live: FilesInMemory = field(default_factory=lambda: FilesInMemory(NAME))
    files: DataFiles | None = None


#: The last transfer's source, by the ranks of the group.
_sources: dict[tuple[int, ...], TransferSource] = {}


class _BoundTransfer(NamedTuple):
    """The target of one rank, bound to the source."""

    files: DataFiles
    binding: Binding
    filling: Filling
    names: Names


class _Transfer:
    """One transfer on one rank. `ranks` are the global ranks of the group, in its order."""

    def __init__(
        self, channel: Channel, deadline: Deadline, ranks: tuple[int, ...], limit: TimeLimit, kept: TransferSource
    ) -> None:
        self._channel = channel
        self._deadline = deadline
        self._ranks = ranks
        self._rank = ranks[channel.rank]
        self._limit = limit
        self._watch = Stopwatch()
        self._source = kept
        known = self._source.known
        # Copies that differ are always an error, since any choice of one to publish would be arbitrary.
        self._planner = Planner(Announcing(), ranks, known.memory, what="transfer", strict=True)
        self._planning = Planning(
            channel, deadline, self._rank, self._planner, known, self._watch, answers=ANSWERS, compares_all=True
        )

    @outside_inference_mode()
    def run(self, source: Mapping[str, object], target: Mapping[str, object], select: Globs | None) -> TransferReport:
        """Transfer and report."""
        try:
            return self._run(source, target, select)
        finally:
            self._source.live.clear()

    def _run(self, source: Mapping[str, object], target: Mapping[str, object], select: Globs | None) -> TransferReport:
        number, world_size, walk = self._channel.rank, self._channel.world_size, self._source.known.walk
        announced, mine = self._planning.agree(lambda: flatten(source, rank=number, world_size=world_size, last=walk))
        with self._watch.phase("match"):
            matched = attempt(lambda: self._match(announced, mine.flat, target, select))
            self._channel.exchange(
                "match",
                told(matched, lambda bound: bound.names),
                lambda names: _compared(names, done(matched).files, announced),
                self._deadline,
                takes=Names,
                gives=Names,
            )
        bound = done(matched)
        together = self._together(bound.files)
        with partly_filled_on_errors(target, bound.binding, together, again="transfer or load it again"):
            with self._watch.phase("move"):
                cost = together.read(bound.filling.plan)
            with self._watch.phase("finish"):
                state = attempt(bound.filling.finish)
                self._channel.confirm("finish", state, self._deadline)
        note_refilled(done(state), bound.binding)
        return TransferReport(
            loaded=tuple(bound.binding.loaded),
            moved_nbytes=cost.read_nbytes,
            received_nbytes=bound.filling.needed_nbytes,
            seconds=self._watch.seconds,
            state=done(state),
        )

    def _match(
        self, announced: Announced, flat: FlatState, target: Mapping[str, object], select: Globs | None
    ) -> _BoundTransfer:
        """Learn the plan, offer this rank's data file to the reading, and match names. Changes no state."""
        files, share = self._learn(announced)
        for layout in share.layouts:
            self._show(files, layout, flat)
        with _in_words_of_transfer():
            binding = bind(
                target,
                stored_tensors(files.manifest),
                files.manifest.body.aliases,
                {**value_codec.decode(announced.values), **flat.own_nodes},
                strict=False,
                rank=self._channel.rank,
                world_size=self._channel.world_size,
                terms=Terms(select),
            )
        names = Names.of(binding, {"select": select})
        binding = replace(binding, targets=to_fill(flat.tensors, binding.targets, self._rank))
        return _BoundTransfer(files, binding, Filling(files, binding, {}, self._rank, self._deadline), names)

    def _learn(self, announced: Announced) -> tuple[DataFiles, WriteAssignment[DecodedTable]]:
        """The data files of the source, and this rank's share in them: the known ones if the plan is the same."""
        source, plan_id = self._source, announced.plan_id
        files, share = source.files, source.known.share
        if files is None or share is None or share.plan_id != plan_id:
            table = fmt.decode_table(announced.table, path=NAME)
            files = live_files(table, source.live, self._holders(table))
            share = WriteAssignment.in_manifest(plan_id, table, self._rank)
        source.files = files
        source.known.remember(share, self._planner.memory)
        return files, share

    def _holders(self, table: DecodedTable) -> Sequence[int]:
        """For each data file of the source, the number in the group of the rank that holds it."""
        order = np.argsort(self._ranks)
        holders: list[int] = order[np.searchsorted(self._ranks, table.writers, sorter=order)].tolist()
        return holders

    def _show(self, files: DataFiles, layout: FileLayout, flat: FlatState) -> None:
        sources = sources_of(files.manifest, layout, flat, self._rank)
        nbytes = layout.data_start + layout.data_nbytes
        live = LiveFile(sources, data_start=layout.data_start, nbytes=nbytes)
        self._source.live.add(files.manifest.file_name(layout.index), live)

    def _together(self, files: DataFiles) -> CooperativeReading:
        return CooperativeReading(files, self._limit, self._channel, self._deadline, verify=False)


def _given(state: Mapping[str, object] | None) -> Mapping[str, object]:
    return {} if state is None else state


@contextmanager
def _in_words_of_transfer() -> Iterator[None]:
    """A ``with`` block that words errors about differences in terms of a transfer: source and target."""
    try:
        yield
    except IncompatibleError as error:
        error.message = f"Source and target differ (the checkpoint is the source here). {error.message}"
        if error.code != "incompatible.select":
            error.action = "Give both states the same names, dtypes and shapes, or restrict the transfer with select=."
        raise


def _compared(ranks: Sequence[Names], files: DataFiles, announced: Announced) -> Names:
    stored, nodes = stored_tensors(files.manifest), value_codec.decode(announced.values)
    with _in_words_of_transfer():
        return compared(ranks, stored, nodes, strict=True)
