"""Tensors as a tree of their names, in which runs of alike parts (layers, experts, slots) are one line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from holdfast.checkpoint.stored_checkpoint import Checkpoint
from holdfast.format.dtypes import DTYPES
from holdfast.format.partition import BoxCells, Cells, FlatCells
from holdfast.geometry import Shape
from holdfast.wording import count

_SEPARATORS = re.compile(r"([/.])")
#: Most ranges, and most names, of alike siblings that are listed.
_MAX_LISTED = 4
#: From this number of parts on, their exact number does not matter to a user who compares layers.
_MANY_PARTS = 1000
#: Most characters of a label that joins several parts of a name.
_MAX_LABEL = 32


@dataclass(frozen=True, slots=True)
class ShownTensor:
    """A stored tensor, as it is shown. `divided`: ``8x1`` parts along the axes, or numbers of flat ranges or boxes."""

    name: str
    dtype: str
    shape: Shape
    divided: str
    num_parts: int
    num_files: int
    nbytes: int

    @property
    def kind(self) -> str:
        """The kind of division, which is equal for tensors that look alike, whatever their number of irregular parts.

        The number of irregular parts varies: with random cuts, as of flat optimizers, a part may be empty and left out.
        """
        number, _, unit = self.divided.partition(" ")
        irregular = number.isdecimal() and (unit or self.num_parts >= _MANY_PARTS)
        return unit if irregular else f"{self.divided} in {self.num_files}"


class Line(NamedTuple):
    """One line of the tree, which stands for `num_tensors` tensors.

    `tensor` is one of them where all are alike, with the least and the largest number of irregular parts of all tensors
    in the checkpoint that look like it.
    """

    depth: int
    label: str
    num_tensors: int
    nbytes: int
    tensor: ShownTensor | None


def tensors_of(checkpoint: Checkpoint) -> list[ShownTensor]:
    """All tensors of a checkpoint, sorted by name."""
    body, manifest = checkpoint.manifest.body, checkpoint.manifest
    divisions: dict[tuple[int, int], tuple[str, int, int, int]] = {}
    found = []
    for number, (name, key) in enumerate(zip(body.names, zip(body.partitions, body.shapes, strict=True), strict=True)):
        if key not in divisions:
            cells = checkpoint.files.cells(number)
            num_files = int(np.count_nonzero(np.bincount(cells.owners)))
            divisions[key] = _divided(cells), len(cells.owners), num_files, int(cells.numels.sum())
        divided, num_parts, num_files, numel = divisions[key]
        dtype = manifest.dtype(number)
        nbytes = numel * DTYPES[dtype].itemsize
        found.append(ShownTensor(name, dtype, manifest.shape(number), divided, num_parts, num_files, nbytes))
    return found


def _divided(cells: Cells) -> str:
    if len(cells.owners) < 2:
        return "whole" if len(cells.owners) else "empty"
    if isinstance(cells, FlatCells):
        return count(len(cells.owners), "range")
    if isinstance(cells, BoxCells):
        return count(len(cells.owners), "box", "boxes")
    return "x".join(str(len(cuts) - 1) for cuts in cells.cuts)


def lines(tensors: Iterable[ShownTensor]) -> Iterator[Line]:
    """The tree, line by line, from the top."""
    root = _NamePart()
    for tensor in tensors:
        node, separator = root, ""
        parts = _SEPARATORS.split(tensor.name)
        for part, following in zip(parts[::2], [*parts[1::2], ""], strict=True):
            node = node.children.setdefault((separator, part), _NamePart())
            separator = following
        node.tensor = tensor
    _measure(root, {}, {})
    yield from _below(root, 0)


@dataclass(slots=True)
class _NamePart:
    """A node of the tree: one part of a name. The key of a child is the separator before it and its own part."""

    tensor: ShownTensor | None = None
    children: dict[tuple[str, str], _NamePart] = field(default_factory=dict)
    num_tensors: int = 0
    nbytes: int = 0
    #: A number that is equal for nodes that look alike: those with equal tensors under equal names.
    likeness: int = 0
    #: The numbers of parts that tensors have in this node and in all nodes that look like it.
    num_parts: set[int] = field(default_factory=set)


def _measure(node: _NamePart, known: dict[object, int], num_parts: dict[int, set[int]]) -> None:
    """Fill in the fields that follow from the nodes below: totals, likeness and numbers of parts."""
    for child in node.children.values():
        _measure(child, known, num_parts)
    own = node.tensor
    node.num_tensors = (own is not None) + sum(child.num_tensors for child in node.children.values())
    node.nbytes = (own.nbytes if own else 0) + sum(child.nbytes for child in node.children.values())
    look = (own.dtype, own.shape, own.kind) if own else None
    key = look, tuple((name, child.likeness) for name, child in node.children.items())
    node.likeness = known.setdefault(key, len(known))
    node.num_parts = num_parts.setdefault(node.likeness, node.num_parts)
    if own:
        node.num_parts.add(own.num_parts)


class _AlikeSiblings(NamedTuple):
    """Siblings that look alike, under one label."""

    label: str
    nodes: list[_NamePart]

    @property
    def first(self) -> _NamePart:
        return self.nodes[0]


def _below(node: _NamePart, depth: int, times: int = 1) -> Iterator[Line]:
    """The lines below a node that stands for `times` alike ones."""
    for group in _groups(node):
        label, count, at = group.label, times * len(group.nodes), group.first
        # A node whose children make one group shares its line with them.
        while at.tensor is None and len(inner := _groups(at)) == 1 and len(label + inner[0].label) <= _MAX_LABEL:
            label, count, at = label + inner[0].label, count * len(inner[0].nodes), inner[0].first
        label = label if depth else label.lstrip("/")
        yield Line(depth, label, count * at.num_tensors, count * at.nbytes, _shown(at, count))
        yield from _below(at, depth + 1, count)


def _shown(node: _NamePart, times: int) -> ShownTensor | None:
    """The tensor of a node that stands for `times` alike ones."""
    tensor = node.tensor
    if tensor is None or times == 1 or len(node.num_parts) == 1:
        return tensor
    return replace(
        tensor, divided=f"{min(node.num_parts)}-{max(node.num_parts)} {tensor.kind}", num_files=tensor.num_parts
    )


def _groups(node: _NamePart) -> list[_AlikeSiblings]:
    """The children of a node in groups: numbered ones that look alike, then neighbouring named ones that look alike."""
    numbered: dict[tuple[str, int], list[tuple[int, _NamePart]]] = {}
    named: list[tuple[str, str, _NamePart]] = []
    for (separator, part), child in node.children.items():
        if part.isascii() and part.isdecimal():
            numbered.setdefault((separator, child.likeness), []).append((int(part), child))
        else:
            named.append((separator, part, child))
    ordered = sorted(((key[0], sorted(alike, key=itemgetter(0))) for key, alike in numbered.items()), key=_first_number)
    groups = []
    for separator, alike in ordered:
        numbers, children = zip(*alike, strict=True)
        groups.append(_AlikeSiblings(separator + _ranges(list(numbers)), list(children)))
    for (separator, _), run in groupby(named, key=lambda entry: (entry[0], entry[2].likeness)):
        parts, children = zip(*((part, child) for _, part, child in run), strict=True)
        groups.append(_AlikeSiblings(separator + _listed(list(parts)), list(children)))
    return groups


def _first_number(entry: tuple[str, list[tuple[int, _NamePart]]]) -> int:
    return entry[1][0][0]


def _ranges(numbers: list[int]) -> str:
    """``0-3, 7`` for ``[0, 1, 2, 3, 7]``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return _listed([str(a) if a == b else f"{a}-{b}" for a, b in runs])


def _listed(names: list[str]) -> str:
    if len(names) == 1:
        return names[0]
    if len(names) > _MAX_LISTED:
        names = [*names[: _MAX_LISTED - 1], "...", names[-1]]
    return f"{{{','.join(names)}}}"
