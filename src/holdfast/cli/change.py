"""``holdfast rollback``, ``rm`` and ``request-save``: the commands that change a run or ask a job to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from holdfast.cli.runs import RunHead
from holdfast.cli.screen import confirmed, console, print_json, say, when
from holdfast.errors import ConfigurationError, CorruptError, NotFoundError, printable
from holdfast.format.records import Commit, Place
from holdfast.reports import size
from holdfast.run.by_path import open_run, selected_checkpoint
from holdfast.run.history import Run
from holdfast.run.paths import Selection, parse, some
from holdfast.run.removal import check_removable, remove_checkpoint
from holdfast.run.rollback import rollback as roll_back
from holdfast.run.save_requests import leave_request, run_to_ask
from holdfast.wording import count


class ChangeDocument(msgspec.Struct, frozen=True):
    """The document that ``rollback --json`` prints: the checkpoint of the change, and the head before and after."""

    run: str
    place: str
    step: int
    head_before: RunHead
    head: RunHead


class Removal(msgspec.Struct, frozen=True):
    """The document that ``rm --json`` prints: the deleted checkpoints."""

    deleted: list[ChangeDocument]


def request_save(run: str) -> None:
    """Ask the job that trains on `run` to save soon."""
    found = run_to_ask(run)
    leave_request(found)
    name = printable(found.storage.location.url)
    say(
        console(),
        f"{name}: a save is requested. The job that trains on this run saves within some steps, if it has the policy "
        "OnRequest; if none runs, the request waits for the next one.",
    )


def rollback(run: str, to: str, *, yes: bool, as_json: bool) -> bool:
    """Make the checkpoint `to` the head of the run. Returns False where the user did not confirm."""
    found = open_run(run)
    target = _selected(found, to)
    commit = found.find(step=target.step, place=target.place)
    before = RunHead.of(found)
    if not as_json:
        screen = console()
        say(screen, f"{printable(found.storage.location.url)}: the head is {before}")
        is_head = next(found.lineage_places(), None) == commit.place
        say(screen, f"  {'stays at    ' if is_head else 'goes back to'}  {_described(commit)}")
        kept = set(_lineage(found, commit.place))
        abandoned = [str(place) for place in _lineage(found) if place not in kept]
        if abandoned:
            say(screen, f"  abandons      {some(abandoned)} (kept; a rollback can go there too)")
        say(screen, "  A running job of this run stops at its next save.")
    if not confirmed("Go back?", yes=yes):
        return False
    roll_back(found, commit.place)
    change = _change(found, commit, before)
    if as_json:
        print_json(change)
    else:
        say(console(), f"the head {_became(before, change.head)}")
    return True


def rm(paths: Sequence[str], *, yes: bool, as_json: bool) -> bool:
    """Delete checkpoints for good. Returns False where the user did not confirm.

    Asks and deletes only where all of `paths` name checkpoints that neither the head nor an epoch needs; else raises.
    """
    doomed = list(dict.fromkeys(_doomed(path) for path in paths))
    if not as_json:
        for one in doomed:
            say(console(), f"{printable(one.run.storage.location.url)}: deletes {_described(one.commit)}")
    what = "it" if len(doomed) == 1 else f"these {count(len(doomed), 'checkpoint')}"
    if not confirmed(f"Delete {what}? This cannot be undone.", yes=yes):
        return False
    changes = [_removed(one, quiet=as_json) for one in doomed]
    if as_json:
        print_json(Removal(changes))
    return True


@dataclass(frozen=True)
class _Doomed:
    """A checkpoint to delete. Two are equal where they are at the same place of the same run."""

    run: Run = field(compare=False)
    commit: Commit = field(compare=False)
    key: tuple[str, str]


def _doomed(path: str) -> _Doomed:
    run, commit = selected_checkpoint(path)
    check_removable(run, commit.place)
    return _Doomed(run, commit, (run.run_id, str(commit.place)))


def _removed(doomed: _Doomed, *, quiet: bool) -> ChangeDocument:
    """Delete one checkpoint, and print that unless `quiet`."""
    run, commit = doomed.run, doomed.commit
    before = RunHead.of(run)
    is_gone = remove_checkpoint(run, commit)
    change = _change(run, commit, before)
    if not quiet:
        kept = "" if is_gone else " (but not the files that other checkpoints refer to)"
        what = f"deleted step {commit.step} at {commit.place}{kept}"
        say(console(), f"{what}; the head {_became(before, change.head)}")
    return change


def _lineage(run: Run, start: Place | None = None) -> Iterator[Place]:
    """The places of the head's lineage, or of that of `start`, newest first, as far as the records of epochs can be
    read: a rollback needs none of them."""
    with suppress(CorruptError, NotFoundError):
        yield from run.lineage_places(start)


def _selected(run: Run, to: str) -> Selection:
    """The selection of the checkpoint `to`, which the user wrote after ``--to``, in `run`."""
    root = run.storage.location.url
    target = parse(f"{root}@{to}")
    if target.root != root:
        raise ConfigurationError(
            f"'--to {to}' does not name a checkpoint.",
            code="config.path",
            action=f"Write --to 3.12 (epoch 3, number 12) or --to step=700; holdfast ls {root} lists them.",
        )
    return target


def _described(commit: Commit) -> str:
    return f"step {commit.step} at {commit.place}, saved {when(commit.created)}, {size(commit.nbytes)}"


def _became(before: RunHead, head: RunHead) -> str:
    return f"is still {before}" if head == before else f"was {before} and is {head}"


def _change(run: Run, commit: Commit, before: RunHead) -> ChangeDocument:
    return ChangeDocument(run.storage.location.url, str(commit.place), commit.step, before, RunHead.of(run))
