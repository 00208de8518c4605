"""Faults of a checkpoint or a record, as values. A module of its own, because the code that finds them needs numpy."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from holdfast.errors import HoldfastError

#: Most tensors, and most blocks, that a fault names.
MAX_NAMED = 16


class Fault(msgspec.Struct, frozen=True):
    """One fault: a stable code, the file, a message, and the first of the tensors that it damages."""

    code: str
    path: str
    message: str
    tensors: tuple[str, ...] = ()
    num_tensors: int = 0

    @staticmethod
    def of(error: HoldfastError, tensors: Iterable[str] = ()) -> Fault:
        """The fault that an error of reading reports; `tensors` are the damaged ones."""
        hit = tuple(dict.fromkeys(tensors))
        return Fault(error.code, error.path or "", error.message, hit[:MAX_NAMED], len(hit))
