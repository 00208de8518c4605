"""Optimizers of checkpoints that hold the ``state_dict()`` of one as a plain dict, as those of DCP do.

Such a dict has one of three forms. ``Optimizer.state_dict()`` has numbers for names of parameters, in the order of the
groups. ``get_optimizer_state_dict`` of ``torch.distributed.checkpoint.state_dict`` has the name that a parameter has in
its module; with ``flatten_optimizer_state_dict`` it has the keys ``state.<name>.<slot>`` and
``param_groups.<name>.<key>``, and no dicts in it. A load into a live optimizer reads all three under the names that
``holdfast.frameworks.optimizer`` gives: `StateDictSource` translates.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import count
from typing import Final, NamedTuple

import msgspec
import torch
from torch.optim import Optimizer

from holdfast.errors import IncompatibleError
from holdfast.format.names import component, join, parse_component
from holdfast.format.values import Items, Node, Open, Plain, TableNode, TensorRef, Text
from holdfast.frameworks import BindingSource, Finish, NamedTensor
from holdfast.frameworks.flat_memory import FlatMemory, Portion
from holdfast.frameworks.optimizer_saving import named_parameters
from holdfast.mapping.parts import StoredTensor
from holdfast.plan.layout import Replicas

_STATE: Final = "state"
_GROUPS: Final = "param_groups"
_PARAMETERS: Final = "params"


class _PlainOptimizer(NamedTuple):
    """The contents of a dict: the group of each parameter, with the stored names that say so; and for each name below
    an optimizer of ours, the stored one.

    Parameters have names that are one component: of their number, or of their name in the module. `equal` are pairs of
    stored tensors that are one hyper-parameter here.
    """

    group_of: dict[str, tuple[int, Sequence[str]]]
    real: dict[str, str]
    equal: Sequence[tuple[str, str]] = ()


def as_optimizer(path: str, optimizer: Optimizer, source: BindingSource) -> BindingSource | None:
    """`source` with the dict at `path` as an optimizer; None if it is no ``state_dict()`` of one.

    Raises `IncompatibleError`, code ``incompatible.optimizer``, where two live parameters have one name in their
    modules.
    """
    node = source.nodes.get(path)
    if not (node == Open("dict") or (isinstance(node, TableNode) and node.kind == "dict")):
        return None
    groups = [named_parameters(path, index, group, source) for index, group in enumerate(optimizer.param_groups)]
    live = {_last(entry.name): index for index, group in enumerate(groups) for entry in group}
    names = list(source.stored_below(path))
    contents = _nested(path, names, source.nodes) or _flat(path, names, source.nodes, live)
    if contents is None:
        return None
    for first, other in contents.equal:
        source.require_equal(first, other)
    own = list(dict.fromkeys(entry.name for group in groups for entry in group))
    if all(type(parse_component(name)) is int for name in contents.group_of):
        _check_whole(path, optimizer, source)
        return StateDictSource(path, source, contents, {})
    _check_distinct(path, own)
    return StateDictSource(path, source, contents, _named_here(path, own, contents, source))


class StateDictSource:
    """A `BindingSource` whose names at and below `path` are those of an optimizer, and stand for the names of a dict.

    `parameters` has the names here of live parameters that are not named by their number, by their names in `source`.
    """

    def __init__(
        self, path: str, source: BindingSource, contents: _PlainOptimizer, parameters: Mapping[str, str]
    ) -> None:
        self._source = source
        self._real = contents.real
        group_of = join(path, "group_of")
        self._groups = {
            join(group_of, component(name)): (group, stored) for name, (group, stored) in contents.group_of.items()
        }
        self._names = sorted([*self._real, *self._groups])
        self._short = parameters
        self._live = {short: name for name, short in self._short.items()}
        nodes: dict[str, Node] = {path: Open("optimizer")}
        nodes.update((name, Plain(group)) for name, (group, _) in self._groups.items())
        nodes.update((name, source.nodes[real]) for name, real in self._real.items() if real in source.nodes)
        self.nodes: Mapping[str, Node] = nodes
        self.is_strict = source.is_strict
        #: Rules do not know slots in a dict.
        self.dropped: Mapping[str, Collection[str]] = {}
        self.recast: AbstractSet[str] = {
            name for name in (*self._real, *self._live) if self._stored_name(name) in source.recast
        }

    def named(self, tensor: torch.Tensor) -> NamedTensor | None:
        """As `BindingSource.named`."""
        entry = self._source.named(tensor)
        if entry is None or entry.name not in self._short:
            return entry
        return msgspec.structs.replace(entry, name=self._short[entry.name])

    def copies(self, name: str) -> Sequence[str]:
        """As `BindingSource.copies`."""
        return [_last(copy) for copy in self._source.copies(self._live.get(name, name))]

    def require_equal(self, name: str, copy: str) -> None:
        """As `BindingSource.require_equal`."""
        self._source.require_equal(self._stored_name(name), self._stored_name(copy))

    def wants(self, name: str) -> bool:
        """As `BindingSource.wants`."""
        return self._source.wants(self._stored_name(name))

    def stored_below(self, path: str) -> Iterator[str]:
        """As `BindingSource.stored_below`."""
        first, behind = (bisect_left(self._names, path + end) for end in ("/", "0"))  # "0" is what follows "/"
        return iter(self._names[first:behind])

    def stored(self, name: str) -> StoredTensor | None:
        """As `BindingSource.stored`."""
        return self._source.stored(self._live.get(name) or self._stored_name(name))

    def memory(
        self,
        name: str,
        *,
        live: torch.Tensor | None,
        like: torch.Tensor | None,
        device: torch.device,
        cast_to: torch.dtype | None = None,
    ) -> torch.Tensor:
        """As `BindingSource.memory`."""
        return self._source.memory(self._stored_name(name), live=live, like=like, device=device, cast_to=cast_to)

    def fill(self, entry: NamedTensor) -> None:
        """As `BindingSource.fill`."""
        self._source.fill(self._stored_entry(entry))

    def fill_all(self, entries: Sequence[NamedTensor]) -> None:
        """As `BindingSource.fill_all`."""
        self._source.fill_all([self._stored_entry(entry) for entry in entries])

    def hold(self, held: FlatMemory) -> None:
        """As `BindingSource.hold`."""
        self._source.hold(held)

    def held(self, tensor: torch.Tensor) -> FlatMemory | None:
        """As `BindingSource.held`."""
        found = self._source.held(tensor)
        if found is None:
            return None
        portions = [each._replace(names=tuple(map(_last, each.names))) for each in found.portions]
        return found._replace(portions=tuple(portions))

    def portion(self, name: str, portion: Portion, memory: torch.Tensor) -> None:
        """As `BindingSource.portion`."""
        self._source.portion(self._stored_name(name), portion, memory)

    def fitting(
        self, names: Sequence[str], live: Sequence[object], like: Sequence[torch.Tensor | None]
    ) -> Sequence[bool]:
        """As `BindingSource.fitting`."""
        return self._source.fitting([self._stored_name(name) for name in names], live, like)

    def of_planes(self, name: str, *, live: object, like: torch.Tensor) -> torch.Tensor | None:
        """As `BindingSource.of_planes`."""
        return self._source.of_planes(self._stored_name(name), live=live, like=like)

    def live(self, path: str, item: object) -> Finish:
        """As `BindingSource.live`."""
        return self._source.live(self._stored_name(path), item)

    def opaque(
        self, path: str, memory: Callable[[str], torch.Tensor] | None = None, replicas: Replicas = "compare"
    ) -> Finish:
        """As `BindingSource.opaque`. `memory` gets the names of this source."""
        real = self._stored_name(path)
        if memory is None:
            return self._source.opaque(real, None, replicas)
        return self._source.opaque(real, lambda name: memory(path + name.removeprefix(real)), replicas)

    def restore(self, write: Callable[[object], object], state: Finish, *, is_random: bool) -> None:
        """As `BindingSource.restore`."""
        self._source.restore(write, state, is_random=is_random)

    def schedules(self, optimizer: Optimizer, path: str) -> None:
        """As `BindingSource.schedules`."""
        self._source.schedules(optimizer, path)

    def schedulers(self, optimizer: Optimizer) -> Sequence[str]:
        """As `BindingSource.schedulers`."""
        return self._source.schedulers(optimizer)

    def differs(self, path: str, here: str) -> None:
        """As `BindingSource.differs`."""
        self._source.differs(self._stored_name(path), here)

    def refuse(self, code: str, path: str, text: str) -> None:
        """As `BindingSource.refuse`."""
        self._source.refuse(code, self._stored_name(path), text)

    def missing(self, name: str) -> None:
        """As `BindingSource.missing`."""
        self._source.missing(self._stored_name(name))

    def unfillable(self, name: str) -> None:
        """As `BindingSource.unfillable`."""
        self._source.unfillable(self._stored_name(name))

    def mark(self, name: str) -> None:
        """As `BindingSource.mark`."""
        for real in self._groups[name][1] if name in self._groups else (self._stored_name(name),):
            self._source.mark(real)

    def _stored_name(self, name: str) -> str:
        return self._groups[name][1][0] if name in self._groups else self._real.get(name, name)

    def _stored_entry(self, entry: NamedTensor) -> NamedTensor:
        real = self._stored_name(entry.name)
        return entry if real == entry.name else msgspec.structs.replace(entry, name=real)


def _nested(path: str, names: Sequence[str], nodes: Mapping[str, Node]) -> _PlainOptimizer | None:
    """The contents of a dict with a dict ``state`` and a list ``param_groups``."""
    groups, state = join(path, _GROUPS), join(path, _STATE)
    held = nodes.get(groups)
    if not isinstance(held, Items):
        return None
    group_of: dict[str, tuple[int, Sequence[str]]] = {}
    listed: set[str] = set()
    for group in range(held.size):
        place = join(groups, str(group), _PARAMETERS)
        parameters = nodes.get(place)
        if not isinstance(parameters, Items):
            return None
        listed.add(place)
        for number in range(parameters.size):
            stored = join(place, str(number))
            name = _parameter(nodes.get(stored))
            if name is None or name in group_of:
                return None
            group_of[name] = group, (stored,)
            listed.add(stored)
    real = {name: name for name in names if name.startswith(groups + "/") and name not in listed}
    for name in names:
        if name.startswith(state + "/"):
            key, _, slot = name[len(state) + 1 :].partition("/")
            parameter = key if key in group_of else _as_number(key)
            if parameter in group_of and slot:
                real[join(state, parameter, slot)] = name
    return _PlainOptimizer(group_of, real) if group_of else None


def _named_here(path: str, own: Iterable[str], contents: _PlainOptimizer, source: BindingSource) -> Mapping[str, str]:
    """The names that live parameters have in the dict. Of the names of a tied one, it is that of a group; state that
    lies under another one too, as in exports, must be equal."""
    found: dict[str, str] = {}
    for parameter in own:
        names = [_last(name) for name in (parameter, *source.copies(parameter))]
        found[parameter] = first = next((name for name in names if name in contents.group_of), names[0])
        for other in names:
            if first in contents.group_of and other not in contents.group_of:
                above = join(path, _STATE, other)
                for name in source.stored_below(above):
                    source.mark(name)
                    source.require_equal(join(path, _STATE, first) + name.removeprefix(above), name)
    return found


def _flat(
    path: str, names: Sequence[str], nodes: Mapping[str, Node], live: Mapping[str, int]
) -> _PlainOptimizer | None:
    """The contents of a dict with keys ``state.<name>.<slot>`` and ``param_groups.<name>.<key>``.

    It does not say which parameters were one group. Those of one `live` group are one here, under its number, as far as
    their hyper-parameters are equal.
    """
    keys = [name[len(path) + 1 :].partition("/") for name in names]
    if not all(key.startswith((f"{_STATE}.", f"{_GROUPS}.")) for key, _, _ in keys):
        return None
    hyper: dict[str, dict[str, str]] = {}
    for (key, _, below), name in zip(keys, names, strict=True):
        if key.startswith(f"{_GROUPS}."):
            parameter, _, short = key[len(_GROUPS) + 1 :].rpartition(".")
            hyper.setdefault(parameter, {})[join(short, *filter(None, (below,)))] = name
    contents = _grouped(join(path, _GROUPS), hyper, nodes, live)
    for (key, _, below), name in zip(keys, names, strict=True):
        if key.startswith(f"{_STATE}."):
            parameter, _, slot = key[len(_STATE) + 1 :].rpartition(".")
            while parameter not in contents.group_of and parameter:
                parameter, _, more = parameter.rpartition(".")
                slot = f"{more}.{slot}"
            if parameter:
                contents.real[join(path, _STATE, parameter, slot, *filter(None, (below,)))] = name
    return contents if contents.group_of else None


def _grouped(
    groups: str, hyper: Mapping[str, Mapping[str, str]], nodes: Mapping[str, Node], live: Mapping[str, int]
) -> _PlainOptimizer:
    """The groups of the parameters with these stored hyper-parameters; see `_flat`."""
    contents = _PlainOptimizer({}, {})
    equal: list[tuple[str, str]] = []
    firsts: dict[int, tuple[Mapping[str, str], dict[str, Node | None]]] = {}
    others = count(max(live.values(), default=-1) + 1)
    for parameter, given in hyper.items():
        values = {short: nodes.get(name) for short, name in given.items()}
        group = live.get(parameter, -1)
        first, known = firsts.get(group, (given, None))
        if known == values:
            contents.group_of[parameter] = group, tuple(given.values())
            tensors = [short for short, node in values.items() if node is None or isinstance(node, TensorRef)]
            equal += ((first[short], given[short]) for short in tensors)
            continue
        if group < 0 or group in firsts:
            group = next(others)
        firsts[group] = given, values
        contents.group_of[parameter] = group, tuple(given.values())[:1]
        contents.real.update((join(groups, str(group), short), name) for short, name in given.items())
    return contents._replace(equal=equal)


def _parameter(node: Node | None) -> str | None:
    """The name of a parameter in a list ``params``; None for anything else."""
    if isinstance(node, Text):
        return component(node.data.decode("utf-8", "replace"))
    return component(node.value) if isinstance(node, Plain) and type(node.value) is int else None


def _as_number(key: str) -> str:
    """The component of a number that was stored as text, as DCP stores the keys of dicts."""
    return component(int(key)) if key.isascii() and key.isdecimal() and len(key) < 19 else key


def _check_whole(path: str, optimizer: Optimizer, source: BindingSource) -> None:
    """Refuse flat parameters of FSDP1 where the checkpoint has numbers: several parameters lie in one of them."""
    if any(source.held(parameter) is not None for group in optimizer.param_groups for parameter in group[_PARAMETERS]):
        raise IncompatibleError(
            f"Optimizer {path!r} trains flat parameters of FSDP1, and the checkpoint knows parameters by their order "
            "alone.",
            code="incompatible.optimizer",
            action="Shard the model with torch.distributed.fsdp.fully_shard (FSDP2), or load into the optimizer of a "
            "model that is not sharded, save that with holdfast, and load the result.",
            path=path,
        )


def _check_distinct(path: str, parameters: Iterable[str]) -> None:
    """Refuse parameters that have one name in several modules."""
    places: dict[str, list[str]] = {}
    for name in parameters:
        places.setdefault(_last(name), []).append(name)
    twice = next((name for name, alike in places.items() if len(alike) > 1), None)
    if twice is not None:
        raise IncompatibleError(
            f"Optimizer {path!r} has several parameters that are {twice!r} in their modules "
            f"({', '.join(sorted(places[twice]))}), and the checkpoint has this name alone.",
            code="incompatible.optimizer",
            action="Load the optimizer of each module into an optimizer of its own.",
            path=path,
        )


def _last(name: str) -> str:
    """The last component of a name: for a tensor of a module, its name there."""
    return name.rpartition("/")[2]
