"""What ranks tell each other when they save into memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from holdfast.agreement.messages import Compare, Questions
from holdfast.checkpointer.backoff import Backoff
from holdfast.errors import ErrorWire
from holdfast.format.records import Place


class MemoryStatus(msgspec.Struct, frozen=True, array_like=True):
    """How a rank's memory stands before a save.

    `sealed` is the newest checkpoint that memory holds whole, as far as this rank can tell (None: of none): this job
    staged it and its part is sealed here, or it was whole on all nodes together when this job began. `is_free`: it has
    a slot that holds nothing; `oldest` is else the oldest checkpoint in a slot that might be filled anew (None: there
    is no such slot now). `given_up` are ids of checkpoints whose copy failed here since the last save. Where the state
    `is_as_before`, the last plan is likely to hold. `trouble` says why the memory of this rank cannot be used.
    `reached` is the last place that this rank heard of; `has_looked`: it knows what memory held before this job.
    `backoff` says for how many saves it leaves memory alone after earlier trouble. `held_up` says why the last try to
    make a snapshot of this rank durable failed ("": none did).
    """

    sealed: Place | None
    is_free: bool
    oldest: Place | None
    given_up: tuple[str, ...]
    is_as_before: bool
    trouble: ErrorWire | None = None
    reached: Place | None = None
    has_looked: bool = True
    backoff: Backoff = Backoff()
    held_up: str = ""

    def has_room(self, needed: Place | None) -> bool:
        """Whether there is a slot, where what comes before `needed` is not needed any more."""
        needed = needed or self.sealed
        return self.is_free or (self.oldest is not None and needed is not None and self.oldest < needed)


class SnapshotRoom(msgspec.Struct, frozen=True, array_like=True):
    """Whether there is room for another snapshot on all ranks: those in `full` have none yet.

    `run_id` is that of the run ("": there is none yet), from which checkpoints of an earlier one are told apart. What
    comes before `needed` is not needed any more: memory holds that whole (None: some rank cannot tell of any).
    `given_up` are checkpoints that can never be whole. Whether all states are `as_before`. `trouble` says why the
    memory of some rank cannot be used; then no rank uses it. `reached` is the last place that all ranks heard of (None:
    some heard of none): what this job staged for a later one is never whole. `all_looked`: no rank has yet to look at
    what memory held before this job. `backoff` is that of all ranks together. `held_up` is that of the first rank in
    `full` that says so.
    """

    run_id: str
    needed: Place | None
    full: tuple[int, ...]
    given_up: tuple[str, ...]
    as_before: bool
    trouble: ErrorWire | None
    reached: Place | None
    all_looked: bool
    backoff: Backoff
    held_up: str

    @staticmethod
    def of(standings: Sequence[MemoryStatus], run_id: str) -> SnapshotRoom:
        """Whether all ranks have room for another snapshot of the run `run_id`, from how the memory of each stands."""
        sealed = [each.sealed for each in standings]
        needed = None if None in sealed else min(each for each in sealed if each is not None)
        full = tuple(number for number, each in enumerate(standings) if not each.has_room(needed))
        given_up = tuple(sorted({each for standing in standings for each in standing.given_up}))
        as_before = all(standing.is_as_before for standing in standings)
        trouble = next((standing.trouble for standing in standings if standing.trouble is not None), None)
        heard = [standing.reached for standing in standings]
        reached = None if None in heard else min(each for each in heard if each is not None)
        all_looked = all(standing.has_looked for standing in standings)
        backoff = Backoff.merged([standing.backoff for standing in standings])
        held_up = next((standings[number].held_up for number in full if standings[number].held_up), "")
        return SnapshotRoom(run_id, needed, full, given_up, as_before, trouble, reached, all_looked, backoff, held_up)


class Agreed(msgspec.Struct, frozen=True, tag="agreed"):
    """Which checkpoint is to be staged, in the epoch that was opened with `incarnation`, by which plan. `manifest` is
    one of the plan, for ranks that do not know it; empty where all do.
    """

    folder: str
    checkpoint_id: str
    run_id: str
    place: Place
    incarnation: str
    step: int
    created: float
    metrics: dict[str, float]
    diverged: tuple[str, ...]
    plan_id: str
    manifest: bytes


#: What rank 0 sends until the plan is placed.
ANSWERS: Final = Questions | Compare | Agreed
