"""The record of the objects that a load or a transfer filled. A later save reads it to find out what its state is."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from holdfast.cooperative.reading import CooperativeReading
from holdfast.errors import HoldfastError
from holdfast.run.loads import TORN, Identity, Load
from holdfast.run.session import JOB
from holdfast.state.binding import Binding
from holdfast.state.identity import TensorMemory, found_in


def note_filled(load: Load, state: object, binding: Binding, *, is_whole: bool) -> None:
    """Record for this process which objects of `state` were filled, by which load."""
    JOB.note_loaded(load, _filled(state, binding, is_whole=is_whole), TensorMemory(binding.memory))


def note_refilled(state: object, binding: Binding) -> None:
    """Record for this process that a transfer has filled these objects whole. Whatever was loaded into them before
    still counts, except for what failed half way."""
    JOB.note_refilled(_filled(state, binding, is_whole=False), TensorMemory(binding.memory))


@contextmanager
def partly_filled_on_errors(
    state: object, binding: Binding, reading: CooperativeReading, *, again: str = "load it again"
) -> Iterator[None]:
    """A ``with`` block that fills `state`. If it fails after an element may have arrived, on any rank, later saves of
    the filled tensors are refused until something else fills them: they would commit parts of two states. `again` is
    the advice in the note of the error."""
    try:
        yield
    except BaseException as error:
        if reading.has_begun:
            note_filled(TORN, state, binding, is_whole=False)
            if isinstance(error, HoldfastError):
                error.add_note(f"The live state is partly filled: {again} before using it.")
        raise


def _filled(state: object, binding: Binding, *, is_whole: bool) -> list[Identity]:
    objects = found_in(state)
    if is_whole or not objects:
        return [found.itself for found in objects]
    names = sorted({*binding.loaded, *(target.name for target in binding.targets)})
    return [found.itself for found in objects if _is_within(names, found.path)]


def _is_within(names: Sequence[str], path: str) -> bool:
    """Whether one of `names`, which are sorted, is `path` or lies below it."""
    at, below = bisect_left(names, path), bisect_left(names, path + "/")
    return names[at : at + 1] == [path] or (below < len(names) and names[below].startswith(path + "/"))
