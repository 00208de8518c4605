"""The doctor of a run: finds what is wrong, says what that means, and offers remedies.

It never repairs by guessing. It finishes a checkpoint only when all of its files exist, removes only checkpoints that
cannot be finished, and says where to get lost files. `examine` changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Final, Protocol

import msgspec

from holdfast.checkpoint.stored_checkpoint import Checkpoint
from holdfast.checkpoint.verification import verify_checkpoint
from holdfast.errors import ConfigurationError, CorruptError, HoldfastError
from holdfast.format import manifest as fmt
from holdfast.format import records
from holdfast.format.hold_records import PINS, is_pins_name
from holdfast.format.quarantine_records import QUARANTINE, quarantine_key
from holdfast.format.records import CHECKPOINTS, EPOCHS, HISTORY, MARKER_KEY, REPLACED, SEAL_NAME, Commit, Place
from holdfast.format.reference_records import REFERENCES, parse_reference_name
from holdfast.format.resume_records import RESUMES, parse_resume_name
from holdfast.format.tombstones import parse_removed_name
from holdfast.run.complete import check_present, complete
from holdfast.run.history import Run
from holdfast.run.leftovers import FOLDERS, temporary_keys
from holdfast.run.lost_commits import commit_anew, published_folder
from holdfast.run.lost_epochs import lost_epoch, make_anew
from holdfast.run.lost_marker import make_marker_anew, probable_marker
from holdfast.run.paths import Selection
from holdfast.run.quarantine import in_quarantine, reason_of
from holdfast.run.removal import abandon, remove_place
from holdfast.run.save_requests import REQUESTS, is_request_name
from holdfast.run.uncommitted import IN_PROGRESS_S, UNREADABLE, Remedy, RunRecords, Uncommitted


class Watch(Protocol):
    """A callback that follows the reading of a checkpoint, for a progress bar."""

    def __call__(self, place: Place, nbytes: int, /) -> AbstractContextManager[Callable[[int], None]]:
        """A context for reading `nbytes` of the checkpoint at a place.

        It gives a function that the doctor calls with the number of bytes read since the last call.
        """


def unwatched(_: Place, __: int, /) -> AbstractContextManager[Callable[[int], None]]:
    """A `Watch` that shows nothing."""
    return nullcontext(lambda _: None)


class Finding(msgspec.Struct, frozen=True):
    """One finding of the doctor.

    `code` is stable, `path` names the file or folder, `text` says what the finding means and what to do. `remedy` says
    whether `finish` or `remove` helps. `folder` is the name of the checkpoint's folder in ``checkpoints/``, where the
    finding concerns one.
    """

    code: str
    path: str
    text: str
    remedy: Remedy
    folder: str | None = None


def examine(run: Run, *, deep: bool = False, watch: Watch = unwatched) -> list[Finding]:
    """Find everything that is wrong in `run`; an empty list where nothing is. Blocking; changes nothing.

    Reads all records, manifests, values and headers of data files, and checks the names and sizes of all files; with
    `deep` also every byte of every checkpoint, which `watch` follows for committed ones. While a job saves into the
    run, findings may be gone a moment later.
    """
    known = RunRecords.of(run)
    return [
        *_marker(run),
        *_names(run),
        *_epochs(run, known),
        *_commits(run, known, deep=deep, watch=watch),
        *_quarantined(run, known),
        *_folders(run, known, deep=deep),
        *(finding for _, finding in _leftovers(run)),
    ]


def repair(run: Run, finding: Finding) -> None:
    """Apply the remedy ``finish`` of a finding, as `finish` does, or make a lost or damaged marker of the run anew."""
    if finding.path == run.storage.path(MARKER_KEY) and finding.remedy == "finish":
        make_marker_anew(run.storage)
    else:
        finish(run, finding)


def finish(run: Run, finding: Finding) -> Commit:
    """Apply the remedy ``finish`` of a finding, and return the newest commit that became visible.

    That completes the finding's checkpoint, after reading all of it (see `complete`), or makes a lost or damaged record
    of an epoch or of a commit anew. Raises `ConfigurationError`, code ``config.remedy``, for another remedy.
    """
    if finding.remedy != "finish":
        raise _no_remedy(finding, "finish")
    name = finding.path.rpartition("/")[2]
    number, place = records.parse_epoch_name(name), records.parse_commit_name(name)
    if number is not None:
        epoch = make_anew(run, RunRecords.of(run), number)
        return run.commit(next(run.history().places_of(epoch.epoch)))
    if finding.folder is None:
        raise _no_remedy(finding, "finish")
    return complete(run, finding.folder) if place is None else commit_anew(run, place, finding.folder)


def remove(run: Run, finding: Finding, *, force: bool = False) -> None:
    """Apply the remedy ``remove`` of a finding: delete the checkpoint or file that it names; durable on return.

    Examines it again first: does nothing where it is gone already, and never deletes files that the head or a commit
    needs. Deletes a save that may be in progress only with `force`: its writers then fail, and the head stays the same.

    Raises:
        ConfigurationError: there is another remedy, or none (``config.remedy``); or it is needed (``config.needed``).
    """
    if not _is_removable(finding, force=force):
        raise _no_remedy(finding, "remove")
    if finding.folder is not None and not finding.code.startswith("leftover"):
        _remove_folder(run, finding, finding.folder, force=force)
        return
    for key, now in _leftovers(run):
        if now.path == finding.path and _is_removable(now, force=force):
            run.storage.delete(key)


def _remove_folder(run: Run, finding: Finding, folder: str, *, force: bool) -> None:
    known = RunRecords.of(run)
    there = Uncommitted(run, known, folder)
    # Only another full read finds damaged data again.
    state = there.state(deep=finding.code == "folder.damaged")
    if state is None:
        return
    now = _finding(run, folder, state.code, state.text, state.remedy)
    if not _is_removable(now, force=force):
        raise _no_remedy(now, "remove")
    place = there.place_to_hide()
    if place is None:
        abandon(run, folder)
        return
    remove_place(run, place, folder)


def _is_removable(finding: Finding, *, force: bool) -> bool:
    return finding.remedy == "remove" or (force and finding.code.endswith(".in_progress"))


def _marker(run: Run) -> Iterator[Finding]:
    """A marker that is missing or damaged. (`run` is then one of `holdfast.run.lost_marker.unmarked_run`.)"""
    try:
        Run.open(run.storage)
    except CorruptError as error:
        path, can_finish = run.storage.path(MARKER_KEY), probable_marker(run.storage) is not None
        text = f"{error.message} Nothing of the run can be loaded without it. Restore it from another copy of the run"
        how = "; or finish it: the run's checkpoints say its id, and it is made anew." if can_finish else "."
        code = "marker.missing" if error.code == "corrupt.marker" else "record.damaged"
        yield Finding(code, path, text + how, "finish" if can_finish else "none")


def _names(run: Run) -> Iterator[Finding]:
    """Names that do not belong to a run."""
    for key in unknown_keys(run):
        is_run = run.storage.nbytes(f"{key}/{MARKER_KEY}") is not None
        yield _unknown(run.storage.path(key), is_run=is_run)


def unknown_keys(run: Run) -> Iterator[str]:
    """The names in the run and in its folders that do not belong to a run, each as a key."""
    for folder in ("", *FOLDERS):
        for name in run.storage.list(folder):
            if not _is_ours(folder, name):
                yield f"{folder}/{name}" if folder else name


def _unknown(path: str, *, is_run: bool = False) -> Finding:
    if is_run:
        text = f"'{path}' is a run of its own inside this run, and not part of it. `holdfast ls` shows its checkpoints"
        return Finding("unknown.name", path, f"{text}; move it beside this run.", "none")
    return Finding("unknown.name", path, f"'{path}' is not part of a run. Nothing reads it.", "none")


#: The names of the records in each folder.
_RECORDS: Final[dict[str, Callable[[str], object]]] = {
    EPOCHS: records.parse_epoch_name,
    HISTORY: lambda name: records.parse_commit_name(name) or parse_removed_name(name),
    CHECKPOINTS: records.parse_folder,
    QUARANTINE: records.parse_commit_name,
    RESUMES: parse_resume_name,
    REFERENCES: parse_reference_name,
    REPLACED: records.parse_commit_name,
}


def _is_ours(folder: str, name: str) -> bool:
    if folder == REQUESTS:
        return is_request_name(name)
    if folder == PINS:
        return is_pins_name(name)
    if folder in _RECORDS:
        return _RECORDS[folder](name) is not None
    return name in (MARKER_KEY, *FOLDERS)


def _epochs(run: Run, known: RunRecords) -> Iterator[Finding]:
    """Epoch records that are missing or damaged, and missing commits that epoch records refer to."""
    present = set(run.epochs())
    for number in range(1, known.newest + 1):
        path = run.storage.path(records.epoch_key(number))
        if number not in present:
            yield _missing_epoch(run, known, number, path)
            continue
        try:
            origin = run.epoch(number).opened_from
        except UNREADABLE as error:
            yield _damaged_epoch(run, known, number, path, error)
            continue
        if origin is not None and origin not in known.commits and origin not in known.removed:
            path = run.storage.path(records.commit_key(origin))
            text = (
                f"Epoch {number} was opened from {origin}, but the commit there is missing. Where the folder of that "
                "checkpoint is among these findings as one to finish, that makes the commit anew; else restore "
                f"'{path}' from another copy of the run."
            )
            yield Finding("commit.missing", path, text, "none")


def _missing_epoch(run: Run, known: RunRecords, number: int, path: str) -> Finding:
    what = f"The record of epoch {number} is missing, so this copy of the run is incomplete. Restore '{path}'"
    lost = lost_epoch(run, known, number)
    if lost is None:
        return Finding("epoch.missing", path, f"{what} from another copy.", "none")
    origin = "began anew" if lost.opened_from is None else f"went on from {lost.opened_from}"
    text = (
        f"{what} from another copy, or finish it: doctor then makes the record anew from the checkpoints of the epoch. "
        f"From their steps doctor guesses that the epoch {origin}. Only another copy can confirm that."
    )
    return Finding("epoch.missing", path, text, "finish")


def _damaged_epoch(run: Run, known: RunRecords, number: int, path: str, error: HoldfastError) -> Finding:
    if isinstance(error, CorruptError) and lost_epoch(run, known, number) is not None:
        text = f"{error.message} Restore the file from another copy of the run, or finish it: doctor makes it anew."
        return Finding("record.damaged", path, text, "finish")
    return Finding("record.damaged", path, f"{error.message} {error.action}", "none")


def _damaged_commit(run: Run, known: RunRecords, place: Place, error: HoldfastError) -> Finding:
    path = run.storage.path(records.commit_key(place))
    folder = published_folder(run, known, place) if isinstance(error, CorruptError) else None
    if folder is None:
        return Finding("record.damaged", path, f"{error.message} {error.action}", "none")
    text = (
        f"{error.message} Restore the file from another copy of the run, or finish it: doctor makes it anew from its "
        f"checkpoint, '{run.storage.path(f'{CHECKPOINTS}/{folder}')}'."
    )
    return Finding("record.damaged", path, text, "finish", folder)


def _commits(run: Run, known: RunRecords, *, deep: bool, watch: Watch) -> Iterator[Finding]:
    """Commits whose record is damaged, or whose checkpoint is damaged or incomplete."""
    for place, commit in sorted(known.commits.items(), reverse=True):
        if not isinstance(commit, Commit):
            yield _damaged_commit(run, known, place, commit)
            continue
        try:
            checkpoint = Checkpoint(run.locate(commit))
            check_present(checkpoint)
        except UNREADABLE as error:
            yield _lost(commit, error.path or run.storage.location.url, error.message)
            continue
        with watch(place, commit.nbytes) if deep else unwatched(place, 0) as progress:
            faults = verify_checkpoint(checkpoint, deep=deep, progress=progress)
        for fault in faults:
            if fault.code == "corrupt.header":
                text = f"{fault.message} Restore the file from another copy of the run."
                yield Finding(fault.code, fault.path, text, "none", commit.checkpoint)
            elif fault.code != "extra.file":
                yield _lost(commit, fault.path, fault.message)


def _quarantined(run: Run, known: RunRecords) -> Iterator[Finding]:
    """Committed checkpoints in quarantine."""
    for place in sorted(in_quarantine(run.storage) & known.commits.keys(), reverse=True):
        name = Selection(run.storage.location, place=place)
        text = (
            f"Loads with fallback=True pass over checkpoint {place}: {reason_of(run.storage, place)} If you have "
            f"restored its files from another copy, 'holdfast verify --deep {name}' lifts the quarantine. If nobody "
            f"needs it, and it is not the head, 'holdfast rm {name}' deletes it."
        )
        yield Finding("commit.quarantined", run.storage.path(quarantine_key(place)), text, "none")


def _lost(commit: Commit, path: str, what: str) -> Finding:
    text = (
        f"{what} Checkpoint {commit.place} (step {commit.step}) was committed, and damaged later; or this copy of the "
        f"run is incomplete. Restore the checkpoint from another copy, as by 'holdfast cp COPY@{commit.place} RUN "
        "--read-back'. Until then load an older one, or load with fallback=True."
    )
    return Finding("commit.damaged", path, text, "none", commit.checkpoint)


def _folders(run: Run, known: RunRecords, *, deep: bool) -> Iterator[Finding]:
    """Checkpoint folders without a commit, and files in any checkpoint's folder that do not belong there."""
    for folder in run.storage.list(CHECKPOINTS):
        if records.parse_folder(folder) is None:
            continue
        if not known.is_committed(folder):
            state = Uncommitted(run, known, folder).state(deep=deep)
            if state is not None:
                yield _finding(run, folder, state.code, state.text, state.remedy)
        for name in run.storage.list(f"{CHECKPOINTS}/{folder}"):
            if not (name in (fmt.NAME, SEAL_NAME) or fmt.is_file_name(name) or fmt.is_mark_name(name)):
                path = run.storage.path(records.checkpoint_key(folder, name))
                yield _unknown(path)


def _leftovers(run: Run) -> Iterator[tuple[str, Finding]]:
    """Temporary files, of dead writers or of writers still at work, each with its key."""
    root = run.storage.path("x").removesuffix("/x")
    for folder, keys in temporary_keys(run.storage):
        old = set(run.storage.leftovers(folder, older_than_s=IN_PROGRESS_S))
        for key in keys:
            path = f"{root}/{key}"  # `Store.path` takes no temporary names
            if key.rpartition("/")[2] in old:
                text = f"The writer of '{path}' died before it published the file. Remove the file to free its space."
                yield key, Finding("leftover", path, text, "remove")
            else:
                text = f"A process is writing '{path}', or died just now. Look again in {IN_PROGRESS_S:.0f} s."
                yield key, Finding("leftover.in_progress", path, text, "none")


def _finding(run: Run, folder: str, code: str, text: str, remedy: Remedy) -> Finding:
    return Finding(code, run.storage.path(f"{CHECKPOINTS}/{folder}"), text, remedy, folder)


def _no_remedy(finding: Finding, remedy: Remedy) -> ConfigurationError:
    return ConfigurationError(
        f"the doctor cannot {remedy} '{finding.path}': {finding.text}",
        code="config.remedy",
        action="Examine the run again, and follow the text of the finding.",
        path=finding.path,
    )
