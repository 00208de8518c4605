"""What `save` and `load` tell about what they did."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class SaveReport:
    """A committed, durable checkpoint.

    `place` is its place in the run's history, `path` its folder. ``nbytes`` counts the tensors and values of the whole
    checkpoint, ``written_nbytes`` what this rank wrote. `diverged` are tensors whose undeclared copies were found to
    differ at this save; one holder's copy of each was saved. ``seconds`` says how long each phase took on this rank.
    """

    step: int
    place: str
    path: str
    nbytes: int
    written_nbytes: int
    num_tensors: int
    diverged: tuple[str, ...]
    seconds: dict[str, float]


@dataclass(frozen=True)
class LoadReport:
    """A loaded state. `state` is the whole tree that was loaded into (tuples in it are new).

    `loaded`, `missing` and `unexpected` are names of tensors and values; with ``strict`` the last two are empty.
    `resharded` are tensors whose local part is not one stored piece, `cast` those that this rank holds in another dtype
    than they are stored in. With a mapping, all names are those after its rules. ``read_nbytes`` came from storage,
    ``needed_nbytes`` is what this rank holds of it. Ranks read for each other, and whole digest blocks, so of both
    only the sums over all ranks compare. ``verify_s`` are seconds that this rank's threads spent on digests.
    `on_meta` are tensors that still have no memory, on the meta device: with ``strict`` only what was not selected.
    `reseeded` are `RandomState` entries that another number of ranks saved: their generators do not go on where they
    were. `diverged` is what the checkpoint says of its tensors, as in `SaveReport`. `skipped` are newer checkpoints
    that were passed over with ``fallback=True``, newest first: the place of each, and what is wrong with it.
    """

    step: int
    place: str
    path: str
    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    resharded: tuple[str, ...]
    cast: tuple[str, ...]
    on_meta: tuple[str, ...]
    reseeded: tuple[str, ...]
    diverged: tuple[str, ...]
    read_nbytes: int
    needed_nbytes: int
    verify_s: float
    seconds: dict[str, float]
    skipped: tuple[tuple[str, str], ...]
    state: object = field(repr=False)


@dataclass(frozen=True)
class TransferReport:
    """A target that was filled from a source. `state` is the whole tree of the target (tuples in it are new).

    `loaded` are the names of tensors and values that this rank's target got, ``received_nbytes`` the size of its parts
    of those tensors. ``moved_nbytes`` is what this rank copied out of its part of the source, for itself and others,
    once for all of them. ``seconds`` says how long each phase took on this rank.
    """

    loaded: tuple[str, ...]
    moved_nbytes: int
    received_nbytes: int
    seconds: dict[str, float]
    state: object = field(repr=False)
