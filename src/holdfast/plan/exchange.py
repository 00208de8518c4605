"""The read plan of several ranks: each byte that any of them needs is read by one of them. Pure.

What a rank needs is runs of bytes of data sections, as columns ``file, start, stop``. The runs of all ranks are united
and divided into chunks; each chunk is read by one of the ranks that need some of it, and given to the others. All
ranks compute the same plan from the same needs, so no plan is exchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from holdfast.geometry import Int64s


@dataclass(frozen=True)
class Chunks:
    """Bytes ``[starts[i], stops[i])`` of the data section of file ``files[i]``, in the order in which they are read.

    ``readers[i]`` is the index in `ranks` of the rank that reads chunk `i`; ``wanted[i, k]`` says whether the rank with
    index `k` needs some of it, which the reader always does.
    """

    ranks: tuple[int, ...]
    files: Int64s
    starts: Int64s
    stops: Int64s
    readers: Int64s
    wanted: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.files)

    def consumers(self, chunk: int) -> list[int]:
        """The ranks other than the reader that need some of a chunk."""
        wanted = self.wanted[chunk].copy()
        wanted[self.readers[chunk]] = False
        return [self.ranks[index] for index in np.flatnonzero(wanted)]


def divide_reads(needs: Mapping[int, Int64s], *, chunk_nbytes: int, first_file: int = 0) -> Chunks:
    """Chunks of at most `chunk_nbytes` that hold all bytes that the ranks need, by rank.

    Reading begins with `first_file` (nodes begin at different ones) and goes round. Of the ranks that need some of a
    chunk, the one that has least to read so far reads it.
    """
    ranks = tuple(sorted(needs))
    files, starts, stops = _chunks([needs[rank] for rank in ranks], chunk_nbytes, first_file)
    wanted = np.zeros((len(files), len(ranks)), np.bool_)
    for index, rank in enumerate(ranks):
        wanted[:, index] = _touched(files, starts, stops, needs[rank])
    return Chunks(ranks, files, starts, stops, _readers(wanted, stops - starts), wanted)


def _chunks(needs: Sequence[Int64s], chunk_nbytes: int, first_file: int) -> tuple[Int64s, Int64s, Int64s]:
    runs = np.concatenate([np.zeros((0, 3), np.int64), *needs])
    runs = runs[np.lexsort((runs[:, 1], runs[:, 0], runs[:, 0] < first_file))]
    files, starts, stops = runs.T
    if not len(runs):
        return files, starts, stops
    # The furthest stop so far in the same file: sorted by file, each file's stops are lifted above those before it.
    turn = np.r_[0, np.cumsum(files[1:] != files[:-1])]
    lift = turn * (int(stops.max()) + 1)
    reach = np.maximum.accumulate(stops + lift) - lift
    fresh = np.flatnonzero(np.r_[True, (turn[1:] != turn[:-1]) | (starts[1:] > reach[:-1])])
    files, starts, stops = files[fresh], starts[fresh], reach[np.append(fresh[1:], len(runs)) - 1]
    counts = -(-(stops - starts) // chunk_nbytes)
    rows = np.repeat(np.arange(len(fresh)), counts)
    begins = starts[rows] + (np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)) * chunk_nbytes
    return files[rows], begins, np.minimum(begins + chunk_nbytes, stops[rows])


def _touched(files: Int64s, starts: Int64s, stops: Int64s, runs: Int64s) -> npt.NDArray[np.bool_]:
    """For each chunk, whether one of `runs` (sorted, apart from each other) shares a byte with it."""
    found = np.zeros(len(files), np.bool_)
    for file in np.unique(runs[:, 0]):
        mine, here = runs[runs[:, 0] == file], files == file
        # The first run that ends behind the chunk's start, if there is one, begins before its end.
        behind = np.searchsorted(mine[:, 2], starts[here], side="right")
        begins = np.append(mine[:, 1], np.iinfo(np.int64).max)
        found[here] = begins[behind] < stops[here]
    return found


def _readers(wanted: npt.NDArray[np.bool_], sizes: Int64s) -> Int64s:
    readers = np.zeros(len(sizes), np.int64)
    load = [0] * wanted.shape[1]
    for chunk, (row, size) in enumerate(zip(wanted, sizes.tolist(), strict=True)):
        reader = min(np.flatnonzero(row).tolist(), key=load.__getitem__)
        readers[chunk] = reader
        load[reader] += size
    return readers
