"""The entries of a state that a load did not restore whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain

from holdfast.format.names import component, split
from holdfast.format.patterns import Globs
from holdfast.mapping.draft import CheckpointTable
from holdfast.state.differences import is_leaf


def left_out(state: object, table: CheckpointTable, select: Globs | None, missing: Iterable[str]) -> tuple[str, ...]:
    """The keys of a loaded `state` below which something keeps its contents: the checkpoint has it, and `select`
    excludes it; or the checkpoint lacks it (`missing`)."""
    values = (name for name in table.nodes if is_leaf(name, table.nodes))
    stored = chain(table.stored, values) if select is not None else ()
    names = chain(missing, (name for name in stored if select is not None and not select.covers(name)))
    entries = {split(name)[0] for name in names if name}
    return tuple(key for key in state if component(key) in entries) if isinstance(state, Mapping) else ()
