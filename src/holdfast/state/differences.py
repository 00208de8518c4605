"""What to say when a checkpoint and a live state do not have the same names or kinds."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Collection, Mapping
from typing import NamedTuple

from holdfast.errors import IncompatibleError
from holdfast.format import values
from holdfast.format.names import own_part
from holdfast.format.values import Encoded, Node, Open, Planes, Stateful, TensorRef, TorchValue
from holdfast.plan.parts import Stored

__all__ = ["Mismatches", "Stored", "difference", "is_leaf", "listing", "word"]

_SHOWN = 10
_HINT_CANDIDATES = 500


def difference(
    missing: Collection[str], unexpected: Collection[str], stored: Mapping[str, Stored], nodes: Mapping[str, Node]
) -> IncompatibleError:
    """The error that says which names are on one side only; a whole unexpected object is one entry."""
    shared = {path: nodes[path] for path in nodes if not own_part(path)}
    collapsed = _collapse(unexpected, [*stored, *(path for path in shared if is_leaf(path, shared))], shared)
    lines = []
    if missing:
        lines.append(f"{len(missing)} missing from the checkpoint: {listing(sorted(missing))}.")
    if unexpected:
        lines.append(f"{len(unexpected)} in the checkpoint but not in the live state: {listing(collapsed)}.")
    candidates = sorted(unexpected)[:_HINT_CANDIDATES]
    hints = []
    for name in sorted(missing)[:_SHOWN]:
        hints += [f"{close} -> {name}" for close in difflib.get_close_matches(name, candidates, n=1, cutoff=0.75)]
    if hints:
        lines.append(f"Perhaps renamed (stored -> live): {', '.join(hints)}.")
    return IncompatibleError(
        "Names differ. " + " ".join(lines),
        code="incompatible.names",
        action="Give both the same names, map the stored ones with mapping=, or load what both have with strict=False.",
        tensor=next(iter(sorted(missing) or sorted(unexpected)), None),
    )


class _Mismatch(NamedTuple):
    code: str
    name: str
    text: str


class Mismatches:
    """Tensors and values that have one name on both sides, but do not fit each other."""

    def __init__(self) -> None:
        self._found: list[_Mismatch] = []

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, code: str, name: str, text: str) -> None:
        """Note that `name` differs, which is an error with `code`; `text` says how."""
        self._found.append(_Mismatch(code, name, text))

    def add_kind(self, name: str, here: str, node: Node | None) -> None:
        """Note that what `here` says has the name of another kind of thing in the checkpoint (see `word`)."""
        self.add("incompatible.kind", name, f"{here} here, {word(node)} in the checkpoint")

    def error(self) -> IncompatibleError:
        """The error that says all of it, with the code of the first."""
        first = self._found[0]
        differing = listing([f"{name!r}: {text}" for _, name, text in self._found], separator="; ")
        return IncompatibleError(
            f"{len(self._found)} differ between the live state and the checkpoint: {differing}.",
            code=first.code,
            action=_ACTIONS[first.code],
            tensor=first.name,
        )


_ACTIONS = {
    "incompatible.dtype": "Create the live tensor in the stored dtype, or have it cast with cast=.",
    "incompatible.shape": "Create the live tensor in the stored shape, map the stored one (mapping=), or leave it out.",
    "incompatible.kind": "Put the same kind of object into the live state, or leave it out of the state.",
    "incompatible.no_state": "Leave it out of the live state, or out of select=: it then begins anew.",
    "incompatible.per_rank": (
        "Load with as many ranks, or say with PerRank(value, on_resize=...) what a rank gets instead: "
        '"first" (what rank 0 had), or a function of all parts.'
    ),
    "incompatible.meta": (
        'Fill what the checkpoint lacks by the mapping (fill="zero"), or give the tensor memory and values before.'
    ),
    "incompatible.tied": (
        "Load into a state that ties only what was tied, or equal, when the checkpoint was written; fuse with mapping= "
        "only parameters that are equal in optimizer state of one element."
    ),
}


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


def listing(names: list[str], separator: str = ", ") -> str:
    """The first names, and how many more there are."""
    more = [f"and {len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
    return separator.join([*names[:_SHOWN], *more])


def word(node: Node | None) -> str:
    """What a node is, for messages; None stands for a tensor without a node."""
    if isinstance(node, (values.Table, values.Items, Open)):
        return f"a stored {node.kind}"
    if isinstance(node, TorchValue):
        return f"a {node.kind}"
    if isinstance(node, (Encoded, Planes)):
        return f"a registered {node.name!r}"
    words = {
        values.PerRank: "a PerRank",
        TensorRef: "a tensor",
        values.Record: "a NamedTuple",
        Stateful: "an object's state",
    }
    return words.get(type(node), "a plain value") if node is not None else "a tensor"


def is_leaf(name: str, nodes: Mapping[str, Node]) -> bool:
    """Whether a stored name is that of a value."""
    node = nodes.get(name)
    return node is not None and isinstance(values.bare(node), values.Leaf)
