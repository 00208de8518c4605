"""The number of further checkpoints that fit on a disk, with a policy's deletions between the saves. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from holdfast.format.records import Place
from holdfast.policy.keep import CheckpointFacts, KeepPolicy, decide

#: A forecast ends after so many saves: then the disk has room enough.
HORIZON: Final = 50


def saves_that_fit(free_nbytes: int, lineage: Sequence[CheckpointFacts], policy: KeepPolicy | None) -> int | None:
    """The number of further saves for which `free_nbytes` suffice, or None where that is `HORIZON` or more.

    `lineage` are the checkpoints that are there, newest first. The next ones are as large as what the save of the
    newest one wrote, and follow each other as they did. After each one, what `policy` does not keep is deleted, except
    for still files to which others refer; None deletes nothing.
    """
    if not lineage:
        return None
    there = list(lineage)
    steps, seconds = _intervals(lineage)
    for number in range(HORIZON):
        coming = _after(there[0], steps, seconds)
        free_nbytes -= coming.nbytes
        if free_nbytes < 0:
            return number
        there.insert(0, coming)
        if policy is not None:
            gone = decide(policy, there, verified=coming.place, now=coming.created).deleted
            free_nbytes += sum(facts.freed_nbytes for facts in gone)
            places = {facts.place for facts in gone}
            there = [facts for facts in there if facts.place not in places]
    return None


def _after(facts: CheckpointFacts, steps: int, seconds: float) -> CheckpointFacts:
    """The facts about a checkpoint that follows another one."""
    place = Place(facts.place.epoch, facts.place.seq + 1)
    return CheckpointFacts(place, facts.step + steps, facts.created + seconds, facts.coming_nbytes, facts.metrics)


def _intervals(lineage: Sequence[CheckpointFacts]) -> tuple[int, float]:
    """The steps and seconds between two saves. Of the saves between two checkpoints of one epoch, some may be deleted:
    their places tell how many there were."""
    for later, earlier in pairwise(lineage):
        number = later.place.seq - earlier.place.seq
        if later.place.epoch == earlier.place.epoch and number > 0:
            return max((later.step - earlier.step) // number, 1), max(later.created - earlier.created, 0.0) / number
    # The first checkpoint came after as many steps as the next one will, as far as anybody knows.
    return max(lineage[0].step, 1), 0.0
