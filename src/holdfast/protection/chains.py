"""A group rebuilds bytes of lost nodes: each range along a chain of nodes that ends where the bytes are wanted.

The first node of a chain multiplies its range by its factor and sends the product to the next one. Each node adds the
product of its own range, and sends the sum on. What the last one sends is the lost range. Nodes work at the same time,
each on another piece of the range, so that a chain takes hardly longer than one transfer; no node holds more than a
piece of anything that is not its own, and each one sends and receives as much as the others.

The pieces of a chain with other factors than 1 begin with a strip of the stripe (`erasure.STRIP_NBYTES`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import accumulate, islice, pairwise
from typing import NamedTuple

from holdfast.protection.erasure import STRIP_NBYTES, coefficients
from holdfast.protection.stripes import FileRange, PlacedRange, Striping


class LostRange(NamedTuple):
    """A range of a file of node `owner`, which is lost, and the node `receiver` that wants it."""

    owner: str
    data: FileRange
    receiver: str


class Hop(NamedTuple):
    """One node of a chain. It adds the product of `factor` with the first `nbytes` of the chain's range of row `row`,
    and sends the first `sum_nbytes` of the sum on: what follows is zeros. For a row of data, `parts` are the ranges of
    files of which its own bytes consist; a row of parity has none."""

    node: str
    row: int
    factor: int
    nbytes: int
    sum_nbytes: int
    parts: tuple[PlacedRange, ...]


class RebuildChain(NamedTuple):
    """The chain for the `nbytes` from `start` of a row of stripe `stripe`. Node `receiver`, which is the last of `hops`
    or none of them, takes `parts` of the sum: what is wanted."""

    stripe: int
    row: int
    start: int
    nbytes: int
    hops: tuple[Hop, ...]
    receiver: str
    parts: tuple[PlacedRange, ...]

    @property
    def transfers(self) -> Iterator[tuple[str, str, int]]:
        """The number of bytes that each node sends to each other one."""
        following = [*(hop.node for hop in self.hops[1:]), self.receiver]
        for hop, receiver in zip(self.hops, following, strict=True):
            if hop.node != receiver:
                yield hop.node, receiver, hop.sum_nbytes


def whole_line(striping: Striping, owner: str, receiver: str) -> list[LostRange]:
    """All files of a lost node, wanted by one node."""
    files = striping.line(owner).files
    return [LostRange(owner, FileRange(each.file, 0, each.nbytes), receiver) for each in files]


def rebuild_chains(striping: Striping, lost: Collection[str], wanted: Iterable[LostRange]) -> list[RebuildChain]:
    """The chains that rebuild all ranges of `wanted`, when the nodes `lost` have lost their data and their parity.

    Neighbouring ranges of a line with one receiver are rebuilt together if they follow each other.

    Raises:
        ValueError: the group has lost more nodes than it tolerates, an owner is not lost, or a range is of no file of
            its owner.
    """
    gone = striping.nodes.intersection(lost)
    if len(gone) > striping.losses:
        raise ValueError(f"{', '.join(sorted(gone))} are lost, but the parity of their group covers {striping.losses}")
    return [
        _chain(striping, gone, stripe=striping.stripe(owner, row), row=row, start=start, stop=stop, receiver=receiver)
        for owner, receiver, begin, end in _spans(striping, gone, wanted)
        for row, start, stop in _row_ranges(striping, owner, begin, end)
    ]


def _spans(striping: Striping, lost: frozenset[str], wanted: Iterable[LostRange]) -> list[tuple[str, str, int, int]]:
    """Owner, receiver, and range of the owner's line of all that is wanted."""
    found: list[tuple[str, str, int, int]] = []
    for owner, data, receiver in wanted:
        if owner not in lost:
            raise ValueError(f"node {owner} is not lost, or not of this group")
        start = striping.line(owner).offset(data)
        if found and found[-1][:2] == (owner, receiver) and found[-1][3] == start:
            start = found.pop()[2]
        found.append((owner, receiver, start, striping.line(owner).offset(data) + data.nbytes))
    return found


def _row_ranges(striping: Striping, owner: str, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """The rows in which bytes [begin, end) of a line lie, each with a range of it."""
    for row, (first, last) in enumerate(pairwise(striping.cuts(owner))):
        start, stop = max(begin, first), min(end, last)
        if start < stop:
            yield row, start - first, stop - first


def _chain(
    striping: Striping, lost: frozenset[str], *, stripe: int, row: int, start: int, stop: int, receiver: str
) -> RebuildChain:
    parts = striping.row_parts(stripe, row, start, stop)
    known = (each for each in range(len(striping.lines)) if striping.node(stripe, each) not in lost)
    sources = tuple(islice(known, striping.num_data))  # P rather than Q: its factors are all 1
    factors = coefficients(row, sources, striping.num_data)
    in_strips = any(factor != 1 for factor in factors)
    if in_strips:
        within = start % STRIP_NBYTES
        parts = tuple(PlacedRange(within + offset, data) for offset, data in parts)
        start -= within
        stop = min(_whole_strips(stop), striping.row_nbytes(stripe, striping.num_data))
    hops = []
    for source, factor in zip(sources, factors, strict=True):
        nbytes = min(stop, striping.row_nbytes(stripe, source)) - start
        if nbytes > 0:
            sum_nbytes = min(_whole_strips(nbytes), stop - start) if in_strips else nbytes
            own = striping.row_parts(stripe, source, start, stop) if source < striping.num_data else ()
            hops.append(Hop(striping.node(stripe, source), source, factor, nbytes, sum_nbytes, own))
    # Short ranges first: nobody sends zeros.
    hops.sort(key=lambda hop: (hop.node == receiver, hop.nbytes, hop.row))
    sums = accumulate((hop.sum_nbytes for hop in hops), max)
    in_order = tuple(hop._replace(sum_nbytes=nbytes) for hop, nbytes in zip(hops, sums, strict=True))
    return RebuildChain(stripe, row, start, stop - start, in_order, receiver, parts)


def _whole_strips(nbytes: int) -> int:
    return -(-nbytes // STRIP_NBYTES) * STRIP_NBYTES
