"""The save plan: from all ranks' layouts to a manifest. Pure.

The manifest itself says which rank writes which bytes: its owners are data files, and each data file has one
writer. Every rank derives its own share from the manifest as any reader would, so there is one algorithm for
order and offsets, and nobody has to send shares.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import msgspec
import numpy as np

from holdfast.errors import StateError
from holdfast.format import manifest as fmt
from holdfast.format.dtypes import DTYPES
from holdfast.format.partition import is_too_long
from holdfast.format.records import Place
from holdfast.geometry import Box, Int64s, Shape, flat_boxes
from holdfast.plan.divide import Claim, Divider, Division, RankGroup, as_grid, grid_boxes
from holdfast.plan.replicas import Cut, Writers, assign
from holdfast.wording import count

#: Still tensors with fewer bytes than this in all are written among the others: a second file would cost more.
_STILL_NBYTES = 1 << 20

#: Space for values is reserved in multiples of this, so that a counter that gains a digit does not change the plan.
_VALUES_GRANULE = 4096


@dataclass(frozen=True)
class RankValues:
    """Values in the file of `rank`: the bytes they need, and their paths, sorted."""

    rank: int
    nbytes: int
    paths: tuple[str, ...]

    @property
    def capacity(self) -> int:
        """The number of bytes that the file reserves for the values."""
        return -(-self.nbytes // _VALUES_GRANULE) * _VALUES_GRANULE


@dataclass(frozen=True)
class RankMessage:
    """One rank's message to the planner: the digest of its body, and its columns."""

    digest: bytes
    columns: bytes


@dataclass(frozen=True)
class CheckpointIdentity:
    """The fields of a manifest that tell one checkpoint from another of the same plan."""

    checkpoint_id: str
    run_id: str
    place: Place
    step: int
    created: float
    metrics: Mapping[str, float]


class _ClaimedTensor(msgspec.Struct, frozen=True, gc=False):
    """A tensor with the claims to it. It `is_still` if all ranks that hold some of it say that training leaves it
    alone."""

    dtype: str
    shape: Shape
    claims: tuple[Claim, ...]
    is_still: bool

    @property
    def nbytes(self) -> int:
        return DTYPES[self.dtype].itemsize * prod(self.shape)


@dataclass(frozen=True)
class SavePlan:
    """The plan of a save: which rank writes which part of which tensor. Several checkpoints may share it. `still` says
    of each tensor whether its parts go into the second files of their writers."""

    ranks: tuple[int, ...]
    tensors: Mapping[str, _ClaimedTensor]
    aliases: Mapping[str, str]
    divisions: Sequence[Division]
    writers: Sequence[Writers]
    still: Sequence[bool]

    def undeclared(self, alike: Int64s) -> tuple[str, ...]:
        """Names of tensors that have a part that several ranks hold without having declared it replicated.

        Ranks with equal numbers in `alike` (indexed by rank) count as one: their common parts have been compared.
        """
        several: dict[int, bool] = {}
        for division in self.divisions:
            if id(division) not in several:  # shared by all tensors divided alike
                several[id(division)] = not division.declared and _differ(alike[division.holders])
        return tuple(name for name, division in zip(self.tensors, self.divisions, strict=True) if several[id(division)])


def plan_save(
    messages: Sequence[RankMessage], bodies: Mapping[bytes, bytes], *, ranks: Sequence[int] | None = None
) -> SavePlan:
    """Plan a save of the state that all ranks described.

    `messages` has one entry per rank of the job (or per rank of `ranks`, where only these save), `bodies` the body of
    each digest in `messages`.

    Raises:
        StateError: ranks disagree about a tensor, or their pieces do not cover it exactly once.
    """
    numbers = tuple(range(len(messages)) if ranks is None else ranks)
    groups = _groups(messages, bodies, numbers)
    tensors = dict(sorted(_collect(groups).items()))
    divider = Divider(groups)
    divisions = [divider.division(name, tensor.shape, tensor.claims) for name, tensor in tensors.items()]
    itemsizes = [DTYPES[tensor.dtype].itemsize for tensor in tensors.values()]
    still = _still(tensors.values())
    writers = _writers(divisions, itemsizes, still, max(numbers) + 1)
    return SavePlan(numbers, tensors, _aliases(groups, tensors), divisions, writers, still)


@dataclass(frozen=True)
class ManifestTemplate:
    """The common part of the manifests of all checkpoints of one plan: the `table` of the state. `still_files` are the
    numbers of its still files."""

    table: fmt.StateTable
    blobs: Sequence[bytes]
    still_files: frozenset[int] = frozenset()

    @staticmethod
    def of(plan: SavePlan, values: Sequence[RankValues]) -> ManifestTemplate:
        """The template for `plan`, with space for `values`."""
        tensors = plan.tensors.values()
        files = _PlannedFiles.of(plan, [block.rank for block in values])
        table = _PartitionTable()
        rows = zip(tensors, plan.divisions, plan.writers, plan.still, strict=True)
        partitions = tuple(
            table.add(tensor.shape, division, writer, files.still if still else files.moving)
            for tensor, division, writer, still in rows
        )
        dtypes: dict[str, int] = {}
        shapes: dict[Shape, int] = {}
        state = fmt.StateTable(
            world_size=len(plan.ranks),
            reader_features=(fmt.SMALL_LAST, *((fmt.STILL_FILES,) if files.are_still else ())),
            names=tuple(plan.tensors),
            dtypes=tuple(dtypes.setdefault(tensor.dtype, len(dtypes)) for tensor in tensors),
            dtype_table=tuple(dtypes),
            shapes=tuple(shapes.setdefault(tensor.shape, len(shapes)) for tensor in tensors),
            shape_table=tuple(shapes),
            partition_table=tuple(table.partitions),
            partitions=partitions,
            aliases=dict(plan.aliases),
            num_files=len(files.written_by),
            writers=table.sequences.add(files.written_by),
            values=tuple(
                fmt.ValueBlock(int(files.moving[block.rank]), block.capacity, block.paths) for block in values
            ),
            sequences=tuple(table.sequences.sequences),
        )
        return ManifestTemplate(state, table.sequences.blobs, files.are_still)

    def encode(
        self, identity: CheckpointIdentity, diverged: Sequence[str] = (), references: Sequence[fmt.Candidate] = ()
    ) -> bytes:
        """The bytes of the manifest of checkpoint `identity`; `diverged` are the sorted names of diverged tensors, and
        `references` the candidates of its still files."""
        body = fmt.Manifest(
            **msgspec.structs.asdict(self.table),
            checkpoint_id=identity.checkpoint_id,
            run_id=identity.run_id,
            place=(identity.place.epoch, identity.place.seq),
            step=identity.step,
            created=identity.created,
            metrics=dict(identity.metrics),
            diverged=tuple(diverged),
        )
        return fmt.encode(body.with_references(tuple(references)), self.blobs)

    def encode_table(self) -> bytes:
        """The bytes of the table alone, for readers of a state that no checkpoint stores."""
        return fmt.encode(self.table, self.blobs)


def encode_plan(
    plan: SavePlan, *, identity: CheckpointIdentity, values: Sequence[RankValues], diverged: Sequence[str] = ()
) -> bytes:
    """The bytes of the manifest of the checkpoint `identity` that `plan` writes."""
    return ManifestTemplate.of(plan, values).encode(identity, diverged)


def _still(tensors: Collection[_ClaimedTensor]) -> tuple[bool, ...]:
    """Whether each tensor goes into a still file: none does where they are too small."""
    total = sum(tensor.nbytes for tensor in tensors if tensor.is_still)
    return tuple(tensor.is_still and total >= _STILL_NBYTES for tensor in tensors)


def _writers(
    divisions: Sequence[Division], itemsizes: Sequence[int], still: Sequence[bool], num_ranks: int
) -> Sequence[Writers]:
    """The writers of each tensor. Those of still tensors do not depend on the others, so that they are the same ones
    in a later plan, when the optimizer has got its slots."""
    found: dict[int, Writers] = {}
    for kind in sorted(set(still)):
        numbers = [number for number, each in enumerate(still) if each == kind]
        chosen = assign([divisions[each] for each in numbers], [itemsizes[each] for each in numbers], num_ranks)
        found |= dict(zip(numbers, chosen, strict=True))
    return [found[number] for number in range(len(still))]


def _differ(rows: Int64s) -> bool:
    """Whether some row has different numbers."""
    return bool((rows != rows[:, :1]).any())


def _groups(messages: Sequence[RankMessage], bodies: Mapping[bytes, bytes], ranks: Sequence[int]) -> list[RankGroup]:
    """Ranks grouped by body; groups are in the order of their lowest ranks."""
    members: dict[bytes, list[tuple[int, bytes]]] = {}
    for rank, message in zip(ranks, messages, strict=True):
        members.setdefault(message.digest, []).append((rank, message.columns))
    return [
        RankGroup.of(
            bodies[digest], np.asarray([rank for rank, _ in group], np.int64), [columns for _, columns in group]
        )
        for digest, group in members.items()
    ]


def _collect(groups: Sequence[RankGroup]) -> dict[str, _ClaimedTensor]:
    """All tensors by name, with the claims to each. Raises `StateError` where dtypes or shapes differ between ranks."""
    tensors: dict[str, _ClaimedTensor] = {}
    for number, group in enumerate(groups):
        body = group.body.body
        still = {body.names[each] for each in body.still}
        for name, dtype_index, shape_index, spec in zip(body.names, body.dtypes, body.shapes, body.specs, strict=True):
            dtype, shape = body.dtype_table[dtype_index], body.shape_table[shape_index]
            known = tensors.get(name)
            if known is None:
                tensors[name] = _ClaimedTensor(dtype, shape, ((number, spec),), name in still)
                continue
            if (known.dtype, known.shape) != (dtype, shape):
                other = groups[known.claims[0][0]].ranks[0]
                raise StateError(
                    f"Tensor {name!r} is {known.dtype} {list(known.shape)} on rank {other}, "
                    f"but {dtype} {list(shape)} on rank {group.ranks[0]}.",
                    code="state.disagree",
                    action="Give different tensors different names.",
                    tensor=name,
                )
            claims = (*known.claims, (number, spec))
            tensors[name] = _ClaimedTensor(dtype, shape, claims, known.is_still and name in still)
    return tensors


def _aliases(groups: Sequence[RankGroup], tensors: Mapping[str, _ClaimedTensor]) -> dict[str, str]:
    aliases: dict[str, str] = {}
    for group in groups:
        for alias, name in group.body.body.aliases:
            if alias in tensors or aliases.setdefault(alias, name) != name:
                raise StateError(
                    f"Tensor {alias!r} is tied to {name!r} on rank {group.ranks[0]}, but not on every rank.",
                    code="state.disagree",
                    action="Tie the same tensors on all ranks that hold them.",
                    tensor=alias,
                )
    return dict(sorted(aliases.items()))


def _writing_ranks(writers: Sequence[Writers], value_ranks: Sequence[int], num_ranks: int) -> Int64s:
    """The ranks that write a data file: those with tensors or values to write."""
    writes = np.zeros(num_ranks, bool)
    writes[list(value_ranks)] = True
    for owners in {id(w.owners): w.owners for w in writers}.values():
        writes[owners] = True
    for writer in writers:
        for cut in writer.cut:
            writes[list(cut.ranks)] = True
    return np.flatnonzero(writes)


@dataclass(frozen=True)
class _PlannedFiles:
    """The data files of a plan: by rank, the number of its moving and of its still file, where it has one. `written_by`
    is the sequence ``writers`` of the manifest, and `are_still` the numbers of the still files."""

    moving: Int64s
    still: Int64s
    written_by: Int64s
    are_still: frozenset[int]

    @staticmethod
    def of(plan: SavePlan, value_ranks: Sequence[int]) -> _PlannedFiles:
        num_ranks, by_kind = max(plan.ranks) + 1, list(zip(plan.writers, plan.still, strict=True))
        moving = _writing_ranks([each for each, still in by_kind if not still], value_ranks, num_ranks)
        still = _writing_ranks([each for each, still in by_kind if still], (), num_ranks)
        keys = np.sort(np.concatenate([2 * moving, 2 * still + 1]))
        number = np.zeros(2 * num_ranks, np.int64)
        number[keys] = np.arange(len(keys))
        are_still = frozenset(np.flatnonzero(keys % 2).tolist())
        return _PlannedFiles(number[::2], number[1::2], keys if are_still else moving, are_still)


class _PartitionTable:
    """The distinct partitions of a manifest under construction."""

    def __init__(self) -> None:
        self.partitions: list[fmt.Partition] = []
        self.sequences = fmt.SequenceTable()
        self._index: dict[tuple[int, bytes], int] = {}
        self._by_owner_array: dict[tuple[int, int], int] = {}

    def add(self, shape: Shape, division: Division, writers: Writers, files: Int64s) -> int:
        """The index of the partition of a tensor with this division and these writers, whose files have the numbers
        `files`, by rank; adds it on first sight."""
        if writers.cut:
            return self._append(self._cut(shape, division, writers, files))
        quick = (id(division), id(writers.owners))  # tensors that are divided alike share these objects
        if quick not in self._by_owner_array:
            owners = files[writers.owners]
            key = (id(division), owners.tobytes())
            if key not in self._index:
                self._index[key] = self._append(self._whole_cells(division, owners))
            self._by_owner_array[quick] = self._index[key]
        return self._by_owner_array[quick]

    def _append(self, partition: fmt.Partition) -> int:
        self.partitions.append(partition)
        return len(self.partitions) - 1

    def _whole_cells(self, division: Division, owners: Int64s) -> fmt.Partition:
        if division.kind == "boxes":
            return self._boxes(division.geometry[0], owners)
        cuts = tuple(self.sequences.add(axis) for axis in division.geometry)
        if division.kind == "flat":
            return fmt.FlatCuts(cuts[0], self.sequences.add(owners))
        return fmt.Grid(cuts, self.sequences.add(owners))

    def _boxes(self, boxes: Int64s, owners: Int64s) -> fmt.Boxes:
        if is_too_long(len(boxes), boxes.shape[1] // 2):
            raise StateError(
                f"A tensor is held in {count(len(boxes), 'box', 'boxes')} that form no grid: too many for a "
                "reader to check.",
                code="state.too_many_boxes",
                action="Hold it in flat ranges, or in fewer and larger boxes.",
            )
        columns = [self.sequences.add(np.ascontiguousarray(column)) for column in boxes.T]
        num_axes = len(columns) // 2
        return fmt.Boxes(tuple(columns[:num_axes]), tuple(columns[num_axes:]), self.sequences.add(owners))

    def _cut(self, shape: Shape, division: Division, writers: Writers, files: Int64s) -> fmt.Partition:
        """The partition whose cells are cut further between replicas."""
        by_cell = {cut.cell: cut for cut in writers.cut}
        if division.kind == "flat":
            return self._cut_ranges(division.geometry[0].tolist(), writers, by_cell, files)
        if len(division.holders) == 1:
            return self._cut_whole(shape, writers.cut[0], files)
        boxes: list[tuple[int, ...]] = []
        ranks: list[int] = []
        for cell, box in enumerate(_cell_boxes(division)):
            cut = by_cell.get(cell)
            if cut is None:
                boxes.append((*box.start, *box.size))
                ranks.append(int(writers.owners[cell]))
                continue
            for low, high, rank in zip(cut.cuts, cut.cuts[1:], cut.ranks, strict=False):
                for _, part in flat_boxes(box.size, low, high):
                    start = tuple(a + b for a, b in zip(box.start, part.start, strict=True))
                    boxes.append((*start, *part.size))
                    ranks.append(rank)
        order = sorted(range(len(boxes)), key=boxes.__getitem__)
        rows = np.asarray([boxes[i] for i in order], np.int64)
        owners = files[np.asarray([ranks[i] for i in order], np.int64)]
        cuts = as_grid(rows, shape)
        if cuts is None:
            return self._boxes(rows, owners)
        return fmt.Grid(tuple(self.sequences.add(axis) for axis in cuts), self.sequences.add(owners))

    def _cut_whole(self, shape: Shape, cut: Cut, files: Int64s) -> fmt.Partition:
        """The partition of a whole tensor cut between its holders: a grid if all cuts are at rows, else flat cuts."""
        owners = self.sequences.add(files[np.asarray(cut.ranks, np.int64)])
        cuts, row = np.asarray(cut.cuts, np.int64), prod(shape[1:])
        if (cuts % row).any():
            return fmt.FlatCuts(self.sequences.add(cuts), owners)
        axes = (cuts // row, *(np.asarray([0, extent], np.int64) for extent in shape[1:]))
        return fmt.Grid(tuple(self.sequences.add(axis) for axis in axes), owners)

    def _cut_ranges(
        self, bounds: list[int], writers: Writers, by_cell: Mapping[int, Cut], files: Int64s
    ) -> fmt.FlatCuts:
        cuts, ranks = [0], []
        for cell, (low, high) in enumerate(itertools.pairwise(bounds)):
            cut = by_cell.get(cell)
            if cut is None:
                cuts.append(high)
                ranks.append(int(writers.owners[cell]))
            else:
                cuts.extend(low + at for at in cut.cuts[1:])
                ranks.extend(cut.ranks)
        owners = files[np.asarray(ranks, np.int64)]
        return fmt.FlatCuts(self.sequences.add(np.asarray(cuts, np.int64)), self.sequences.add(owners))


def _cell_boxes(division: Division) -> list[Box]:
    rows = division.geometry[0] if division.kind == "boxes" else grid_boxes(division.geometry)
    num_axes = rows.shape[1] // 2
    return [Box(tuple(row[:num_axes]), tuple(row[num_axes:])) for row in rows.tolist()]
