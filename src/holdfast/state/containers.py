"""Live containers that take loaded items: tuples are rebuilt; lists, dicts and Counters keep their identity."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast


def maker(kind: type) -> Callable[..., object]:
    """A function that makes a tuple of type `kind` from its items."""
    make = getattr(kind, "_make", None)
    if make is not None:
        return lambda *items: make(items)
    return lambda *items: kind(items)


def refill(item: object, new: object) -> object:
    """Replace the contents of a list, dict or Counter by those of `new`, and return `item`. Does nothing when `new` is
    `item` itself, which means that nothing was loaded."""
    if new is not item:
        if isinstance(item, list):
            item[:] = cast("list[object]", new)
        elif isinstance(item, dict):
            item.clear()
            item.update(cast("dict[object, object]", new))
    return item
