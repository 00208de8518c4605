"""What is wrong with a checkpoint or a record, as a value. Apart from what finds it, which needs numpy."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from holdfast.errors import HoldfastError

#: How many tensors, and how many blocks, a fault names at most.
MAX_NAMED = 16


class Fault(msgspec.Struct, frozen=True):
    """One thing that is wrong: a stable code, the file, what to know, and the first of the tensors that it hits."""

    code: str
    path: str
    message: str
    tensors: tuple[str, ...] = ()
    num_tensors: int = 0

    @staticmethod
    def of(error: HoldfastError, tensors: Iterable[str] = ()) -> Fault:
        """What an error of reading says, as a fault."""
        hit = tuple(dict.fromkeys(tensors))
        return Fault(error.code, error.path or "", error.message, hit[:MAX_NAMED], len(hit))
