"""Names that somebody may have meant who wrote another one."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

_COMPONENTS = re.compile(r"[/.]")
#: A component of a pattern that stands for any other.
_WILD = re.compile(r"\*+|\{\w+(?::\*+)?\}")
#: How alike two words are that a slip of the finger, or a shorter form, sets apart.
_ALIKE = 0.75
_SHORTEST_STEM = 3
#: Names whose likeness is compared letter by letter, which is slow.
_MAX_RANKED = 500


class Substitution(NamedTuple):
    """The part in which two near names differ: what stands for what."""

    old: str
    new: str


def near(name: str, candidates: Collection[str], *, count: int = 3) -> list[str]:
    """Those of `candidates` that somebody who wrote `name` may have meant, the most alike first; `count` at most.

    `name` may be a pattern: a component that is a wildcard or a field stands for the one in its place. One that begins
    with ``*`` is compared with the end of each name, one that ends with ``**`` with the beginning.
    """
    own = _COMPONENTS.split(name)
    close = [other for other in candidates if other != name and _may_be_meant(own, _COMPONENTS.split(other))]
    matcher = difflib.SequenceMatcher(b=name)

    def likeness(other: str) -> float:
        matcher.set_seq1(other)
        return -matcher.ratio()

    return sorted(close[:_MAX_RANKED], key=likeness)[:count]


def _may_be_meant(own: Sequence[str], other: Sequence[str]) -> bool:
    """Whether the components `other` are near those of a name or pattern `own`."""
    if own[0].startswith("*"):
        other = other[-len(own) :]
    elif own[-1] == "**":
        other = other[: len(own)]
    places = zip(own, [*other, *own[len(other) :]], strict=False)
    filled = [there if _WILD.fullmatch(one) else one.replace("*", "") for one, there in places]
    return filled == other or _differing(filled, other) is not None


def substitution(old: str, new: str) -> Substitution | None:
    """What one of two names has instead of what is in the other, where one may be a renamed form of the other."""
    found = _differing(_COMPONENTS.split(old), _COMPONENTS.split(new))
    return None if found is None else Substitution(*map(".".join, found))


def _differing(a: Sequence[str], b: Sequence[str]) -> tuple[Sequence[str], Sequence[str]] | None:
    """The components in the middle that differ, where they are alike one by one, or only one name has them.

    Names that share all but unlike components, such as ``groups/0/eps`` and ``groups/0/momentum``, are no forms of one
    another, however long the part is that they share.
    """
    start = _num_equal(a, b)
    stop = _num_equal(a[start:][::-1], b[start:][::-1])
    middle_a, middle_b = a[start : len(a) - stop], b[start : len(b) - stop]
    if not middle_a or not middle_b:
        # Something was put in, such as the name of a wrapper: what is below it is the same.
        return (middle_a, middle_b) if stop else None
    if len(middle_a) != len(middle_b):
        return None
    alike = all(one == other or _alike(one, other) for one, other in zip(middle_a, middle_b, strict=True))
    return (middle_a, middle_b) if alike else None


def _num_equal(a: Sequence[str], b: Sequence[str]) -> int:
    """How many components both begin with."""
    for number, (one, other) in enumerate(zip(a, b, strict=False)):
        if one != other:
            return number
    return min(len(a), len(b))


def _alike(one: str, other: str) -> bool:
    if one.isdecimal() or other.isdecimal():
        return False  # another layer is another thing
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
    """Whether the one begins like the other and has its letters in their order, such as ``attn`` and ``attention``."""
    letters = iter(longer)
    return longer[:2] == shorter[:2] and all(letter in letters for letter in shorter)
