"""The messages between ranks in a save into memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec

from holdfast.agreement.plan_messages import Compare, Questions
from holdfast.checkpointer.backoff import Backoff
from holdfast.errors import ErrorWire
from holdfast.format.manifest import Candidate
from holdfast.format.records import Place


class MemoryStatus(msgspec.Struct, frozen=True, array_like=True):
    """The status of a rank's memory before a save.

    - `sealed`: the newest checkpoint that memory holds whole, as far as this rank can tell (None: it can tell of none).
      Either this job staged it and its part is sealed here, or it was whole on all nodes together when this job began.
    - `is_free`: the rank has a slot that holds nothing that is needed.
    - `oldest`: the oldest checkpoint in the other slots that might be filled anew (None: there is no such slot now).
    - `given_up`: ids of the last checkpoints whose copy failed here.
    - `is_as_before`: the state has the same tensors as at the last save, so the last plan is likely to hold.
    - `trouble`: the reason why this rank's memory cannot be used.
    - `reached`: the last place that this rank heard of.
    - `has_looked`: the rank knows what memory held before this job.
    - `backoff`: the number of saves for which the rank does not try memory, after earlier trouble.
    - `held_up`: the reason why the last try to make a snapshot of this rank durable failed ("": none failed).
    - `fenced`: the reason why this node's keeper will never commit the checkpoint that this job restored from memory
      ("": it may).
    - `has_left`: a slot holds a checkpoint that an earlier job left, that is not durable, and that this job did not
      restore.
    - ``left_s``: the seconds until the machine of this rank is taken away, as far as the rank knows.
    - `run_id`: the id of the run that the rank's memory belongs to (None: it is not known yet).
    - `awaits_peers`: other nodes do not protect the newest snapshot of this rank yet.
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
    fenced: str = ""
    has_left: bool = False
    left_s: float = math.inf
    run_id: str | None = None
    awaits_peers: bool = False

    def has_room(self, needed: Place | None) -> bool:
        """Whether the rank has a slot to fill, given that checkpoints before `needed` are not needed any more."""
        needed = needed or self.sealed
        return self.is_free or (self.oldest is not None and needed is not None and self.oldest < needed)


class SnapshotRoom(msgspec.Struct, frozen=True, array_like=True):
    """The room for another snapshot on all ranks together.

    - `run_id`: the id of the run ("": there is none yet), which tells its checkpoints from those of an earlier run.
    - `needed`: the newest checkpoint that memory holds whole on all ranks (None: some rank can tell of none). Earlier
      ones are not needed any more.
    - `full`: the ranks that have no room yet.
    - `given_up`: checkpoints that can never be whole.
    - `as_before`: all ranks' states have the same tensors as at the last save.
    - `trouble`: the reason why some rank's memory cannot be used; no rank uses memory then.
    - `reached`: the last place that all ranks heard of (None: some rank heard of none). A checkpoint that this job
      staged for a later place can never be whole.
    - `all_looked`: every rank knows what memory held before this job.
    - `backoff`: the merged backoff of all ranks.
    - `held_up`: the reason of the first rank in `full` that has one, else of the first rank.
    - `awaits_commit`: the checkpoint that this job restored from memory is not committed yet, and no save can follow it
      before. Then `full` is empty as long as the save may wait, and has all ranks when it waits no longer.
    - `looks_again`: all ranks are to look again at what earlier jobs left in memory.
    - `is_new_run`: the memory of some rank does not belong to the run yet. Then all look at their slots again.
    - `awaits_peers`: other nodes do not protect the newest snapshot of some rank in `full` yet.
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
    awaits_commit: bool = False
    looks_again: bool = False
    is_new_run: bool = False
    awaits_peers: bool = False

    @property
    def has_room(self) -> bool:
        """Whether the next save may begin."""
        return not self.full and not self.awaits_commit

    @property
    def why_full(self) -> str:
        """The reason why the next save may not begin."""
        if self.awaits_commit:
            return "the checkpoint that was restored from memory is not committed yet"
        if self.awaits_peers:
            return f"the newest snapshots of {self.full_ranks} are not protected by other nodes yet"
        return f"the snapshots of {self.full_ranks} are not durable yet"

    @property
    def full_ranks(self) -> str:
        """The first ranks that have no room yet, as a sentence names them."""
        noun = "rank" if len(self.full) == 1 else "ranks"
        return f"{noun} {', '.join(map(str, self.full[:8]))}{' ...' if len(self.full) > 8 else ''}"

    @staticmethod
    def of(standings: Sequence[MemoryStatus], run_id: str) -> SnapshotRoom:
        """Merge the memory statuses of all ranks, for the run `run_id`."""
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
        told = [standings[number].held_up for number in full] + [standing.held_up for standing in standings]
        held_up = next(filter(None, told), "")
        return SnapshotRoom(
            *(run_id, needed, full, given_up, as_before, trouble, reached, all_looked, backoff, held_up),
            is_new_run=any(standing.run_id != run_id for standing in standings),
            awaits_peers=any(standings[number].awaits_peers for number in full),
        )


class Agreed(msgspec.Struct, frozen=True, tag="agreed"):
    """The checkpoint that the ranks are to stage, the `incarnation` of its epoch, and its plan. `manifest` is the
    encoded manifest, for ranks that do not know the plan; empty if all ranks know it. `references` are the candidates
    of its still files. With `memory_only`, it is to stay in memory.
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
    references: tuple[Candidate, ...]
    memory_only: bool = False


#: The messages that rank 0 may send until the plan is placed, and the one that tells its place.
ANSWERS: Final = Questions | Compare | Agreed
