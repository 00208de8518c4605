"""Garbage collection: what no checkpoint of a run needs is deleted, without a policy, and each thing has its reason.

Roots are all committed checkpoints, whatever the lineage; the unfinished saves of the newest epoch, whose job may live;
files that other checkpoints refer to; what is pinned or read; and everything that holdfast does not know. A plan lists
what goes and what stays. A collection looks at each thing again before it deletes it, by the protocols of
`holdfast.run.removal`, so it may run beside jobs, readers, copies and other deletions. Only names that were listed are
deleted. The process may be killed anywhere, and the next collection goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec

from holdfast.format.records import CHECKPOINTS
from holdfast.run.diagnosis import unknown_keys
from holdfast.run.history import Run
from holdfast.run.holds import Holds
from holdfast.run.leftovers import temporary_keys
from holdfast.run.references import ended_references
from holdfast.run.remains import Fate, Remnant, delete_remnant, remnant, remnants
from holdfast.run.removal import doomed_keys
from holdfast.run.resumes import ResumeCounts
from holdfast.run.uncommitted import IN_PROGRESS_S, RunRecords
from holdfast.store.base import Store

#: The time of grace where the caller gives none, and the least one: clocks of machines differ.
GRACE_S: Final = IN_PROGRESS_S
LEAST_GRACE_S: Final = 60.0

_ROOT: Final = "."
_PARTS: Final = "parts of a save or copy that was cut off: its epoch is over, and data files are missing"
_REST: Final = "rest of a deletion that was interrupted, or that left still files to checkpoints that are gone"
_TEMPORARY: Final = "temporary, and nobody has written to it for the time of grace, or its writer is dead"
_RECORDS: Final = "of no effect any more: they have ended"


class Garbage(msgspec.Struct, frozen=True, kw_only=True):
    """Files of a run that go or stay together.

    `path` is the folder or the file below the run's root, ``.`` for the root itself. `kind` is a stable word for the
    `reason`, which is a clause.
    """

    path: str
    kind: str
    reason: str
    nbytes: int
    num_files: int


@dataclass(frozen=True)
class CollectionPlan:
    """The `garbage` of a run while `epoch` is its newest epoch, and what is `kept` although no commit names it."""

    epoch: int
    grace_s: float
    garbage: tuple[Garbage, ...]
    kept: tuple[Garbage, ...]


@dataclass
class CollectionOutcome:
    """A collection has `deleted` some garbage, and `left` the rest, which somebody has needed meanwhile."""

    deleted: list[Garbage] = field(default_factory=list)
    left: list[Garbage] = field(default_factory=list)


def plan_collection(run: Run, *, grace_s: float = GRACE_S) -> CollectionPlan:
    """Find the garbage of `run`. Changes nothing. Some requests for the run, one for each commit, and one for each file
    that no commit names."""
    epoch = run.newest_epoch() or 0
    garbage: list[Garbage] = []
    kept: list[Garbage] = []
    for found in remnants(run, epoch=epoch, grace_s=grace_s):
        goes, each = _judged(run, found)
        (garbage if goes else kept).append(each)
    doomed = {each.path for each in garbage}
    kept += [_measured(run.storage, key, "unknown", "holdfast does not know it", [key]) for key in unknown_keys(run)]
    for folder, keys in _ended_records(run).items():
        garbage.append(_measured(run.storage, folder, "records", _RECORDS, keys))
    for folder, keys in temporary_keys(run.storage, older_than_s=grace_s):
        if folder not in doomed:
            garbage.append(_measured(run.storage, folder or _ROOT, "temporary", _TEMPORARY, keys))
    return CollectionPlan(epoch, grace_s, tuple(garbage), tuple(kept))


def collect(run: Run, plan: CollectionPlan, *, told: Callable[[Garbage], None] = lambda _: None) -> CollectionOutcome:
    """Delete the garbage of `plan`, durably, and the garbage that these deletions make.

    It calls `told` with each thing that it deleted. It looks at each thing again first, and keeps those that somebody
    needs by now.
    """
    done = CollectionOutcome()
    for each in _collected(run, plan, done):
        told(each)
    if not done.deleted:
        return done
    # A save that was cut off may have been what needed the still files of a removed checkpoint.
    seen = {(each.path, each.kind) for each in plan.garbage}
    later = plan_collection(run, grace_s=plan.grace_s)
    rest = tuple(each for each in later.garbage if (each.path, each.kind) not in seen)
    for each in _collected(run, replace(later, garbage=rest), done):
        told(each)
    return done


def _judged(run: Run, found: Remnant) -> tuple[bool, Garbage]:
    """Whether a folder goes, and what is in it."""
    path, kind, reason = f"{CHECKPOINTS}/{found.folder}", found.kind, found.reason
    goes = _is_garbage(found.fate)
    held = Holds.of(run.storage).reasons(found.place) if found.place is not None else ()
    if goes and not held:
        keys = doomed_keys(run, found.place, found.folder)
        kind, reason = ("parts", _PARTS) if found.fate == "cut_off" else ("interrupted_deletion", _REST)
    else:
        keys = [f"{path}/{name}" for name in run.storage.list(path)]
        kind, reason = ("held", " and ".join(held)) if held else (kind, reason)
    return goes and not held, _measured(run.storage, path, kind, reason, keys)


def _is_garbage(fate: Fate) -> bool:
    return fate in ("half_removed", "cut_off")


def _collected(run: Run, plan: CollectionPlan, done: CollectionOutcome) -> Iterator[Garbage]:
    """Delete the garbage of `plan`; gives each thing once it is deleted."""
    if not plan.garbage:
        return
    known = RunRecords.of(run)
    for each in plan.garbage:
        stays = ""
        if each.kind == "temporary":
            folder = each.path.removeprefix(_ROOT)
            names = run.storage.leftovers(folder, older_than_s=plan.grace_s)
            _delete(run.storage, (f"{folder}/{name}" if folder else name for name in names))
        elif each.kind == "records":
            _delete(run.storage, _ended_records(run).get(each.path, ()))
        else:
            found = remnant(run, known, each.path.rpartition("/")[2], epoch=plan.epoch, grace_s=plan.grace_s)
            if found is None:
                continue  # somebody else has deleted or committed it
            if not _is_garbage(found.fate):
                stays = found.reason
            elif delete_remnant(run, found) is None:
                stays = "somebody has needed it since"
        if stays:
            done.left.append(msgspec.structs.replace(each, reason=stays))
            continue
        done.deleted.append(each)
        yield each


def _ended_records(run: Run) -> dict[str, list[str]]:
    """The keys of records that do not count any more, by their folder."""
    ended = [*Holds.of(run.storage).ended, *ended_references(run), *ResumeCounts.of(run).ended]
    folders: dict[str, list[str]] = {}
    for key in ended:
        folders.setdefault(key.partition("/")[0], []).append(key)
    return folders


def _delete(storage: Store, keys: Iterable[str]) -> None:
    for key in keys:
        storage.delete(key)


def _measured(storage: Store, path: str, kind: str, reason: str, keys: Iterable[str]) -> Garbage:
    sizes = [storage.nbytes(key) for key in keys]
    return Garbage(
        path=path,
        kind=kind,
        reason=reason,
        nbytes=sum(size or 0 for size in sizes),
        num_files=sum(size is not None for size in sizes),
    )
