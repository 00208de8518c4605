"""The matching of live tensors with stored ones: which stored tensor fills which memory."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple

import msgspec
import torch

from holdfast.format import values
from holdfast.format.patterns import Globs
from holdfast.format.values import Node
from holdfast.geometry import Shape
from holdfast.mapping.parts import StoredTensor, castable
from holdfast.plan.layout import TensorLayout
from holdfast.state.collect import LocalTensor
from holdfast.state.differences import Mismatches
from holdfast.state.local_memory import digest_of


class BoundTensor(msgspec.Struct, frozen=True, gc=False):
    """A live tensor to fill: its name, the name of the stored tensor that fills it, and its local memory.

    One stored tensor may fill several live ones.
    """

    name: str
    source: str
    local: LocalTensor


class Terms(NamedTuple):
    """The terms of a load: which part of a checkpoint it loads, and which differences it allows.

    Live tensors, values and objects whose names are not in `select` keep their contents, and none of their names counts
    as missing or unexpected. `cast` says which live tensors may have another dtype than the stored ones. Some fields
    come from a mapping: `equal` gives for a stored name other stored tensors that must be equal to that one, and `kept`
    has the stored tensors that fill only a part of a live one, which keeps the rest; `CheckpointTable` explains
    `dropped` and `recast`. With `is_strict`, optimizers must be of the class that was saved. With `ignores_unexpected`,
    no stored name counts as unexpected, and values that the live state does not have are not looked up.
    """

    select: Globs | None = None
    cast: Globs | bool = False
    equal: Mapping[str, Sequence[str]] = MappingProxyType({})
    kept: Collection[str] = ()
    is_strict: bool = True
    ignores_unexpected: bool = False
    dropped: Mapping[str, Collection[str]] = MappingProxyType({})
    recast: AbstractSet[str] = frozenset()

    def selects(self, name: str) -> bool:
        """Whether the load fills what has this name."""
        return self.select is None or name in self.select


class Matcher:
    """The search for stored tensors by the names of live ones.

    A live tensor with several names may match several stored ones, if it was saved where they did not share memory.
    They must be equal: the first one fills the live tensor, the others fill extra memory on the host, and
    `check_copies` compares them.
    """

    def __init__(
        self,
        stored: Mapping[str, StoredTensor],
        aliases: Mapping[str, str],
        nodes: Mapping[str, Node],
        mismatches: Mismatches,
        terms: Terms,
    ) -> None:
        self.targets: list[BoundTensor] = []
        self.used: set[str] = set()
        self.missing: set[str] = set()
        #: Shapes of the missing tensors.
        self.missing_shapes: dict[str, Shape] = {}
        #: The number of live tensors that the checkpoint does not have.
        self.num_lost = 0
        #: The canonical name of every other name that is stored.
        self.aliases = aliases
        self._stored = stored
        self._nodes = nodes
        self._mismatches = mismatches
        #: Pairs of a live tensor and a copy that must prove equal to it.
        self._copies: list[tuple[BoundTensor, BoundTensor]] = []
        self._copies_of: dict[str, list[str]] = {}
        self._required: dict[str, list[str]] = {}
        self._terms = terms
        self._cast = terms.cast is True
        self._globs = terms.cast if isinstance(terms.cast, Globs) else None
        #: Whether a tensor with one name, stored under that name in its dtype and shape, needs no further look.
        self._is_plain = not (terms.equal or terms.kept or self._globs)

    def canonical(self, name: str) -> str:
        """The name under which the tensor `name` is stored: `name` itself unless it is an alias."""
        return self.aliases.get(name, name)

    def is_tensor(self, name: str) -> bool:
        """Whether a tensor is stored under this name."""
        return self.canonical(name) in self._stored

    def match_alike(self, found: Sequence[LocalTensor]) -> bool:
        """Match live tensors of one name each, if every one is stored under its name in its dtype and shape, as in
        nearly all loads. Otherwise returns False and matches none."""
        # By columns, because states have thousands of tensors.
        layouts = [local.layout for local in found]
        names = [layout.name for layout in layouts]
        if not self._is_plain or any(map(_on_meta, found)):
            return False
        if not (self.aliases.keys().isdisjoint(names) and self._required.keys().isdisjoint(names)):
            return False
        if list(map(self._stored.get, names)) != [(layout.dtype, layout.shape) for layout in layouts]:
            return False
        self.used.update(names)
        self.targets += map(BoundTensor, names, names, found)
        return True

    def match(self, names: Sequence[str], local: LocalTensor) -> str:
        """Find the source of a live tensor with these names (sorted); returns the name under which it is stored.

        Notes the tensor as missing, or a mismatch, where no stored tensor fits it.
        """
        if len(names) == 1 and self._is_plain and self._is_stored_alike(names[0], local.layout):
            self._fill(BoundTensor(names[0], names[0], local))
            return names[0]
        sources: dict[str, str] = {}
        for name in names:
            source = self.aliases.get(name, name)
            if source in self._stored:
                sources.setdefault(source, name)
        if not sources:
            self.num_lost += 1
            self._note_missing(names, local.layout.shape)
            return self.canonical(names[0])
        source, name = next(iter(sources.items()))
        stored, layout = self._stored[source], local.layout
        may_cast = self.may_cast(names)
        if stored.dtype != layout.dtype and not (may_cast and castable(stored.dtype, layout.dtype)):
            kind = ", and no cast converts between them" if may_cast else ""
            text = f"{layout.dtype} here, {stored.dtype} in the checkpoint{kind}"
            self._mismatches.add("incompatible.dtype", name, text)
        if stored.shape != layout.shape:
            self._mismatches.add("incompatible.shape", name, f"{layout.shape} here, {stored.shape} in the checkpoint")
        if source in self._terms.kept and _on_meta(local):
            text = "on the meta device, so it has no values to keep where the checkpoint has none"
            self._mismatches.add("incompatible.meta", name, text)
        target = BoundTensor(name, source, local)
        self._fill(target)
        if len(sources) > 1 or name in self._required or source in self._terms.equal:
            required = chain.from_iterable(self._required.get(each, ()) for each in sources.values())
            made_equal = chain.from_iterable(self._terms.equal.get(each, ()) for each in sources)
            self._match_copies(target, [*sources, *required, *made_equal][1:])
        return source

    def _is_stored_alike(self, name: str, layout: TensorLayout) -> bool:
        """Whether `name` is the only stored tensor for a live one, and equals it in dtype and shape."""
        stored = self._stored.get(name)
        return stored == (layout.dtype, layout.shape) and name not in self.aliases and name not in self._required

    def may_cast(self, names: Sequence[str]) -> bool:
        """Whether a live tensor with these names may have another dtype than the stored one."""
        # Look up all names, so that every glob is tried and none counts as unmatched.
        return self._cast if self._globs is None else True in [name in self._globs for name in names]

    def source_of(self, names: Sequence[str]) -> str:
        """The name under which a live tensor with these names is stored. Fills and notes nothing."""
        sources = map(self.canonical, names)
        return next((source for source in sources if source in self._stored), self.canonical(names[0]))

    def copies(self, name: str) -> Sequence[str]:
        """Other stored names of the live tensor that is filled from the stored `name`."""
        return self._copies_of.get(name, ())

    def require_equal(self, name: str, copy: str) -> None:
        """Require that the tensor or value stored as `copy` is equal to the one stored as `name`.

        Values are compared at once; tensors are compared after the caller has matched `name`.
        """
        if copy not in self._nodes:
            self._required.setdefault(name, []).append(self.canonical(copy))
            return
        for path, node in values.walk(self._nodes, copy):
            original = name + path[len(copy) :]
            self.used.add(path)
            if not values.same(node, self._nodes.get(original)):
                self._mismatches.add(
                    "incompatible.tied", original, f"one value here, but stored separately as {path!r}, which differs"
                )
            for tensor, other in zip(values.tensors_at(original, node), values.tensors_at(path, node), strict=True):
                self._required.setdefault(tensor, []).append(self.canonical(other))

    def check_copies(self) -> None:
        """Compare all copies. Call it after everything was read. Raises `IncompatibleError` where one differs."""
        for target, copy in self._copies:
            pairs = zip(target.local.memory, copy.local.memory, strict=True)
            if any(digest_of(mine) != digest_of(other) for mine, other in pairs):
                self._mismatches.add(
                    "incompatible.tied", target.name, _separately([target.source, copy.source], "which differ")
                )
        if self._mismatches:
            raise self._mismatches.error()

    def _fill(self, target: BoundTensor) -> None:
        self.used.add(target.source)
        self.targets.append(target)

    def _match_copies(self, target: BoundTensor, others: Sequence[str]) -> None:
        others = [other for other in dict.fromkeys(others) if other != target.source]
        self._copies_of[target.source] = others
        for other in others:
            if self._stored.get(other) != self._stored[target.source]:
                text = _separately([target.source, other], "which differ in dtype or shape")
                self._mismatches.add("incompatible.tied", target.name, text)
                continue
            memory = tuple(
                torch.empty_like(part, device="cpu", memory_format=torch.contiguous_format)
                for part in target.local.memory
            )
            if target.source in self._terms.kept and not _on_meta(target.local):
                for mine, part in zip(memory, target.local.memory, strict=True):
                    mine.copy_(part)
            copy = BoundTensor(target.name, other, LocalTensor(target.local.layout, memory))
            self._fill(copy)
            self._copies.append((target, copy))

    def _note_missing(self, names: Sequence[str], shape: Shape) -> None:
        for name in names:
            if name in self._nodes:
                self._mismatches.add_kind(name, "a tensor", self._nodes[name])
            else:
                self.missing.add(name)
                self.missing_shapes[name] = shape


def _on_meta(local: LocalTensor) -> bool:
    return not local.address and any(part.is_meta for part in local.memory)


def _separately(names: Sequence[str], how: str) -> str:
    return f"one tensor here, but stored separately as {' and '.join(map(repr, names))}, {how}"


class SelectedNodes(Mapping[str, Node]):
    """A view of `nodes` that shows the selected ones only."""

    def __init__(self, nodes: Mapping[str, Node], select: Globs) -> None:
        self._nodes = nodes
        self._select = select

    def __getitem__(self, path: str) -> Node:
        if path not in self._select:
            raise KeyError(path)
        return self._nodes[path]

    def __contains__(self, path: object) -> bool:
        return isinstance(path, str) and path in self._select and path in self._nodes

    def __iter__(self) -> Iterator[str]:
        return (path for path in self._nodes if path in self._select)

    def __len__(self) -> int:
        return sum(1 for _ in self)
