"""The translation of named live tensors into layouts and local memory, each memory once."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec
import torch
from torch import nn

from holdfast.errors import StateError
from holdfast.format.manifest import MAX_AXES, MAX_NUMEL
from holdfast.format.names import own_part
from holdfast.frameworks import NamedTensor
from holdfast.frameworks.torch_dtypes import DTYPE_NAMES
from holdfast.geometry import Shape
from holdfast.plan.layout import Placed, Replicas, Spec, TensorLayout, Whole
from holdfast.state.local_placements import PlacementReader, is_dtensor, local_part, local_parts, specs_of
from holdfast.wording import count

if TYPE_CHECKING:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

T = TypeVar("T")

_WHOLE: dict[Replicas, Whole] = {"split": Whole("split"), "first": Whole("first"), "compare": Whole("compare")}
#: Types of tensors that consist of their memory alone.
_PLAIN = {torch.Tensor, nn.Parameter}

_by_name = attrgetter("name")
_second = itemgetter(1)
_replicas_of = attrgetter("replicas")
_dtype_of = attrgetter("dtype")
_layout_of = attrgetter("layout")
_shape_of = attrgetter("shape")
_requires_grad = attrgetter("requires_grad")


class LocalTensor(msgspec.Struct, frozen=True, gc=False):
    """A logical tensor's layout, and the memory of this rank's part of it.

    `memory` has detached tensors that share the live memory: one for `Placed` and `Whole`, one per part for `Pieces`.
    They need not be contiguous.
    """

    layout: TensorLayout
    memory: tuple[torch.Tensor, ...]


class Tied(msgspec.Struct, frozen=True, gc=False):
    """A tensor's memory, and all entries of the state that share it; the first entry has the canonical name."""

    local: LocalTensor
    entries: list[NamedTensor]


class Facts(NamedTuple):
    """The facts that determine the description of tensors, by column: equal facts mean an equal description.

    Dtypes, shapes and strides are those of local parts. `specs` are the ids of DTensors' specs. The address of an empty
    tensor identifies the tensor object, and that of a tensor on the meta device its storage.
    """

    names: list[str]
    replicas: list[Replicas]
    specs: list[int]
    dtypes: list[torch.dtype]
    shapes: list[Shape]
    strides: list[Shape]
    addresses: list[int]


class WalkCache(NamedTuple):
    """The result of one call of `TensorCollector.add`: the numbers and layouts of the tensors whose memory is new
    (`new`, `layouts`), and for each other tensor its number and the place in `found` of the tensor that it is tied to
    (`tied`). It keeps the specs alive, so that no other spec gets their ids. `num_left` is the number of slots that the
    walk had left for this call."""

    facts: Facts
    specs: Sequence[object]
    new: list[int]
    layouts: list[TensorLayout]
    tied: list[tuple[int, int]]
    num_left: int = 0

    def untied(self, items: Sequence[T]) -> Iterable[T]:
        """Those of `items`, one per tensor, that belong to the tensors whose memory is new."""
        return map(items.__getitem__, self.new) if self.tied else items


class _FoundTensors(NamedTuple):
    """The facts, DTensor specs and local memory of tensors, before they are compared with the last walk."""

    facts: Facts
    specs: Sequence[DTensorSpec | None]
    parts: Sequence[torch.Tensor]


class _Home(msgspec.Struct, frozen=True, gc=False):
    """A tensor whose memory was found, and its place in `TensorCollector.found`."""

    layout: TensorLayout
    part: torch.Tensor
    place: int

    @property
    def key(self) -> tuple[object, ...]:
        """A key that is equal for two tensors at one address if they are tied: their local parts have one form, and
        they are the same part of tensors with one global shape and placement."""
        part, layout = self.part, self.layout
        spec = layout.spec if isinstance(layout.spec, Placed) else None
        offset = part.storage_offset() if part.is_meta else None
        return (part.device, part.dtype, part.shape, part.stride(), layout.shape, spec, offset)


class TensorCollector:
    """The descriptions of tensors, each memory once.

    Tensors are tied when they are one object, or the same memory with one shape, stride and dtype. Memory that merely
    overlaps does not tie them.

    `last` is `remembered` of the collector of the last walk of the state: tensors that have not changed since are not
    described again. It keeps no memory alive. With `meta`, tensors on the meta device are described too. Without
    `remembers`, `remembered` lacks facts that only a later walk needs.
    """

    def __init__(self, last: Sequence[WalkCache] = (), *, meta: bool = False, remembers: bool = True) -> None:
        self._meta = meta
        self._remembers = remembers
        #: Each memory; at the same place the entry with its first name; and by place its other entries. (In columns,
        #: because there are thousands.)
        self.found: list[LocalTensor] = []
        self._first: list[NamedTensor] = []
        self._others: dict[int, list[NamedTensor]] = {}
        #: The canonical name of every other name.
        self.aliases: dict[str, str] = {}
        self.remembered: list[WalkCache] = []
        self._last = deque(last)
        self._placements = PlacementReader()

    def add(self, added: Iterable[NamedTensor]) -> None:
        """Add tensors to `found`. Raises `StateError` for tensors that cannot be stored."""
        ordered = sorted(added, key=_by_name)
        read = _read(ordered, meta=self._meta, with_strides=self._remembers)
        known = self._last.popleft() if self._last else None
        if known is None or known.facts != read.facts:
            self._last.clear()  # later tensors may be tied to the changed ones
            known = self._describe(ordered, read)
        parts = known.untied(read.parts)
        if any(map(_requires_grad, read.parts)):
            parts = [part.detach() if part.requires_grad else part for part in parts]
        self.found += map(LocalTensor, known.layouts, zip(parts, strict=True))
        self._first += known.untied(ordered)
        for number, place in known.tied:
            self._others.setdefault(place, []).append(ordered[number])
            entries = self._entries(place)
            self.aliases[ordered[number].name] = entries[0].name
            if len({own_part(entry.name) is None for entry in entries}) > 1:
                raise _shared_and_own(entries)
        self.remembered.append(known)

    def tied(self) -> Iterator[Tied]:
        """All memory that was found, each with all its entries."""
        for place, (local, first) in enumerate(zip(self.found, self._first, strict=True)):
            yield Tied(local, self._entries(place) if place in self._others else [first])

    def _entries(self, place: int) -> list[NamedTensor]:
        return [self._first[place], *self._others.get(place, ())]

    def names(self) -> dict[int, NamedTensor]:
        """All tensors by id, each with its canonical name and with the `replicas` of its first entry."""
        names = {id(entry.tensor): entry for entry in self._first}
        for place, others in self._others.items():
            name, replicas = self._first[place].name, self._first[place].replicas
            names |= {id(entry.tensor): NamedTensor(name, entry.tensor, replicas) for entry in others}
        return names

    def _describe(self, ordered: Sequence[NamedTensor], read: _FoundTensors) -> WalkCache:
        # By columns too: a first save and every load run this.
        facts = read.facts
        if self._remembers:
            facts = facts._replace(shapes=_plain(facts.shapes), strides=_plain(facts.strides))
        # Unchanged tensors passed this check in an earlier walk: a storage gets another address when it is resized.
        if any(
            reaches_beyond(part)
            for part in read.parts
            # The quick test that most tensors pass is inline: thousands of calls cost more than the test.
            if not part.is_contiguous()
            or part.untyped_storage().nbytes() < part.storage_offset() * part.itemsize + part.nbytes
        ):
            raise _unsupported(ordered, read.parts, meta=self._meta)
        layouts = self._layouts(facts, read.specs)
        tied = self._ties(layouts, read.parts, facts.addresses)
        new = [number for number in range(len(layouts)) if number not in tied]
        return WalkCache(facts, read.specs, new, [layouts[number] for number in new], list(tied.items()))

    def _layouts(self, facts: Facts, placed: Sequence[DTensorSpec | None]) -> list[TensorLayout]:
        """The layout of each tensor. Tensors of one kind share its parts: torch gives equal DTensors one spec."""
        kinds = list(zip(facts.specs, facts.shapes, facts.dtypes, facts.replicas, strict=True))
        first = dict(zip(reversed(kinds), reversed(range(len(kinds))), strict=True))
        shapes: dict[Shape, Shape] = {}
        known: dict[tuple[int, Shape, torch.dtype, Replicas], tuple[str, Shape, Spec]] = {}
        for kind, number in sorted(first.items(), key=_second):
            _, held, dtype, replicas = kind
            described = placed[number]
            (shape,) = _plain([held if described is None else described.shape], shapes)
            spec: Spec = _WHOLE[replicas]
            if described is not None:
                spec = self._placements.spec(described, shape, held, facts.names[number])
            known[kind] = DTYPE_NAMES[dtype], shape, spec
        numbers: dict[Shape, int] = {}
        for kind, number in first.items():
            shape = known[kind][1]
            numbers[shape] = min(number, numbers.get(shape, number))
        for shape, number in numbers.items():
            check_shape(facts.names[number], shape)
        columns = zip(*map(known.__getitem__, kinds), strict=True)
        return list(map(TensorLayout, facts.names, *columns))

    def _ties(
        self, layouts: Sequence[TensorLayout], parts: Sequence[torch.Tensor], addresses: Sequence[int]
    ) -> dict[int, int]:
        """The numbers of the tensors that are tied to an earlier one, each with that one's place in `found`."""
        tied: dict[int, int] = {}
        homes = self._homes(addresses)
        for number, address in enumerate(addresses) if homes else ():
            others = homes.get(address)
            if others is not None:
                home = _Home(layouts[number], parts[number], len(self.found) + number - len(tied))
                same = next((other for other in others if other.key == home.key), None)
                if same is None:
                    others.append(home)
                else:
                    tied[number] = same.place
        return tied

    def _homes(self, addresses: Sequence[int]) -> dict[int, list[_Home]]:
        """The tensors found so far, by address, for those `addresses` that several tensors have: few or none."""
        distinct = set(addresses)
        before = {each for known in self.remembered for each in distinct.intersection(known.facts.addresses)}
        if not before and len(distinct) == len(addresses):
            return {}
        homes: dict[int, list[_Home]] = {
            address: [] for address, count in Counter(addresses).items() if count > 1 or address in before
        }
        if before:
            for place, (local, entry) in enumerate(zip(self.found, self._first, strict=True)):
                part = local.memory[0]
                others = homes.get(_address(entry.tensor, part, meta=self._meta))
                if others is not None:
                    others.append(_Home(local.layout, part, place))
        return homes


def _read(ordered: Sequence[NamedTensor], *, meta: bool, with_strides: bool) -> _FoundTensors:
    """Read the facts, specs and local parts of tensors. Raises `StateError` for a tensor that cannot be stored."""
    # By columns, with almost no Python code per tensor: every save runs this.
    tensors = [entry.tensor for entry in ordered]
    parts, specs = local_parts(tensors), specs_of(tensors)
    dtypes = list(map(_dtype_of, parts))
    kinds = set(dtypes)
    if (
        not _PLAIN.issuperset(map(type, parts))
        or not DTYPE_NAMES.keys() >= kinds
        or not {torch.strided}.issuperset(map(_layout_of, parts))
        or any(map(torch.Tensor.is_neg, parts))
        or (any(dtype.is_complex for dtype in kinds) and any(map(torch.Tensor.is_conj, parts)))
    ):
        raise _unsupported(ordered, parts, meta=meta)
    addresses = list(map(torch.Tensor.data_ptr, parts))
    if not all(addresses):
        addresses = [_address(tensor, part, meta=meta) for tensor, part in zip(tensors, parts, strict=True)]
    if not all(addresses):
        raise _unsupported(ordered, parts, meta=meta)
    try:
        shapes = list(map(_shape_of, parts))
    except RuntimeError as error:  # a nested tensor in the strided layout passes the checks above, but has no shape
        raise _unsupported(ordered, parts, meta=meta) from error
    facts = Facts(
        names=list(map(_by_name, ordered)),
        replicas=list(map(_replicas_of, ordered)),
        specs=list(map(id, specs)),
        dtypes=dtypes,
        shapes=shapes,
        strides=list(map(torch.Tensor.stride, parts)) if with_strides else [],
        addresses=addresses,
    )
    return _FoundTensors(facts, specs, parts)


def _plain(shapes: Iterable[Shape], known: dict[Shape, Shape] | None = None) -> list[Shape]:
    """The same shapes or strides as plain tuples, one object for equal ones, also for those that are `known`: they are
    kept from save to save, and the garbage collector stops tracking plain tuples of numbers after its first pass."""
    known = {} if known is None else known
    return [known.get(shape) or known.setdefault(shape, tuple(shape)) for shape in shapes]


def _address(tensor: torch.Tensor, part: torch.Tensor, *, meta: bool) -> int:
    """The address of the local memory of `tensor`; a negative number that identifies the tensor where it is empty, and
    its storage where it is on the meta device; 0 if it has no memory and should have."""
    if part.is_meta and part.nbytes:
        return -part.untyped_storage()._cdata if meta else 0  # noqa: SLF001
    return part.data_ptr() if part.nbytes else -id(tensor)


def reaches_beyond(part: torch.Tensor) -> bool:
    """Whether a tensor has elements beyond the end of its storage, because some code made the storage smaller."""
    if part.is_meta or not part.numel():
        return False
    if part.is_contiguous():
        last = part.numel() - 1
    else:
        last = sum((extent - 1) * stride for extent, stride in zip(part.shape, part.stride(), strict=True))
    return (part.storage_offset() + last + 1) * part.element_size() > part.untyped_storage().nbytes()


def unsupported_tensor(name: str, tensor: torch.Tensor, problem: str) -> StateError:
    """The error for a tensor that cannot be stored because it has `problem`."""
    kind = type(tensor)
    shape = "" if nn.parameter.is_lazy(tensor) or tensor.is_nested else f" of shape {tuple(tensor.shape)}"
    if nn.parameter.is_lazy(tensor):
        action = "Run one forward pass before saving or loading: it creates the parameters of lazy modules."
    elif tensor.is_nested:
        action = "Put its parts into the state: nested.values() and nested.offsets(), or nested.unbind()."
    elif tensor.is_meta:
        action = "Give the tensor memory with model.to_empty(device=...)."
    elif tensor.is_conj() or tensor.is_neg():
        action = "Put tensor.resolve_conj().resolve_neg() into the state instead."
    elif kind in _PLAIN or is_dtensor(tensor):
        action = "Put a plain, dense torch.Tensor or DTensor of a storable dtype into the state instead."
    else:
        action = f"Register its type and the plain tensors in it: holdfast.register_tensor({kind.__qualname__}, ...)."
    return StateError(
        f"Tensor {name!r}{shape} cannot be stored: it has {problem}.",
        code="state.unsupported_tensor",
        action=action,
        tensor=name,
    )


def check_shape(name: str, shape: Sequence[int]) -> None:
    """Refuse a shape that no manifest can hold. An extent of 0 does not excuse other extents that are too large.

    Raises:
        StateError: code ``state.unsupported_tensor``; the error names the tensor.
    """
    if len(shape) > MAX_AXES:
        problem = f"{count(len(shape), 'axis', 'axes')}, but the limit is {MAX_AXES}"
    elif (prod(shape) or prod(filter(None, shape))) > MAX_NUMEL:
        problem = f"axes too long for any checkpoint: {list(shape)}"
    else:
        return
    raise StateError(
        f"Tensor {name!r} cannot be stored: it has {problem}.",
        code="state.unsupported_tensor",
        action="Give the tensor another shape, or take it out of the state.",
        tensor=name,
    )


def _unsupported(ordered: Sequence[NamedTensor], parts: Sequence[torch.Tensor], *, meta: bool) -> StateError:
    """The error for the first tensor that has a problem."""
    problems = zip(ordered, (_problem(part, meta=meta) for part in parts), strict=True)
    return next(unsupported_tensor(entry.name, entry.tensor, problem) for entry, problem in problems if problem)


def is_describable(tensor: torch.Tensor) -> bool:
    """Whether a tensor, which may be on the meta device, can be stored."""
    return _problem(local_part(tensor), meta=True) is None


def _problem(part: torch.Tensor, *, meta: bool) -> str | None:
    """The reason why the memory of a tensor cannot be read directly; None if it can."""
    if nn.parameter.is_lazy(part):
        return "no shape yet"
    if part.is_nested:
        return "parts of different shapes (a nested tensor)"
    if type(part) not in _PLAIN:
        return f"type {type(part).__module__}.{type(part).__qualname__}"
    if part.dtype not in DTYPE_NAMES:
        return f"dtype {part.dtype}"
    if part.layout is not torch.strided:
        return f"layout {part.layout}"
    if part.is_neg() or part.is_conj():
        return "a lazy negation or conjugation"
    return _lacking(part, meta=meta)


def _lacking(part: torch.Tensor, *, meta: bool) -> str | None:
    """The memory that a dense tensor lacks; None if it has all of it."""
    if part.nbytes and not part.data_ptr() and not (meta and part.is_meta):
        return f"no memory ({'it is on the meta device' if part.is_meta else 'it was released'})"
    if reaches_beyond(part):
        return "elements beyond the end of its storage, which was made smaller"
    return None


def _shared_and_own(entries: Sequence[NamedTensor]) -> StateError:
    names = [entry.name for entry in entries]
    return StateError(
        f"One tensor is in a PerRank and also outside of it: {', '.join(map(repr, names))}.",
        code="state.per_rank",
        action="Take it out of the PerRank, or put a copy into the PerRank.",
        tensor=names[0],
    )
