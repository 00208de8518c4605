"""The loads that a process remembers, by which a save finds out which checkpoints its state came from."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import chain
from typing import Final, NamedTuple, Protocol

from holdfast.format.records import Place


class Identity(Protocol):
    """Recognises an object or its memory, without keeping it alive."""

    @property
    def key(self) -> Hashable:
        """A key that is equal for the same object, and differs between objects that are alive."""

    @property
    def is_alive(self) -> bool:
        """Whether the object still exists; else another one may have its key."""


class FilledMemory(Protocol):
    """Recognises the memory of many tensors, by a number each, without keeping it alive.

    One object stands for all of them: if each load left one object per tensor, Python's garbage collector would walk
    the whole process.
    """

    def among(self, numbers: AbstractSet[int]) -> AbstractSet[int]:
        """The `numbers` whose memory belongs to these tensors."""

    def forget(self, newer: FilledMemory | None) -> bool:
        """Forget memory that no longer exists, and memory that is in `newer`. Returns whether anything is left."""


class StatePart(NamedTuple):
    """An object in a state.

    `itself` is None where the object is recognised only by its memory; `memory` returns the numbers of its memory.
    """

    itself: Identity | None
    memory: Callable[[], Sequence[int]]


class MadeEqual(NamedTuple):
    """The `names` of the tensors that one load filled on all these `ranks`: their copies were equal after it."""

    names: frozenset[str]
    ranks: frozenset[int]


@dataclass(frozen=True, slots=True)
class Load:
    """One load of `place` of the run with id `run_id` at `root`, found when epoch `seen` was the newest.

    `continues` is the caller's statement whether the run continues from it, or None. `is_whole`: the load filled the
    whole state that was given with the whole checkpoint, without a selection, a mapping or a cast. `is_torn`: the load
    failed half way, so what it filled may hold parts of two states. `passed` is the damaged checkpoint instead of which
    it took `place`, or None. `equal` are the copies that it made equal. `has_commit`: the load found the checkpoint by
    its commit; a checkpoint that was restored from node memory may not be committed yet. `step` is the step of the
    checkpoint. `is_restore`: it is a `Checkpointer.restore`. `is_newest`: the caller asked for the newest checkpoint,
    and not for a certain one. `left` are the keys of the entries that the load did not restore whole. `number` counts
    the loads of this process.
    """

    root: str
    run_id: str
    place: Place | None
    seen: int
    continues: bool | None = None
    is_whole: bool = True
    is_torn: bool = False
    passed: Place | None = None
    equal: MadeEqual = field(default=MadeEqual(frozenset(), frozenset()), compare=False, repr=False)
    has_commit: bool = True
    step: int = -1
    is_restore: bool = False
    is_newest: bool = False
    left: tuple[str, ...] = ()
    number: int = 0


class Sources(NamedTuple):
    """The loads that last filled the objects of a save (None: never loaded), as of load `number`."""

    loads: frozenset[Load | None]
    number: int

    def made_equal(self, ranks: Iterable[int]) -> frozenset[str]:
        """The names of the tensors whose copies on all these ranks were equal after one of the loads."""
        wanted = frozenset(ranks)
        found = (load.equal for load in self.loads if load is not None and not load.is_torn)
        return frozenset(chain.from_iterable(each.names for each in found if each.ranks >= wanted))


#: A load or a transfer that failed half way.
TORN: Final = Load("", "", None, 0, is_whole=False, is_torn=True)
#: The sources of a state that no load filled.
NEVER_LOADED: Final = Sources(frozenset((None,)), 0)
