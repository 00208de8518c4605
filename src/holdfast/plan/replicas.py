"""The writers of replicas: the holders of equal pieces write equal shares of their bytes.

All pieces with the same holders form one line of bytes, which is cut into equal shares for the least loaded holders. A
group has no more writers than shares of 32 MiB, so that small state is not scattered. A piece on a border between two
shares is cut: at a whole row of the piece where rows are small against a share (pieces stay boxes, and regular sharding
stays regular), else at an element. Pieces that nobody declared replicated are never cut, because their copies may
differ without anybody noticing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.geometry import Int64s
from holdfast.plan.divide import Division

#: Borders move to whole rows that are at most this part of a share.
_ROW_PART = 256
#: A group of pieces has at most one writer per this many bytes.
SHARE_NBYTES = 32 << 20


@dataclass(frozen=True)
class Cut:
    """A cell that several holders write: element ranges of the cell's own row-major order, with a writer for each."""

    cell: int
    cuts: tuple[int, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Writers:
    """The writers of a tensor: one rank per cell, except for the cells in `cut`."""

    owners: Int64s
    cut: tuple[Cut, ...] = ()


class _SharedCells:
    """The cells of all tensors that several ranks hold, as columns."""

    def __init__(self) -> None:
        self.sets: dict[bytes, int] = {}
        #: Per tensor: its number, cells, holder sets, bytes, and the smallest part that may be cut off (0: never cut).
        self.columns: list[tuple[Int64s, Int64s, Int64s, Int64s, Int64s]] = []
        self._of_division: dict[int, tuple[Int64s, Int64s, Int64s]] = {}

    def add(self, tensor: int, division: Division, itemsize: int) -> None:
        known = self._of_division.get(id(division))
        if known is None:
            distinct, inverse = np.unique(division.holders, axis=0, return_inverse=True)
            sets = np.asarray([self.sets.setdefault(row.tobytes(), len(self.sets)) for row in distinct], np.int64)
            rows = division.row_numels if division.declared else np.zeros(len(inverse), np.int64)
            known = (sets[inverse.reshape(-1)], division.numels, rows)
            self._of_division[id(division)] = known
        sets, numels, rows = known
        cells = np.arange(len(sets), dtype=np.int64)
        self.columns.append((np.full(len(sets), tensor), cells, sets, numels * itemsize, rows * itemsize))


def assign(divisions: Sequence[Division], itemsizes: Sequence[int], world_size: int) -> list[Writers]:
    """The writers of each tensor; a pure function of its arguments."""
    loads = np.zeros(world_size, np.int64)
    pieces = _SharedCells()
    writers: list[Writers] = []
    alone: dict[tuple[int, int], tuple[Writers, Int64s]] = {}
    for tensor, (division, itemsize) in enumerate(zip(divisions, itemsizes, strict=True)):
        if division.holders.shape[1] > 1:
            pieces.add(tensor, division, itemsize)
            writers.append(Writers(division.holders[:, 0].copy()))
            continue
        key = (id(division), itemsize)
        if key not in alone:
            owners = division.holders[:, 0]
            load = np.bincount(owners, weights=division.numels, minlength=world_size).astype(np.int64) * itemsize
            alone[key] = (Writers(owners), load)
        writers.append(alone[key][0])
        loads += alone[key][1]
    if pieces.sets:
        _share_out(pieces, loads, itemsizes, writers)
    return writers


def _share_out(pieces: _SharedCells, loads: Int64s, itemsizes: Sequence[int], writers: list[Writers]) -> None:
    tensors, cells, sets, nbytes, rows = (np.concatenate(column) for column in zip(*pieces.columns, strict=True))
    order = np.lexsort((cells, tensors, sets))
    tensors, cells, sets, nbytes, rows = (column[order] for column in (tensors, cells, sets, nbytes, rows))
    heads = np.flatnonzero(np.r_[True, np.diff(sets) != 0])
    ends = np.r_[heads[1:], len(sets)]
    totals = np.add.reduceat(nbytes, heads)
    holders = [np.unique(np.frombuffer(key, np.int64)) for key in pieces.sets]
    owners = np.empty(len(sets), np.int64)
    cuts: dict[int, list[Cut]] = {}
    for number in np.argsort(-totals, kind="stable").tolist():
        low, high = int(heads[number]), int(ends[number])
        chosen, share = _choose(holders[int(sets[low])], loads, int(totals[number]))
        after = np.cumsum(nbytes[low:high])
        before = after - nbytes[low:high]
        first, last = before // share, (after - 1) // share
        cuttable = rows[low:high] > 0
        owners[low:high] = chosen[np.where(cuttable, first, (before + after - 1) // 2 // share)]
        for at in np.flatnonzero((first != last) & cuttable).tolist():
            tensor = int(tensors[low + at])
            row = int(rows[low + at])
            granule = row if row * _ROW_PART <= share else itemsizes[tensor]
            ranges, ranks = _cut(int(before[at]), int(after[at]), share, chosen, granule)
            if len(ranks) == 1:
                owners[low + at] = ranks[0]
                continue
            elements = tuple(border // itemsizes[tensor] for border in ranges)
            cuts.setdefault(tensor, []).append(Cut(int(cells[low + at]), elements, ranks))
        np.add.at(loads, chosen, np.diff(np.minimum(np.arange(len(chosen) + 1) * share, int(totals[number]))))
    _keep(owners, order, cuts, pieces, writers)


def _keep(
    owners: Int64s, order: Int64s, cuts: dict[int, list[Cut]], pieces: _SharedCells, writers: list[Writers]
) -> None:
    """Set the writers of each tensor from `owners`, which are in the order of holder sets, and from `cuts`."""
    as_added = np.empty_like(owners)
    as_added[order] = owners
    low = 0
    for column, *_ in pieces.columns:
        high = low + len(column)
        if high > low:
            tensor = int(column[0])
            writers[tensor] = Writers(as_added[low:high].copy(), tuple(cuts.get(tensor, ())))
        low = high


def _choose(holders: Int64s, loads: Int64s, total: int) -> tuple[Int64s, int]:
    """The writers of a group, which are its least loaded holders, and the number of bytes for each."""
    num_writers = min(len(holders), -(-total // SHARE_NBYTES))
    chosen = np.sort(holders[np.argsort(loads[holders], kind="stable")[:num_writers]])
    return chosen, -(-total // num_writers)


def _cut(before: int, after: int, share: int, chosen: Int64s, granule: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Byte ranges of a piece at ``[before, after)`` of its group's line, and the writer of each."""
    cuts, ranks = [0], [int(chosen[before // share])]
    for number in range(before // share + 1, (after - 1) // share + 1):
        border = (number * share - before) // granule * granule
        if border > cuts[-1]:
            cuts.append(border)
            ranks.append(int(chosen[number]))
        else:  # the border falls into the first granule: nothing is left for the writer before
            ranks[-1] = int(chosen[number])
    cuts.append(after - before)
    return tuple(cuts), tuple(ranks)
