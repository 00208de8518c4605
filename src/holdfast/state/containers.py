"""Live containers that take loaded items: tuples are made anew, lists, dicts and Counters keep their identity."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast


def maker(kind: type) -> Callable[..., object]:
    """The constructor of a tuple type from its items."""
    make = getattr(kind, "_make", None)
    if make is not None:
        return lambda *items: make(items)
    return lambda *items: kind(items)


def refill(item: object, new: object) -> object:
    """Replace what a list, dict or Counter holds; nothing was loaded when `new` is `item` itself."""
    if new is not item:
        if isinstance(item, list):
            item[:] = cast("list[object]", new)
        elif isinstance(item, dict):
            item.clear()
            item.update(cast("dict[object, object]", new))
    return item
