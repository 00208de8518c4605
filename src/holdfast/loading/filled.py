"""The record of what a load has filled, by which a later save knows what its state is."""

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
    filled = found_in(state)
    if not is_whole:
        names = sorted({*binding.loaded, *(target.name for target in binding.targets)})
        filled = [found for found in filled if _is_within(names, found.path)]
    memory = TensorMemory([part for target in binding.targets for part in target.local.memory])
    JOB.note_loaded(load, [found.itself for found in filled], memory)


@contextmanager
def partly_filled_on_errors(state: object, binding: Binding, reading: CooperativeReading) -> Iterator[None]:
    """A ``with`` block that fills `state`. Where it fails after the first element may have arrived, on any rank, later
    saves of what it filled are refused until something else fills that: they would commit parts of two states."""
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
