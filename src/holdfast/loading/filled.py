"""The record of the objects that a load filled. A later save reads it to find out from which checkpoint they are."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from holdfast.cooperative.reading import CooperativeReading
from holdfast.errors import HoldfastError
from holdfast.run.session import JOB, TORN, Load
from holdfast.state.binding import Binding
from holdfast.state.identity import TensorMemory, found_in


def note_filled(load: Load, state: object, binding: Binding, *, is_whole: bool) -> None:
    """Record for this process which objects of `state` were filled, by which load."""
    names = sorted({*binding.loaded, *(target.name for target in binding.targets)})
    filled = [found.itself for found in found_in(state) if is_whole or _is_within(names, found.path)]
    memory = TensorMemory(part for target in binding.targets for part in target.local.memory)
    JOB.note_loaded(load, filled, memory)


@contextmanager
def partly_filled_on_errors(state: object, binding: Binding, reading: CooperativeReading) -> Iterator[None]:
    """A ``with`` block that fills `state`. If it fails after an element may have arrived, on any rank, later saves of
    the filled tensors are refused until another load fills them: they would commit parts of two states."""
    try:
        yield
    except BaseException as error:
        if reading.has_begun:
            note_filled(TORN, state, binding, is_whole=False)
            if isinstance(error, HoldfastError):
                error.add_note("The live state is partly filled: load it again before using it.")
        raise


def _is_within(names: Sequence[str], path: str) -> bool:
    """Whether one of `names`, which are sorted, is `path` or lies below it."""
    at, below = bisect_left(names, path), bisect_left(names, path + "/")
    return names[at : at + 1] == [path] or (below < len(names) and names[below].startswith(path + "/"))
