"""The layout of a group's sealed files in stripes, each with parity on other nodes than its data.

A group has g nodes and tolerates p losses, one or two. The data files of a node, one after another, are its *line*. The
line is cut into g - p *segments* of about one size. There are g stripes. Stripe number s has g *rows*, one from each
node: row r lies on node (s + p + r) mod g. The first g - p rows are segments, and the last p are parity: P on node s,
and Q on node s + 1. So

- segment number r of any node is row r of its stripe, and has the same factor in Q in all stripes;
- each node holds p rows of parity, as long as the longest segment in their stripes;
- each node sends each of its segments to p other nodes.

A line is cut only at ends of the blocks that have digests, so that the holder of a parity can verify what it adds.
Nothing is sent or read of a row beyond its end: it counts as zeros.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from holdfast.format.container import BLOCK_NBYTES
from holdfast.protection.erasure import MAX_NUM_DATA, coefficients, parity_nbytes


class FileRange(NamedTuple):
    """The `nbytes` from `start` of data file number `file` of a checkpoint."""

    file: int
    start: int
    nbytes: int


class PlacedRange(NamedTuple):
    """A range of a file, with its `offset` from the start of a range of a row."""

    offset: int
    data: FileRange


class ParityShare(NamedTuple):
    """The part of a node's data that goes into a row of parity: segment number `row` of node `sender`, for row
    `parity_row` of stripe `stripe`, which node `holder` keeps. The holder adds its product with `factor`. The
    `parts` of the segment follow each other without gaps, and have `nbytes` together."""

    stripe: int
    sender: str
    row: int
    holder: str
    parity_row: int
    factor: int
    nbytes: int
    parts: tuple[PlacedRange, ...]


class LineFile(NamedTuple):
    """Data file number `file` of a checkpoint. It has `nbytes`, of which the first `data_start` are its header."""

    file: int
    data_start: int
    nbytes: int


@dataclass(frozen=True)
class NodeLine:
    """The line of node `node`."""

    node: str
    files: tuple[LineFile, ...]

    @cached_property
    def _starts(self) -> list[int]:
        """The start of each file in the line, and the end of the line."""
        return list(accumulate((each.nbytes for each in self.files), initial=0))

    @cached_property
    def _numbers(self) -> dict[int, int]:
        return {each.file: number for number, each in enumerate(self.files)}

    @property
    def nbytes(self) -> int:
        """The bytes of all files."""
        return self._starts[-1]

    def cuts(self, num_segments: int) -> tuple[int, ...]:
        """The start of each of so many segments in the line, and the end of the line."""
        return tuple(self._cut(-(-number * self.nbytes // num_segments)) for number in range(num_segments + 1))

    def _cut(self, position: int) -> int:
        """The first end of a block with a digest, or of a header, that is not before `position`."""
        number = self._number_at(position)
        if number == len(self.files):
            return self.nbytes
        start, (_, data_start, nbytes) = self._starts[number], self.files[number]
        within = position - start
        if within <= data_start:
            return start + (data_start if within else 0)
        return start + min(data_start - (data_start - within) // BLOCK_NBYTES * BLOCK_NBYTES, nbytes)

    def _number_at(self, position: int) -> int:
        """The last file that begins at or before `position`; the number of files at the end of the line."""
        return len(self.files) if position >= self.nbytes else bisect_right(self._starts, position) - 1

    def offset(self, data: FileRange) -> int:
        """The offset of a range of one of the files in the line; ValueError unless the range lies in that file."""
        number = self._numbers.get(data.file)
        if number is None or data.start < 0 or data.nbytes < 0 or data.start + data.nbytes > self.files[number].nbytes:
            raise ValueError(f"node {self.node} has no {data}")
        return self._starts[number] + data.start

    def ranges(self, start: int, stop: int) -> Iterator[PlacedRange]:
        """The ranges of files that lie at [start, stop) of the line, with their offsets from `start`."""
        number, position = self._number_at(start), start
        while position < stop:
            file, _, nbytes = self.files[number]
            within = position - self._starts[number]
            taken = min(nbytes - within, stop - position)
            if taken:
                yield PlacedRange(position - start, FileRange(file, within, taken))
            position += taken
            number += 1


@dataclass(frozen=True)
class Striping:
    """The stripes of one group of nodes, for one generation. `lines` are in the order of the group, which is the same
    for all generations, and `losses` is one or two."""

    lines: tuple[NodeLine, ...]
    losses: int

    def __post_init__(self) -> None:
        if not 1 <= self.losses <= 2:
            raise ValueError(f"losses is {self.losses}, but parity exists for one or two losses")
        if not 1 <= self.num_data <= MAX_NUM_DATA:
            most = MAX_NUM_DATA + self.losses
            raise ValueError(f"a group has {self.losses + 1} to {most} nodes, not {len(self.lines)}")
        if len(self._numbers) < len(self.lines):
            raise ValueError("a node is twice in a group")

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {line.node: number for number, line in enumerate(self.lines)}

    @property
    def nodes(self) -> frozenset[str]:
        """The nodes of the group."""
        return frozenset(self._numbers)

    @property
    def num_data(self) -> int:
        """The number of rows of data in a stripe."""
        return len(self.lines) - self.losses

    @cached_property
    def _parity_nbytes(self) -> tuple[int, ...]:
        """The bytes of each row of parity, by stripe."""
        stripes, rows = range(len(self.lines)), range(self.num_data)
        return tuple(parity_nbytes(max(self._segment_nbytes(stripe, row) for row in rows)) for stripe in stripes)

    def node(self, stripe: int, row: int) -> str:
        """The node with a row of a stripe."""
        return self.lines[self._number(stripe, row)].node

    def _number(self, stripe: int, row: int) -> int:
        """The number of the node in the group."""
        return (stripe + self.losses + row) % len(self.lines)

    def stripe(self, node: str, row: int) -> int:
        """The stripe in which `node` has a row of that number."""
        return (self._numbers[node] - self.losses - row) % len(self.lines)

    def line(self, node: str) -> NodeLine:
        """The line of a node of the group."""
        return self.lines[self._numbers[node]]

    @cached_property
    def _cuts(self) -> tuple[tuple[int, ...], ...]:
        return tuple(line.cuts(self.num_data) for line in self.lines)

    def cuts(self, node: str) -> tuple[int, ...]:
        """The start of each segment in the line of `node`, and the end of the line."""
        return self._cuts[self._numbers[node]]

    def row_nbytes(self, stripe: int, row: int) -> int:
        """The bytes of a row of a stripe, of data or of parity."""
        return self._segment_nbytes(stripe, row) if row < self.num_data else self._parity_nbytes[stripe]

    def _segment_nbytes(self, stripe: int, row: int) -> int:
        cuts = self._cuts[self._number(stripe, row)]
        return cuts[row + 1] - cuts[row]

    def row_parts(self, stripe: int, row: int, start: int, stop: int) -> tuple[PlacedRange, ...]:
        """The ranges of files that are bytes [start, stop) of a row of data, as far as it has them."""
        number = self._number(stripe, row)
        begin, end = self._cuts[number][row : row + 2]
        return tuple(self.lines[number].ranges(begin + start, min(begin + stop, end)))

    def shares(self, sender: str) -> Iterator[ParityShare]:
        """The shares that `sender` sends to the holders of parity: all its bytes, `losses` times."""
        for row in range(self.num_data):
            stripe = self.stripe(sender, row)
            nbytes = self.row_nbytes(stripe, row)
            if nbytes:
                parts = self.row_parts(stripe, row, 0, nbytes)
                for parity_row in self.parity_rows:
                    holder = self.node(stripe, parity_row)
                    yield ParityShare(
                        stripe, sender, row, holder, parity_row, self.data_factors(parity_row)[row], nbytes, parts
                    )

    @property
    def parity_rows(self) -> range:
        """The numbers of the rows of parity of each stripe."""
        return range(self.num_data, len(self.lines))

    def data_factors(self, parity_row: int) -> Sequence[int]:
        """The factors of the rows of data in a row of parity."""
        return coefficients(parity_row, tuple(range(self.num_data)), self.num_data)

    def held_nbytes(self, holder: str) -> int:
        """The bytes of all rows of parity that `holder` keeps."""
        return sum(self._parity_nbytes[self.stripe(holder, row)] for row in self.parity_rows)
