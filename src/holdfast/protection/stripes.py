"""How the sealed files of a group of nodes are laid out in stripes, each with parity on other nodes than its data.

A group has g nodes and tolerates p losses, one or two. The data files of a node, one after another, are its *line*. The
line is cut into g - p *segments* of one size, of which the last may be shorter or empty. There are g stripes. Stripe
number s has g *rows*, one from each node: row r lies on node (s + p + r) mod g. The first g - p rows are segments, and
the last p are parity: P on node s, and Q on node s + 1. So

- segment number r of any node is row r of its stripe, and has the same factor in Q in all stripes;
- each node holds p rows of parity, as long as the longest segment in their stripes;
- each node sends each of its segments to p other nodes.

Nothing is sent or read of a row beyond its end: it counts as zeros.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

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


@dataclass(frozen=True)
class NodeLine:
    """The line of node `node`: its data files, each with its number in the checkpoint and its bytes."""

    node: str
    files: tuple[tuple[int, int], ...]

    @cached_property
    def _starts(self) -> list[int]:
        """The start of each file in the line, and the end of the line."""
        return list(accumulate((nbytes for _, nbytes in self.files), initial=0))

    @property
    def nbytes(self) -> int:
        """The bytes of all files."""
        return self._starts[-1]

    def offset(self, data: FileRange) -> int:
        """Where a range of one of the files begins in the line; ValueError unless the range lies in that file."""
        number = self._numbers.get(data.file)
        if number is None or data.start < 0 or data.nbytes < 0 or data.start + data.nbytes > self.files[number][1]:
            raise ValueError(f"node {self.node} has no {data}")
        return self._starts[number] + data.start

    @cached_property
    def _numbers(self) -> dict[int, int]:
        return {file: number for number, (file, _) in enumerate(self.files)}

    def ranges(self, start: int, stop: int) -> Iterator[PlacedRange]:
        """The ranges of files that lie at [start, stop) of the line, with their offsets from `start`."""
        number = max(0, bisect_right(self._starts, start) - 1)
        position = start
        while position < min(stop, self.nbytes):
            file, nbytes = self.files[number]
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
        return self._line(stripe, row).node

    def _line(self, stripe: int, row: int) -> NodeLine:
        return self.lines[(stripe + self.losses + row) % len(self.lines)]

    def stripe(self, node: str, row: int) -> int:
        """The stripe in which `node` has a row of that number."""
        return (self._numbers[node] - self.losses - row) % len(self.lines)

    def line(self, node: str) -> NodeLine:
        """The line of a node of the group."""
        return self.lines[self._numbers[node]]

    def cut_nbytes(self, node: str) -> int:
        """The bytes of each segment of the line of `node` but the last ones."""
        return -(-self.line(node).nbytes // self.num_data)

    def row_nbytes(self, stripe: int, row: int) -> int:
        """The bytes of a row of a stripe, of data or of parity."""
        return self._segment_nbytes(stripe, row) if row < self.num_data else self._parity_nbytes[stripe]

    def _segment_nbytes(self, stripe: int, row: int) -> int:
        line = self._line(stripe, row)
        size = self.cut_nbytes(line.node)
        return max(0, min(size, line.nbytes - row * size))

    def row_parts(self, stripe: int, row: int, start: int, stop: int) -> tuple[PlacedRange, ...]:
        """The ranges of files that are bytes [start, stop) of a row of data."""
        line = self._line(stripe, row)
        begin = row * self.cut_nbytes(line.node)
        stop = min(stop, self._segment_nbytes(stripe, row))
        return tuple(line.ranges(begin + start, begin + stop))

    def shares(self, sender: str) -> Iterator[ParityShare]:
        """What `sender` sends to the holders of parity: all its bytes, `losses` times."""
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
