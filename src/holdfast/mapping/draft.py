"""A checkpoint's names, tensors and values, while the rules of a mapping rewrite them. Pure.

Below an optimizer's path, ``state/<parameter>/<slot>``, and ``<parameter as one component>`` below ``group_of`` and
``order``, follow their parameters (``holdfast.frameworks.optimizer`` names them).
"""

from __future__ import annotations

from collections import ChainMap, Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple, cast

from holdfast.errors import IncompatibleError
from holdfast.format import values
from holdfast.format.names import component, join, parse_component, split
from holdfast.format.patterns import Pattern, meant
from holdfast.format.values import Node, Open
from holdfast.mapping.parts import ImpossibleError, Made, Parts, StoredTensor, as_stored

_SHOWN = 5

#: Makes the tensors that a rule gives from those that it takes. Raises `ImpossibleError`.
Make = Callable[[Sequence[Made]], Sequence[Made]]


@dataclass(frozen=True)
class CheckpointTable:
    """A checkpoint as a load sees it: its tensors, aliases and values by name, after a mapping or without one.

    `parts` has an entry for each tensor that is not simply the stored tensor of its name. `equal` has an entry for each
    optimizer state of one element whose parameter was fused from several: the names (in `stored`) of the tensors that
    must be equal to it. `dropped` has the slots of which rules have dropped a part, by the name of their parameter's
    state; `recast` the tensors that rules have given another dtype.
    """

    stored: Mapping[str, StoredTensor]
    aliases: Mapping[str, str]
    nodes: Mapping[str, Node]
    parts: Mapping[str, Parts]
    equal: Mapping[str, Sequence[str]]
    dropped: Mapping[str, Collection[str]] = field(default_factory=dict)
    recast: AbstractSet[str] = frozenset()

    def partly_kept(self) -> frozenset[str]:
        """The names of the tensors that have elements without a stored value, which keep their live values."""
        return frozenset(
            name for name, parts in self.parts.items() if any(part.source is None and not part.zero for part in parts)
        )


class Step(NamedTuple):
    """One step of a rule: `make` turns the tensors named `sources` into those named `targets`."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    make: Make


class _RuleEffect:
    """The names that the steps of one rule take away, and the tensors and values that they put in their place."""

    def __init__(self) -> None:
        self.gone: list[str] = []
        self.made: list[tuple[str, Made]] = []
        self.origins: list[tuple[str, str]] = []
        self.equal: dict[str, dict[str, Made]] = {}


class MappingState:
    """The table that rules rewrite. Its errors name the current `rule`."""

    def __init__(
        self, stored: Mapping[str, StoredTensor], aliases: Mapping[str, str], nodes: Mapping[str, Node]
    ) -> None:
        self.rule = ""
        self.stored = dict(stored)
        self.aliases = dict(aliases)
        #: The values that rules have made, by texts that are no stored paths.
        self._made: dict[str, Node] = {}
        self._nodes: Mapping[str, Node] = ChainMap(self._made, cast("MutableMapping[str, Node]", nodes))
        #: The stored path of each value, by its current path.
        self._origins = dict(zip(nodes, nodes, strict=True))
        self._parts: dict[str, Parts] = {}
        #: For each optimizer state of one element, by name: the tensors that must be equal to it, by their old names.
        self._equal: dict[str, dict[str, Made]] = {}
        #: For each optimizer and parameter, the paths below ``state/<parameter>``: its slots.
        self.optimizers = {path: self._read_optimizer(path) for path in self._optimizer_paths()}
        #: The slots of these parameters that rules have dropped, where others of the parameter stay.
        self._dropped: dict[str, dict[str, set[str]]] = {}
        self._stored_dtypes = {name: tensor.dtype for name, tensor in stored.items()}

    def table(self) -> CheckpointTable:
        """The table after all rules."""
        compared = {name: made for others in self._equal.values() for name, made in others.items()}
        for name, made in compared.items():
            if name in self.stored or name in self.aliases:
                text = f"a load compares {name!r} with the optimizer state that it was fused into; leave that name free"
                raise self.refused(text, name)
            self.put(name, made)
        return CheckpointTable(
            self.stored,
            self.aliases,
            _Renamed(self._origins, self._nodes),
            self._parts,
            {name: tuple(others) for name, others in self._equal.items()},
            {join(path, "state", name): slots for path, lost in self._dropped.items() for name, slots in lost.items()},
            frozenset(filter(self._is_recast, self._parts)),
        )

    def _is_recast(self, name: str) -> bool:
        sources = (part.source for part in self._parts[name] if part.source is not None)
        return any(self._stored_dtypes[source] != self.stored[name].dtype for source in sources)

    # --- content -----------------------------------------------------------------------------------------------------

    def subjects(self) -> list[str]:
        """All names that rules match: those of the table without the names inside optimizers, plus their parameters'.

        The names inside an optimizer follow its parameters.
        """
        names = dict.fromkeys(chain(self.stored, self.aliases, self._origins))
        for name in self._inside_optimizers():
            names.pop(name, None)
        return list(names | dict.fromkeys(chain(*self.optimizers.values())))

    def tensors(self) -> list[str]:
        """The names of the tensors outside optimizers, tied ones under all their names."""
        inside = self._inside_optimizers()
        return [name for name in chain(self.stored, self.aliases) if name not in inside]

    def slots_matching(self, pattern: Pattern, path: str, parameter: str) -> list[str]:
        """The names of a parameter's optimizer state that `pattern` matches down into the slot's own name.

        A pattern that only matches a container above the slots does not count.
        """
        least = len(_slot(path, parameter, ""))
        names = [_slot(path, parameter, slot) for slot in self.optimizers[path][parameter]]
        return [name for name in names if (pattern.match(name) or 0) > least]

    def make(self, sources: Sequence[str], make: Make) -> Sequence[Made]:
        """The tensors that `make` makes of those named `sources`. Raises `IncompatibleError` where it cannot."""
        try:
            return make([self._tensor(name) for name in sources])
        except ImpossibleError as error:
            raise self.refused(f"{_some(sources)}: {error}", sources[0]) from error

    def _tensor(self, name: str) -> Made:
        name = self.aliases.get(name, name)
        stored, parts = self.stored[name], self._parts.get(name)
        return as_stored(name, stored) if parts is None else Made(stored.dtype, stored.shape, parts)

    def _inside_optimizers(self) -> set[str]:
        return {
            name
            for path, parameters in self.optimizers.items()
            for parameter, slots in parameters.items()
            for name in _inside(path, parameter, slots)
        }

    def _optimizer_paths(self) -> Iterator[str]:
        for path in self._nodes:
            above, _, last = path.rpartition("/")
            if last == "group_of" and self._nodes.get(above) == Open("optimizer"):
                yield above

    def _read_optimizer(self, path: str) -> dict[str, list[str]]:
        groups, state = (join(path, name) + "/" for name in ("group_of", "state"))
        parameters: dict[str, list[str]] = {
            str(parse_component(name.removeprefix(groups))): [] for name in self._nodes if name.startswith(groups)
        }
        for name in dict.fromkeys(chain(self.stored, self.aliases, self._nodes)):
            if name.startswith(state):
                components = split(name.removeprefix(state))
                above = ("/".join(components[:stop]) for stop in range(1, len(components)))
                parameter = next((name for name in above if name in parameters), None)
                if parameter is not None:
                    parameters[parameter].append(name[len(_slot(path, parameter, "")) :])
        return parameters

    # --- names -------------------------------------------------------------------------------------------------------

    def move(self, renamed: Mapping[str, str]) -> None:
        """Rename subjects, all at once; the names inside optimizers follow. `renamed` has the new name of each."""
        moves = dict(renamed)
        optimizers: dict[str, dict[str, list[str]]] = {}
        for path, parameters in self.optimizers.items():
            new_path = renamed.get(path, path)
            optimizers[new_path] = {renamed.get(name, name): slots for name, slots in parameters.items()}
            for name, slots in parameters.items():
                new_name = renamed.get(name, name)
                moves.update(zip(_inside(path, name, slots), _inside(new_path, new_name, slots), strict=True))
        self._dropped = {
            renamed.get(path, path): {renamed.get(name, name): slots for name, slots in lost.items()}
            for path, lost in self._dropped.items()
        }
        self._refuse_meeting(moves)
        for name in moves.keys() & self.stored.keys():
            self._parts.setdefault(name, self._tensor(name).parts)
        self.optimizers = optimizers
        self.stored = {moves.get(name, name): stored for name, stored in self.stored.items()}
        self.aliases = {moves.get(name, name): moves.get(of, of) for name, of in self.aliases.items()}
        self._parts = {moves.get(name, name): parts for name, parts in self._parts.items()}
        self._equal = {moves.get(name, name): others for name, others in self._equal.items()}
        # Where several containers get one name, the node of the first stays, and so do all names below them.
        self._origins = {moves.get(path, path): self._origins[path] for path in reversed(self._origins)}

    def _refuse_meeting(self, moves: Mapping[str, str]) -> None:
        held = dict.fromkeys(chain(self.stored, self.aliases, self._origins))
        for new, count in Counter(moves.get(name, name) for name in held).items():
            if count > 1:
                olds = [name for name in held if moves.get(name, name) == new]
                if not all(map(self._is_container, olds)):
                    raise self.refused(f"{_some(sorted(olds))} would get the same name {new!r}", new)

    def _is_container(self, path: str) -> bool:
        return path in self._origins and isinstance(self._nodes[self._origins[path]], Open | values.TableNode)

    def remove(self, names: Collection[str]) -> None:
        """Remove `names` from the table: subjects, and names inside optimizers that the caller has found to be gone."""
        for name in names:
            self.stored.pop(name, None)
            self.aliases.pop(name, None)
            self._parts.pop(name, None)
            self._equal.pop(name, None)
            self._origins.pop(name, None)

    def drop(self, pattern: Pattern) -> bool:
        """Remove the names that a pattern matches; a tied tensor keeps its other names. Returns whether any matched."""
        gone = {name for name in self.subjects() if pattern.match(name) is not None}
        heirs = {of: name for name, of in self.aliases.items() if of in gone and name not in gone}
        gone.difference_update(heirs)
        for path, parameters in list(self.optimizers.items()):
            for name, slots in list(parameters.items()):
                if path in gone or name in gone:
                    gone.update(_inside(path, name, slots))
                    del parameters[name]
                    continue
                dropped = self.slots_matching(pattern, path, name)
                gone.update(dropped)
                lost = {slot for slot in slots if _slot(path, name, slot) in dropped}
                slots[:] = [slot for slot in slots if slot not in lost]
                if lost:
                    self._dropped.setdefault(path, {}).setdefault(name, set()).update(lost)
            if path in gone:
                del self.optimizers[path]
        self.untied(gone, in_place=False)
        self.remove(gone.union(heirs.values()))
        self.move(heirs)
        return bool(gone or heirs)

    def untied(self, names: Iterable[str], *, in_place: bool) -> list[str]:
        """Untie `names`: make each a tensor of its own, while the other names of tied tensors keep what they have.

        With `in_place`, a tensor all of whose names are in `names` stays tied. Returns `names`, with each tensor that
        stays tied once.
        """
        names = list(names)
        chosen = set(names)
        ties: dict[str, list[str]] = defaultdict(list)
        for name, of in self.aliases.items():
            ties[of].append(name)
        for of, others in ties.items():
            if in_place and chosen.issuperset([of, *others]):
                chosen.difference_update(others)
                continue
            left = [name for name in others if name not in chosen] if of in chosen else []
            for name in [name for name in others if name in chosen] + left[:1]:
                tensor = self._tensor(of)
                del self.aliases[name]
                self.put(name, tensor)
            self.aliases.update(dict.fromkeys(left[1:], left[0]) if left else {})
        return [name for name in names if name in chosen]

    # --- values ------------------------------------------------------------------------------------------------------

    def value(self, path: str) -> Node | None:
        """The node at `path`; None if there is none."""
        origin = self._origins.get(path)
        return None if origin is None else self._nodes[origin]

    def values_at(self, path: str) -> list[str]:
        """The paths of all nodes at and below `path`."""
        return [name for name in self._origins if name == path or name.startswith(f"{path}/")]

    def put_value(self, path: str, node: Node) -> None:
        """Put a node at `path`, in place of the one that is there."""
        made = f"\0{len(self._made)}"
        self._made[made] = node
        self._origins[path] = made

    # --- state of optimizers -----------------------------------------------------------------------------------------

    def group_name(self, path: str, parameter: str) -> str:
        """The path of the value that says which group of the optimizer at `path` has a parameter."""
        return _group_of(path, parameter)

    def take_masters(self, path: str, slot: str) -> None:
        """Make each parameter that the optimizer at `path` has a master weight of, in `slot`, that master weight."""
        for parameter, slots in self.optimizers[path].items():
            if slot in slots:
                name = _slot(path, parameter, slot)
                self.untied([parameter, name], in_place=False)
                self.put(parameter, self._tensor(name))
                slots.remove(slot)
                self.remove([name])

    def give_masters(self, path: str, slot: str) -> None:
        """Make each parameter of the optimizer at `path` a slot of its own, too. Refuses parameters of less precision
        than fp32, and those that have the slot."""
        for parameter, slots in self.optimizers[path].items():
            name = self.aliases.get(parameter, parameter)
            if slot in slots or name not in self.stored or self.stored[name].dtype != "float32":
                raise self.refused(f"{parameter!r} is not stored in float32 or has a master weight already", parameter)
            self.put(_slot(path, parameter, slot), self._tensor(name))
            slots.append(slot)

    def drop_state(self, path: str, slot: str) -> None:
        """Remove all slots of the parameters of the optimizer at `path` that have this `slot`."""
        for parameter, slots in self.optimizers[path].items():
            if slot in slots:
                names = [_slot(path, parameter, each) for each in slots]
                self.untied(names, in_place=False)
                self.remove(names)
                slots.clear()

    def spread_value(self, name: str, path: str, slot: str) -> None:
        """Make the value `name`, if there is one, a slot of each parameter of the optimizer at `path`."""
        origin = self._origins.pop(name, None)
        for parameter, slots in self.optimizers[path].items() if origin is not None else ():
            self._origins[_slot(path, parameter, slot)] = cast("str", origin)
            slots.append(slot)

    # --- tensors -----------------------------------------------------------------------------------------------------

    def put(self, name: str, made: Made) -> None:
        """Put the tensor `made` into the table under `name`."""
        self.stored[name] = StoredTensor(made.dtype, made.shape)
        self._parts[name] = made.parts

    def run(self, steps: Iterable[Step]) -> None:
        """Take all steps at once. Where tensors are parameters, their state in optimizers changes in the same way."""
        steps, change = list(steps), _RuleEffect()
        self.untied(self._state_of({name for step in steps for name in step.sources}), in_place=False)
        for step in steps:
            change.gone += step.sources
            change.made += zip(step.targets, self.make(step.sources, step.make), strict=True)
            for path, parameters in self.optimizers.items():
                held = [name for name in step.sources if name in parameters]
                lost = [name for name in step.sources if name not in parameters]
                if held and lost:
                    raise self.refused(f"{held[0]!r} is a parameter of optimizer {path!r}, {lost[0]!r} is not", held[0])
                if held:
                    self._take_state(path, step, change)
        self._commit(change)

    def _state_of(self, names: Collection[str]) -> list[str]:
        """The names of the state that optimizers keep for the parameters among `names`."""
        return [
            _slot(path, name, slot)
            for path, parameters in self.optimizers.items()
            for name, slots in parameters.items()
            if name in names
            for slot in slots
        ]

    def _take_state(self, path: str, step: Step, change: _RuleEffect) -> None:
        parameters = self.optimizers[path]
        group = self._one_value([_group_of(path, name) for name in step.sources])
        change.origins += [(_group_of(path, name), group) for name in step.targets]
        first, slots = step.sources[0], parameters[step.sources[0]]
        for name in step.sources:
            if sorted(parameters[name]) != sorted(slots):
                raise self.refused(f"{first!r} and {name!r} have different state in optimizer {path!r}", name)
            change.gone += _inside(path, name, slots)
        for slot in slots:
            sources = [_slot(path, name, slot) for name in step.sources]
            targets = [_slot(path, name, slot) for name in step.targets]
            if all(name in self.stored or name in self.aliases for name in sources):
                self._take_slot(slot, sources, targets, step, change)
            else:
                value = self._one_value(sources)
                change.origins += [(name, value) for name in targets]
        for name in step.sources:
            del parameters[name]
        parameters.update((name, list(slots)) for name in step.targets)
        lost = self._dropped.get(path, {})
        lost.update(dict.fromkeys(step.targets, lost[first]) if first in lost else {})

    def _take_slot(self, slot: str, sources: list[str], targets: list[str], step: Step, change: _RuleEffect) -> None:
        """Change a slot of its parameter's shape like the parameter; keep a slot of one element, to be compared.

        A load later checks that such elements of all `sources` are equal.
        """
        shapes = [self._tensor(name).shape for name in step.sources]
        made = [self._tensor(name) for name in sources]
        if slot != "step" and [one.shape for one in made] == shapes:
            change.made += zip(targets, self.make(sources, step.make), strict=True)
            return
        for name, one in zip(sources, made, strict=True):
            if set(one.shape) - {1}:
                text = f"optimizer state {name!r} has shape {one.shape}, not its parameter's shape {shapes[0]}"
                raise self.refused(
                    f"{text}, so the rule cannot convert it; drop the parameter's state in an earlier rule", name
                )
        others = dict(zip(sources[1:], made[1:], strict=True))
        for name in sources:
            others |= self._equal.get(name, {})
        change.made += [(name, made[0]) for name in targets]
        change.equal |= {name: others for name in targets if others}

    def _one_value(self, paths: Sequence[str]) -> str:
        """The stored path of the plain value that all `paths` share. Refuses values that differ."""
        origins = [self._origins.get(path) for path in paths]
        found = [None if origin is None else self._nodes[origin] for origin in origins]
        for path, node in zip(paths, found, strict=True):
            if not isinstance(node, values.Leaf):
                raise self.refused(f"{path!r} is not a plain value, so the rule cannot convert it", path)
            if not values.same(node, found[0]):
                raise self.refused(f"{paths[0]!r} and {path!r} differ, so they cannot become one value", path)
        assert origins[0] is not None
        return origins[0]

    def _commit(self, change: _RuleEffect) -> None:
        for name, count in Counter(change.gone).items():
            if count > 1:
                raise self.refused(f"the rule matches {name!r} twice", name)
        # A tensor that keeps its name keeps its node, which refers to it.
        kept = {name: self._origins[name] for name, _ in change.made if name in self._origins}
        self.remove(change.gone)
        for name, count in Counter(name for name, _ in change.made).items():
            if count > 1 or name in self.stored or name in self.aliases or self._is_value(name):
                raise self.refused(f"two entries would get the name {name!r}", name)
        for name, made in change.made:
            self.put(name, made)
        self._origins.update(kept)
        self._origins.update(change.origins)
        self._equal.update(change.equal)

    def _is_value(self, name: str) -> bool:
        return name in self._origins and not isinstance(self._nodes[self._origins[name]], values.TensorRef)

    # --- errors ------------------------------------------------------------------------------------------------------

    def unmatched(self, names: str) -> IncompatibleError:
        """The error for a pattern that matches nothing that its rule can change."""
        subjects = self.subjects()
        containers = {name[:at] for name in subjects for at, letter in enumerate(name) if letter == "/"}
        found = meant(names, [name for name in subjects if name not in containers], below="{x:**}")
        close = [name for name in found if name not in (names, "")]
        hint = f"; did you mean {_some(close)}?" if close else "."
        if isinstance(self.value(names), values.PlanesNode):
            hint = ": it is a tensor that consists of planes, which are renamed and dropped together, and not reshaped."
        return self.refused(f"{names!r} matches nothing that this kind of rule can change{hint}")

    def refused(self, text: str, tensor: str | None = None) -> IncompatibleError:
        """The error for a rule that cannot be applied; `text` says why, `tensor` names the tensor."""
        return IncompatibleError(
            f"{self.rule}: {text}{'' if text.endswith(('?', '.')) else '.'}",
            code="incompatible.mapping",
            action="Correct the mapping. Rules apply in order: each one sees the names that the earlier rules made.",
            tensor=tensor,
        )


class _Renamed(Mapping[str, Node]):
    """The nodes of a checkpoint under other paths; each is looked up when it is asked for."""

    def __init__(self, origins: Mapping[str, str], nodes: Mapping[str, Node]) -> None:
        self._origins = origins
        self._nodes = nodes

    def __getitem__(self, path: str) -> Node:
        return self._nodes[self._origins[path]]

    def __contains__(self, path: object) -> bool:
        return path in self._origins

    def __iter__(self) -> Iterator[str]:
        return iter(self._origins)

    def __len__(self) -> int:
        return len(self._origins)


def _slot(path: str, parameter: str, slot: str) -> str:
    return join(path, "state", parameter, slot)


def _group_of(path: str, parameter: str) -> str:
    return join(path, "group_of", component(parameter))


def _inside(path: str, parameter: str, slots: Iterable[str]) -> list[str]:
    """The names inside an optimizer that follow a parameter: its group, its position, and its slots.

    Only `Rename` keeps the position: other rules change what the state of all parameters has of this one.
    """
    position = join(path, "order", component(parameter))
    return [_group_of(path, parameter), position, *(_slot(path, parameter, slot) for slot in slots)]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more
