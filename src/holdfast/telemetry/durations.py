"""Durations as text for people."""

from __future__ import annotations

from typing import Final

_UNITS: Final = ((86400 * 2, 86400, "d"), (7200, 3600, "h"), (120, 60, "min"), (1, 1, "s"))


def duration(seconds: float) -> str:
    """A duration in a unit that suits it, such as ``4.2 ms`` or ``3.5 min``."""
    for least_s, unit_s, unit in _UNITS:
        if seconds >= least_s:
            return f"{seconds / unit_s:.3g} {unit}"
    return f"{1000 * seconds:.3g} ms" if seconds else "0"
