"""The read plan of several ranks: each byte that any of them needs is read by one of them. Pure.

What a rank needs is runs of bytes of data sections, as rows ``file, start, stop``. The runs of all ranks are united and
divided into chunks. One rank of a node, its *leader* for the chunk, brings it there, and gives it to those that want
some of it. It reads it from storage, or gets it from the leader of another node. All ranks compute the same plan from
the same needs, so no plan is exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from holdfast.geometry import Int64s

Bools = npt.NDArray[np.bool_]


class Seconds(NamedTuple):
    """How long reading takes at least: where nodes read for themselves, where each byte is read once and sent on."""

    apart: float
    once: float

    @property
    def favour_exchange(self) -> bool:
        """Whether the second way is the shorter one."""
        return self.once < self.apart


class Bandwidths(msgspec.Struct, frozen=True, array_like=True):
    """What a job's storage and network carry, in bytes per second: what one node reads at most, what all nodes together
    read at most, and what one node receives from others."""

    node_storage: float
    all_storage: float
    node_network: float

    def __post_init__(self) -> None:
        if not min(self.node_storage, self.all_storage, self.node_network) > 0:
            raise ValueError("bandwidths are positive")

    def seconds(self, nodes: Sequence[int], once: int) -> Seconds:
        """How long a load takes at least whose `nodes` need so many bytes each, and `once` different ones together.

        Both ways take as long as their slowest part: the storage of the busiest node, all storage together, and with an
        exchange what the busiest node receives.
        """
        most, total = max(nodes), sum(nodes)
        received = most - most * once / max(total, 1)
        return Seconds(
            max(most / self.node_storage, total / self.all_storage),
            max(once / len(nodes) / self.node_storage, once / self.all_storage, received / self.node_network),
        )

    def favour_exchange(self, nodes: Sequence[Int64s]) -> bool:
        """Whether a load is over sooner when each byte is read once and sent to the other nodes that need it; `nodes`
        are their needs."""
        return self.seconds([_num_bytes(runs) for runs in nodes], _num_bytes(united(nodes))).favour_exchange


@dataclass(frozen=True)
class Chunks:
    """What one node needs, in the order in which it comes: bytes ``[starts[i], stops[i])`` of the data section of file
    ``files[i]``, at most a buffer, which all nodes know as number ``numbers[i]``.

    ``leaders[i]`` is the index in `ranks` (those of the node) of the leader, and ``wanted[i, k]`` says whether the rank
    with index `k` needs some of it. The leader gets it from the rank ``senders[i]`` of another node, or, where that is
    -1, reads it and sends it to ``receivers[i]``, ranks of other nodes.
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


def divide_reads(ranks: Sequence[int], needs: Sequence[Int64s], *, chunk_nbytes: int, first_file: int = 0) -> Chunks:
    """Chunks of at most `chunk_nbytes` for the `ranks` of a node that reads all it needs by itself.

    Reading begins with `first_file` (nodes begin at different ones) and goes round. Of the ranks that need some of a
    chunk, the one that has least to read leads.
    """
    files, starts, stops = _divided(needs, chunk_nbytes, first_file)
    wanted = _wanted(files, starts, stops, needs)
    leaders = _least_loaded(wanted, stops - starts)
    count = len(files)
    none = np.full(count, -1, np.int64)
    return Chunks(tuple(ranks), np.arange(count), files, starts, stops, leaders, wanted, none, ((),) * count)


def divide_job_reads(
    nodes: Sequence[Sequence[int]],
    needs: Sequence[Sequence[Int64s]],
    node: int,
    *,
    chunk_nbytes: int,
    owners: Sequence[int] | None = None,
) -> Chunks:
    """Chunks for number `node` of the nodes of a job that reads each byte once; `nodes` are their ranks, and `needs`
    what each of these needs.

    The nodes that need some of a chunk take turns in reading one, and so do the ranks of a node in leading, whether
    they need it or not: so every rank knows who leads on another node. With `owners` each file is read by one rank, its
    owner, and by no other.
    """
    united_needs = [united(each) for each in needs]
    files, starts, stops = _divided(united_needs, chunk_nbytes, 0)
    wanting = _wanted(files, starts, stops, united_needs)
    numbers = np.arange(len(files))
    leaders = np.stack([_in_turn(ranks, numbers // len(nodes)) for ranks in nodes], axis=1)
    if owners is None:
        turns = numbers % np.maximum(wanting.sum(axis=1), 1)
        readers = np.argmax(np.cumsum(wanting, axis=1) > turns[:, None], axis=1)
    else:
        node_of = {rank: number for number, ranks in enumerate(nodes) for rank in ranks}
        reading = np.asarray(owners, np.int64)[files]
        readers = np.asarray([node_of[rank] for rank in reading.tolist()], np.int64)
        leaders[numbers, readers] = reading
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
    """Runs that hold just what some of `needs` hold, sorted and apart from each other."""
    return np.stack(_merged(needs, 0), axis=1)


def _merged(needs: Sequence[Int64s], first_file: int) -> tuple[Int64s, Int64s, Int64s]:
    runs = np.concatenate([np.zeros((0, 3), np.int64), *needs])
    runs = runs[np.lexsort((runs[:, 1], runs[:, 0], runs[:, 0] < first_file))]
    files, starts, stops = runs.T
    if not len(runs):
        return files, starts, stops
    # The furthest stop so far in the same file: each file's stops are lifted above those of the files before it.
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
    """For each chunk, whether one of `runs` (sorted, apart from each other) shares a byte with it."""
    # All files in one line, each behind the longest reach into the one before.
    known = np.unique(np.concatenate([files, runs[:, 0]]))
    reach = np.zeros(len(known) + 1, np.int64)
    here, there = np.searchsorted(known, files), np.searchsorted(known, runs[:, 0])
    np.maximum.at(reach, here + 1, stops)
    np.maximum.at(reach, there + 1, runs[:, 2])
    base = np.cumsum(reach)
    # The first run that ends behind the chunk's start, if there is one, begins before its end.
    behind = np.searchsorted(base[there] + runs[:, 2], base[here] + starts, side="right")
    begins = np.append(base[there] + runs[:, 1], np.iinfo(np.int64).max)
    found: Bools = begins[behind] < base[here] + stops
    return found


def _least_loaded(wanted: Bools, sizes: Int64s) -> Int64s:
    alone = np.where(wanted.sum(axis=1) == 1, wanted.argmax(axis=1), -1) if wanted.size else np.zeros(0, np.int64)
    leaders = alone.tolist()
    # What nobody else can read comes first, wherever it lies: it is known before anything is shared out.
    load = [int(sizes[alone == rank].sum()) for rank in range(wanted.shape[1])]
    for chunk in np.flatnonzero(alone < 0).tolist():
        leaders[chunk] = min(np.flatnonzero(wanted[chunk]).tolist(), key=load.__getitem__)
        load[leaders[chunk]] += int(sizes[chunk])
    return np.asarray(leaders, np.int64)


def _num_bytes(runs: Int64s) -> int:
    return int((runs[:, 2] - runs[:, 1]).sum())
