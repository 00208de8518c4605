"""Nouns with their numbers and articles, and times, for messages."""

from __future__ import annotations

import re

#: Nouns that take "an": most words that begin with a vowel, and abbreviations whose first letter is spoken with one,
#: such as LBFGS or SGD.
_VOWEL_FIRST = re.compile(r"['\"]?(?:(?i:(?!eu|one|uni)(?:[aeio]|u[lmnp]))|[AEFHILMNORSX](?=[A-Z0-9]))")


def count(number: int, noun: str, plural: str | None = None) -> str:
    """The noun with its number: ``1 file``, ``2 files``. Pass `plural` where the plural is not the noun with an s."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def with_article(noun: str) -> str:
    """The noun with its article: ``a Linear``, ``an AdamW``, ``an LRScheduler``."""
    return f"{'an' if _VOWEL_FIRST.match(noun) else 'a'} {noun}"


def kind_of(item: object) -> str:
    """The name of the type of `item` with its article."""
    return with_article(type(item).__name__)


def duration(seconds: float) -> str:
    """A time with two or three digits, in the unit that suits it."""
    if 0 < seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    for unit_s, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.3g} {unit}"
    return f"{seconds:.3g} s"
