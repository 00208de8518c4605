"""``holdfast diff``: the differences between two checkpoints."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.text import Text

from holdfast.checkpoint.compare import Comparison, TensorDifference, TensorFacts, compare, pairs
from holdfast.checkpoint.stored_checkpoint import Checkpoint
from holdfast.cli.screen import Listing, console, counting, print_json, say, when
from holdfast.cli.value_text import kind_of, natural, shortened, shown_name, text_of
from holdfast.errors import NotFoundError, printable
from holdfast.format.values import Node
from holdfast.run.history import resolve
from holdfast.run.leases import lease_during
from holdfast.run.paths import parse
from holdfast.wording import count

#: Most rows of one kind on screen; JSON has all of them.
_MAX_ROWS = 40
#: A component of a name that is the number of a layer, an expert or a group.
_NUMBER = re.compile(r"(?<![^/.])[0-9]+(?![^/.])")


class Side(msgspec.Struct, frozen=True):
    """One of the two checkpoints."""

    path: str
    place: str
    step: int
    created: float
    world_size: int
    num_files: int


class DifferingValue(msgspec.Struct, frozen=True):
    """A value that differs, as text; null on a side that lacks it."""

    name: str
    a: str | None
    b: str | None


class DiffDocument(msgspec.Struct, frozen=True):
    """The document that ``--json`` prints. With ``--stat`` the lists are empty, and only the numbers are given."""

    equal: bool
    a: Side
    b: Side
    num_common: int
    num_only_a: int
    num_only_b: int
    num_differing: int
    num_values: int
    max_abs: float | int | None
    only_a: list[str]
    only_b: list[str]
    tensors: list[TensorDifference]
    values: list[DifferingValue]


def diff(a: str, b: str, *, stat: bool, names: str, as_json: bool) -> bool:
    """Compare the tensors and values at two paths whose names match the glob `names`, and print the differences.

    An empty `names` matches all. Returns True where both checkpoints are equal.
    """
    sides = [Checkpoint(resolve(parse(path)).sealed) for path in (a, b)]

    def wanted(name: str) -> bool:
        return not names or fnmatchcase(name, names)

    total = sum(pair.nbytes for pair in pairs(*sides, wanted=wanted))
    with ExitStack() as stack:
        for side in sides:
            stack.enter_context(lease_during(side.sealed))
        advance = stack.enter_context(counting("comparing", total, quiet=as_json))
        found = compare(*sides, wanted=wanted, progress=advance)
    if names and not (found.num_common or found.only_a or found.only_b or found.values):
        raise NotFoundError(
            f"nothing in '{a}' and '{b}' has a name that matches {names!r}, or only values that are equal do.",
            code="not_found.tensor",
            action="List names with holdfast show PATH --names '*'.",
        )
    document = _document(sides, found, stat=stat)
    if as_json:
        print_json(document)
    else:
        _show(document, found, stat=stat)
    return found.equal


def _document(sides: Sequence[Checkpoint], found: Comparison, *, stat: bool) -> DiffDocument:
    largest = [difference.max_abs for difference in found.tensors if difference.max_abs is not None]
    one, other = (_side(checkpoint) for checkpoint in sides)
    return DiffDocument(
        equal=found.equal,
        a=one,
        b=other,
        num_common=found.num_common,
        num_only_a=len(found.only_a),
        num_only_b=len(found.only_b),
        num_differing=len(found.tensors),
        num_values=len(found.values),
        max_abs=max(largest, default=None),
        only_a=[] if stat else found.only_a,
        only_b=[] if stat else found.only_b,
        tensors=[] if stat else found.tensors,
        values=[] if stat else [DifferingValue(value.name, _text(value.a), _text(value.b)) for value in found.values],
    )


def _side(checkpoint: Checkpoint) -> Side:
    body = checkpoint.manifest.body
    place = str(checkpoint.manifest.place)
    return Side(checkpoint.folder, place, body.step, body.created, body.world_size, body.num_files)


def _text(node: Node | None) -> str | None:
    return None if node is None else text_of(node)


def _show(document: DiffDocument, found: Comparison, *, stat: bool) -> None:
    screen = console()
    for name, side in (("A", document.a), ("B", document.b)):
        by = f"{count(side.num_files, 'file')} by {count(side.world_size, 'rank')}"
        text = f"step {side.step} at {side.place}, saved {when(side.created)}, {by}"
        say(screen, Text.assemble((f"{name} ", "bold"), f"{printable(side.path)}\n  {text}"))
    if not stat:
        _print_names(screen, "only in A", document.only_a)
        _print_names(screen, "only in B", document.only_b)
        _print_tensors(screen, found.tensors)
        _print_values(screen, found)
    screen.print()
    say(screen, _verdict(document))


def _verdict(document: DiffDocument) -> Text:
    if document.equal:
        what = f" {count(document.num_common, 'tensor')} bit for bit, and all values"
        return Text.assemble(("equal:", "bold green"), what)
    parts = []
    if document.num_differing:
        largest = "" if document.max_abs is None else f" (by at most {_number(document.max_abs)})"
        parts.append(f"{document.num_differing:,} of {count(document.num_common, 'tensor')} in both{largest}")
    if document.num_values:
        parts.append(count(document.num_values, "value"))
    for number, side in ((document.num_only_a, "A"), (document.num_only_b, "B")):
        if number:
            parts.append(f"{count(number, 'tensor')} only in {side}")
    common = document.num_common
    if not common:
        parts.append("no tensor is in both")
    elif not document.num_differing:
        parts.append(f"the {count(common, 'tensor')} in both {'is' if common == 1 else 'are'} equal")
    return Text.assemble(("different: ", "bold red"), "; ".join(parts))


def _print_names(screen: Console, title: str, names: list[str]) -> None:
    if not names:
        return
    screen.print(f"\n{title}: {count(len(names), 'tensor')}", style="bold")
    for name in names[:_MAX_ROWS]:
        say(screen, f"  {shown_name(name)}")
    _print_rest(screen, len(names))


class _AlikeDifferences(NamedTuple):
    """The differences of tensors whose names differ in numbers only, or of one tensor, in one row."""

    name: str
    kinds: str
    members: list[TensorDifference]

    @property
    def differing(self) -> str:
        """The number of elements that differ, as text."""
        if any(one.num_differing is None for one in self.members):
            return "not compared"
        number = sum(one.num_differing or 0 for one in self.members)
        numel = sum(one.a.numel for one in self.members)
        return f"all {number:,}" if 0 < number == numel else f"{number:,} of {numel:,}"

    @property
    def largest(self) -> str:
        """The largest difference of elements, and the number of differing pairs with a nan or infinity, as text."""
        finite = max((one.max_abs for one in self.members if one.max_abs is not None), default=None)
        strange = sum(one.num_not_finite for one in self.members)
        parts = [] if finite is None else [_number(finite)]
        return " + ".join([*parts, f"{strange:,} nan/inf"] if strange else parts)


def _print_tensors(screen: Console, tensors: list[TensorDifference]) -> None:
    """Print the tensors that differ. Where they are too many, tensors of several layers that are alike are one row."""
    if not tensors:
        return
    groups = _groups(tensors, merge=len(tensors) > _MAX_ROWS)
    shown = groups[:_MAX_ROWS]
    optional = {
        "num": [f"{len(group.members):,}" if len(group.members) > 1 else "" for group in shown],
        "A -> B": [group.kinds for group in shown],
    }
    optional = {name: cells for name, cells in optional.items() if any(cells)}
    made = Listing(
        "tensor", *optional, "differing", "max |A-B|", right=("num", "differing", "max |A-B|"), spare=("num",)
    )
    for group, *cells in zip(shown, *optional.values(), strict=True):
        made.add_row(shown_name(group.name), *cells, group.differing, group.largest)
    screen.print()
    screen.print(made)
    _print_rest(screen, len(groups))


def _groups(tensors: list[TensorDifference], *, merge: bool) -> list[_AlikeDifferences]:
    found: dict[tuple[str, str], _AlikeDifferences] = {}
    for one in sorted(tensors, key=lambda one: natural(one.name)):
        name = _NUMBER.sub("*", one.name) if merge else one.name
        kinds = "" if one.a == one.b else f"{_kind(one.a)} -> {_kind(one.b)}"
        found.setdefault((name, kinds), _AlikeDifferences(name, kinds, [])).members.append(one)
    return [group if len(group.members) > 1 else group._replace(name=group.members[0].name) for group in found.values()]


def _kind(side: TensorFacts) -> str:
    return f"{side.dtype} {list(side.shape)}"


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _print_values(screen: Console, found: Comparison) -> None:
    if not found.values:
        return
    screen.print()
    made = Listing("value", "A", "B")
    for value in found.values[:_MAX_ROWS]:
        made.add_row(shown_name(value.name), _cell(value.a, value.b), _cell(value.b, value.a))
    screen.print(made)
    _print_rest(screen, len(found.values))


def _cell(node: Node | None, other: Node | None) -> str:
    """A value as text, with its type where the other side has another type."""
    if node is None:
        return "-"
    text = shortened(text_of(node))
    return text if other is None or kind_of(node) == kind_of(other) else f"{kind_of(node)} {text}"


def _print_rest(screen: Console, number: int) -> None:
    if number > _MAX_ROWS:
        say(screen, f"  and {number - _MAX_ROWS:,} more: --names GLOB narrows, --json lists all")
