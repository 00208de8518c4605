"""Packages that only some listeners need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.errors import ConfigurationError


@contextmanager
def imported_for(listener: str, *, extra: str) -> Iterator[None]:
    """A ``with`` block that imports what `listener` needs and the `extra` of holdfast has. Raises
    `ConfigurationError`, code ``config.extra``, if it is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"{listener} needs the package '{error.name}', which is not installed.",
            code="config.extra",
            action=f"pip install 'holdfast[{extra}]'",
        ) from error
