"""`RandomState`: the random generators of each rank, as one entry of a state."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.frameworks.random_generators import RandomGenerators
from holdfast.state.per_rank import PerRank


class RandomState(PerRank[RandomGenerators]):
    """The generators of Python (`random`), numpy (`numpy.random`), torch and its CUDA devices, of every rank.

    Put one into the state: ``{"model": model, "random": holdfast.RandomState()}``. A save records the state of this
    rank's generators. A load restores it, after everything else was loaded. On the same number of ranks as in the save,
    the generators of each rank continue exactly. On another number of ranks, all are seeded anew from the state of rank
    0, each rank differently; the report lists that as ``reseeded``, and a warning is logged.
    """

    def __init__(self) -> None:
        super().__init__(RandomGenerators(), on_resize="first")


def has_random_state(state: Mapping[str, object]) -> bool:
    """Whether a `RandomState` is an entry of `state`, or of a dict in it."""
    return any(
        isinstance(item, RandomState) or (isinstance(item, Mapping) and has_random_state(item))
        for item in state.values()
    )
