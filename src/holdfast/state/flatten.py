"""The saving side: a nested state becomes named tensors in local memory and a flat table of values."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container as Holds
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import Literal, TypeAlias, cast

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.errors import StateError
from holdfast.format import values
from holdfast.format.names import component, join, own_part, rank_component
from holdfast.format.patterns import Globs
from holdfast.format.values import Container, Encoded, Leaf, Node, Open, PlanesNode, Stateful, TableNode, TensorRef
from holdfast.frameworks import Adapter, Deferred, NamedTensor
from holdfast.frameworks.flat_memory import FlatMemory, Portion
from holdfast.frameworks.known_types import refusal_of, unwrapped
from holdfast.frameworks.piecewise import Piecewise
from holdfast.frameworks.registry import adapter_of, describing
from holdfast.frameworks.stateful import reading
from holdfast.frameworks.still import Still
from holdfast.plan.layout import Replicas
from holdfast.state.arrays import Array, check_array
from holdfast.state.collect import LocalTensor, TensorCollector, WalkCache, unsupported_tensor
from holdfast.state.differences import listing
from holdfast.state.flat_owners import FlatOwners, piecewise_of
from holdfast.state.local_placements import dtensor_type, is_dtensor, local_parts, torch_value
from holdfast.state.marks import Marked
from holdfast.state.per_rank import PerRank
from holdfast.state.piecewise_layouts import describe
from holdfast.state.plain_forms import is_registrable, plain_form
from holdfast.state.plane_parts import PlaneDivider, name_of_planes, plane_name
from holdfast.state.registered_types import ARRAY, Registration, any_registered, registered
from holdfast.state.sharded_tensors import any_sharded, in_pieces, is_sharded
from holdfast.state.still_names import StillNames
from holdfast.wording import count, kind_of, with_article

_TENSOR = TensorRef()
#: Containers of which a selection may take a part. (It takes all entries of a list or none, but may take a part of each
#: entry.)
_DIVISIBLE = frozenset((dict, OrderedDict, list, tuple))

#: Types of slots that `Walk` may leave for later: tensors that consist of their memory alone, and immutable values.
_PLAIN = {torch.Tensor, nn.Parameter}
_CONSTANT = {type(None), bool, int, float, complex, str, bytes}

#: Where a load finds the tensor: in the live state, among the slots of an optimizer that may have none yet, or inside
#: what an object takes back as a whole, so that the load makes another.
_Where: TypeAlias = Literal["live", "slots", "inside"]

_name_of = attrgetter("name")
_tensor_of = attrgetter("tensor")


@dataclass(frozen=True)
class FlatState:
    """A flat state: tensors by canonical name (sorted), other names of the same memory, and the table of values.

    `own_nodes` are the values that belong to this rank alone: the contents of its `PerRank` parts. `remembered` makes
    the next walk cheaper, and keeps no memory alive. `unmatched` maps each glob of the selection that matches nothing
    on this rank to similar names. `still` are the names of the tensors that training leaves alone.
    """

    tensors: dict[str, LocalTensor]
    aliases: dict[str, str]
    nodes: dict[str, Node]
    own_nodes: dict[str, Node]
    remembered: Sequence[WalkCache]
    unmatched: Mapping[str, list[str]]
    still: frozenset[str] = frozenset()


def flatten(
    state: Mapping[str, object],
    *,
    rank: int = 0,
    world_size: int = 1,
    last: Sequence[WalkCache] = (),
    select: Globs | None = None,
    meta: bool = False,
) -> FlatState:
    """Name everything in `state`. Copies nothing: tensors share the live memory. Reads the values now.

    Leaves may be modules, optimizers, objects with ``state_dict`` and ``load_state_dict``, tensors, values (see
    ``holdfast.format.values``) and registered types; containers are dicts, lists, tuples, NamedTuples, OrderedDicts
    and Counters. Names inside a `PerRank` contain `rank`, and its node records that there are `world_size` such parts.
    `last` is `remembered` of the last walk of this state: tensors that have not changed since are not described again.
    Reads only the parts in `select`: it selects optimizers, objects and values by their own names, and lists only with
    all their entries. With `meta`, tensors may be on the meta device. Raises `StateError`, which names the path and the
    type, for any other leaf, for names that collide, for cycles, and for tensors without a layout.
    """
    walk = Walk(state, rank=rank, world_size=world_size, last=last, select=select, leaves=False, meta=meta)
    return walk.finish()


def check_root(state: Mapping[str, object]) -> None:
    """Refuse a root that is not a dict with string keys."""
    problem = None
    if not isinstance(state, MutableMapping):
        problem = f"The state is {kind_of(state)}, not a dict."
    elif strange := [key for key in state if type(key) is not str]:
        problem = f"The state has the key {strange[0]!r:.80}, {kind_of(strange[0])}, but its keys must be strings."
    if problem is not None:
        raise StateError(
            problem,
            code="state.root",
            action='Pass a dict with string keys, such as {"model": model}.',
        )


def check_depth(path: str) -> None:
    """Refuse a container at such a depth that it probably contains itself."""
    if path.count("/") >= values.MAX_DEPTH - 1:
        top = "/".join(path.split("/")[:4])
        raise StateError(
            f"The containers at {top!r:.200} contain themselves, or are nested more than {values.MAX_DEPTH} deep.",
            code="state.nesting",
            action="Take the cycle out, or flatten them.",
            path=path,
        )


class Walk:
    """One walk of a state, in two parts; it is the `Sink` of the adapters.

    The constructor reads the whole structure: every tensor, value, group and slot. Only the slots in `left`, thousands
    of plain tensors that only a step changes, have no names yet. `finish` names them. Without `leaves`,
    `left` stays empty: then call `finish` at once.
    """

    def __init__(
        self,
        state: Mapping[str, object],
        *,
        rank: int = 0,
        world_size: int = 1,
        last: Sequence[WalkCache] = (),
        select: Globs | None = None,
        leaves: bool = True,
        meta: bool = False,
    ) -> None:
        """Read the structure of `state`; the other arguments are those of `flatten`."""
        self._select = select
        #: Tensors that are not saved, but may have optimizer state that is.
        self._left_out: list[NamedTensor] = []
        self._rank = rank
        self._world_size = world_size
        self._per_rank = False
        self._planes = PlaneDivider()
        self._planed: list[tuple[NamedTensor, str]] = []
        self._nodes: dict[str, Node] = {}
        self._tensors: dict[str, NamedTensor] = {}
        self._names: dict[int, NamedTensor] = {}
        #: Objects whose state has names of tensors in its own names, with their adapters.
        self._last: list[tuple[str, object, Adapter]] = []
        #: The optimizers in the state; their steps change tensors.
        self.optimizers: list[Optimizer] = []
        self._piecewise: dict[str, Piecewise] = {}
        self._held = FlatOwners()
        self._collector = TensorCollector(last, meta=meta)
        self._num_collected = 0
        #: Parts that `finish` may name; once the constructor has decided, only those that it does name.
        self._deferred: list[Deferred] = []
        #: The names of tensors that steps change, and of those that something else may change too.
        self._stepped: set[str] = set()
        self._unsteady: set[str] = set()
        self._changed_elsewhere: list[torch.Tensor] = []
        self._still = StillNames()
        #: The slots that `finish` names.
        self.left = Marked()
        self._begin(state, leaves=leaves)

    @property
    def remembered(self) -> Sequence[WalkCache]:
        """The caches of this walk, to pass to the next one as `last`."""
        return self._collector.remembered

    def found(self) -> dict[str, LocalTensor]:
        """The tensors that were named so far."""
        found = {local.layout.name: local for local in self._collector.found}
        for (name, *others), local in describe(self._piecewise):
            found[name] = local
            self._collector.aliases.update(dict.fromkeys(others, name))
        return found

    def stepped(self, found: Mapping[str, LocalTensor]) -> set[str]:
        """The names of those of the `found` tensors that only steps of the optimizers change: trained parameters that
        have a gradient or slots, and those slots, however they are nested.

        Excludes parameters that a forward changes too, and tensors that steps in a CUDA graph change, because a replay
        calls no hooks.
        """
        return self._with_planes(self._stepped - self._unsteady) & found.keys()

    def _with_planes(self, names: set[str]) -> set[str]:
        """The `names` of tensors, and those of their planes."""
        nodes = ((name, self._nodes.get(name)) for name in names) if self._planed else ()
        planed = ((name, node.planes) for name, node in nodes if isinstance(node, PlanesNode))
        return names.union(plane_name(name, plane) for name, planes in planed for plane in planes)

    def finish(self) -> FlatState:
        """Name the slots in `left`, and return the flat state. Any thread may call it, once; the slots must not have
        changed since the walk began."""
        for part in self._deferred:
            part.describe(self)
        self._gather()
        self._collector.remembered[-1] = self.remembered[-1]._replace(num_left=len(self.left.memory))
        found = self.found()
        own = {path: node for path, node in self._nodes.items() if own_part(path)} if self._per_rank else {}
        return FlatState(
            {name: found[name] for name in sorted(found)},
            self._collector.aliases,
            {path: node for path, node in self._nodes.items() if path not in own} if own else self._nodes,
            own,
            self.remembered,
            {} if self._select is None else self._select.unmatched(),
            self._still.among(found, self._with_planes(self._still.frozen - self._stepped - self._unsteady)),
        )

    def _begin(self, state: Mapping[str, object], *, leaves: bool) -> None:
        check_root(state)
        self._nodes[""] = Open("dict")
        self._children("", [(component(key), item) for key, item in state.items()], "compare", live=True)
        # An optimizer's names contain those of parameters, so every parameter must have its canonical name first.
        self._gather()
        self._names = self._collector.names()
        self._name_portions()
        for entry, plane in self._planed:
            first = self._tensors.get(plane)
            canonical = plane if first is None else self._names[id(first.tensor)].name
            self._names[id(entry.tensor)] = NamedTensor(name_of_planes(canonical), entry.tensor, entry.replicas)
        saved = frozenset(self._names) if self._left_out else frozenset[int]()
        saved -= {id(entry.tensor) for entry in self._left_out if self._held.of(entry.tensor) is not None}
        for entry in sorted(self._left_out, key=_name_of):
            self._names.setdefault(id(entry.tensor), entry)
        for path, item, adapter in self._last:
            num_before = len(self.optimizers)
            with describing(path, adapter):
                adapter.describe(path, item, self)
            for optimizer in self.optimizers[num_before:] if self._left_out else ():
                self._refuse_part_of_trained(path, optimizer, saved)
        self._unsteady.update(self._names[id(tensor)].name for tensor in self._changed_elsewhere)
        self._gather()
        # By now, memory that the state also has elsewhere has got its canonical name from there.
        if leaves:
            self._leave_some()
            self._gather()

    def _name_portions(self) -> None:
        """Name the portions in flat memory that the selection takes."""
        for held in self._held.all():
            for portion in held.portions:
                wanted = [name for name in portion.names if self.wants(name)]
                item = piecewise_of(portion, held.memory)
                for name in wanted:
                    self._add_piecewise(name, item)
                if not wanted:
                    self._left_out.append(NamedTensor(portion.names[0], held.owner, "compare"))
            canonical = self._held.rename(held, lambda names: next(filter(self.wants, names), names[0]))
            self._names[id(held.owner)] = NamedTensor(canonical, held.owner, "compare")

    def _add_piecewise(self, name: str, item: Piecewise) -> None:
        if name in self._piecewise or name in self._tensors or name in self._nodes:
            raise _collision(name)
        self._piecewise[name] = item

    def _leave_some(self) -> None:
        """Name the deferred parts that cannot be left for `finish`."""
        deferred, self._deferred = self._deferred, []
        for part in deferred:
            if not self._leave(part):
                num_tensors, num_pieces = len(self._tensors), len(self._piecewise)
                part.describe(self)
                self._stepped.update(islice(self._tensors, num_tensors, None))
                self._stepped.update(islice(self._piecewise, num_pieces, None))

    def _refuse_part_of_trained(self, path: str, optimizer: Optimizer, saved: Holds[int]) -> None:
        """Refuse a selection that takes the state of an optimizer and only a part of the weights that it trains: after
        a load, it would go on with other weights. (An optimizer without any of them is a choice, as is one without
        its frozen ones.) `saved` has the ids of the tensors that the selection takes."""
        trained = {id(each): each for group in optimizer.param_groups for each in group["params"] if each.requires_grad}
        lacking = [self._names[key].name for key in trained if key not in saved and key in self._names]
        if lacking and len(lacking) < len(trained):
            raise StateError(
                f"select takes optimizer {path!r}, but {len(lacking):,} of the {count(len(trained), 'weight')} that it "
                f"trains are not selected: {listing(sorted(lacking))}.",
                code="state.select_weights",
                action="Select them too, freeze (requires_grad_) what is not trained, or leave the optimizer out.",
                path=path,
            )

    def _leave(self, part: Deferred) -> bool:
        """Leave a part for `finish` if all its slots are plain tensors and constants. Returns whether it is left."""
        slots = list(part.slots())
        kinds, dtensor = set(map(type, slots)), dtensor_type()
        if not kinds <= _PLAIN | _CONSTANT | {dtensor}:
            return False
        if not kinds <= _PLAIN:
            tensors = [slot for slot in slots if isinstance(slot, torch.Tensor)]
            slots = [slot._local_tensor if type(slot) is dtensor else slot for slot in tensors]  # noqa: SLF001
            if not set(map(type, slots)) <= _PLAIN:
                return False
        parts = cast("list[torch.Tensor]", slots)
        if not self.left.add(parts):
            return False
        self._deferred.append(part)
        return True

    def _gather(self) -> None:
        """Describe the tensors that were added since the last call."""
        self._collector.add(islice(self._tensors.values(), self._num_collected, None))
        self._num_collected = len(self._tensors)

    def named(self, tensor: torch.Tensor) -> NamedTensor | None:
        """As `Sink.named`."""
        return self._names.get(id(tensor))

    def wants(self, name: str) -> bool:
        """As `Sink.wants`."""
        return self._select is None or name in self._select

    def chosen(self, entries: Sequence[NamedTensor]) -> Sequence[NamedTensor]:
        """As `Sink.chosen`."""
        if self._select is None:
            return entries
        wanted = [entry.name in self._select for entry in entries]
        self._left_out += [entry for entry, is_wanted in zip(entries, wanted, strict=True) if not is_wanted]
        return [entry for entry, is_wanted in zip(entries, wanted, strict=True) if is_wanted]

    def pieces(self, name: str, item: Piecewise) -> None:
        """As `Sink.pieces`."""
        self._add_piecewise(name, item)

    def hold(self, held: FlatMemory) -> None:
        """As `Sink.hold`."""
        self._held.add(held)

    def held(self, tensor: torch.Tensor) -> FlatMemory | None:
        """As `Sink.held`."""
        return self._held.of(tensor)

    def portion(self, name: str, portion: Portion, memory: torch.Tensor) -> None:
        """As `Sink.portion`."""
        self._add_piecewise(name, piecewise_of(portion, memory))

    def unsteady(self, tensors: Iterable[torch.Tensor]) -> None:
        """As `Sink.unsteady`."""
        self._changed_elsewhere += tensors

    def frozen(self, names: Iterable[str]) -> None:
        """As `Sink.frozen`."""
        self._still.frozen.update(names)

    def steps(self, optimizer: Optimizer, trained: Iterable[NamedTensor]) -> None:
        """As `Sink.steps`."""
        self.optimizers.append(optimizer)
        self._stepped.update(map(_name_of, trained))

    def later(self, part: Deferred) -> None:
        """As `Sink.later`."""
        self._deferred.append(part)

    def tensors(self, entries: Iterable[NamedTensor]) -> None:
        """As `Sink.tensors`."""
        self._add(entries, where="live")

    def _add(self, entries: Iterable[NamedTensor], *, where: _Where) -> None:
        """Add tensors. Refuses those that no load could make `where` it may have to."""
        # With almost no Python code per tensor: every save runs this.
        listed = list(entries)
        added = {entry.name: entry for entry in listed}
        known = (self._tensors.keys(), self._nodes.keys(), self._piecewise.keys())
        if len(added) < len(listed) or not all(map(added.keys().isdisjoint, known)):
            names = [entry.name for entry in listed]
            raise _collision(
                next(name for name in names if names.count(name) > 1 or any(name in keys for keys in known))
            )
        if any_registered(set(map(type, local_parts(list(map(_tensor_of, listed)))))):
            for entry in listed:
                registration = registered(entry.tensor, name=entry.name)
                if registration is not None:
                    planed = registration.planed
                    if planed is not None and (where == "inside" or (where == "slots" and not planed.can_be_made)):
                        raise _unmakeable(entry.name, planed.name)
                    del added[entry.name]
                    self._add_planes(entry, registration)
        self._tensors.update(added)

    def slots(self, entries: Iterable[NamedTensor]) -> None:
        """As `Sink.slots`."""
        self._add(entries, where="slots")

    def _add_planes(self, entry: NamedTensor, registration: Registration) -> None:
        planes = self._planes.planes(entry, registration)
        self._nodes[entry.name] = PlanesNode(registration.name, tuple(planes))
        for key, plane in planes.items():
            if isinstance(plane, Piecewise):
                self._add_piecewise(plane_name(entry.name, key), plane)
            else:
                self._tensors[plane.name] = plane
        self._planed.append((entry, plane_name(entry.name, next(iter(planes)))))

    def tree(self, path: str, value: object, replicas: Replicas = "compare") -> None:
        """As `Sink.tree`."""
        self._visit(path, value, replicas, live=False)

    def live(self, path: str, item: object) -> None:
        """As `Sink.live`."""
        if not self._visit(path, item, "compare", live=True) and self.wants(path):
            raise _unsupported_leaf(path, item)

    def whole(self, path: str, value: object) -> None:
        """As `Sink.whole`."""
        self._visit(path, value, "first" if own_part(path) else "compare", live=False)
        self._nodes[path] = Stateful(cast("Leaf | TensorRef | PlanesNode | Container | Encoded", self._nodes[path]))

    def node(self, path: str, node: Node) -> None:
        """As `Sink.node`."""
        if path in self._nodes or path in self._tensors:
            raise _collision(path)
        self._nodes[path] = node

    def _visit(self, path: str, item: object, replicas: Replicas, *, live: bool) -> bool:
        """Add the item at `path`; returns False where it is not selected. With `live`, a load can bind it again, so
        modules and the like are allowed, and the selection applies."""
        if type(item) is Still:
            self._still.paths.append(path)
        item = item if isinstance(item, torch.Tensor) else unwrapped(item)
        if self._select is not None and live and not own_part(path):
            if (adapter := adapter_of(item)) is not None and adapter.is_divisible:
                return self._object(path, item)
            if type(item) in _DIVISIBLE or values.is_record(item):
                return self._part_of(path, item, replicas)
            if path not in self._select:
                self._left_out += [NamedTensor(path, item, replicas)] if isinstance(item, torch.Tensor) else []
                return False
        if isinstance(item, torch.Tensor):
            self._add_tensors([NamedTensor(path, item, replicas)], live=live)
        elif (node := values.leaf(item) or torch_value(item)) is not None:
            self.node(path, node)
        elif (registration := registered(item)) is not None:
            self._encoded(path, item, registration, replicas)
        elif isinstance(item, Piecewise):
            self.node(path, _TENSOR)
            self._piecewise[path] = item
        elif (shell := values.container(item, path)) is not None:
            check_depth(path)
            self.node(path, shell[0])
            self._children(path, shell[1], replicas, live=live)
        elif not live or not self._object(path, item):
            raise _unsupported_leaf(path, item)
        return True

    def _children(self, path: str, children: Iterable[tuple[str, object]], replicas: Replicas, *, live: bool) -> None:
        """Add the entries of a container: its tensors all at once, because there may be thousands."""
        prefix, is_whole = f"{path}/" if path else "", self._select is None or not live
        tensors: list[NamedTensor] = []
        for name, child in children:
            if is_whole and isinstance(child, torch.Tensor):
                tensors.append(NamedTensor(prefix + name, child, replicas))
            else:
                self._visit(prefix + name, child, replicas, live=live)
        self._add_tensors(tensors, live=live)

    def _part_of(self, path: str, item: object, replicas: Replicas) -> bool:
        """Add the selected entries of a container; returns False where there are none."""
        check_depth(path)
        shell = values.container(item, path)
        assert shell is not None
        node, children = shell
        added = [name for name, child in children if self._visit(join(path, name), child, replicas, live=True)]
        if not added and not (self.wants(path) and not children):
            return False
        if isinstance(node, TableNode):
            node = TableNode(node.kind, tuple(added))
        elif len(added) < len(children):
            entries = count(len(children), "entry", "entries")
            raise StateError(
                f"select takes only {len(added)} of the {entries} of {path!r}, {kind_of(item)}.",
                code="state.select",
                action="Select all of them or none, or keep them in a dict.",
                path=path,
            )
        self.node(path, node)
        return True

    def _object(self, path: str, item: object) -> bool:
        """Add an object that a load can bind again. Returns False where it cannot be saved, or no part of it is
        selected."""
        if isinstance(item, PerRank):
            return self._own(path, item)
        adapter = adapter_of(item)
        if adapter is None or (adapter.spans_ranks and own_part(path)):
            return False
        if adapter.needs_names:
            self._last.append((path, item, adapter))
            return True
        with describing(path, adapter):
            return adapter.describe(path, item, self)

    def _add_tensors(self, entries: Sequence[NamedTensor], *, live: bool) -> None:
        """Add tensors with their nodes. With `live`, a load fills these; else it makes others."""
        for entry in entries if self._per_rank else ():
            if is_dtensor(entry.tensor) and own_part(entry.name):
                raise unsupported_tensor(entry.name, entry.tensor, "parts on several ranks, but is in a PerRank")
        if any_sharded(map(type, map(_tensor_of, entries))):
            for entry in entries:
                if is_sharded(entry.tensor):
                    self.node(entry.name, _TENSOR)
                    self._piecewise[entry.name] = in_pieces(entry.name, entry.tensor)
            entries = [entry for entry in entries if not is_sharded(entry.tensor)]
        self._add(entries, where="live" if live else "inside")
        for entry in entries:
            self._nodes.setdefault(entry.name, _TENSOR)

    def _encoded(self, path: str, item: object, registration: Registration, replicas: Replicas) -> None:
        if registration is ARRAY:
            check_array(path, cast("Array", item))
        with reading(path, f"the encode function of {registration.name!r}"):
            encoded = registration.encode(item)
        if registered(encoded) is None:  # an encode function that returns its argument would recurse for ever
            self._visit(path, encoded, replicas, live=False)
        node = self._nodes.get(path)
        if not isinstance(node, Leaf | TensorRef | Container):
            raise StateError(
                f"The encode function of {registration.name!r} turned {path!r} into another registered type.",
                code="state.encoded",
                action="Return plain values from the function, or the object inside a list.",
                path=path,
            )
        self._nodes[path] = Encoded(registration.name, node)

    def _own(self, path: str, item: PerRank[object]) -> bool:
        if own_part(path):
            return False
        self._per_rank = True
        self.node(path, values.PerRankNode(self._world_size))
        self._visit(join(path, rank_component(self._rank)), item.value, "first", live=True)
        return True


def _collision(path: str) -> StateError:
    return StateError(
        f"Two parts of the state have the name {path!r}.",
        code="state.collision",
        action="Rename one of them.",
        path=path,
    )


def _unmakeable(name: str, kind: str) -> StateError:
    return StateError(
        f"{name!r} is a tensor of type {kind.partition('{')[0]}, which a load would have to make, and only a "
        "registration tells how.",
        code="state.planes",
        action="Register the type with holdfast.register_tensor, whose rebuild function makes it; or hold it where a "
        "load finds a live one to fill, such as a parameter or an entry of the state; or keep a plain tensor.",
        tensor=name,
    )


def _unsupported_leaf(path: str, item: object) -> StateError:
    kind = type(item)
    problem = "cannot be saved without pickle"
    refusal = refusal_of(item)
    if refusal is not None:
        problem, action = refusal.problem, refusal.action
    elif isinstance(item, np.ndarray):
        action = "Put numpy.asarray(array) into the state."
    elif isinstance(item, PerRank) or ((adapter := adapter_of(item)) is not None and adapter.spans_ranks):
        action = (
            "Put it directly into the state, not into a PerRank or the result of state_dict() or get_extra_state()."
        )
    else:
        plain = plain_form(item, _variable(path))
        first = "Take it out of the state" if plain is None else f"Put {plain} into the state instead"
        register = f", or register its type: holdfast.register_value({kind.__qualname__}, ...)"
        action = f"{first}{register if is_registrable(item) else ''}."
    return StateError(
        f"{path!r} is {with_article(f'{kind.__module__}.{kind.__qualname__}')}, which {problem}.",
        code="state.unsupported_leaf",
        action=action,
        path=path,
    )


def _variable(path: str) -> str:
    """The last component of `path` if it is a valid name of a variable, else "value"."""
    last = path.rpartition("/")[2]
    return last if last.isidentifier() else "value"
