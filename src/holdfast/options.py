"""Checks of options at the place where a caller gives them. Each error says in one sentence what the option takes."""

from __future__ import annotations

import operator
from datetime import timedelta
from typing import Final, SupportsFloat, SupportsIndex

from holdfast.wording import kind_of

#: Longest timeout, 11 days: the system's calls that wait count milliseconds in 32 bits.
MAX_TIMEOUT_S: Final = 1_000_000.0


def check_flag(name: str, value: object) -> None:
    """Raise `TypeError` unless the option `name` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {value!r}")


def checked_number(name: str, value: object, *, least: int, reason: str) -> int:
    """The whole number that the option `name` was given as. Raises `TypeError` for anything else, and `ValueError` for
    less than `least`, with the `reason` of this limit."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{name} must be a whole number, not {kind_of(value)}: {value!r}")
    number = operator.index(value)
    if number < least:
        raise ValueError(f"{name} is {number}, but {reason}")
    return number


def check_positive(name: str, value: object, unit: str) -> None:
    """Raise `TypeError` unless the option `name` is a number, and `ValueError` unless it is positive."""
    if isinstance(value, bool) or not isinstance(value, SupportsFloat):
        hint = f"; write {value.total_seconds()}" if isinstance(value, timedelta) and unit == "seconds" else ""
        raise TypeError(f"{name} must be a number of {unit}, not {value!r}{hint}")
    try:
        is_positive = float(value) > 0
    except OverflowError:
        raise ValueError(f"{name} must be a number of {unit} that a float can hold, not {value!r:.50}...") from None
    if not is_positive:
        raise ValueError(f"{name} must be positive, not {value}")


def check_timeout(timeout_s: object) -> None:
    """Raise `TypeError` or `ValueError` unless `timeout_s` is a positive number of seconds that a wait can last."""
    check_positive("a timeout", timeout_s, "seconds")
    if float(timeout_s) > MAX_TIMEOUT_S:  # type: ignore[arg-type]  # `check_positive` has found a number
        raise ValueError(f"a timeout must be at most {MAX_TIMEOUT_S:,.0f} seconds, not {timeout_s}")
