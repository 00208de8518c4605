"""The errors for a checkpoint and a live state that differ in names or kinds."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from holdfast.errors import HoldfastError, IncompatibleError
from holdfast.format import values
from holdfast.format.names import own_part, parse_component
from holdfast.format.near import Substitution, near, substitution
from holdfast.format.patterns import Globs
from holdfast.format.values import (
    Encoded,
    Node,
    Open,
    PerRankNode,
    PlanesNode,
    Stateful,
    TableNode,
    TensorRef,
    TorchValue,
)
from holdfast.geometry import Shape
from holdfast.mapping.parts import StoredTensor
from holdfast.wording import count, with_article

_SHOWN = 10
#: Most parts of entries that an advice names.
_PARTS = 5
#: Numbers of names among which renamed ones are searched, on the live and on the stored side.
_HINTS = 50
_HINT_CANDIDATES = 1000
_NUMBER = re.compile(r"(?<!\d)(?:0|[1-9]\d*)(?!\d)")


def difference(
    missing: Collection[str],
    unexpected: Collection[str],
    stored: Mapping[str, StoredTensor],
    nodes: Mapping[str, Node],
    shapes: Mapping[str, Shape],
    *,
    select: Globs | None = None,
) -> IncompatibleError:
    """The error that lists the names that only one side has; a whole unexpected object is one entry.

    `shapes` are those of the missing tensors: a stored tensor of another shape is not a renamed one. `select` has the
    live names that the load fills. Stored names that it leaves out may be former names of missing ones.
    """
    shared = {path: node for path, node in _readable(nodes) if not own_part(path)}
    known = [*stored, *(path for path in shared if is_leaf(path, shared))]
    objects, rest = _collapse(unexpected, known, shared)
    optimizers = [path for path, node in shared.items() if node == Open("optimizer") and path not in objects]
    only_stored = sorted([*objects.values(), *_listed(rest, unexpected, optimizers)])
    message, details = "Names differ.", list[str]()
    for number, what, entries in (
        (len(missing), "missing from the checkpoint", _listed(missing, missing, optimizers)),
        (len(unexpected), "in the checkpoint but not in the live state", only_stored),
    ):
        if len(entries) == 1:
            message += f" {number:,} {what}: {entries[0]}."
        elif entries:
            message += f" {number:,} {what}."
            details += [f"{what}:", *(f"  {line}" for line in _first(entries))]
    stored_names = [*known, *(path for path, node in shared.items() if isinstance(node, PerRankNode))]
    filled = stored_names if select is None else list(filter(select.covers, stored_names))
    former = [*unexpected, *{*known}.difference(filled)]
    objects, rest = _collapse(former, known, shared)
    containers = _renamed_containers(missing, former, objects)
    renamed = [f"{old} -> {new}" for old, new in containers.items()]
    lacking, left = _without(containers, missing, [*objects, *rest])
    renamed += _renamed(lacking, left, stored, shapes)
    if renamed:
        details += ["perhaps renamed (stored -> live):", *(f"  {line}" for line in _first(renamed))]
    return IncompatibleError(
        message,
        code="incompatible.names",
        action=" ".join(
            [
                _names_action(missing, unexpected, _parts(filled, missing, unexpected, shared)),
                *_grown(unexpected, known, shared),
                *(() if missing else _unbuilt(unexpected, stored, nodes)),
            ]
        ),
        tensor=next(iter(sorted(missing) or sorted(unexpected)), None),
        details=tuple(details),
    )


def _readable(nodes: Mapping[str, Node]) -> Iterator[tuple[str, Node]]:
    """The nodes that can be read. Errors of others, of values that this load may not even need, would hide this one."""
    for path in nodes:
        with suppress(HoldfastError):
            yield path, nodes[path]


def _listed(names: Collection[str], lacking: Collection[str], optimizers: Sequence[str]) -> list[str]:
    """`names` as lines. The names of an optimizer for parameters that are `lacking` themselves are one line."""
    lacking = set(lacking)
    rest, lines = list(names), list[str]()
    for path in optimizers:
        own = {name for name in rest if name.startswith(f"{path}/")}
        following = {name for name in own if _parameter_of(name, path, lacking)}
        if following and own - following == {name for name in own if name.startswith(f"{path}/param_groups/")}:
            following = own  # only names of its groups are left, and they follow too
        if following:
            rest = [name for name in rest if name not in following]
            lines.append(f"{path} (the optimizer state of these parameters: {count(len(following), 'name')})")
    return sorted([*grouped(rest), *lines])


def _parameter_of(name: str, optimizer: str, parameters: Collection[str]) -> str | None:
    """The one of `parameters` to which an optimizer's `name` belongs; None if it belongs to none."""
    state = f"{optimizer}/state/"
    for named in (f"{optimizer}/group_of/", f"{optimizer}/order/"):
        if name.startswith(named):
            parameter = str(parse_component(name.removeprefix(named)))
            return parameter if parameter in parameters else None
    parts = name.removeprefix(state).split("/") if name.startswith(state) else []
    return next((prefix for prefix in map("/".join, _prefixes(parts)) if prefix in parameters), None)


def _prefixes(parts: Sequence[str]) -> Iterator[Sequence[str]]:
    return (parts[:stop] for stop in range(1, len(parts)))


class _StateParts(NamedTuple):
    """The largest parts of a state that both sides have whole (`common`), and those of which one side has nothing."""

    common: Sequence[str]
    others: Sequence[str]


def _parts(
    known: Collection[str], missing: Collection[str], unexpected: Collection[str], nodes: Mapping[str, Node]
) -> _StateParts:
    """The parts of a state with the stored names `known`: entries, and entries of dicts below them. None where
    something that no load takes in parts, such as an optimizer, is not whole, and where a message has no room for the
    parts of entries."""
    unwanted = set(unexpected)
    shared, lacking = [name for name in known if name not in unwanted], [*missing, *unexpected]
    found = _StateParts([], [])
    for depth in range(1, values.MAX_DEPTH):
        here, there = ({"/".join(name.split("/")[:depth]) for name in names} for names in (shared, lacking))
        mixed = here & there
        found = _StateParts([*found.common, *sorted(here - mixed)], [*found.others, *sorted(there - mixed)])
        if not mixed and (depth == 1 or max(map(len, found)) <= _PARTS):
            return found
        if not mixed or any(path in known or not _is_divisible(path, nodes) for path in mixed):
            break
        shared, lacking = (
            [name for name in names if "/".join(name.split("/")[:depth]) in mixed] for names in (shared, lacking)
        )
    return _StateParts([], [])


def _is_divisible(path: str, nodes: Mapping[str, Node]) -> bool:
    """Whether a load may take some of the entries of a container: of one that rules made, which has no node, or of a
    dict of modules and optimizers. Dicts of other systems may be the state of an object, which is taken whole."""
    node = nodes.get(path)
    is_dict = isinstance(node, TableNode) or node == Open("dict")
    return node is None or (is_dict and any(name.rpartition("/")[0] == path for name in _objects(nodes)))


def _objects(nodes: Mapping[str, Node]) -> Iterator[str]:
    """The paths of modules and optimizers."""
    return (path for path, node in nodes.items() if isinstance(node, Open) and node.kind != "dict")


def _names_action(missing: Collection[str], unexpected: Collection[str], parts: _StateParts) -> str:
    """The advice for names that differ. Where one side only has additional parts, it is to select the others."""
    if not parts.common or (missing and unexpected):
        action = "Give both the same names, map the stored ones with mapping=, or load what both have with strict=False"
        return " ".join([f"{action}.", *_hints(missing, unexpected)])
    selected = _selected(parts.common)
    if missing:
        nothing = ", ".join(_first([repr(part) for part in parts.others]))
        return (
            f"The checkpoint has nothing of {nothing}: load the rest with select={selected}, or what both have with "
            "strict=False."
        )
    return f"Load only these entries with select={selected}, add the others, or load what both have with strict=False."


def _selected(entries: Sequence[str]) -> str:
    """The value of ``select=`` for `entries` of the state."""
    given = ", ".join(f'"{entry}"' for entry in entries)
    return given if len(entries) == 1 else f"[{given}]"


def _grown(unexpected: Collection[str], known: Iterable[str], nodes: Mapping[str, Node]) -> Iterator[str]:
    """Explain how to load a dict that had more entries when it was saved than the job begins with."""
    lacking = set(unexpected)
    here = {name.rpartition("/")[0] for name in known if name not in lacking}
    for path in sorted({name.rpartition("/")[0] for name in lacking if is_leaf(name, nodes)} & here):
        node = nodes.get(path)
        if isinstance(node, TableNode) and node.kind == "dict" and not values.holds_live(path, nodes):
            yield f"If the job fills the dict {path!r} while it trains, load into an empty one: it takes all entries."
            return


def _unbuilt(unexpected: Collection[str], stored: Collection[str], nodes: Mapping[str, Node]) -> Iterator[str]:
    """Explain a dict of tensors that a training made, and that is empty or missing in the live state."""
    parents = sorted({name.rpartition("/")[0] for name in unexpected if name in stored})
    for path in parents:
        node = nodes.get(path)
        if isinstance(node, TableNode) and all(f"{path}/{key}" in unexpected for key in node.keys):
            yield (
                f"A load fills tensors and makes none: build the dict {path!r} with its entries before it, each a "
                "tensor of the saved shape and dtype, such as a clone."
            )
            return


def _hints(missing: Collection[str], unexpected: Collection[str]) -> Iterator[str]:
    """Explain the names that differ in ways that users often meet."""
    names = {*missing, *unexpected}
    flat = [name for name in unexpected if "/" not in name]
    for entry in sorted({_entry(name) for name in missing}):
        if 2 * sum(f"{entry}/{name}" in missing for name in flat) > len(flat):
            yield (
                f"The stored names have no {entry!r} before them. With Rename of holdfast.mapping, "
                f'mapping=[Rename("{{x:**}}", "{entry}/{{x}}")] puts it there.'
            )
            break
    rates = [name.removesuffix("/initial_lr") for name in names if name.endswith("/initial_lr")]
    if rates and not any(f"{group}/lr" in names for group in rates):  # else the whole group is on one side only
        yield "A learning-rate scheduler adds initial_lr to the groups of its optimizer: build it before the load."
    saved, live = (sorted({_entry(name) for name in side if "/state/%int=" in name}) for side in (unexpected, missing))
    if saved:
        yield (
            f"If {saved[0]!r} was saved as a state_dict(), read it with holdfast.open(path)"
            f".tree({saved[0]!r}), and pass that to load_state_dict."
        )
    elif live and any(name.replace("/state/%int=", "/state/") in names for name in missing if "/state/%int=" in name):
        # In what `tree` returns, an optimizer would look for numbers in vain.
        yield (
            "DCP stores the numbers of the parameters in optimizer.state_dict() as text: give the model and the "
            f'optimizer themselves to holdfast.load, as {{"model": model, "{live[0]}": optimizer}}, or make them '
            f"numbers again with {_numbering(live[0])}."
        )


def _entry(name: str) -> str:
    """The entry of the state that contains `name`."""
    return name.partition("/")[0]


def _renamed_containers(
    missing: Collection[str], unexpected: Collection[str], objects: Collection[str]
) -> dict[str, str]:
    """The unexpected stored objects whose names are all missing in one live container: stored path -> live path."""
    found: dict[str, str] = {}
    for old in sorted(objects):
        below = _below(old, unexpected)
        end = min(below, default="")
        live = [name.removesuffix(f"/{end}") for name in missing if end and name.endswith(f"/{end}")]
        alike = [new for new in live[:_HINTS] if below == _below(new, missing)]
        for new in alike if len(alike) == 1 else near(old, alike, count=1):
            found[old] = new
    return found


def _below(container: str, names: Collection[str]) -> set[str]:
    return {name.removeprefix(f"{container}/") for name in names if name.startswith(f"{container}/")}


def _without(
    containers: Mapping[str, str], missing: Collection[str], unexpected: Collection[str]
) -> tuple[Collection[str], Collection[str]]:
    """The live and stored names that no renamed container explains. (An optimizer's names contain names of parameters,
    so a renamed container changes them too.)"""
    for old, new in containers.items():
        moved = {name.replace(f"/{old}%2F", f"/{new}%2F") for name in unexpected if f"/{old}%2F" in name}
        missing = [name for name in missing if name not in moved and not name.startswith(f"{new}/")]
        unexpected = [name for name in unexpected if name != old]
    return missing, unexpected


def _renamed(
    missing: Collection[str],
    unexpected: Collection[str],
    stored: Mapping[str, StoredTensor],
    shapes: Mapping[str, Shape],
) -> list[str]:
    """Lines about stored names that may be former names of live ones; of several with the same change, the first."""
    candidates = sorted(unexpected)[:_HINT_CANDIDATES]
    alike: dict[Substitution | None, list[str]] = {}
    for name in sorted(missing)[:_HINTS]:
        shape = shapes.get(name)
        fitting = [other for other in candidates if other not in stored or shape in (None, stored[other].shape)]
        for other in near(name, fitting, count=1):
            alike.setdefault(substitution(other, name), []).append(f"{other} -> {name}")
    return [hints[0] + (f" (and {len(hints) - 1} more alike)" if len(hints) > 1 else "") for hints in alike.values()]


def grouped(names: Collection[str]) -> list[str]:
    """`names`, sorted, as few lines: names that differ in one number only, such as a layer's, are one line, and so are
    several plain keys of one container."""
    by_pattern: dict[str, list[str]] = {}
    for name in sorted(names):
        by_pattern.setdefault(_NUMBER.sub("*", name), []).append(name)
    lines: list[str] = []
    siblings: dict[str, list[str]] = {}
    for alike in by_pattern.values():
        if len(alike) > 1:
            lines.append(_numbered(alike))
        else:
            parent, _, key = alike[0].rpartition("/")
            siblings.setdefault(parent if "." not in key else alike[0], []).append(alike[0])
    for parent, children in siblings.items():
        keys = [child.rpartition("/")[2] for child in children]
        several = len(children) > 1 and parent
        lines += [f"{parent}/{{{', '.join(keys)}}} ({count(len(keys), 'name')})"] if several else children
    return sorted(lines)


def _numbered(names: Sequence[str]) -> str:
    """Names with the same text between their numbers, as one line."""
    rows = [_NUMBER.findall(name) for name in names]
    varying = [at for at, column in enumerate(zip(*rows, strict=True)) if len(set(column)) > 1]
    if len(varying) != 1:
        return f"{names[0]} and {len(names) - 1:,} more alike"
    (at,) = varying
    texts = _NUMBER.split(names[0])
    numbers = sorted(int(row[at]) for row in rows)
    is_range = numbers == list(range(numbers[0], numbers[-1] + 1))
    shown = f"{numbers[0]}-{numbers[-1]}" if is_range else ",".join(map(str, _first([str(n) for n in numbers])))
    parts = [f"{{{shown}}}" if number == at else text for number, text in enumerate(rows[0])]
    name = "".join(text + part for text, part in zip(texts, [*parts, ""], strict=True))
    return f"{name} ({count(len(names), 'name')})"


def _first(lines: Sequence[str]) -> list[str]:
    """The first `_SHOWN` lines, and the number of the others."""
    more = [f"and {len(lines) - _SHOWN:,} more"] if len(lines) > _SHOWN else []
    return [*lines[:_SHOWN], *more]


class _Mismatch(NamedTuple):
    code: str
    name: str
    text: str


class Mismatches:
    """The tensors and values that both sides have under one name but that do not fit each other."""

    def __init__(self) -> None:
        self._found: list[_Mismatch] = []

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, code: str, name: str, text: str) -> None:
        """Note that `name` differs, which is an error with `code`; `text` says how."""
        self._found.append(_Mismatch(code, name, text))

    def add_kind(self, name: str, here: str, node: Node | None) -> None:
        """Note that the live object `name`, which `here` describes, is of another kind in the checkpoint (see
        `word`)."""
        self.add("incompatible.kind", name, f"{here} here, {word(node)} in the checkpoint")

    def error(self) -> IncompatibleError:
        """The error that lists all mismatches, with the code of the first one. Equal differences are grouped in
        lines."""
        first = self._found[0]
        alike: dict[str, list[str]] = {}
        for _, name, text in self._found:
            alike.setdefault(text, []).append(name)
        lines = [f"{name if ' ' in name else repr(name)}: {text}" for text in alike for name in grouped(alike[text])]
        message = f"Under {count(len(self._found), 'name')} the live state and the checkpoint differ"
        return IncompatibleError(
            f"{message}: {lines[0]}." if len(lines) == 1 else f"{message}.",
            code=first.code,
            action=self._optimizer_action() or _action(dict.fromkeys(code for code, _, _ in self._found)),
            tensor=first.name,
            details=tuple(_first(lines)) if len(lines) > 1 else (),
        )

    def _optimizer_action(self) -> str:
        """The advice where an optimizer was stored as a dict by its ``state_dict()``. Other systems store the numbers
        in it as texts, and an optimizer that takes such a dict has no state, without an error."""
        groups = "/param_groups"
        for _, name, text in self._found:
            if name.endswith(groups) and text == "a list here, a stored dict in the checkpoint":
                key = name.removesuffix(groups).rpartition("/")[2]
                return (
                    "The checkpoint has an optimizer as an object: give the optimizer itself in place of its "
                    f"state_dict(), as {{{key!r}: optimizer}}, and its model beside it."
                )
        saved = next(
            (name for _, name, text in self._found if text.startswith("an optimizer here, a stored dict")), None
        )
        if saved is None:
            return ""
        return (
            f"Load into a live dict in the form of the optimizer's state_dict() instead, and give that to "
            f"load_state_dict(). Where another system stored it, add {_numbering(saved)}: "
            f"it wrote the numbers of parameters as texts, and this makes them numbers again."
        )


def _numbering(name: str) -> str:
    """The option that makes numbers of parameters that were stored as text."""
    return f"mapping=[Rename({name + '/state/{i}/{x}'!r}, {name + '/state/%int={i}/{x}'!r})] of holdfast.mapping"


def _action(codes: Iterable[str]) -> str:
    """The advice for the first two of these codes."""
    first, *others = codes
    if not others:
        return _ACTIONS[first]
    if (first, others[0]) == ("incompatible.shape", "incompatible.slots"):
        return f"{_ACTIONS[first]} strict=False starts the optimizer state of that parameter afresh."
    return f"{_ACTIONS[first]} {_ACTIONS[others[0]]}"


_ACTIONS = {
    "incompatible.blocks": (
        "Divide the parameters as in the save, or between blocks: only parts of whole blocks, of 4,096 elements or "
        "more, are quantised. Or leave the optimizer out of the state, or out of select=: it then starts afresh."
    ),
    "incompatible.dtype": "Create the live tensor in the stored dtype, or cast the stored one with cast=.",
    "incompatible.shape": (
        "Create the live tensor in the stored shape, map the stored one (mapping=), or leave it out, such as with "
        'select="!model/head.*".'
    ),
    "incompatible.slots": (
        "Give the parameter its stored shape, or start its optimizer state afresh with strict=False."
    ),
    "incompatible.needed_slots": (
        "Leave the mapping of these slots out, or the optimizer out of select=: it then starts afresh. So does a "
        'parameter whose whole state is dropped, such as with Drop("optimizer/state/**"), but not with Adagrad. If the '
        "class has steps of its own, and they make the slots that they lack, pass strict=False."
    ),
    "incompatible.slot_dtype": (
        "These slots need the dtype of their parameter. To train in another dtype, build the model in it, and pass "
        "cast=True, or globs that match the optimizer too: its slots then follow it. Leave a rule out that casts them "
        "to another dtype."
    ),
    "incompatible.flat_slots": (
        "Wrap the model with use_orig_params=True, which has slots for each parameter; or leave the optimizer "
        "out, with select=."
    ),
    "incompatible.megatron_buckets": (
        "Load the folder into a job of that layout, on any number of data-parallel ranks, and save it with holdfast, "
        'which any layout loads; or load the weights alone, with select="model".'
    ),
    "incompatible.kind": (
        "Put the same kind of object into the live state, or leave it out of the state. A stored dict, such as a "
        "state_dict(), fills a live dict with the same keys and tensors of their shapes: build that before the load. "
        "holdfast.open(path).tree(name) reads it without one."
    ),
    "incompatible.planed_slot": (
        "Import the library of the type before the load, or take one step of the optimizer first, so that it has the "
        "slots that a load fills. Or leave the optimizer out of select=: it then starts afresh."
    ),
    "incompatible.planes": (
        "Select, drop and rename a tensor that consists of planes by its own name, which takes all of its planes."
    ),
    "incompatible.no_state": "Leave the object out of the live state, or out of select=: it then starts afresh.",
    "incompatible.scheduler_class": (
        "Build the scheduler that was saved, or leave it out of the live state, or out of select=: it then starts "
        "afresh."
    ),
    "incompatible.per_rank": (
        "Load with the same number of ranks, or choose with PerRank(value, on_resize=...) the value of each rank: "
        '"first" (the value of rank 0), or a function of all parts. For data, put an order of holdfast.data, such as '
        "GlobalOrder, into the state in place of the loader: it goes on with any number of ranks."
    ),
    "incompatible.meta": (
        'Fill the missing part by the mapping (fill="zero"), or give the tensor memory and values before the load.'
    ),
    "incompatible.tied": (
        "Load into a state that gives two names to one tensor or object only where both were one, or equal, when the "
        "checkpoint was saved. With mapping=, fuse only parameters whose optimizer state of one element, such as step, "
        "is equal."
    ),
}


def _collapse(
    names: Collection[str], known: Collection[str], nodes: Mapping[str, Node]
) -> tuple[dict[str, str], list[str]]:
    """The stored objects all of whose names are in `names`, each with a line about it; and the other names."""
    objects = {
        path: node.kind if isinstance(node, Open) else "object with a state_dict"
        for path, node in nodes.items()
        if isinstance(node, Stateful) or (isinstance(node, Open) and node.kind != "dict")
    }

    def owner(name: str) -> str | None:
        return next((path for path in objects if name == path or name.startswith(path + "/")), None)

    totals = Counter(map(owner, known))
    counts = Counter(map(owner, names))
    whole = {
        path: f"{path} (the whole {objects[path]}: {count(number, 'name')})"
        for path, number in counts.items()
        if path is not None and number == totals[path]
    }
    return whole, [name for name in names if owner(name) not in whole]


def listing(names: list[str], separator: str = ", ") -> str:
    """The first names, and the number of the others, as one text."""
    return separator.join(_first(names))


def word(node: Node | None) -> str:
    """The kind of a node in words, for messages; None stands for a tensor without a node."""
    if isinstance(node, (values.TableNode, values.Items, Open)):
        return f"a stored {node.kind}"
    if isinstance(node, values.RecordNode):
        return f"a NamedTuple {node.name}"
    if isinstance(node, TorchValue):
        return with_article(node.kind)
    if isinstance(node, (Encoded, PlanesNode)):
        return f"a registered {node.name!r}"
    words = {
        values.PerRankNode: "a PerRank",
        TensorRef: "a tensor",
        Stateful: "an object's state",
    }
    return words.get(type(node), "a plain value") if node is not None else "a tensor"


def is_leaf(name: str, nodes: Mapping[str, Node]) -> bool:
    """Whether a stored name belongs to a value that is not a container."""
    node = nodes.get(name)
    return node is not None and isinstance(values.bare(node), values.Leaf)
