"""Names that a user may have meant when they wrote a name that does not exist."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

_COMPONENTS = re.compile(r"[/.]")
#: A component of a pattern that matches any component.
_WILD = re.compile(r"\*+|\{\w+(?::\*+)?\}")
#: Least likeness (a ratio of `difflib`) of two words that differ by a typing error only.
_ALIKE = 0.75
_SHORTEST_STEM = 3
#: Most names that are ranked by comparing them letter by letter, which is slow.
_MAX_RANKED = 500


class Substitution(NamedTuple):
    """The part in which two near names differ, in the one and in the other."""

    old: str
    new: str


def near(name: str, candidates: Collection[str], *, count: int = 3) -> list[str]:
    """At most `count` of `candidates` that a user who wrote `name` may have meant, the most alike first.

    `name` may be a pattern: a component that is a wildcard or a field matches any component in its place. A pattern
    that begins with ``*`` is compared with the end of each name, one that ends with ``**`` with the beginning.
    """
    own = _COMPONENTS.split(name)
    close = [other for other in candidates if other != name and _may_be_meant(own, _COMPONENTS.split(other))]
    matcher = difflib.SequenceMatcher(b=name)

    def likeness(other: str) -> float:
        matcher.set_seq1(other)
        return -matcher.ratio()

    return sorted(close[:_MAX_RANKED], key=likeness)[:count]


def _may_be_meant(own: Sequence[str], other: Sequence[str]) -> bool:
    """Whether the components `other` of a name are near the components `own` of a name or pattern."""
    if own[0].startswith("*"):
        other = other[-len(own) :]
    elif own[-1] == "**":
        other = other[: len(own)]
    places = zip(own, [*other, *own[len(other) :]], strict=False)
    filled = [there if _WILD.fullmatch(one) else one.replace("*", "") for one, there in places]
    return filled == other or _differing(filled, other) is not None


def substitution(old: str, new: str) -> Substitution | None:
    """The part in which two names differ, where one may be a renamed form of the other; else None."""
    found = _differing(_COMPONENTS.split(old), _COMPONENTS.split(new))
    return None if found is None else Substitution(*map(".".join, found))


def _differing(a: Sequence[str], b: Sequence[str]) -> tuple[Sequence[str], Sequence[str]] | None:
    """The components in the middle in which two names differ, or None where neither name is a form of the other.

    The differing components must be alike one by one, or only one of the names may have any. Names that differ in
    unlike components, such as ``groups/0/eps`` and ``groups/0/momentum``, are no forms of one another, however long
    the part is that they share.
    """
    start = _num_equal(a, b)
    stop = _num_equal(a[start:][::-1], b[start:][::-1])
    middle_a, middle_b = a[start : len(a) - stop], b[start : len(b) - stop]
    if not middle_a or not middle_b:
        # One name has components that the other lacks, such as a wrapper's; the components below them must be equal.
        return (middle_a, middle_b) if stop else None
    if len(middle_a) != len(middle_b):
        return None
    alike = all(one == other or _alike(one, other) for one, other in zip(middle_a, middle_b, strict=True))
    return (middle_a, middle_b) if alike else None


def _num_equal(a: Sequence[str], b: Sequence[str]) -> int:
    """Number of components that both begin with."""
    for number, (one, other) in enumerate(zip(a, b, strict=False)):
        if one != other:
            return number
    return min(len(a), len(b))


def _alike(one: str, other: str) -> bool:
    if one.isdecimal() or other.isdecimal():
        return False  # numbers name different layers or groups, not slips of one name
    shorter, longer = sorted((one.lower(), other.lower()), key=len)
    if (
        longer[:-1] == shorter
        or _is_transposed(shorter, longer)
        or (len(shorter) >= _SHORTEST_STEM and _is_short_form(shorter, longer))
    ):
        return True
    matcher = difflib.SequenceMatcher(None, shorter, longer)
    return matcher.real_quick_ratio() >= _ALIKE and matcher.quick_ratio() >= _ALIKE and matcher.ratio() >= _ALIKE


def _is_transposed(one: str, other: str) -> bool:
    """Whether two neighbouring letters changed places, such as in ``gtp`` for ``gpt``."""
    if len(one) != len(other) or len(one) < _SHORTEST_STEM:
        return False
    at = [number for number, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
    if len(at) != 2 or at[1] - at[0] != 1:
        return False
    pair = one[at[0] : at[1] + 1]
    return other[at[0] : at[1] + 1] == pair[::-1] and not pair.isdecimal()


def _is_short_form(shorter: str, longer: str) -> bool:
    """Whether `shorter` begins like `longer` and has only letters of it, in order: ``attn`` and ``attention``."""
    letters = iter(longer)
    return longer[:2] == shorter[:2] and all(letter in letters for letter in shorter)
