"""A nested state as named tensors in local memory and a flat table of values: the saving side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, cast

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.errors import StateError
from holdfast.format import values
from holdfast.format.names import component, join, own_part, plane_component, rank_component
from holdfast.format.values import Container, Encoded, Leaf, Node, Open, Planes, Stateful, TensorRef
from holdfast.frameworks import NamedTensor
from holdfast.frameworks.module import flatten_module
from holdfast.frameworks.optimizer import flatten_optimizer
from holdfast.frameworks.stateful import is_stateful
from holdfast.plan.layout import Placed, Replicas, Spec, TensorLayout, Whole
from holdfast.state.per_rank import PerRank
from holdfast.state.placements import DTYPE_NAMES, PlacementReader, is_dtensor, torch_value
from holdfast.state.registry import Registration, planes_of, registered

_WHOLE: dict[Replicas, Whole] = {"split": Whole("split"), "first": Whole("first"), "compare": Whole("compare")}


@dataclass(frozen=True)
class LocalTensor:
    """A logical tensor and the memory of this rank's part.

    `memory` holds detached tensors that share the live memory: one for `Placed` and `Whole`, one per part for
    `Pieces`. They need not be contiguous.
    """

    layout: TensorLayout
    memory: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class FlatState:
    """A state, flat: tensors by canonical name (sorted), other names of the same memory, and the table of values.

    `own_nodes` are the values that belong to this rank alone: the contents of its `PerRank` parts.
    """

    tensors: dict[str, LocalTensor]
    aliases: dict[str, str]
    nodes: dict[str, Node]
    own_nodes: dict[str, Node]


class Tied(NamedTuple):
    """One memory and every name it has; the first is the canonical one."""

    local: LocalTensor
    entries: list[NamedTensor]


def flatten(state: Mapping[str, object], *, rank: int = 0, world_size: int = 1) -> FlatState:
    """Name everything in `state`. Nothing is copied: tensors share the live memory, values are read now.

    Leaves may be modules, optimizers, objects with ``state_dict`` and ``load_state_dict``, tensors, values (see
    ``holdfast.format.values``) and registered types; containers are dicts, lists, tuples, NamedTuples, OrderedDicts
    and Counters. What a `PerRank` holds is named after `rank`; that there are `world_size` such parts is recorded.
    Raises `StateError`, which names the path and the type, for anything else, for names that collide, for cycles, and
    for tensors without a layout.
    """
    return _Flattener(rank, world_size).run(state)


def check_root(state: Mapping[str, object]) -> None:
    """Refuse a root that is no dict with string keys."""
    if not isinstance(state, MutableMapping) or not all(type(key) is str for key in state):
        raise StateError(
            f"The state is a {type(state).__name__}, not a dict whose keys all are strings.",
            code="state.root",
            action="Pass a dict with string keys.",
        )


def check_depth(path: str) -> None:
    """Refuse containers so deep that they are likely to contain themselves."""
    if path.count("/") >= values.MAX_DEPTH:
        raise StateError(
            f"The containers at {path!r:.200} contain themselves, or are nested more than {values.MAX_DEPTH} deep.",
            code="state.nesting",
            action="Take the cycle out, or flatten them.",
            path=path,
        )


class Gatherer:
    """Describes tensors, each memory once.

    Tensors are tied when they are one object, or the same memory seen with one shape, stride and dtype. Overlapping
    memory alone is no tie.
    """

    def __init__(self) -> None:
        self.found: list[Tied] = []
        self._by_object: dict[int, Tied] = {}
        self._by_pointer: dict[int, list[Tied]] = {}
        self._placements = PlacementReader()

    def add(self, entries: Iterable[NamedTensor]) -> list[Tied]:
        """Add tensors to `found`; returns what is new. Raises `StateError` for tensors that cannot be stored."""
        before = len(self.found)
        with torch.no_grad():  # so that DTensors give their local tensor itself
            for entry in sorted(entries, key=_name):
                tied = self._by_object.get(id(entry.tensor))
                if tied is None:
                    tied = self._tied(entry)
                    self._by_object[id(entry.tensor)] = tied
                tied.entries.append(entry)
                if len(tied.entries) > 1 and bool(own_part(entry.name)) != bool(own_part(tied.entries[0].name)):
                    raise _shared_and_own(tied)
        return self.found[before:]

    def _tied(self, entry: NamedTensor) -> Tied:
        local = _read(entry, self._placements)
        new = Tied(local, [])
        if local.memory[0].nbytes:
            same_start = self._by_pointer.setdefault(local.memory[0].data_ptr(), [])
            for other in same_start:
                if _memory_key(other.local) == _memory_key(local):
                    return other
            same_start.append(new)
        self.found.append(new)
        return new


def _read(entry: NamedTensor, placements: PlacementReader) -> LocalTensor:
    """A live tensor's layout and local memory. Raises `StateError` for a tensor that cannot be stored."""
    name, tensor, replicas = entry
    spec: Spec = _WHOLE[replicas]
    shape = tuple(tensor.shape)
    if type(tensor) is torch.Tensor or type(tensor) is nn.Parameter:
        part = tensor.detach()
    elif is_dtensor(tensor):
        spec = placements.spec(tensor, name)
        part = tensor.to_local().detach()
    else:
        part = tensor
    dtype = DTYPE_NAMES.get(tensor.dtype)
    if dtype is None:
        raise _unsupported_tensor(name, tensor, f"dtype {tensor.dtype}")
    problem = _problem(part)
    if problem is not None:
        raise _unsupported_tensor(name, tensor, problem)
    return LocalTensor(TensorLayout(name, dtype, shape, spec), (part,))


def planes_as_tensors(entry: NamedTensor, registration: Registration) -> dict[str, NamedTensor]:
    """The planes of a tensor of a registered type, by their own names, as entries of a state."""
    planes = planes_of(entry.name, entry.tensor, registration)
    names = {plane: join(entry.name, plane_component(plane)) for plane in planes}
    return {plane: NamedTensor(names[plane], tensor, entry.replicas) for plane, tensor in planes.items()}


def name_of_planes(plane_name: str) -> str:
    """The name of the tensor that a plane belongs to."""
    return plane_name.rpartition("/")[0]


class _Flattener:
    """One walk of a state; the `Sink` of the frameworks."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._per_rank = False
        self._planed: list[tuple[NamedTensor, str]] = []
        self._nodes: dict[str, Node] = {}
        self._tensors: dict[str, NamedTensor] = {}
        self._names: dict[int, NamedTensor] = {}
        self._optimizers: list[tuple[str, Optimizer]] = []

    def run(self, state: Mapping[str, object]) -> FlatState:
        check_root(state)
        self._nodes[""] = Open("dict")
        for key, item in state.items():
            self._visit(component(key), item, "compare", live=True)
        # Optimizers name their state after parameters, so they come when every parameter has its canonical name.
        gatherer = Gatherer()
        canonical = {}
        for local, entries in gatherer.add(self._tensors.values()):
            for entry in entries:
                self._names[id(entry.tensor)] = NamedTensor(local.layout.name, entry.tensor, entries[0].replicas)
                canonical[entry.name] = local.layout.name
        for entry, plane in self._planed:
            self._names[id(entry.tensor)] = entry._replace(name=name_of_planes(canonical[plane]))
        named = len(self._tensors)
        for path, optimizer in self._optimizers:
            flatten_optimizer(path, optimizer, self)
        gatherer.add(islice(self._tensors.values(), named, None))
        own = {path: node for path, node in self._nodes.items() if own_part(path)} if self._per_rank else {}
        return FlatState(
            {local.layout.name: local for local, _ in sorted(gatherer.found, key=_canonical_name)},
            {entry.name: local.layout.name for local, entries in gatherer.found for entry in entries[1:]},
            {path: node for path, node in self._nodes.items() if path not in own},
            own,
        )

    def named(self, tensor: torch.Tensor) -> NamedTensor | None:
        return self._names.get(id(tensor))

    def tensor(self, entry: NamedTensor) -> None:
        self._claim(entry.name)
        registration = registered(entry.tensor)
        if registration is None:
            self._tensors[entry.name] = entry
            return
        planes = planes_as_tensors(entry, registration)
        self._nodes[entry.name] = Planes(registration.name, tuple(planes))
        self._tensors.update((plane.name, plane) for plane in planes.values())
        self._planed.append((entry, next(iter(planes.values())).name))

    def tree(self, path: str, value: object, replicas: Replicas = "compare") -> None:
        self._visit(path, value, replicas, live=False)

    def node(self, path: str, node: Node) -> None:
        self._claim(path)
        self._nodes[path] = node

    def _claim(self, path: str) -> None:
        check_depth(path)
        if path in self._nodes or path in self._tensors:
            raise StateError(
                f"Two parts of the state have the name {path!r}.",
                code="state.collision",
                action="Rename one of them.",
                path=path,
            )

    def _visit(self, path: str, item: object, replicas: Replicas, *, live: bool) -> None:
        """Add what lies at `path`. `live`: it can be bound again on loading, so modules and the like are allowed."""
        node = values.leaf(item) or torch_value(item)
        if node is not None:
            self.node(path, node)
        elif isinstance(item, torch.Tensor):
            self._tensor_at(path, item, replicas)
        elif (registration := registered(item)) is not None:
            self._encoded(path, item, registration, replicas)
        elif isinstance(item, (nn.Module, Optimizer, PerRank)) and (not live or own_part(path)):
            raise _unsupported_leaf(path, item)
        elif isinstance(item, PerRank):
            self._own(path, item)
        elif isinstance(item, nn.Module):
            flatten_module(path, item, self)
        elif isinstance(item, Optimizer):
            self._optimizers.append((path, item))
        elif (shell := values.container(item, path)) is not None:
            self.node(path, shell[0])
            for name, child in shell[1]:
                self._visit(join(path, name), child, replicas, live=live)
        elif live and is_stateful(item):
            self._visit(path, item.state_dict(), replicas, live=False)
            self._nodes[path] = Stateful(cast("Leaf | TensorRef | Planes | Container | Encoded", self._nodes[path]))
        else:
            raise _unsupported_leaf(path, item)

    def _tensor_at(self, path: str, item: torch.Tensor, replicas: Replicas) -> None:
        if is_dtensor(item) and own_part(path):
            raise _unsupported_tensor(path, item, "parts on several ranks, but stands in a PerRank")
        self.tensor(NamedTensor(path, item, replicas))
        self._nodes.setdefault(path, TensorRef())

    def _encoded(self, path: str, item: object, registration: Registration, replicas: Replicas) -> None:
        self._visit(path, registration.encode(item), replicas, live=False)
        node = self._nodes[path]
        if not isinstance(node, Leaf | TensorRef | Container):
            raise StateError(
                f"{path!r} was encoded to another registered type by {registration.name!r}.",
                code="state.encoded",
                action="Have it give plain values, or put the object that it gives into a list.",
                path=path,
            )
        self._nodes[path] = Encoded(registration.name, node)

    def _own(self, path: str, item: PerRank[object]) -> None:
        self._per_rank = True
        self.node(path, values.PerRank(self._world_size))
        self._visit(join(path, rank_component(self._rank)), item.value, "first", live=True)


def _name(entry: NamedTensor) -> str:
    return entry.name


def _canonical_name(tied: Tied) -> str:
    return tied.local.layout.name


def _memory_key(local: LocalTensor) -> tuple[object, ...]:
    """Equal for tensors at one address that are one memory: also globally, where the local part is one of many."""
    part, layout = local.memory[0], local.layout
    spec = id(layout.spec) if isinstance(layout.spec, Placed) else None
    return (part.device, part.dtype, part.shape, part.stride(), layout.shape, spec)


def _problem(part: torch.Tensor) -> str | None:
    """Why the memory of a tensor cannot be read as it stands."""
    if type(part) is not torch.Tensor:
        return f"type {type(part).__module__}.{type(part).__qualname__}"
    if part.is_meta:
        return "no memory (it is on the meta device)"
    if part.layout is not torch.strided:
        return f"layout {part.layout}"
    if part.is_neg() or part.is_conj():
        return "a lazy negation or conjugation"
    if part.nbytes and not part.data_ptr():
        return "no memory (it was released)"
    return None


def _unsupported_tensor(name: str, tensor: torch.Tensor, problem: str) -> StateError:
    kind = type(tensor)
    if tensor.is_meta:
        action = "Give the tensor memory with model.to_empty(device=...)."
    elif kind in (torch.Tensor, nn.Parameter) or is_dtensor(tensor):
        action = "Keep a plain, dense torch.Tensor or DTensor of a storable dtype in the state."
    else:
        action = f"Say with holdfast.register_tensor({kind.__qualname__}, ...) which plain tensors it consists of."
    return StateError(
        f"Tensor {name!r} of shape {tuple(tensor.shape)} cannot be stored: it has {problem}.",
        code="state.unsupported_tensor",
        action=action,
        tensor=name,
    )


def _shared_and_own(tied: Tied) -> StateError:
    names = [entry.name for entry in tied.entries]
    return StateError(
        f"One tensor belongs to a rank alone and to all ranks: {', '.join(map(repr, names))}.",
        code="state.per_rank",
        action="Take it out of the PerRank, or put a copy there.",
        tensor=names[0],
    )


def _unsupported_leaf(path: str, item: object) -> StateError:
    kind = type(item)
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        action = "Put torch.from_numpy(array) into the state."
    elif isinstance(item, (nn.Module, Optimizer, PerRank)):
        action = "Put it into the state itself: not into a PerRank, nor what state_dict() or get_extra_state() returns."
    else:
        action = f"Take it out of the state, or say with holdfast.register_value({kind.__qualname__}, ...) what it is."
    return StateError(
        f"{path!r} is a {kind.__module__}.{kind.__qualname__}, which cannot be saved without pickle.",
        code="state.unsupported_leaf",
        action=action,
        path=path,
    )
