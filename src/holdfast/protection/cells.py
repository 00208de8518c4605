"""Nodes in cells: each node of a cell protects the others of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from holdfast.protection.neighbourhood import Numbers, Relation

Cell: TypeAlias = list[int]


def stripe(order: Sequence[int], numbers: Numbers, num_cells: int) -> list[Cell]:
    """The nodes in `order`, in `num_cells` cells of sizes that differ by one at most. The domains, whose `numbers` are
    given, are spread as evenly as can be."""
    grouped = sorted(order, key=lambda node: numbers[node])  # stable: inside a domain in the given order
    return [grouped[first::num_cells] for first in range(num_cells)]


def take_apart(order: Sequence[int], numbers: Numbers, num_taken: int) -> tuple[Cell, list[int]]:
    """`num_taken` nodes, one after another from the domain that has most nodes left, and the other nodes."""
    left: dict[int, list[int]] = {}
    for node in order:
        left.setdefault(int(numbers[node]), []).append(node)
    taken = [max(reversed(left.values()), key=len).pop() for _ in range(num_taken)]
    rest = set(taken)
    return sorted(taken, key=order.index), [node for node in order if node not in rest]


def most_of_a_domain(cells: Sequence[Cell], numbers: Numbers) -> int:
    """The most nodes of one domain in one cell."""
    return max((int(np.bincount(numbers[cell]).max()) for cell in cells), default=0)


def part_groups(cells: Sequence[Cell], numbers: Numbers, related: Relation, *, limit: int) -> list[Cell]:
    """The cells after swaps of nodes that leave fewer related nodes in one cell, as far as swaps find. No swap puts
    more than `limit` nodes of one domain into one cell."""
    if not related.any():
        return list(cells)
    nodes = [node for cell in cells for node in cell]
    swaps = _Swaps([len(cell) for cell in cells], numbers[nodes], related[np.ix_(nodes, nodes)], limit)
    waiting = list(range(len(nodes)))
    while waiting:
        waiting = [moved for node in waiting for moved in swaps.improve(node)]
    return [[nodes[place] for place in cell] for cell in swaps.cells]


class _Swaps:
    """Nodes 0, 1, ... in cells of the given sizes, which are swapped. Each swap lowers the number of related pairs in
    cells, so there is an end."""

    def __init__(self, sizes: Sequence[int], numbers: Numbers, related: Relation, limit: int) -> None:
        ends = np.cumsum(sizes).tolist()
        self.cells = [list(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
        self._numbers = numbers
        self._related = related.astype(np.int16)
        self._limit = limit
        self._cell_of = np.repeat(np.arange(len(sizes)), sizes)
        self._counts = np.zeros((len(sizes), int(numbers.max()) + 1), dtype=np.int32)
        self._conflicts = np.zeros(len(numbers), dtype=np.int32)
        for number in range(len(sizes)):
            self._record(number)

    def _record(self, number: int) -> None:
        cell = self.cells[number]
        self._cell_of[cell] = number
        self._counts[number] = np.bincount(self._numbers[cell], minlength=self._counts.shape[1])
        self._conflicts[cell] = self._related[np.ix_(cell, cell)].sum(axis=1)

    def improve(self, node: int) -> tuple[int, ...]:
        """Swap `node` with the node that lowers the number of related pairs most. Returns the nodes that moved."""
        if not self._conflicts[node]:
            return ()
        here, related = self._cell_of[node], self._related[node]
        in_cells = np.bincount(self._cell_of, related, minlength=len(self.cells))
        after = in_cells[self._cell_of] + self._related[self.cells[here]].sum(axis=0) - 2 * related
        gain = self._conflicts[node] + self._conflicts - after
        others = np.flatnonzero((gain > 0) & (self._cell_of != here))
        others = others[self._fit(node, others)]
        if not others.size:
            return ()
        other = int(others[gain[others].argmax()])
        there = self._cell_of[other]
        self.cells[here][self.cells[here].index(node)] = other
        self.cells[there][self.cells[there].index(other)] = node
        self._record(int(here))
        self._record(int(there))
        return node, other

    def _fit(self, node: int, others: Numbers) -> Relation:
        """Which of the `others` can be swapped with `node` without too many nodes of a domain in one cell."""
        mine, theirs = self._numbers[node], self._numbers[others]
        same = mine == theirs
        here = self._counts[self._cell_of[node], theirs] - same < self._limit
        there = self._counts[self._cell_of[others], mine] - same < self._limit
        return np.asarray(here & there)
