"""A checkpoint's names, tensors and values, while the rules of a mapping rewrite them. Pure.

Below an optimizer's path, ``state/<parameter>/<slot>`` and ``group_of/<parameter as one component>`` follow their
parameters (``holdfast.frameworks.optimizer`` names them).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from holdfast.errors import IncompatibleError
from holdfast.format import values
from holdfast.format.names import component, join, parse_component, split
from holdfast.format.near import near
from holdfast.format.patterns import Pattern
from holdfast.format.values import Node, Open
from holdfast.mapping.parts import ImpossibleError, Made, Parts, StoredTensor, as_stored

_SHOWN = 5

#: What a rule makes of tensors. Raises `ImpossibleError`.
Make = Callable[[Sequence[Made]], Sequence[Made]]


@dataclass(frozen=True)
class CheckpointTable:
    """A checkpoint as it is loaded: what is stored under which name, after a mapping or without one.

    `parts` has the tensors that are not just the stored tensor of their name. `equal` has optimizer state of one
    element whose parameter was fused from several: the tensors (of `stored`) that must turn out to be equal to it.
    """

    stored: Mapping[str, StoredTensor]
    aliases: Mapping[str, str]
    nodes: Mapping[str, Node]
    parts: Mapping[str, Parts]
    equal: Mapping[str, Sequence[str]]

    def partly_kept(self) -> frozenset[str]:
        """The tensors of which some elements are to stay what they were."""
        return frozenset(
            name for name, parts in self.parts.items() if any(part.source is None and not part.zero for part in parts)
        )


class Step(NamedTuple):
    """Tensors that become others."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    make: Make


class _RuleEffect:
    """What the steps of one rule take away, and what they put in its place."""

    def __init__(self) -> None:
        self.gone: list[str] = []
        self.made: list[tuple[str, Made]] = []
        self.origins: list[tuple[str, str]] = []
        self.equal: dict[str, dict[str, Made]] = {}


class MappingState:
    """The table that rules rewrite. What cannot be done is refused with an error that names the current `rule`."""

    def __init__(
        self, stored: Mapping[str, StoredTensor], aliases: Mapping[str, str], nodes: Mapping[str, Node]
    ) -> None:
        self.rule = ""
        self.stored = dict(stored)
        self.aliases = dict(aliases)
        self._nodes = nodes
        #: The stored path of each value, by its path now.
        self._origins = dict(zip(nodes, nodes, strict=True))
        self._parts: dict[str, Parts] = {}
        #: What must be equal to optimizer state of one element, by the names that it had.
        self._equal: dict[str, dict[str, Made]] = {}
        #: By optimizer and parameter: what lies below ``state/<parameter>``.
        self.optimizers = {path: self._read_optimizer(path) for path in self._optimizer_paths()}

    def table(self) -> CheckpointTable:
        """What has become of it all."""
        compared = {name: made for others in self._equal.values() for name, made in others.items()}
        for name, made in compared.items():
            if name in self.stored or name in self.aliases:
                raise self.refused(f"{name!r} is to be compared with the state of what it was fused to", name)
            self.put(name, made)
        equal = {name: tuple(others) for name, others in self._equal.items()}
        return CheckpointTable(self.stored, self.aliases, _Renamed(self._origins, self._nodes), self._parts, equal)

    # --- what there is -----------------------------------------------------------------------------------------------

    def subjects(self) -> list[str]:
        """All names but those inside the state of optimizers, which follow their parameters."""
        names = dict.fromkeys(chain(self.stored, self.aliases, self._origins))
        for name in self._inside_optimizers():
            names.pop(name, None)
        return list(names | dict.fromkeys(chain(*self.optimizers.values())))

    def tensors(self) -> list[str]:
        """The names of tensors among the subjects, tied ones under all their names."""
        inside = self._inside_optimizers()
        return [name for name in chain(self.stored, self.aliases) if name not in inside]

    def slots_matching(self, pattern: Pattern, path: str, parameter: str) -> list[str]:
        """The names of a parameter's state in an optimizer that a pattern matches by more than where they lie."""
        least = len(_slot(path, parameter, ""))
        names = [_slot(path, parameter, slot) for slot in self.optimizers[path][parameter]]
        return [name for name in names if (pattern.match(name) or 0) > least]

    def make(self, sources: Sequence[str], make: Make) -> Sequence[Made]:
        """What `make` makes of tensors."""
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
        """Give subjects other names, all at once, and the state of optimizers with them."""
        moves = dict(renamed)
        optimizers: dict[str, dict[str, list[str]]] = {}
        for path, parameters in self.optimizers.items():
            new_path = renamed.get(path, path)
            optimizers[new_path] = {renamed.get(name, name): slots for name, slots in parameters.items()}
            for name, slots in parameters.items():
                new_name = renamed.get(name, name)
                moves.update(zip(_inside(path, name, slots), _inside(new_path, new_name, slots), strict=True))
        self._refuse_meeting(moves)
        for name in moves.keys() & self.stored.keys():
            self._parts.setdefault(name, self._tensor(name).parts)
        self.optimizers = optimizers
        self.stored = {moves.get(name, name): stored for name, stored in self.stored.items()}
        self.aliases = {moves.get(name, name): moves.get(of, of) for name, of in self.aliases.items()}
        self._parts = {moves.get(name, name): parts for name, parts in self._parts.items()}
        self._equal = {moves.get(name, name): others for name, others in self._equal.items()}
        # Of containers that become one the first stays, and all that lies below them does.
        self._origins = {moves.get(path, path): self._origins[path] for path in reversed(self._origins)}

    def _refuse_meeting(self, moves: Mapping[str, str]) -> None:
        held = dict.fromkeys(chain(self.stored, self.aliases, self._origins))
        for new, count in Counter(moves.get(name, name) for name in held).items():
            if count > 1:
                olds = [name for name in held if moves.get(name, name) == new]
                if not all(map(self._is_container, olds)):
                    raise self.refused(f"{_some(sorted(olds))} would both be {new!r}", new)

    def _is_container(self, path: str) -> bool:
        return path in self._origins and isinstance(self._nodes[self._origins[path]], Open | values.TableNode)

    def remove(self, names: Collection[str]) -> None:
        """Take subjects away, and names inside optimizers, which must be known to be gone."""
        for name in names:
            self.stored.pop(name, None)
            self.aliases.pop(name, None)
            self._parts.pop(name, None)
            self._equal.pop(name, None)
            self._origins.pop(name, None)

    def drop(self, pattern: Pattern) -> bool:
        """Take away what a pattern matches; a tied tensor lives on under its other names. False for nothing."""
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
                slots[:] = [slot for slot in slots if _slot(path, name, slot) not in dropped]
            if path in gone:
                del self.optimizers[path]
        self.untied(gone, in_place=False)
        self.remove(gone.union(heirs.values()))
        self.move(heirs)
        return bool(gone or heirs)

    def untied(self, names: Iterable[str], *, in_place: bool) -> list[str]:
        """`names`, each a tensor of its own: the other names of what is tied stay what they are.

        What is to be changed in place under all its names stays tied, and is named once.
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

    # --- tensors -----------------------------------------------------------------------------------------------------

    def put(self, name: str, made: Made) -> None:
        """Have a tensor under that name."""
        self.stored[name] = StoredTensor(made.dtype, made.shape)
        self._parts[name] = made.parts

    def run(self, steps: Iterable[Step]) -> None:
        """Take all steps at once, with the state of optimizers for the tensors that are parameters."""
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

    def _take_slot(self, slot: str, sources: list[str], targets: list[str], step: Step, change: _RuleEffect) -> None:
        """A slot of its parameter's shape becomes what its parameter becomes; one element stays, if all agree."""
        shapes = [self._tensor(name).shape for name in step.sources]
        made = [self._tensor(name) for name in sources]
        if slot != "step" and [one.shape for one in made] == shapes:
            change.made += zip(targets, self.make(sources, step.make), strict=True)
            return
        for name, one in zip(sources, made, strict=True):
            if set(one.shape) - {1}:
                text = f"optimizer state {name!r} has shape {one.shape}, not its parameter's shape {shapes[0]}"
                raise self.refused(f"{text}, so the rule does not say what becomes of it; drop it before", name)
        others = dict(zip(sources[1:], made[1:], strict=True))
        for name in sources:
            others |= self._equal.get(name, {})
        change.made += [(name, made[0]) for name in targets]
        change.equal |= {name: others for name in targets if others}

    def _one_value(self, paths: Sequence[str]) -> str:
        """The stored path of the value that all `paths` have."""
        origins = [self._origins.get(path) for path in paths]
        found = [None if origin is None else self._nodes[origin] for origin in origins]
        for path, node in zip(paths, found, strict=True):
            if not isinstance(node, values.Leaf):
                raise self.refused(f"{path!r} is no plain value, so the rule does not say what becomes of it", path)
            if not values.same(node, found[0]):
                raise self.refused(f"{paths[0]!r} and {path!r} differ, so they cannot become one", path)
        assert origins[0] is not None
        return origins[0]

    def _commit(self, change: _RuleEffect) -> None:
        for name, count in Counter(change.gone).items():
            if count > 1:
                raise self.refused(f"{name!r} matches twice", name)
        # What keeps its name keeps its node, which refers to it.
        kept = {name: self._origins[name] for name, _ in change.made if name in self._origins}
        self.remove(change.gone)
        for name, count in Counter(name for name, _ in change.made).items():
            if count > 1 or name in self.stored or name in self.aliases or self._is_value(name):
                raise self.refused(f"{name!r} would be two things", name)
        for name, made in change.made:
            self.put(name, made)
        self._origins.update(kept)
        self._origins.update(change.origins)
        self._equal.update(change.equal)

    def _is_value(self, name: str) -> bool:
        return name in self._origins and not isinstance(self._nodes[self._origins[name]], values.TensorRef)

    # --- errors ------------------------------------------------------------------------------------------------------

    def unmatched(self, names: str) -> IncompatibleError:
        """The error for a pattern that matches nothing that its rule is for."""
        close = near(names, self.subjects())
        hint = f"; did you mean {_some(close)}?" if close else "."
        return self.refused(f"{names!r} matches nothing that such a rule changes{hint}")

    def refused(self, text: str, tensor: str | None = None) -> IncompatibleError:
        """The error for what a rule cannot do."""
        return IncompatibleError(
            f"{self.rule}: {text}{'' if text.endswith(('?', '.')) else '.'}",
            code="incompatible.mapping",
            action="Correct the mapping: rules apply in order, to the names as the rules before left them.",
            tensor=tensor,
        )


class _Renamed(Mapping[str, Node]):
    """Values under other paths; each is looked up when it is asked for."""

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
    """The names that follow a parameter."""
    return [_group_of(path, parameter), *(_slot(path, parameter, slot) for slot in slots)]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more
