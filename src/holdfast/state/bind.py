"""The loading side: a checkpoint's names are bound to a live state.

`bind` finds out which stored tensor fills which local memory, and where names, dtypes and shapes differ; it changes
nothing. `Binding.allocate` gives memory to tensors on the meta device, and when all memory has been filled,
`Binding.finish` puts the values in place.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
import torch

from holdfast.errors import IncompatibleError
from holdfast.format import values
from holdfast.format.names import component, join, own_part, rank_component
from holdfast.format.patterns import Globs
from holdfast.format.values import Encoded, Node, Open, Stateful, TensorRef, TorchValue
from holdfast.frameworks import Adapter, Finish, NamedTensor
from holdfast.frameworks.known_types import unwrapped
from holdfast.frameworks.piecewise import Piecewise
from holdfast.frameworks.registry import adapter_of
from holdfast.frameworks.registry import bound as adapted
from holdfast.frameworks.stateful import StatefulAdapter, description_of, writing
from holdfast.frameworks.still import Still
from holdfast.mapping.parts import StoredTensor
from holdfast.plan.layout import Replicas
from holdfast.state.arrays import array_as_tensor, check_array, is_shareable
from holdfast.state.bind_tensors import TensorBinder
from holdfast.state.binding import Binding
from holdfast.state.bounds import check_writable
from holdfast.state.containers import maker, refill
from holdfast.state.differences import Mismatches, difference, is_leaf
from holdfast.state.flatten import check_depth, check_root
from holdfast.state.kinds import (
    DICTS,
    RecordTypes,
    is_dict_of_values,
    is_list_of_live,
    is_of_class,
    may_replace,
    restore_order,
)
from holdfast.state.local_placements import generator_state, revive
from holdfast.state.match import Matcher, SelectedNodes, Terms
from holdfast.state.meta import check_fillable
from holdfast.state.overlap import TargetMemory, check_disjoint
from holdfast.state.per_rank import PerRank
from holdfast.state.random_state import RandomState
from holdfast.state.registered_types import ARRAY, check_registered, decode, registered
from holdfast.state.resized import INSIDE, objects_in, put
from holdfast.state.same_objects import SameObjects, is_changed_in_place
from holdfast.wording import count, kind_of, with_article

#: The advice about an error that a user's ``on_resize`` raises.
_ON_RESIZE: Final = "Correct the function: it gets the stored values of all ranks, this rank, and the number of ranks."


def bind(
    into: Mapping[str, object],
    stored: Mapping[str, StoredTensor],
    aliases: Mapping[str, str],
    nodes: Mapping[str, Node],
    *,
    strict: bool,
    rank: int = 0,
    world_size: int = 1,
    terms: Terms | None = None,
    device: torch.device | None = None,
) -> Binding:
    """Match a live state with a checkpoint's tensors, other names of tensors, and values.

    `rank` and `world_size` select this rank's parts of `PerRank` entries. `nodes` may read its values on demand: this
    looks up the values that the live state needs, and unneeded ones that belong to all ranks. Without `terms`,
    everything is loaded and nothing may differ. `device` is the device on which tensors on the meta device get their
    memory (see `MetaTensors`).

    Raises `IncompatibleError` when a dtype, a shape or a kind differs, and with `strict` also when only one side has a
    name (code ``incompatible.names``) or a tensor would stay on the meta device (``incompatible.meta``). Ranks that
    hold different parts of a model see names of other ranks as unexpected: they bind without `strict`, compare, and
    raise `difference` and `check_fillable` themselves. Raises `StateError` for a live state that could not be saved,
    and for targets that share memory.
    """
    check_root(into)
    binder = _Binder(stored, aliases, nodes, terms or Terms(), rank, world_size, device=device)
    binding = binder.run(cast("MutableMapping[str, object]", into))
    if strict and (binding.missing or binding.unexpected):
        selected = None if terms is None else terms.select
        raise difference(binding.missing, binding.unexpected, stored, nodes, binding.missing_shapes, select=selected)
    if strict:
        check_fillable(binding.unfillable)
    return binding


class _Binder:
    """One walk of a live state to bind it; it is the `BindingSource` of the adapters."""

    def __init__(
        self,
        stored: Mapping[str, StoredTensor],
        aliases: Mapping[str, str],
        nodes: Mapping[str, Node],
        terms: Terms,
        rank: int,
        world_size: int,
        *,
        device: torch.device | None,
    ) -> None:
        self._select, self._is_selected = terms.select, terms.selects
        self.is_strict, self._ignores_unexpected = terms.is_strict, terms.ignores_unexpected
        self.dropped, self.recast = terms.dropped, terms.recast
        #: The nodes that adapters see: for modules only the selected ones. Optimizers are selected as a whole.
        self.nodes = nodes if self._select is None else SelectedNodes(nodes, self._select)
        self._all_nodes = nodes
        self._rank = rank
        self._world_size = world_size
        self._own_parts: set[str | None] = {None}
        self._stored = stored
        self._aliases = aliases
        self._mismatches = Mismatches()
        self._matcher = Matcher(stored, aliases, nodes, self._mismatches, terms)
        self._same_objects = SameObjects(
            self._matcher, self._mismatches, is_selected=self._is_selected, stored_below=self.stored_below
        )
        self._tensors = TensorBinder(stored, nodes, self._matcher, self._mismatches, terms, device=device)
        #: The part of `BindingSource` that concerns tensors.
        self.fill, self.fill_all = self._tensors.fill, self._tensors.fill_all
        self.memory, self.fitting = self._tensors.memory, self._tensors.fitting
        self.of_planes = self._tensors.of_planes
        self.named, self.stored = self._tensors.named, self._tensors.stored
        self.hold, self.held, self.portion = self._tensors.hold, self._tensors.held, self._tensors.portion
        self._unfillable: set[str] = set()
        self._reseeded: list[str] = []
        self._records = RecordTypes()
        #: Objects whose state has names of tensors in its own names, with their adapters.
        self._last: list[tuple[str, object, Adapter]] = []
        self._schedulers: dict[int, list[str]] = {}
        self._finish_statefuls: list[Finish] = []
        #: The last steps of all: other objects may draw random numbers while they are restored.
        self._finish_generators: list[Finish] = []

    def run(self, into: MutableMapping[str, object]) -> Binding:
        finish_containers = self._dict("", into)
        self._tensors.match(named=bool(self._last))
        self._tensors.match_held()
        self.nodes = self._all_nodes
        finish_last = [adapted(path, adapter, item, self) for path, item, adapter in self._last]
        self._tensors.match(named=False)
        self._tensors.match_pieces()
        if self._mismatches:
            raise self._mismatches.error()
        memory = TargetMemory.of(self._matcher.targets)
        check_disjoint(memory)
        check_writable(memory)

        def finish() -> object:
            self._matcher.check_copies()
            self._tensors.rebuild()
            for step in (finish_containers, *finish_last, *self._finish_statefuls, *self._finish_generators):
                step()
            return into

        used = self._matcher.used
        tensors_used = filter(used.__contains__, self._stored)  # mostly in order, so that the sort is quick
        values_used = (name for name in used.difference(self._stored) if is_leaf(name, self.nodes))
        return Binding(
            self._matcher.targets,
            memory.parts,
            sorted(chain(tensors_used, values_used)),
            sorted(self._matcher.missing),
            self._matcher.missing_shapes,
            sorted(self._unexpected()),
            sorted(self._tensors.on_meta),
            sorted(self._unfillable),
            sorted(self._reseeded),
            self._matcher.num_lost,
            self._tensors.to_allocate.allocate,
            finish,
        )

    def _unexpected(self) -> Iterator[str]:
        """The unused names of tensors, of values, and of whole `PerRank` entries."""
        if self._ignores_unexpected:
            return
        for name in {*self._stored, *self.nodes} - self._matcher.used:
            if own_part(name) not in self._own_parts:
                continue
            if self._select is not None and not self._covers(self._select, name):
                continue
            if name in self._stored or self._is_value(name):
                yield name

    def _is_value(self, name: str) -> bool:
        """Whether a stored name, which the live state does not use, is that of a value. One that cannot be read counts
        as a value where the load leaves out what the live state lacks."""
        try:
            node = self.nodes[name]
        except IncompatibleError:
            if self.is_strict:
                raise
            return True
        return isinstance(values.bare(node), values.Leaf | values.PerRankNode)

    def _covers(self, select: Globs, name: str) -> bool:
        """Whether a stored name is selected; if it belongs to an object that is loaded as a whole, whether that object
        is selected too."""
        if not select.covers(name):
            return False
        for end in (index for index, letter in enumerate(name) if letter == "/"):
            node = self.nodes.get(name[:end])
            if isinstance(node, Stateful | values.PerRankNode) or node == Open("optimizer"):
                return select.covers(name[:end])
        return True

    def wants(self, name: str) -> bool:
        return self._is_selected(name)

    def stored_below(self, path: str) -> Iterator[str]:
        # "0" is what follows "/".
        first, behind = (bisect_left(self._all_names, path + end) for end in ("/", "0"))
        return iter(self._all_names[first:behind])

    @cached_property
    def _all_names(self) -> list[str]:
        # By a dict, which keeps their order: each part is mostly sorted, so that the sort is quick.
        return sorted(dict.fromkeys(chain(self._stored, self._aliases, self.nodes)))

    def copies(self, name: str) -> Sequence[str]:
        return self._matcher.copies(name)

    def require_equal(self, name: str, copy: str) -> None:
        self._matcher.require_equal(name, copy)

    def restore(self, write: Callable[[object], object], state: Finish, *, is_random: bool) -> None:
        steps = self._finish_generators if is_random else self._finish_statefuls
        steps.append(lambda: write(state()))

    def schedules(self, optimizer: torch.optim.Optimizer, path: str) -> None:
        self._schedulers.setdefault(id(optimizer), []).append(path)

    def schedulers(self, optimizer: torch.optim.Optimizer) -> Sequence[str]:
        return self._schedulers.get(id(optimizer), ())

    def differs(self, path: str, here: str) -> None:
        self._mismatches.add_kind(path, here, self.nodes.get(path))

    def refuse(self, code: str, path: str, text: str) -> None:
        self._mismatches.add(code, path, text)

    def missing(self, name: str) -> None:
        if self._is_selected(name):
            self._matcher.missing.add(name)

    def unfillable(self, name: str) -> None:
        self._tensors.on_meta.add(name)
        if self._is_selected(name):
            self._unfillable.add(name)

    def mark(self, name: str) -> None:
        self._matcher.used.add(name)

    def opaque(
        self, path: str, memory: Callable[[str], torch.Tensor] | None = None, replicas: Replicas = "compare"
    ) -> Finish:
        tensors: dict[str, torch.Tensor] = {}
        for name, node in values.walk(self._all_nodes, path):
            registration = values.registration(node)
            if registration is not None:
                check_registered(registration, name)
            self.mark(name)
            for tensor in values.tensors_at(name, node):
                host = torch.device("cpu")
                tensors[tensor] = memory(tensor) if memory else self.memory(tensor, live=None, like=None, device=host)
                self.fill(NamedTensor(tensor, tensors[tensor], replicas))

        def rebuilt() -> object:
            with writing(path, "a decode function"):
                return values.rebuild(
                    self._all_nodes,
                    path,
                    tensors.__getitem__,
                    revive=revive,
                    record=self._records.type_of,
                    decode=decode,
                )

        return rebuilt

    def live(self, path: str, item: object) -> Finish:
        return self._part(path, item) or (lambda: item)

    def _part(self, path: str, item: object) -> Finish | None:
        """Bind a live item. Returns None when its container keeps the same object, as it does tensors: most states have
        thousands of them."""
        if isinstance(item, torch.Tensor):
            self.fill(NamedTensor(path, item, "compare"))
            return None
        if type(item) is np.ndarray:
            if self._is_selected(path):
                check_array(path, item)
            if is_shareable(item):
                return self._array(path, item)
        inner = unwrapped(item)
        if inner is not item:
            return self._inside(item, self._part(path, inner))
        if self._is_whole(item) and not self._is_selected(path):
            return None
        if is_changed_in_place(item):
            self._same_objects.note(path, item, self._all_nodes)
        if isinstance(item, (dict, list, tuple)) and not isinstance(item, torch.Size) and registered(item) is None:
            check_depth(path)
            return self._container(path, item)
        return self._object(path, item)

    def _object(self, path: str, item: object) -> Finish | None:
        """As `_part`, for an item that is neither a tensor nor a container."""
        if registered(item) is not None:
            return self._value(path, item)
        if isinstance(item, PerRank):
            return self._per_rank(path, item)
        if isinstance(item, Piecewise):
            self._tensors.fill_pieces(path, item)
        elif isinstance(item, torch.Generator):
            self._generator(path, item)
        elif (adapter := adapter_of(item)) is None:
            return self._value(path, item)
        elif adapter.needs_names:
            self._last.append((path, item, adapter))
        else:
            return adapted(path, adapter, item, self)
        return None

    def _inside(self, wrapper: object, part: Finish | None) -> Finish | None:
        """The finish of a wrapped object, with the wrapper as its result: the wrapper keeps its place."""
        if part is None:
            return None

        def finish() -> object:
            inner = part()
            if type(wrapper) is Still:
                wrapper.value = inner
            return wrapper

        return finish

    def _array(self, path: str, item: npt.NDArray[Any]) -> Finish | None:
        """Bind an array as a tensor over its memory, so that it is filled in place."""
        node = self.nodes.get(path)
        if not isinstance(node, TensorRef | Encoded | None) or (isinstance(node, Encoded) and node.name != ARRAY.name):
            self._mismatches.add_kind(path, "a numpy array", node)
        else:
            self.fill(NamedTensor(path, array_as_tensor(item), "compare"))
        return None

    def _is_whole(self, item: object) -> bool:
        """Whether an item, which is not a tensor, is loaded as a whole or not at all, so that its own name selects
        it."""
        if self._select is None or ((adapter := adapter_of(item)) is not None and adapter.is_divisible):
            return False
        if registered(item) is not None or isinstance(item, Counter | torch.Size):
            return True
        return not isinstance(item, dict | list | tuple) or (
            not isinstance(item, dict) and not values.is_record(item) and self._records.hold_only_values(item)
        )

    def _per_rank(self, path: str, item: PerRank[object]) -> Finish:
        node = self.nodes.get(path)
        self.mark(path)
        if node is None:
            self.missing(path)
        elif not isinstance(node, values.PerRankNode):
            self._mismatches.add_kind(path, "a PerRank", node)
        elif node.world_size == self._world_size:
            return self._own(join(path, rank_component(self._rank)), item)
        elif item.on_resize == "first":
            first = self._own(join(path, rank_component(0)), item)
            if isinstance(item, RandomState):
                self._reseeded.append(path)
                self._finish_generators.append(lambda: item.value.reseed(self._rank))
            return first
        elif item.on_resize == "error":
            sizes = f"saved by {count(node.world_size, 'rank')}, to be loaded by {count(self._world_size, 'rank')}"
            self._mismatches.add("incompatible.per_rank", path, sizes)
        else:
            return self._merged(path, item, item.on_resize)
        return lambda: item

    def _own(self, part: str, item: PerRank[object]) -> Finish:
        self._own_parts.add(part)
        self._same_objects.note(part, item, self._all_nodes)
        value = self.live(part, item.value)

        def finish() -> object:
            item.value = value()
            return item

        return finish

    def _merged(self, path: str, item: PerRank[object], merge: Callable[[list[object], int, int], object]) -> Finish:
        parts = self.opaque(path)
        live = unwrapped(item.value)

        def merged() -> object:
            held = cast("list[object]", parts())
            with writing(path, "on_resize", action=_ON_RESIZE):
                return merge(held, self._rank, self._world_size)

        if registered(live) is None and isinstance(adapter_of(live), StatefulAdapter):
            description = description_of(path, live)
            self.restore(description.write, merged, is_random=description.is_random)
            return lambda: item

        for name in objects_in(path, live):
            self._mismatches.add("incompatible.per_rank", name, INSIDE)

        def finish() -> object:
            if (new := put(live, merged())) is not live:
                item.value = new
            return item

        return finish

    def _container(self, path: str, item: dict[object, object] | list[object] | tuple[object, ...]) -> Finish:
        if isinstance(item, dict):
            return self._whole(path, item, "counter") if isinstance(item, Counter) else self._dict(path, item)
        record = values.is_record(item)
        kind = "list" if isinstance(item, list) else "tuple"
        if not record and self._records.hold_only_values(item) and not is_list_of_live(self.nodes, path, kind):
            return self._whole(path, item, kind)
        self._expect(path, item, values.RecordNode if record else values.Items)
        node = self.nodes.get(path)
        if record and self.is_strict and not is_of_class(item, node):
            self._mismatches.add_kind(path, f"a NamedTuple {type(item).__name__}", node)
        names = item._fields if values.is_record(item) else [str(index) for index in range(len(item))]
        parts = [self.live(join(path, name), part) for name, part in zip(names, item, strict=True)]
        if isinstance(item, list):
            return lambda: refill(item, [part() for part in parts])
        make = maker(type(item))
        return lambda: make(*[part() for part in parts])

    def _dict(self, path: str, item: MutableMapping[str, object] | dict[object, object]) -> Finish:
        if path and not item and self._is_selected(path) and is_dict_of_values(self.nodes, path):
            return self._whole(path, item, *DICTS)  # a dict that the job fills while it trains
        self._expect(path, item, values.TableNode, Open)
        node = self.nodes.get(path) if self._is_selected(path) else None
        if isinstance(node, values.TableNode) and node.kind not in DICTS:
            self._mismatches.add_kind(path, kind_of(item), node)
        entries = cast("MutableMapping[object, object]", item)
        prefix = path + "/" if path else ""
        parts: dict[object, Finish] = {}
        for key, entry in entries.items():
            name = prefix + component(key, path=path)
            if isinstance(entry, torch.Tensor):  # as in `_part`, and here because there may be thousands
                self.fill(NamedTensor(name, entry, "compare"))
            elif (part := self._part(name, entry)) is not None:
                parts[key] = part

        def finish() -> object:
            for key, part in parts.items():
                entries[key] = part()
            restore_order(entries, node)
            return item

        return finish

    def _whole(self, path: str, item: object, *kinds: str) -> Finish:
        """Bind a container of values that is of one of the `kinds`. It is replaced as a whole; a list, dict or Counter
        takes the new contents in place."""
        node = self.nodes.get(path)
        if node is not None and not (isinstance(node, (values.Items, values.TableNode)) and node.kind in kinds):
            self._mismatches.add_kind(path, with_article(kinds[0]), node)
            return lambda: item
        value = self._value(path, item)
        return lambda: refill(item, value()) if isinstance(item, (list, dict)) else value()

    def _value(self, path: str, item: object) -> Finish:
        node = self.nodes.get(path)
        if node is None and self._matcher.canonical(path) not in self._stored:
            self.missing(path)
        elif node is None or values.holds_live(path, self.nodes) or not may_replace(item, node):
            self._mismatches.add_kind(path, kind_of(item), node)
        else:
            return self.opaque(path)
        return lambda: item

    def _generator(self, path: str, item: torch.Generator) -> None:
        node = self.nodes.get(path)
        if node is None:
            self.missing(path)
        elif isinstance(node, TorchValue) and [node.kind, node.text.split(":")[0]] == ["generator", item.device.type]:
            self.mark(path)
            state = generator_state(node)
            self._finish_generators.append(lambda: item.set_state(state))
        else:
            self._mismatches.add_kind(path, with_article(f"{item.device.type} Generator"), node)

    def _expect(self, path: str, item: object, *kinds: type[Node]) -> None:
        node = self.nodes.get(path) if self._is_selected(path) else None
        fits = node is None or (isinstance(values.bare(node), kinds) and values.registration(node) is None)
        if not fits or (self._matcher.canonical(path) in self._stored and self._is_selected(path)):
            self._mismatches.add_kind(path, kind_of(item), node)
