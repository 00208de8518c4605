"""The fallback of a load from a damaged checkpoint, or from one that ended job after job: the next older one on its
lineage that has all its files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import dropwhile

import msgspec

from holdfast.checkpoint.stored_checkpoint import Checkpoint
from holdfast.errors import CorruptError, HoldfastError, NotFoundError
from holdfast.format.records import Place
from holdfast.run.complete import check_present
from holdfast.run.history import Located, Run, no_head
from holdfast.run.paths import Selection
from holdfast.run.quarantine import in_quarantine, reason_of
from holdfast.run.resumes import ResumeLimit, restart_loop
from holdfast.store.base import Store


class Skipped(msgspec.Struct, frozen=True, array_like=True):
    """A checkpoint that a load passed over, and the reason. `is_damaged`: its bytes are; else too many jobs in a row
    have resumed it."""

    place: Place
    reason: str
    is_damaged: bool = True


def is_damage(error: HoldfastError) -> bool:
    """Whether `error` says that stored bytes are lost or altered, so that another checkpoint may be sound."""
    return isinstance(error, CorruptError)


def resolve_sound(
    target: Selection, storage: Store, skipped: Sequence[Skipped] = (), limit: ResumeLimit | None = None
) -> tuple[Located, tuple[Skipped, ...]]:
    """Find the newest checkpoint on the lineage of `target` (of the head, for a run) whose files all exist, and to
    which `limit` does not object.

    Returns the checkpoint, and all checkpoints passed over: those in `skipped`, which earlier calls returned, and those
    that this call passed over, also those in quarantine. `storage` is the store at the root of `target`. Checks seal,
    manifest and sizes of files, but does not read data, so the data may still turn out to be damaged.

    Raises:
        ConfigurationError: none is left, and `limit` objected to one (``config.restart_loop``).
        CorruptError: none is left (``corrupt.lineage``), or records of the lineage itself are damaged.
        NotFoundError: there is no such run or commit.
    """
    run = Run.open(storage)
    epoch = run.newest_epoch()
    passed, shut = list(skipped), in_quarantine(storage)
    for place in _candidates(run, target, passed):
        if place in shut:
            passed.append(Skipped(place, reason_of(storage, place)))
            continue
        try:
            sealed = run.locate(run.commit(place))
            check_present(Checkpoint(sealed))
        except (CorruptError, NotFoundError) as error:
            passed.append(Skipped(place, error.message))
            continue
        if limit is not None and (objection := limit.objection(run, place)) is not None:
            passed.append(Skipped(place, objection, is_damaged=False))
            continue
        return Located(sealed, run, epoch), tuple(passed)
    if not passed:
        no_head(run)
    if not all(one.is_damaged for one in passed):
        reasons = "; ".join(f"{one.place}: {one.reason}" for one in passed)
        raise restart_loop(run, f"no checkpoint on the lineage of '{target}' is resumed. {reasons}.")
    reasons = " ".join(f"{one.place}: {one.reason}" for one in passed)
    raise CorruptError(
        f"no checkpoint on the lineage of '{target}' can be loaded. {reasons}",
        code="corrupt.lineage",
        action="Restore one of them from another copy of the run."
        + (" Then lift its quarantine with holdfast verify --deep." if shut else ""),
        path=target.root,
    )


def _candidates(run: Run, target: Selection, skipped: Sequence[Skipped]) -> Iterator[Place]:
    """Places of the lineage, from the newest one that was not checked yet."""
    if skipped:
        last = skipped[-1].place
        return dropwhile(lambda place: place >= last, run.lineage_places(skipped[0].place))
    start = target.place
    if target.step is not None:
        start = run.find(step=target.step).place
    elif start is not None and not run.is_committed(start):
        run.find(place=start)
    return run.lineage_places(start)
