"""Which older checkpoint to load when one is damaged: the next one on its lineage all of whose files are there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import dropwhile

import msgspec

from holdfast.checkpoint.reading import Checkpoint
from holdfast.errors import CorruptError, HoldfastError, NotFoundError
from holdfast.format.records import Place
from holdfast.run.complete import check_present
from holdfast.run.history import Located, Run, no_head
from holdfast.run.paths import Selection
from holdfast.store.base import Store


class Skipped(msgspec.Struct, frozen=True, array_like=True):
    """A checkpoint that was passed over, and why."""

    place: Place
    reason: str


def is_damage(error: HoldfastError) -> bool:
    """Whether `error` says that stored bytes are lost or altered, so that another checkpoint may be sound."""
    return isinstance(error, CorruptError)


def resolve_sound(
    target: Selection, storage: Store, skipped: Sequence[Skipped] = ()
) -> tuple[Located, tuple[Skipped, ...]]:
    """The newest checkpoint on the lineage of `target` (of the head, for a run) that was not skipped yet and whose
    seal, manifest and files are all there; and what was skipped on the way to it, with what had been before. `storage`
    is the one at the root of `target`.

    Data is not read, so it may still turn out to be damaged.

    Raises:
        CorruptError: none is left (``corrupt.lineage``), or records that say what the lineage is are damaged.
        NotFoundError: there is no such run or commit.
    """
    run = Run.open(storage)
    epoch = run.newest_epoch()
    passed = list(skipped)
    for place in _candidates(run, target, passed):
        try:
            sealed = run.locate(run.commit(place))
            check_present(Checkpoint(sealed))
        except (CorruptError, NotFoundError) as error:
            passed.append(Skipped(place, error.message))
            continue
        return Located(sealed, run, epoch), tuple(passed)
    if not passed:
        no_head(run)
    reasons = " ".join(f"{one.place}: {one.reason}" for one in passed)
    raise CorruptError(
        f"no checkpoint on the lineage of '{target}' can be loaded. {reasons}",
        code="corrupt.lineage",
        action="Restore one of them from another copy of the run.",
        path=target.root,
    )


def _candidates(run: Run, target: Selection, skipped: Sequence[Skipped]) -> Iterator[Place]:
    """Places of the lineage, from the newest that was not looked at yet."""
    if skipped:
        last = skipped[-1].place
        return dropwhile(lambda place: place >= last, run.lineage_places(skipped[0].place))
    start = target.place
    if target.step is not None:
        start = run.find(step=target.step).place
    elif start is not None and not run.is_committed(start):
        run.find(place=start)
    return run.lineage_places(start)
