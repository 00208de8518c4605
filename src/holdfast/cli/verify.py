"""``holdfast verify``: check that a checkpoint is as it was sealed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import msgspec
from rich.text import Text

from holdfast.checkpoint.fault import Fault
from holdfast.checkpoint.sealed import Sealed
from holdfast.checkpoint.stored_checkpoint import Checkpoint
from holdfast.checkpoint.verification import verify_checkpoint
from holdfast.cli.screen import console, counting, print_json, say
from holdfast.errors import CorruptError, HoldfastError, NotFoundError, StorageError, printable
from holdfast.format.records import Place
from holdfast.reports import size
from holdfast.run.by_path import CommittedAt, checkpoint_at, open_run
from holdfast.run.epoch_faults import epoch_faults
from holdfast.run.history import Run, is_folder, resolve
from holdfast.run.leases import lease_during
from holdfast.run.paths import parse
from holdfast.run.quarantine import HARMLESS, Quarantined, lift, quarantine_of
from holdfast.store.urls import open_store
from holdfast.wording import count

#: Most tensors of a fault that are named on screen.
_NAMED = 5
_STRUCTURE = "files, sizes, headers and values checked; --deep reads the tensors too"


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The report on one checkpoint: its content as far as verified, and its faults.

    `quarantine` is that in which it is now, or null; `released` says whether it was in one until now. Where its records
    cannot be read, only `path` and `findings` are known, and perhaps `place`, `step` and `quarantine`.
    """

    path: str
    place: str | None
    step: int | None
    num_tensors: int = 0
    num_files: int = 0
    nbytes: int = 0
    deep: bool = False
    seconds: float = 0.0
    findings: list[Fault]
    quarantine: Quarantined | None = None
    released: bool = False


class VerifyDocument(msgspec.Struct, frozen=True):
    """The document that ``--json`` prints.

    `sound` is true where every byte was read and is as it was sealed, false where there is a finding, and null where a
    check without ``--deep`` found nothing. `findings` are those in records of the run that belong to no checkpoint.
    """

    sound: bool | None
    checkpoints: list[Report]
    findings: list[Fault]


class _Subject(NamedTuple):
    """A checkpoint to verify.

    `name` names it until its seal has been read. `find` finds it, or returns None where it has been removed since it
    was listed.
    """

    name: str
    find: Callable[[], Sealed | None]


def verify(path: str, *, deep: bool, every: bool, as_json: bool) -> bool:
    """Verify one checkpoint, or all of a run, and print the findings. Returns True where there are none."""
    subjects = _committed(path) if every else iter([_Subject(path, lambda: resolve(parse(path)).sealed)])
    reports: list[Report] = []
    for subject in subjects:
        report = _verify(subject, deep=deep, quiet=as_json)
        if report is None:
            continue
        reports.append(report)
        if not as_json:
            _show(report, brief=every and not deep)
    known = {fault.path for report in reports for fault in report.findings}
    findings = [fault for fault in _record_faults(path) if fault.path not in known]
    num_bad = sum(bool(report.findings) for report in reports)
    is_fine = not num_bad and not findings
    if as_json:
        sound = None if is_fine and not deep else is_fine
        print_json(VerifyDocument(sound, reports, findings))
        return is_fine
    if findings:
        console().print(Text.assemble((count(len(findings), "finding"), "bold red"), " in the records of the run"))
        _show_faults(findings)
    if every:
        fine = "all sound" if deep else "all sound in structure"
        verdict = f"{num_bad} with findings" if num_bad else fine if reports else "nothing to verify"
        basis = "" if deep or not reports else f"; {_STRUCTURE}"
        say(console(), f"{count(len(reports), 'checkpoint')}, {verdict}{basis}")
    return is_fine


def _record_faults(path: str) -> Iterator[Fault]:
    """The faults in the records of the run that `path` names; none for a checkpoint folder alone."""
    storage = open_store(parse(path).location)
    if not is_folder(storage):
        yield from epoch_faults(Run.open(storage))


def _committed(path: str) -> Iterator[_Subject]:
    """All committed checkpoints of a run, newest first, whether or not they are on the lineage of its head."""
    run = open_run(path)
    for place in run.places():
        yield _Subject(f"{run.storage.location}@{place}", partial(_sealed, run, place))


def _sealed(run: Run, place: Place) -> Sealed | None:
    commit = run.needed_commit(place)
    return None if commit is None else run.locate(commit)


def _verify(subject: _Subject, *, deep: bool, quiet: bool) -> Report | None:
    start = time.monotonic()
    try:
        sealed = subject.find()
    except CorruptError as error:
        return _unreadable(subject.name, error, at=_committed_at(subject.name))
    if sealed is None:
        return None
    try:
        checkpoint = Checkpoint(sealed)
    except (CorruptError, NotFoundError) as error:
        return _unreadable(subject.name, error, at=sealed)
    seal = checkpoint.seal
    nbytes = sum(file.nbytes for file in seal.files)
    shown = counting(f"verifying {seal.place}", nbytes if deep else None, quiet=quiet)
    with lease_during(sealed), shown as advance:
        faults = verify_checkpoint(checkpoint, deep=deep, progress=advance)
    is_whole = deep and all(fault.code in HARMLESS for fault in faults)
    released = is_whole and _released(sealed)
    return Report(
        path=checkpoint.folder,
        place=str(seal.place),
        step=seal.step,
        num_tensors=len(checkpoint.manifest.body.names),
        num_files=len(seal.files),
        nbytes=nbytes,
        deep=deep,
        seconds=time.monotonic() - start,
        findings=faults,
        quarantine=None if released else _quarantine(sealed),
        released=released,
    )


def _released(sealed: Sealed) -> bool:
    """Take a checkpoint that is whole out of quarantine. Returns False where it was not in quarantine, and where this
    process may not write into the run."""
    if sealed.commit is not None:
        with suppress(StorageError):
            return lift(sealed.storage, sealed.commit.place)
    return False


def _quarantine(sealed: Sealed) -> Quarantined | None:
    return None if sealed.commit is None else quarantine_of(sealed.storage, sealed.commit.place)


def _committed_at(path: str) -> CommittedAt | None:
    """The commit of a checkpoint whose seal cannot be read; None where that cannot be read either."""
    with suppress(HoldfastError):
        return checkpoint_at(path)
    return None


def _unreadable(path: str, error: HoldfastError, *, at: Sealed | CommittedAt | None) -> Report:
    if at is None:
        return Report(path=path, place=None, step=None, findings=[Fault.of(error)])
    facts = at.seal if isinstance(at, Sealed) else at.commit
    quarantine = _quarantine(at) if isinstance(at, Sealed) else quarantine_of(at.run.storage, at.commit.place)
    return Report(path=path, place=str(facts.place), step=facts.step, findings=[Fault.of(error)], quarantine=quarantine)


def _show(report: Report, *, brief: bool) -> None:
    """Print a report. Where `brief`, leave out the list of checks that is the same for all checkpoints."""
    screen = console()
    name = f"step {report.step} at {report.place}" if report.place else printable(report.path)
    contents = ""
    if report.num_files:
        contents = (
            f": {count(report.num_tensors, 'tensor')}, {size(report.nbytes)} in {count(report.num_files, 'file')}"
        )
    num_faults = len(report.findings)
    sound = "sound" if report.deep else "structure sound"
    verdict = (count(num_faults, "finding"), "bold red") if num_faults else (sound, "bold green")
    checked = "" if brief and report.num_files else f"; {_checked(report)}"
    say(screen, Text.assemble(verdict, f": {name}{contents}{checked}"))
    _show_faults(report.findings)
    if report.released:
        say(screen, "  it was in quarantine, because a load had found it damaged; now loads take it again")
    if report.quarantine is not None:
        say(screen, f"  {printable(f'{report.quarantine} {report.quarantine.advice}')}")


def _show_faults(faults: Sequence[Fault]) -> None:
    screen = console()
    for fault in faults:
        say(screen, Text.assemble("  ", printable(fault.message), (f" [{fault.code}]", "dim")))
        if fault.tensors:
            rest = fault.num_tensors - len(fault.tensors[:_NAMED])
            named = ", ".join(map(printable, fault.tensors[:_NAMED])) + (f" and {rest:,} more" if rest else "")
            say(screen, f"    holds {named}")


def _checked(report: Report) -> str:
    """The checks that the verdict rests on, as text."""
    if not report.num_files:
        return "its records cannot be read, so nothing else was checked"
    if not report.deep:
        return _STRUCTURE
    speed = f", {size(int(report.nbytes / report.seconds))}/s" if report.seconds > 0 else ""
    return f"every byte checked in {report.seconds:.1f} s{speed}"
