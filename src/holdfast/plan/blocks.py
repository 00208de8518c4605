"""The blocks of data files that nodes read, counted for all files and nodes. Pure.

A load reads whole blocks, each once per node however many ranks and tensors want some of it, and neighbouring blocks in
one request. Nodes that want the same blocks of a file are counted together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from holdfast.format.container import BLOCK_NBYTES, Files, num_blocks
from holdfast.geometry import Int64s
from holdfast.plan.exchange import Bools
from holdfast.plan.requirements import WantedKind

#: Largest size of one read request, where nodes read for each other.
REQUEST_NBYTES = 2 << 20
#: Most offsets of pieces and blocks that are in memory at once.
_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class PerFile:
    """Bytes and requests that all nodes together read from each data file."""

    nbytes: Int64s
    num_requests: Int64s


@dataclass(frozen=True)
class NodeReading:
    """The bytes that each node reads for itself, and the reads of each data file in two ways.

    `apart`: each node reads all it wants by itself. `once`: one node reads each block that several nodes want.
    """

    nodes: Int64s
    apart: PerFile
    once: PerFile


class _Classes(NamedTuple):
    """Classes of nodes that want the same blocks of a file.

    Node ``nodes[i]`` is of class ``of[i]``; ``counts`` has the number of nodes of each class, and ``rows`` the sets of
    nodes that each class belongs to. The last class has no nodes and belongs to all sets.
    """

    nodes: Int64s
    of: Int64s
    counts: Int64s
    rows: Bools


class _Touched(NamedTuple):
    """The blocks of a file that each of `sets` of nodes wants: a row per set, and an empty last column."""

    file: int
    nbytes: int
    sets: tuple[int, ...]
    blocks: Bools


def count_blocks(files: Files, wants: Sequence[WantedKind], members: Bools, *, apart_nbytes: int = 0) -> NodeReading:
    """Count the reads for `wants`; ``members[s]`` says which nodes are in set number ``s``. Nodes that read by
    themselves use requests of up to `apart_nbytes`, where that is more than `REQUEST_NBYTES`."""
    num_files = files.manifest.body.num_files
    reading = NodeReading(
        np.zeros(members.shape[1], np.int64),
        PerFile(*np.zeros((2, num_files), np.int64)),
        PerFile(*np.zeros((2, num_files), np.int64)),
    )
    known: dict[tuple[int, ...], _Classes] = {}
    for touched in _touched(files, wants, len(members)):
        classes = known.get(touched.sets)
        if classes is None:
            classes = known[touched.sets] = _classes(members[list(touched.sets)])
        unions = np.stack([touched.blocks[row].any(axis=0) for row in classes.rows])
        nbytes = _sizes(unions, touched.nbytes)
        reading.nodes[classes.nodes] += nbytes[classes.of]
        for per_file, weights, request_nbytes in (
            (reading.apart, classes.counts, max(apart_nbytes, REQUEST_NBYTES)),
            (reading.once, classes.counts == 0, REQUEST_NBYTES),
        ):
            per_file.nbytes[touched.file] = nbytes @ weights
            per_file.num_requests[touched.file] = _requests(unions, request_nbytes) @ weights
    return reading


def _classes(members: Bools) -> _Classes:
    nodes = np.flatnonzero(members.any(axis=0))
    numbers: dict[bytes, int] = {}
    of = np.asarray([numbers.setdefault(column.tobytes(), len(numbers)) for column in members.T[nodes]], np.int64)
    rows = np.frombuffer(b"".join(numbers), np.bool_).reshape(len(numbers), len(members))
    everything = np.ones((1, len(members)), np.bool_)
    return _Classes(nodes, of, np.bincount(of, minlength=len(numbers) + 1), np.concatenate([rows, everything]))


def _sizes(blocks: Bools, data_nbytes: int) -> Int64s:
    """The bytes of the blocks of each row; the last block of a file may be short."""
    beyond = (blocks.shape[1] - 1) * BLOCK_NBYTES - data_nbytes
    nbytes: Int64s = blocks.sum(axis=1) * BLOCK_NBYTES - blocks[:, -2] * beyond
    return nbytes


def _requests(blocks: Bools, request_nbytes: int) -> Int64s:
    """The requests of up to `request_nbytes` that read the blocks of each row."""
    width = blocks.shape[1]
    # No run continues in the next row, because the last column is empty.
    edges = np.flatnonzero(np.diff(blocks.reshape(-1), prepend=False))
    begins, lengths = edges[::2], edges[1::2] - edges[::2]
    requests = np.zeros(len(blocks), np.int64)
    np.add.at(requests, begins // width, -(-lengths * BLOCK_NBYTES // request_nbytes))
    return requests


def _touched(files: Files, wants: Sequence[WantedKind], num_sets: int) -> Iterator[_Touched]:
    """The wanted blocks of each file that any node reads from. Works on groups of files at a time, to bound memory."""
    wanted = np.zeros((files.manifest.body.num_files, num_sets), np.bool_)
    for want in wants:
        wanted[want.owners, want.sets] = True
    needed = np.flatnonzero(wanted.any(axis=1))
    if not len(needed):
        return
    tensors = np.unique(np.concatenate([want.tensors for want in wants]))
    positions = np.sort(files.position[tensors])
    sizes = files.columns(needed, positions[:0]).data_nbytes
    costs = len(positions) + wanted[needed].sum(axis=1) * (num_blocks(int(sizes.max())) + 1)
    turns = np.flatnonzero(np.diff(np.cumsum(costs) // _AT_ONCE)) + 1
    for chunk in np.split(needed, turns):
        yield from _touched_of(files, chunk, positions, wants, wanted[chunk])


def _touched_of(
    files: Files, chunk: Int64s, positions: Int64s, wants: Sequence[WantedKind], wanted: Bools
) -> Iterator[_Touched]:
    """The wanted blocks of the files `chunk`; ``wanted[f, s]`` says whether node set ``s`` wants any of file ``f``."""
    columns = files.columns(chunk, positions)
    widths = -(-columns.data_nbytes // BLOCK_NBYTES) + 1
    # The blocks of each file and set on one line, each followed by one empty place.
    lengths = np.where(wanted, widths[:, None], 0).reshape(-1)
    ends = np.cumsum(lengths)
    heads = (ends - lengths).reshape(wanted.shape)
    lows, highs = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for want in wants:
        first, last = np.searchsorted(want.owners, [chunk[0], chunk[-1] + 1])
        if first == last:
            continue
        rows = np.searchsorted(chunk, want.owners[first:last])
        offsets = columns.offsets[rows[:, None], np.searchsorted(positions, files.position[want.tensors])]
        itemsizes, line = files.itemsizes[want.tensors], heads[rows, want.sets[first:last], None]
        begins, stops = (offsets + each[first:last, None] * itemsizes for each in (want.firsts, want.lasts))
        lows.append((begins // BLOCK_NBYTES + line).reshape(-1))
        highs.append((-(-stops // BLOCK_NBYTES) + line).reshape(-1))
    count = int(ends[-1])
    edges = np.bincount(np.concatenate(lows), minlength=count) - np.bincount(np.concatenate(highs), minlength=count)
    blocks = np.cumsum(edges) > 0
    for row, file in enumerate(chunk.tolist()):
        sets = tuple(np.flatnonzero(wanted[row]).tolist())
        width = int(widths[row])
        head = int(heads[row, sets[0]])
        held = blocks[head : head + len(sets) * width].reshape(len(sets), width)
        yield _Touched(file, int(columns.data_nbytes[row]), sets, held)
