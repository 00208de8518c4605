"""Moments as text for people."""

from __future__ import annotations

from datetime import datetime
from typing import Final

from holdfast.format.records import LAST_S

_DAY_S: Final = 86_400


def moment_text(unix_s: float) -> str:
    """A moment in local time. Moments that `datetime` does not know, from damaged files, become the last that it knows
    in all time zones."""
    return datetime.fromtimestamp(min(unix_s, LAST_S - _DAY_S)).astimezone().strftime("%Y-%m-%d %H:%M:%S")
