"""Divisions: the cells of a tensor and their holders, merged from the ranks' claims before writers are chosen.

A *claim* is one body's spec for one tensor, with the ranks that sent the body. All claims to a tensor must make up
one division: cells that cover the tensor exactly once, each with its holders.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from holdfast.errors import StateError
from holdfast.geometry import Int64s, Shape, coverage_fault
from holdfast.plan.body import DecodedBody, HeldParts, PiecesWire, PlacedWire, RankColumns, WholeWire
from holdfast.plan.layout import Mesh, Placement
from holdfast.plan.placements import placed_cells


@dataclass(frozen=True, eq=False)
class Division:
    """Cells of a tensor and their holders (``[cells, holders]``, ascending, padded at the end by repeating the last).

    ``kind`` says what ``geometry`` is: one array of cuts per axis (``grid``), one array of flat cuts (``flat``), or
    one array ``[cells, 2 * axes]`` of starts and sizes (``boxes``). Where holders are `declared` replicas, several of
    them may write parts of a cell; else one holder writes the whole cell, so that copies that differ are never mixed.
    """

    kind: str
    geometry: tuple[Int64s, ...]
    holders: Int64s
    declared: bool = True

    @property
    def numels(self) -> Int64s:
        """Elements of each cell."""
        if self.kind == "flat":
            return np.diff(self.geometry[0])
        if self.kind == "boxes":
            boxes = self.geometry[0]
            sizes: Int64s = boxes[:, boxes.shape[1] // 2 :].prod(axis=1)
            return sizes
        numels: Int64s = np.ones(1, np.int64)
        for cuts in self.geometry:
            numels = (numels[:, None] * np.diff(cuts)).reshape(-1)
        return numels

    @property
    def row_numels(self) -> Int64s:
        """Elements of one row (along the first axis) of each cell; 1 for flat ranges."""
        if self.kind == "flat" or not self.geometry:
            return np.ones(len(self.holders), np.int64)
        if self.kind == "boxes":
            boxes = self.geometry[0]
            rows: Int64s = self.numels // boxes[:, boxes.shape[1] // 2]
            return rows
        heights = np.diff(self.geometry[0])
        numels: Int64s = self.numels // np.repeat(heights, len(self.holders) // max(len(heights), 1))
        return numels


@dataclass(frozen=True, eq=False)
class RankGroup:
    """All ranks that sent one body, with their columns."""

    body: DecodedBody
    ranks: Int64s
    #: None where the body has no pieces.
    columns: RankColumns | None
    #: For each spec that is pieces, by index: the first spec with the same parts on all ranks.
    alike: Mapping[int, int]

    @staticmethod
    def of(encoded: bytes, ranks: Int64s, columns: Sequence[bytes]) -> RankGroup:
        """Decode a body and the columns of the ranks that share it."""
        body = DecodedBody(encoded)
        pieces = [(index, spec) for index, spec in enumerate(body.body.spec_table) if isinstance(spec, PiecesWire)]
        if not pieces:
            return RankGroup(body, ranks, None, {})
        decoded = RankColumns(ranks, columns)
        first = decoded.alike()
        known: dict[PiecesWire, int] = {}
        alike = {
            index: known.setdefault(PiecesWire(first[spec.number], spec.replicas), index) for index, spec in pieces
        }
        return RankGroup(body, ranks, decoded, alike)

    def held(self, spec: PiecesWire) -> list[HeldParts]:
        """The parts that the ranks hold of the tensors with that spec."""
        assert self.columns is not None
        return self.columns.parts(spec.number)


#: A claim: the number of the group, and the number of the spec in the group's body.
Claim = tuple[int, int]


class Divider:
    """Turns claims into divisions; equal claims to equally shaped tensors share one division."""

    def __init__(self, groups: Sequence[RankGroup]) -> None:
        self.groups = groups
        self._divisions: dict[tuple[tuple[Claim, ...], Shape], Division] = {}
        self._placed: dict[tuple[Mesh, tuple[Placement, ...], Shape], Division] = {}

    def division(self, name: str, shape: Shape, claims: tuple[Claim, ...]) -> Division:
        """The division of tensor `name`.

        Raises:
            StateError: parts are missing, overlap without being equal, or a rank of a mesh lacks the tensor.
        """
        claims = tuple((number, self.groups[number].alike.get(spec, spec)) for number, spec in claims)
        key = (claims, shape)
        division = self._divisions.get(key)
        if division is None:
            division = self._divisions[key] = self._combine(name, shape, claims)
        return division

    def _combine(self, name: str, shape: Shape, claims: tuple[Claim, ...]) -> Division:
        parts: list[Division] = []
        senders: dict[tuple[Mesh, tuple[Placement, ...]], set[int]] = {}
        for number, spec_number in claims:
            group = self.groups[number]
            spec = group.body.body.spec_table[spec_number]
            if isinstance(spec, PlacedWire):
                placed = group.body.placed(spec)
                key = (placed.mesh, placed.placements)
                if key not in senders:
                    grid = placed_cells(placed, shape)
                    parts.append(Division("grid", grid.cuts, grid.holders))
                senders.setdefault(key, set()).update(group.ranks.tolist())
            elif isinstance(spec, WholeWire):
                holders = group.ranks[:1] if spec.replicas == "first" else group.ranks
                parts.append(Division("grid", tuple(_whole_cuts(extent) for extent in shape), holders[None, :]))
            else:
                for held in group.held(spec):
                    parts.extend(_pieces(shape, held))
        for (mesh, _), ranks in senders.items():
            _check_senders(name, mesh, ranks)
        if not prod(shape):
            return Division("grid", tuple(_whole_cuts(extent) for extent in shape), np.zeros((0, 1), np.int64))
        if all(spec_replicas(self.groups, claim) == "first" for claim in claims):
            parts = parts[:1]  # groups come in order of their lowest rank: keep the lowest holder's copy
        merged = _merge(name, shape, parts)
        # A mesh declares which of its own ranks hold replicas. It says nothing about the copies on another mesh.
        one_mesh = len({mesh for mesh, _ in senders}) <= 1
        return replace(merged, declared=one_mesh and all(self._is_declared(claim) for claim in claims))

    def _is_declared(self, claim: Claim) -> bool:
        spec = self.groups[claim[0]].body.body.spec_table[claim[1]]
        return isinstance(spec, PlacedWire) or spec.replicas != "compare"


def spec_replicas(groups: Sequence[RankGroup], claim: Claim) -> str | None:
    """The replica policy of a claim to a plain tensor; None for other claims."""
    spec = groups[claim[0]].body.body.spec_table[claim[1]]
    return spec.replicas if isinstance(spec, WholeWire) else None


def _whole_cuts(extent: int) -> Int64s:
    return np.asarray([0, extent] if extent else [0], np.int64)


def _pieces(shape: Shape, held: HeldParts) -> Iterable[Division]:
    numbers, holders = held.numbers, held.holders[:, None]
    if len(shape) == 1 and held.num_axes:  # turn boxes of a vector into ranges: one kind less to merge
        numbers = np.stack([numbers[:, 0], numbers.sum(axis=1)], axis=1)
    if held.num_axes > 1:
        filled = (numbers[:, held.num_axes :] > 0).all(axis=1)
        kind = "boxes"
    else:
        filled = numbers[:, 1] > numbers[:, 0]
        kind = "ranges"
    if filled.any():  # empty parts do not say how other ranks hold the tensor
        yield Division(kind, (numbers[filled],), holders[filled])


def _check_senders(name: str, mesh: Mesh, ranks: set[int]) -> None:
    absent = sorted(set(mesh.ranks) - ranks)
    if absent:
        raise StateError(
            f"Tensor {name!r} is a DTensor on a mesh with ranks {_some(absent)}, but those ranks do not save it.",
            code="state.absent_on_mesh",
            action="Put the same modules and optimizers into the state on every rank of the mesh.",
            tensor=name,
        )


def _merge(name: str, shape: Shape, parts: list[Division]) -> Division:
    """Merge the divisions of all claims into one. Raises `StateError` where they do not fit together."""
    if not parts:
        raise _coverage_error(name, "no rank holds any of it")
    if len(parts) == 1 and parts[0].kind == "grid":
        return parts[0]
    first = parts[0]
    if first.kind == "grid" and all(p.kind == "grid" and _same_cuts(p, first) for p in parts):
        return Division("grid", first.geometry, _union([p.holders for p in parts]))
    if len(shape) < 2:
        return _merge_ranges(name, shape, [_as_ranges(p) for p in parts])
    if any(p.kind == "ranges" for p in parts):
        if not all(p.kind == "ranges" for p in parts):
            raise StateError(
                f"Some ranks hold tensor {name!r} in flat ranges, others in boxes.",
                code="state.mixed_pieces",
                action="Describe the tensor in the same way on all ranks.",
                tensor=name,
            )
        return _merge_ranges(name, shape, parts)
    return _merge_boxes(name, shape, parts)


def _as_ranges(part: Division) -> Division:
    """The cells of a vector, or of a tensor without axes, as ranges with one holder each."""
    if part.kind == "ranges":
        return part
    cuts = part.geometry[0] if part.geometry else np.asarray([0, 1], np.int64)
    ranges = np.stack([cuts[:-1], cuts[1:]], axis=1)
    num_holders = part.holders.shape[1]
    return Division("ranges", (np.repeat(ranges, num_holders, axis=0),), part.holders.reshape(-1, 1))


def _same_cuts(a: Division, b: Division) -> bool:
    return all(np.array_equal(p, q) for p, q in zip(a.geometry, b.geometry, strict=True))


def _union(columns: Sequence[Int64s]) -> Int64s:
    """The holders of each row in one row: sorted, with duplicates moved to the end as repeats of the largest."""
    holders = np.sort(np.concatenate(columns, axis=1), axis=1)
    if holders.shape[1] > 1:
        repeated = np.zeros(holders.shape, bool)
        repeated[:, 1:] = holders[:, 1:] == holders[:, :-1]
        if repeated.any():
            holders = np.where(repeated, holders[:, -1:], holders)
            holders.sort(axis=1)
    return holders


def _merge_ranges(name: str, shape: Shape, parts: list[Division]) -> Division:
    numbers = np.concatenate([p.geometry[0] for p in parts])
    ranks = np.concatenate([p.holders[:, 0] for p in parts])
    ranges, holders = _group_equal(numbers, ranks)
    numel = prod(shape)
    starts, stops = ranges[:, 0], ranges[:, 1]
    expected = np.r_[0, stops]
    wrong = np.flatnonzero(np.r_[starts, numel] != expected)
    if len(wrong):
        at = int(min(expected[wrong[0]], np.r_[starts, numel][wrong[0]]))
        times = "not held by any rank" if np.r_[starts, numel][wrong[0]] > at else "held in two different ranges"
        raise _coverage_error(name, f"flat element {at} of {numel} is {times}")
    if not shape:
        return Division("grid", (), holders)
    return Division("grid" if len(shape) == 1 else "flat", (expected,), holders)


def _merge_boxes(name: str, shape: Shape, parts: list[Division]) -> Division:
    numbers, ranks = [], []
    for part in parts:
        boxes = part.geometry[0] if part.kind == "boxes" else grid_boxes(part.geometry)
        for column in range(part.holders.shape[1]):
            numbers.append(boxes)
            ranks.append(part.holders[:, column])
    boxes, holders = _group_equal(np.concatenate(numbers), np.concatenate(ranks))
    num_axes = len(shape)
    starts, sizes = boxes[:, :num_axes], boxes[:, num_axes:]
    outside = np.flatnonzero((starts < 0).any(axis=1) | (starts + sizes > np.asarray(shape)).any(axis=1))
    if len(outside):
        box = boxes[outside[0]].tolist()
        raise _coverage_error(
            name, f"a piece at {box[:num_axes]} of size {box[num_axes:]} lies outside shape {list(shape)}"
        )
    fault = coverage_fault([shape], np.zeros(len(boxes), np.int64), starts, sizes)
    if fault is not None:
        held = "not held by any rank" if fault.times == 0 else f"held in {fault.times} different pieces"
        raise _coverage_error(name, f"element {list(fault.index)} is {held}")
    cuts = as_grid(boxes, shape)
    return Division("boxes", (boxes,), holders) if cuts is None else Division("grid", cuts, holders)


def as_grid(boxes: Int64s, shape: Shape) -> tuple[Int64s, ...] | None:
    """The cut points per axis where `boxes` are all cells of a grid over `shape`, else None.

    `boxes` are rows of starts and sizes, in row-major order of starts.
    """
    starts = [np.unique(column) for column in boxes[:, : len(shape)].T]
    if prod(len(column) for column in starts) != len(boxes):
        return None
    cuts = tuple(np.append(column, extent) for column, extent in zip(starts, shape, strict=True))
    return cuts if np.array_equal(grid_boxes(cuts), boxes) else None


def grid_boxes(cuts: tuple[Int64s, ...]) -> Int64s:
    """All cells of a grid as rows of starts and sizes."""
    starts = np.meshgrid(*[c[:-1] for c in cuts], indexing="ij")
    sizes = np.meshgrid(*[np.diff(c) for c in cuts], indexing="ij")
    return np.stack([grid.reshape(-1) for grid in (*starts, *sizes)], axis=1)


def _group_equal(numbers: Int64s, ranks: Int64s) -> tuple[Int64s, Int64s]:
    """Distinct rows in lexicographic order, and the holders of each as a padded matrix."""
    if len(numbers) < 2 or (np.diff(numbers[:, 0]) > 0).all():
        return numbers, ranks[:, None]  # in order and distinct already, such as flat cuts in rank order
    order = np.lexsort((ranks, *numbers.T[::-1]))
    numbers, ranks = numbers[order], ranks[order]
    fresh = np.r_[True, (numbers[1:] != numbers[:-1]).any(axis=1)] if len(numbers) else np.zeros(0, bool)
    heads = np.flatnonzero(fresh)
    counts = np.diff(np.r_[heads, len(numbers)])
    widest = int(counts.max()) if len(counts) else 1
    columns = np.minimum(np.arange(widest), counts[:, None] - 1)
    return numbers[heads], _union([ranks[heads[:, None] + columns]])


def _coverage_error(name: str, what: str) -> StateError:
    return StateError(
        f"The ranks' pieces of tensor {name!r} do not make up the whole tensor: {what}.",
        code="state.coverage",
        action="Correct the pieces: each element must be held once, or in identical pieces by several ranks.",
        tensor=name,
    )


def _some(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
