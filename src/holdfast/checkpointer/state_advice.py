"""Advice about a state that a `Checkpointer` saves: what it forgets, and what it keeps a stale copy of."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Final

from holdfast.phases import LOG
from holdfast.state.random_state import has_random_state

_log = logging.getLogger(__name__)

#: The keys by which a dict is recognised as the `state_dict()` of an object.
_COPIED_KINDS: Final = (
    (frozenset(("state", "param_groups")), "the optimizer"),
    (frozenset(("last_epoch", "_step_count")), "the scheduler"),
    (frozenset(("scale", "growth_factor", "_growth_tracker")), "the gradient scaler"),
)


def advise_on_randomness(state: Mapping[str, object]) -> None:
    """Tell a loop if its state has no random generators."""
    if not has_random_state(state):
        LOG.info(
            "the state has no holdfast.RandomState(), so a job that resumes draws other random numbers than one that "
            'goes on; add an entry "random": holdfast.RandomState()'
        )


def warn_of_copies(state: Mapping[str, object]) -> None:
    """Warn of entries that are a `state_dict()`: training does not change such a copy, so each save would store its
    first values again."""
    for name, kind in _copies(state, ""):
        _log.warning(
            "%r is a state_dict(): a copy of this moment, which training does not change. Give %s itself, unless your "
            "code replaces the entry before each save",
            name,
            kind,
        )


def _copies(state: Mapping[str, object], path: str) -> Iterator[tuple[str, str]]:
    for key, item in state.items():
        if isinstance(item, Mapping):
            name = f"{path}/{key}" if path else str(key)
            kind = next((kind for keys, kind in _COPIED_KINDS if keys <= item.keys()), None)
            if kind is None:
                yield from _copies(item, name)
            else:
                yield name, kind
