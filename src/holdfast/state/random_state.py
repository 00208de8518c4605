"""`RandomState`: the random generators of each rank, as one entry of a state."""

from __future__ import annotations

from holdfast.frameworks.random_generators import RandomGenerators
from holdfast.state.per_rank import PerRank


class RandomState(PerRank[RandomGenerators]):
    """The generators of Python (`random`), numpy (`numpy.random`), torch and its CUDA devices, of every rank.

    Put one into the state: ``{"model": model, "random": holdfast.RandomState()}``. A save notes where this rank's
    generators are; a load has them go on from there, after everything else was loaded. On as many ranks as saved, each
    rank goes on exactly. On another number of ranks all are seeded anew, each differently, from what rank 0 had; the
    report lists that as ``reseeded``, and a warning is logged.
    """

    def __init__(self) -> None:
        super().__init__(RandomGenerators(), on_resize="first")
