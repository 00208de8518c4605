"""A wish for a save."""

from __future__ import annotations

from typing import NamedTuple


class Wish(NamedTuple):
    """A wish for a save, with its reason. With `memory_only`, a save to memory alone grants it."""

    reason: str
    memory_only: bool = False


def stronger(one: Wish | None, other: Wish | None) -> Wish | None:
    """The one of two wishes whose save grants both; `one` if either does."""
    if one is None or (other is not None and one.memory_only and not other.memory_only):
        return other
    return one
