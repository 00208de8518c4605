"""A checkpoint's names bound to a live state: the loading side.

`bind` says which local memory is to be filled from which stored tensor and where names, dtypes and shapes differ; it
changes nothing. When all memory has been filled, `Binding.finish` puts the values in place.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, cast

import msgspec
import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.errors import IncompatibleError, NotFoundError
from holdfast.format import values
from holdfast.format.names import component, join
from holdfast.format.values import Node, Open, Stateful, TensorRef, TorchValue
from holdfast.frameworks import Finish, NamedTensor
from holdfast.frameworks.module import bind_module
from holdfast.frameworks.optimizer import bind_optimizer
from holdfast.frameworks.stateful import SelfDescribing, is_stateful
from holdfast.geometry import Shape
from holdfast.plan.layout import Replicas
from holdfast.state.flatten import Gatherer, LocalTensor, Tied, check_depth, check_root
from holdfast.state.placements import empty, generator_state, revive, same_placement

_SHOWN = 10
_HINT_CANDIDATES = 500


class Stored(NamedTuple):
    """A tensor of the checkpoint, or what it becomes on the way in."""

    dtype: str
    shape: Shape


class Target(NamedTuple):
    """Memory to fill: the live name, the canonical stored name, and the local memory (its layout has the stored name).

    One stored tensor may have several targets.
    """

    name: str
    source: str
    local: LocalTensor


@dataclass(frozen=True)
class Binding:
    """What `bind` found. Name lists are sorted and hold tensors and values alike.

    `loaded` and `unexpected` are stored names, `missing` are live ones; a live object that the checkpoint lacks wholly
    is missing under its path.
    """

    targets: list[Target]
    loaded: list[str]
    missing: list[str]
    unexpected: list[str]
    finish: Finish
    """Puts the values in place and returns the whole tree; to be called once, after all targets were filled.

    Order: containers and extra states, optimizers, objects with ``load_state_dict``, and random generators last.
    """


def bind(
    into: Mapping[str, object],
    stored: Mapping[str, Stored],
    aliases: Mapping[str, str],
    nodes: Mapping[str, Node],
    *,
    strict: bool,
) -> Binding:
    """Match a live state with a checkpoint's tensors, other names of tensors, and values.

    Raises `IncompatibleError` when a dtype, a shape or a kind differs, and with `strict` also when a name is on one
    side only (code ``incompatible.names``). Ranks that hold different parts of a model see names of other ranks as
    unexpected: they bind without `strict`, compare, and raise `difference` themselves. Raises `StateError` for a live
    state that could not be saved.
    """
    check_root(into)
    binder = _Binder(stored, aliases, nodes)
    binding = binder.run(cast("MutableMapping[str, object]", into))
    if strict and (binding.missing or binding.unexpected):
        raise difference(binding.missing, binding.unexpected, stored, nodes)
    return binding


def difference(
    missing: Collection[str], unexpected: Collection[str], stored: Mapping[str, Stored], nodes: Mapping[str, Node]
) -> IncompatibleError:
    """The error that says which names are on one side only; a whole unexpected object is one entry."""
    collapsed = _collapse(unexpected, [*stored, *_value_names(nodes)], nodes)
    lines = []
    if missing:
        lines.append(f"{len(missing)} missing from the checkpoint: {_listing(sorted(missing))}.")
    if unexpected:
        lines.append(f"{len(unexpected)} in the checkpoint but not in the live state: {_listing(collapsed)}.")
    candidates = sorted(unexpected)[:_HINT_CANDIDATES]
    hints = []
    for name in sorted(missing)[:_SHOWN]:
        hints += [f"{close} -> {name}" for close in difflib.get_close_matches(name, candidates, n=1, cutoff=0.75)]
    if hints:
        lines.append(f"Perhaps renamed (stored -> live): {', '.join(hints)}.")
    return IncompatibleError(
        "Names differ. " + " ".join(lines),
        code="incompatible.names",
        action="Give both the same names, or load what both have with strict=False.",
        tensor=next(iter(sorted(missing) or sorted(unexpected)), None),
    )


class _Mismatch(NamedTuple):
    what: str
    name: str
    text: str


class _Binder:
    """One walk of a live state; the `Source` of the frameworks."""

    def __init__(self, stored: Mapping[str, Stored], aliases: Mapping[str, str], nodes: Mapping[str, Node]) -> None:
        self.nodes = nodes
        self._stored = stored
        self._aliases = aliases
        self._pending: list[NamedTensor] = []
        self._names: dict[int, NamedTensor] = {}
        self._records: dict[tuple[str, tuple[str, ...]], Callable[..., object]] = {}
        self._optimizers: list[tuple[str, Optimizer]] = []
        self._finish_statefuls: list[Finish] = []
        self._finish_generators: list[Finish] = []
        self._targets: list[Target] = []
        self._used: set[str] = set()
        self._missing: set[str] = set()
        self._mismatches: list[_Mismatch] = []

    def run(self, into: MutableMapping[str, object]) -> Binding:
        finish_containers = self._dict("", into)
        for name, tied in self._resolve():
            for entry in tied.entries:
                self._names[id(entry.tensor)] = NamedTensor(name, entry.tensor, tied.entries[0].replicas)
        finish_optimizers = [self._optimizer(path, optimizer) for path, optimizer in self._optimizers]
        self._resolve()
        if self._mismatches:
            raise self._incompatible()

        def finish() -> object:
            for step in (finish_containers, *finish_optimizers, *self._finish_statefuls, *self._finish_generators):
                step()
            return into

        known = [*self._stored, *_value_names(self.nodes)]
        return Binding(
            self._targets,
            sorted(name for name in known if name in self._used),
            sorted(self._missing),
            sorted(name for name in known if name not in self._used),
            finish,
        )

    def named(self, tensor: torch.Tensor) -> NamedTensor | None:
        return self._names.get(id(tensor))

    def stored_below(self, path: str) -> Iterator[str]:
        prefix = path + "/"
        return (name for name in chain(self._stored, self._aliases, self.nodes) if name.startswith(prefix))

    def memory(
        self, name: str, *, live: torch.Tensor | None, like: torch.Tensor | None, device: torch.device
    ) -> torch.Tensor:
        stored = self._stored.get(self._canonical(name))
        if stored is None:
            raise NotFoundError(
                f"The values refer to tensor {name!r}, which is not among the tensors to load.",
                code="not_found.tensor",
                action="Select that tensor too, or leave the object that it belongs to out.",
                tensor=name,
            )
        like = like if like is not None and tuple(like.shape) == stored.shape else None
        fits = (
            live is not None
            and live.dtype is getattr(torch, stored.dtype)
            and tuple(live.shape) == stored.shape
            and live.device == device
            and same_placement(live, like)
        )
        if live is not None and fits:
            return live
        return empty(stored.dtype, stored.shape, like=like, device=device)

    def fill(self, entry: NamedTensor) -> None:
        self._pending.append(entry)

    def missing(self, name: str) -> None:
        self._missing.add(name)

    def mark(self, name: str) -> None:
        self._used.add(name)

    def opaque(
        self, path: str, memory: Callable[[str], torch.Tensor] | None = None, replicas: Replicas = "compare"
    ) -> Finish:
        tensors: dict[str, torch.Tensor] = {}
        for name, node in values.leaves(self.nodes, path):
            self.mark(name)
            if isinstance(node, TensorRef):
                host = torch.device("cpu")
                tensors[name] = memory(name) if memory else self.memory(name, live=None, like=None, device=host)
                self.fill(NamedTensor(name, tensors[name], replicas))
        return lambda: values.rebuild(self.nodes, path, tensors.__getitem__, revive=revive, record=self._record_type)

    def live(self, path: str, item: object) -> Finish:
        if isinstance(item, torch.Tensor):
            self.fill(NamedTensor(path, item, "compare"))
        elif isinstance(item, nn.Module):
            return bind_module(path, item, self)
        elif isinstance(item, Optimizer):
            self._optimizers.append((path, item))
        elif isinstance(item, torch.Generator):
            self._generator(path, item)
        elif isinstance(item, (dict, list, tuple)) and not isinstance(item, torch.Size):
            check_depth(path)
            return self._container(path, item)
        elif is_stateful(item):
            self._stateful(path, item)
        else:
            return self._value(path, item)
        return lambda: item

    def _container(self, path: str, item: dict[object, object] | list[object] | tuple[object, ...]) -> Finish:
        if isinstance(item, dict):
            return self._whole(path, item, "counter") if isinstance(item, Counter) else self._dict(path, item)
        record = values.is_record(item)
        if not record and self._holds_only_values(item):
            return self._whole(path, item, "list" if isinstance(item, list) else "tuple")
        self._expect(path, item, values.Record if record else values.Items)
        names = item._fields if values.is_record(item) else [str(index) for index in range(len(item))]
        parts = [self.live(join(path, name), part) for name, part in zip(names, item, strict=True)]
        if isinstance(item, list):
            return lambda: _refill(item, [part() for part in parts])
        make = _maker(type(item))
        return lambda: make(*[part() for part in parts])

    def _dict(self, path: str, item: MutableMapping[str, object] | dict[object, object]) -> Finish:
        self._expect(path, item, values.Table, Open)
        entries = cast("MutableMapping[object, object]", item)
        parts = {key: self.live(join(path, component(key, path=path)), entry) for key, entry in entries.items()}

        def finish() -> object:
            for key, part in parts.items():
                entries[key] = part()
            return item

        return finish

    def _holds_only_values(self, item: object) -> bool:
        """Whether no part of `item` has to keep its identity. Notes the types of NamedTuples on the way."""
        if isinstance(item, (torch.Tensor, nn.Module, Optimizer, torch.Generator)):
            return False
        if isinstance(item, dict):
            return all(self._holds_only_values(part) for part in item.values())
        if isinstance(item, (list, tuple)):
            if values.is_record(item):
                self._records[type(item).__name__, item._fields] = _maker(type(item))
            return all(self._holds_only_values(part) for part in item)
        return not is_stateful(item)

    def _whole(self, path: str, item: object, kind: str) -> Finish:
        """Bind a container of values: replaced as a whole, a list or Counter in place."""
        node = self.nodes.get(path)
        if node is not None and not (isinstance(node, (values.Items, values.Table)) and node.kind == kind):
            self._differs("kind", path, f"a {kind} here, {_word(node)} in the checkpoint")
            return lambda: item
        value = self._value(path, item)
        return lambda: _refill(item, value()) if isinstance(item, (list, Counter)) else value()

    def _value(self, path: str, item: object) -> Finish:
        node = self.nodes.get(path)
        if node is None and self._canonical(path) not in self._stored:
            self.missing(path)
        elif node is None or not self._is_value(path, node):
            self._differs("kind", path, f"a {type(item).__name__} here, {_word(node)} in the checkpoint")
        else:
            return self.opaque(path)
        return lambda: item

    def _is_value(self, path: str, node: Node) -> bool:
        whole = not isinstance(node, (Open, Stateful))
        return whole and not any(isinstance(part, TensorRef) for _, part in values.leaves(self.nodes, path))

    def _generator(self, path: str, item: torch.Generator) -> None:
        node = self.nodes.get(path)
        if node is None:
            self.missing(path)
        elif isinstance(node, TorchValue) and (node.kind, node.text.partition(":")[0]) == (
            "generator",
            item.device.type,
        ):
            self.mark(path)
            state = generator_state(node)
            self._finish_generators.append(lambda: item.set_state(state))
        else:
            self._differs("kind", path, f"a {item.device.type} Generator here, {_word(node)} in the checkpoint")

    def _stateful(self, path: str, item: SelfDescribing) -> None:
        node = self.nodes.get(path)
        if node is None:
            self.missing(path)
        elif isinstance(node, Open):
            self._differs("kind", path, f"a {type(item).__name__} here, {_word(node)} in the checkpoint")
        else:
            state = self.opaque(path)
            self._finish_statefuls.append(lambda: item.load_state_dict(state()))

    def _optimizer(self, path: str, optimizer: Optimizer) -> Finish:
        node = self.nodes.get(path)
        if node == Open("optimizer"):
            return bind_optimizer(path, optimizer, self)
        if node is None:
            self.missing(path)
        else:
            self._differs("kind", path, f"an optimizer here, {_word(node)} in the checkpoint")
        return lambda: optimizer

    def _record_type(self, name: str, fields: tuple[str, ...]) -> Callable[..., object]:
        return self._records.get((name, fields)) or values.record_type(name, fields)

    def _canonical(self, name: str) -> str:
        return self._aliases.get(name, name)

    def _resolve(self) -> list[tuple[str, Tied]]:
        """Find the source of every tensor that was added since the last call; gives each with its stored name."""
        pending, self._pending = self._pending, []
        return [(self._resolve_one(tied), tied) for tied in Gatherer().add(pending)]

    def _resolve_one(self, tied: Tied) -> str:
        layout, names = tied.local.layout, [entry.name for entry in tied.entries]
        sources = {source: name for name in reversed(names) if (source := self._canonical(name)) in self._stored}
        if not sources:
            for name in names:
                if name in self.nodes:
                    self._differs("kind", name, f"a tensor here, {_word(self.nodes[name])} in the checkpoint")
                else:
                    self.missing(name)
            return self._canonical(names[0])
        source, name = min(sources.items(), key=lambda item: item[1])
        stored = self._stored[source]
        if len(sources) > 1:
            self._differs("tied", name, f"one tensor here, stored separately as {_listing(sorted(sources))}")
        if stored.dtype != layout.dtype:
            self._differs("dtype", name, f"{layout.dtype} here, {stored.dtype} in the checkpoint")
        if stored.shape != layout.shape:
            self._differs("shape", name, f"{layout.shape} here, {stored.shape} in the checkpoint")
        self.mark(source)
        local = LocalTensor(msgspec.structs.replace(layout, name=source), tied.local.memory)
        self._targets.append(Target(name, source, local))
        return source

    def _expect(self, path: str, item: object, *kinds: type[Node]) -> None:
        node = self.nodes.get(path)
        if (node is not None and not isinstance(values.bare(node), kinds)) or self._canonical(path) in self._stored:
            self._differs("kind", path, f"a {type(item).__name__} here, {_word(node)} in the checkpoint")

    def _differs(self, what: str, name: str, text: str) -> None:
        self._mismatches.append(_Mismatch(what, name, text))

    def _incompatible(self) -> IncompatibleError:
        first = self._mismatches[0]
        listing = _listing([f"{name!r}: {text}" for _, name, text in self._mismatches], separator="; ")
        return IncompatibleError(
            f"{len(self._mismatches)} differ between the live state and the checkpoint: {listing}.",
            code=f"incompatible.{first.what}",
            action=_ACTIONS[first.what],
            tensor=first.name,
        )


_ACTIONS = {
    "dtype": "Create the live tensor in the stored dtype.",
    "shape": "Create the live tensor in the stored shape, or leave it out of the state.",
    "kind": "Put the same kind of object into the live state, or leave it out of the state.",
    "tied": "Tie them as they were tied when the checkpoint was written.",
}


def _value_names(nodes: Mapping[str, Node]) -> list[str]:
    return [path for path, node in nodes.items() if isinstance(values.bare(node), values.Leaf)]


def _collapse(names: Collection[str], known: Collection[str], nodes: Mapping[str, Node]) -> list[str]:
    """`names`, sorted, where all names of one stored object are written as one line."""
    objects = {
        path: node.kind if isinstance(node, Open) else "object with a state_dict"
        for path, node in nodes.items()
        if isinstance(node, Stateful) or (isinstance(node, Open) and node.kind != "dict")
    }

    def owner(name: str) -> str | None:
        return next((path for path in objects if name == path or name.startswith(path + "/")), None)

    totals = Counter(map(owner, known))
    counts = Counter(map(owner, names))
    whole = {path for path, count in counts.items() if path is not None and count == totals[path]}
    lines = {f"{path} (the whole {objects[path]}: {counts[path]} names)" for path in whole}
    return sorted(lines.union(name for name in names if owner(name) not in whole))


def _listing(names: list[str], separator: str = ", ") -> str:
    more = [f"and {len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
    return separator.join([*names[:_SHOWN], *more])


def _word(node: Node | None) -> str:
    """What a node is, for messages; None stands for a tensor without a node."""
    if isinstance(node, (values.Table, values.Items, Open)):
        return f"a stored {node.kind}"
    if isinstance(node, TorchValue):
        return f"a {node.kind}"
    words = {TensorRef: "a tensor", values.Record: "a NamedTuple", Stateful: "an object's state"}
    return words.get(type(node), "a plain value") if node is not None else "a tensor"


def _maker(kind: type) -> Callable[..., object]:
    """The constructor of a tuple type from its items."""
    make = getattr(kind, "_make", None)
    if make is not None:
        return lambda *items: make(items)
    return lambda *items: kind(items)


def _refill(item: object, new: object) -> object:
    """Replace what a list or Counter holds; nothing was loaded when `new` is `item` itself."""
    if new is not item:
        if isinstance(item, list):
            item[:] = cast("list[object]", new)
        elif isinstance(item, Counter):
            item.clear()
            item.update(cast("Counter[object]", new))
    return item
