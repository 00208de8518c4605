"""A nested state as named tensors in local memory and a flat table of values: the saving side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple, cast

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.errors import StateError
from holdfast.format import values
from holdfast.format.names import component, join
from holdfast.format.values import Node, Open, Stateful, TensorRef
from holdfast.frameworks import NamedTensor
from holdfast.frameworks.module import flatten_module
from holdfast.frameworks.optimizer import flatten_optimizer
from holdfast.frameworks.stateful import is_stateful
from holdfast.plan.layout import Placed, Replicas, Spec, TensorLayout, Whole
from holdfast.state.placements import DTYPE_NAMES, PlacementReader, is_dtensor, torch_value

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
    """A state, flat: tensors by canonical name (sorted), other names of the same memory, and the table of values."""

    tensors: dict[str, LocalTensor]
    aliases: dict[str, str]
    nodes: dict[str, Node]
    own_nodes: dict[str, Node] = field(default_factory=dict)


class Tied(NamedTuple):
    """One memory and every name it has; the first is the canonical one."""

    local: LocalTensor
    entries: list[NamedTensor]


def flatten(state: Mapping[str, object], *, rank: int = 0, world_size: int = 1) -> FlatState:
    """Name everything in `state`. Nothing is copied: tensors share the live memory, values are read now.

    Leaves may be modules, optimizers, objects with ``state_dict`` and ``load_state_dict``, tensors, and values (see
    ``holdfast.format.values``); containers are dicts, lists, tuples, NamedTuples, OrderedDicts and Counters.
    Raises `StateError`, which names the path and the type, for anything else, for names that collide, for cycles, and
    for tensors without a layout.
    """
    return _Flattener().run(state)


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


class _Flattener:
    """One walk of a state; the `Sink` of the frameworks."""

    def __init__(self) -> None:
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
        for local, entries in gatherer.add(self._tensors.values()):
            for entry in entries:
                self._names[id(entry.tensor)] = NamedTensor(local.layout.name, entry.tensor, entries[0].replicas)
        named = len(self._tensors)
        for path, optimizer in self._optimizers:
            flatten_optimizer(path, optimizer, self)
        gatherer.add(islice(self._tensors.values(), named, None))
        return FlatState(
            {local.layout.name: local for local, _ in sorted(gatherer.found, key=_canonical_name)},
            {entry.name: local.layout.name for local, entries in gatherer.found for entry in entries[1:]},
            self._nodes,
        )

    def named(self, tensor: torch.Tensor) -> NamedTensor | None:
        return self._names.get(id(tensor))

    def tensor(self, entry: NamedTensor) -> None:
        self._claim(entry.name)
        self._tensors[entry.name] = entry

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
            self.tensor(NamedTensor(path, item, replicas))
            self._nodes[path] = TensorRef()
        elif live and isinstance(item, nn.Module):
            flatten_module(path, item, self)
        elif live and isinstance(item, Optimizer):
            self._optimizers.append((path, item))
        elif (shell := values.container(item, path)) is not None:
            self.node(path, shell[0])
            for name, child in shell[1]:
                self._visit(join(path, name), child, replicas, live=live)
        elif live and is_stateful(item):
            self._visit(path, item.state_dict(), replicas, live=False)
            self._nodes[path] = Stateful(cast("values.Leaf | TensorRef | values.Container", self._nodes[path]))
        else:
            raise _unsupported_leaf(path, item)


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
    return StateError(
        f"Tensor {name!r} of shape {tuple(tensor.shape)} cannot be stored: it has {problem}.",
        code="state.unsupported_tensor",
        action="Give the tensor memory with model.to_empty(device=...)."
        if tensor.is_meta
        else "Keep a plain, dense torch.Tensor or DTensor of a storable dtype in the state.",
        tensor=name,
    )


def _unsupported_leaf(path: str, item: object) -> StateError:
    kind = type(item)
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        action = "Put torch.from_numpy(array) into the state."
    elif isinstance(item, (nn.Module, Optimizer)):
        action = "Put it into the state itself, not into what a state_dict() or get_extra_state() returns."
    else:
        action = "Take it out of the state, or convert it to tensors, plain values, lists and dicts."
    return StateError(
        f"{path!r} is a {kind.__module__}.{kind.__qualname__}, which cannot be saved without pickle.",
        code="state.unsupported_leaf",
        action=action,
        path=path,
    )
