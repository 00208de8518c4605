"""The read plan of several ranks: one of them reads each byte that any of them needs. Pure.

A rank's needs are runs of bytes of data sections, as rows ``file, start, stop``. The plan unites the runs of all ranks
and divides them into chunks. One rank of a node, its *leader* for the chunk, brings the chunk to the node, and gives it
to the ranks that want some of it. The leader reads the chunk from storage, or receives it from the leader of another
node. All ranks compute the same plan from the same needs, so no plan is exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from holdfast.geometry import Int64s
from holdfast.options import check_positive

Bools = npt.NDArray[np.bool_]
#: Requests that each rank of a node gets before they become larger than a chunk, so that all have as much to read.
_MIN_REQUESTS = 4


class Seconds(NamedTuple):
    """The least time of a load: where each node reads for itself (`apart`), or each byte is read `once` and sent."""

    apart: float
    once: float

    @property
    def favour_exchange(self) -> bool:
        """Whether reading each byte once and sending it takes less time."""
        return self.once < self.apart


class Bandwidths(msgspec.Struct, frozen=True, array_like=True):
    """Bandwidths of a job's storage and network, in bytes per second.

    `node_storage` is the most that one node reads, `all_storage` the most that all nodes together read, `node_network`
    the most that one node receives from others.
    """

    node_storage: float
    all_storage: float
    node_network: float

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            check_positive(name, getattr(self, name), "bytes per second")

    def seconds(self, nodes: Sequence[int], once: int) -> Seconds:
        """The least time of a load in which the nodes need `nodes` bytes each, and `once` different bytes together.

        Each way takes as long as its slowest part: the storage of the busiest node, all storage together, and with an
        exchange the bytes that the busiest node receives.
        """
        most, total = max(nodes), sum(nodes)
        received = most - most * once / max(total, 1)
        return Seconds(
            max(most / self.node_storage, total / self.all_storage),
            max(once / len(nodes) / self.node_storage, once / self.all_storage, received / self.node_network),
        )

    def favour_exchange(self, nodes: Sequence[Int64s]) -> bool:
        """Whether a load ends sooner when one node reads each byte and sends it to the others that need it.

        `nodes` are the needs of each node.
        """
        return self.seconds([_num_bytes(runs) for runs in nodes], _num_bytes(united(nodes))).favour_exchange


@dataclass(frozen=True)
class Chunks:
    """The chunks that one node needs, in the order of their arrival.

    Chunk ``i`` is bytes ``[starts[i], stops[i])`` of the data section of file ``files[i]``, at most one buffer; all
    nodes know it by the number ``numbers[i]``. ``leaders[i]`` is the index of its leader in `ranks`, the ranks of the
    node, and ``wanted[i, k]`` says whether the rank with index `k` needs some of it. Where ``senders[i]`` is -1, the
    leader reads the chunk and sends it to ``receivers[i]``, ranks of other nodes; else it receives the chunk from the
    rank ``senders[i]`` of another node.
    """

    ranks: tuple[int, ...]
    numbers: Int64s
    files: Int64s
    starts: Int64s
    stops: Int64s
    leaders: Int64s
    wanted: Bools
    senders: Int64s
    receivers: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        return len(self.files)

    def consumers(self, chunk: int) -> list[int]:
        """The ranks of the node, other than the leader, that need some of a chunk."""
        leader = self.leaders[chunk]
        return [self.ranks[index] for index in np.flatnonzero(self.wanted[chunk]).tolist() if index != leader]


def divide_reads(
    ranks: Sequence[int],
    needs: Sequence[Int64s],
    *,
    chunk_nbytes: int,
    request_nbytes: int = 0,
    first_file: int = 0,
) -> Chunks:
    """Plan the reads of a node that reads all it needs by itself: chunks of at most `chunk_nbytes` for its `ranks`.

    Reading begins with `first_file` (nodes begin with different files), and after the last file continues with the
    first. Among the ranks that need some of a chunk, the one with the least to read leads. It leads the chunks that
    follow it, too, up to `request_nbytes`, so that it can read them by one request.
    """
    files, starts, stops = _divided(needs, chunk_nbytes, first_file)
    wanted = _wanted(files, starts, stops, needs)
    count = len(files)
    width = min(request_nbytes // chunk_nbytes, count // (len(ranks) * _MIN_REQUESTS))
    follows = (files[1:] == files[:-1]) & (starts[1:] == stops[:-1]) & (wanted[1:] == wanted[:-1]).all(axis=1)
    leaders = _least_loaded(wanted, stops - starts, _in_groups(follows, max(width, 1)))
    none = np.full(count, -1, np.int64)
    return Chunks(tuple(ranks), np.arange(count), files, starts, stops, leaders, wanted, none, ((),) * count)


def divide_job_reads(
    nodes: Sequence[Sequence[int]],
    needs: Sequence[Sequence[Int64s]],
    node: int,
    *,
    chunk_nbytes: int,
    holders: Sequence[int] | None = None,
) -> Chunks:
    """Plan the reads of a job that reads each byte once: the chunks for node number `node`.

    `nodes` are the ranks of each node, `needs` the needs of each of these ranks. The nodes that need some of a chunk
    take turns in reading chunks. The ranks of a node take turns in leading, whether they need the chunk or not, so
    every rank knows the leaders of other nodes. `holders` has for each file the only rank that can read it, or -1 where
    all can.
    """
    united_needs = [united(each) for each in needs]
    files, starts, stops = _divided(united_needs, chunk_nbytes, 0)
    wanting = _wanted(files, starts, stops, united_needs)
    numbers = np.arange(len(files))
    leaders = np.stack([_in_turn(ranks, numbers // len(nodes)) for ranks in nodes], axis=1)
    turns = numbers % np.maximum(wanting.sum(axis=1), 1)
    readers = np.argmax(np.cumsum(wanting, axis=1) > turns[:, None], axis=1)
    if holders is not None:
        node_of = {rank: number for number, ranks in enumerate(nodes) for rank in ranks}
        holder = np.asarray(holders, np.int64)[files]
        held = np.flatnonzero(holder >= 0)
        readers[held] = [node_of[rank] for rank in holder[held].tolist()]
        leaders[held, readers[held]] = holder[held]
    wanting[numbers, readers] = True
    here = np.flatnonzero(wanting[:, node])
    read_here = readers[here] == node
    elsewhere = wanting[here] & (np.arange(len(nodes)) != node)
    receivers = tuple(
        tuple(leaders[number][np.flatnonzero(row)].tolist()) if mine else ()
        for number, row, mine in zip(here.tolist(), elsewhere, read_here.tolist(), strict=True)
    )
    files, starts, stops = files[here], starts[here], stops[here]
    return Chunks(
        tuple(nodes[node]),
        here,
        files,
        starts,
        stops,
        np.searchsorted(nodes[node], leaders[here, node]),
        _wanted(files, starts, stops, needs[node]),
        np.where(read_here, -1, leaders[here, readers[here]]),
        receivers,
    )


def _in_turn(ranks: Sequence[int], turns: Int64s) -> Int64s:
    return np.asarray(ranks, np.int64)[turns % len(ranks)]


def united(needs: Sequence[Int64s]) -> Int64s:
    """The union of `needs`: sorted runs with gaps between them."""
    return np.stack(_merged(needs, 0), axis=1)


def _merged(needs: Sequence[Int64s], first_file: int) -> tuple[Int64s, Int64s, Int64s]:
    runs = np.concatenate([np.zeros((0, 3), np.int64), *needs])
    runs = runs[np.lexsort((runs[:, 1], runs[:, 0], runs[:, 0] < first_file))]
    files, starts, stops = runs.T
    if not len(runs):
        return files, starts, stops
    # The furthest stop so far in the same file. Each file's stops are lifted above those of the files before it, so
    # that one running maximum serves all.
    turn = np.r_[0, np.cumsum(files[1:] != files[:-1])]
    lift = turn * (int(stops.max()) + 1)
    reach = np.maximum.accumulate(stops + lift) - lift
    fresh = np.flatnonzero(np.r_[True, (turn[1:] != turn[:-1]) | (starts[1:] > reach[:-1])])
    return files[fresh], starts[fresh], reach[np.append(fresh[1:], len(runs)) - 1]


def _divided(needs: Sequence[Int64s], chunk_nbytes: int, first_file: int) -> tuple[Int64s, Int64s, Int64s]:
    files, starts, stops = _merged(needs, first_file)
    counts = -(-(stops - starts) // chunk_nbytes)
    rows = np.repeat(np.arange(len(files)), counts)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = starts[rows] + within * chunk_nbytes
    return files[rows], begins, np.minimum(begins + chunk_nbytes, stops[rows])


def _wanted(files: Int64s, starts: Int64s, stops: Int64s, needs: Sequence[Int64s]) -> Bools:
    """For each chunk and each of `needs`, whether they share a byte."""
    columns = [_touched(files, starts, stops, runs) for runs in needs]
    return np.stack(columns, axis=1) if columns else np.zeros((len(files), 0), np.bool_)


def _touched(files: Int64s, starts: Int64s, stops: Int64s, runs: Int64s) -> Bools:
    """For each chunk, whether one of `runs` (sorted, with gaps between them) shares a byte with it."""
    # Lay all files on one line, each behind the furthest byte of the one before.
    known = np.unique(np.concatenate([files, runs[:, 0]]))
    reach = np.zeros(len(known) + 1, np.int64)
    here, there = np.searchsorted(known, files), np.searchsorted(known, runs[:, 0])
    np.maximum.at(reach, here + 1, stops)
    np.maximum.at(reach, there + 1, runs[:, 2])
    base = np.cumsum(reach)
    # A run shares a byte with the chunk if the first run that ends behind the chunk's start begins before its end.
    behind = np.searchsorted(base[there] + runs[:, 2], base[here] + starts, side="right")
    begins = np.append(base[there] + runs[:, 1], np.iinfo(np.int64).max)
    found: Bools = begins[behind] < base[here] + stops
    return found


def _in_groups(follows: Bools, width: int) -> Int64s:
    """The first of the group of each chunk: groups are up to `width` chunks of which each but the first `follows` the
    one before."""
    numbers = np.arange(len(follows) + 1)
    runs = np.maximum.accumulate(np.where(np.r_[False, follows], 0, numbers))
    return numbers - (numbers - runs) % width


def _least_loaded(wanted: Bools, sizes: Int64s, groups: Int64s) -> Int64s:
    """The leader of each chunk; those of one group have the same."""
    alone = np.where(wanted.sum(axis=1) == 1, wanted.argmax(axis=1), -1) if wanted.size else np.zeros(0, np.int64)
    leaders = alone.tolist()
    # Count the chunks that only one rank wants first, wherever they lie, so that the shared ones balance them.
    load = [int(sizes[alone == rank].sum()) for rank in range(wanted.shape[1])]
    for chunk in np.flatnonzero(alone < 0).tolist():
        if groups[chunk] == chunk:
            leaders[chunk] = min(np.flatnonzero(wanted[chunk]).tolist(), key=load.__getitem__)
        else:
            leaders[chunk] = leaders[groups[chunk]]
        load[leaders[chunk]] += int(sizes[chunk])
    return np.asarray(leaders, np.int64)


def _num_bytes(runs: Int64s) -> int:
    return int((runs[:, 2] - runs[:, 1]).sum())
