"""``holdfast ls``: the checkpoints of a run, on the lineage of its head and off it."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import groupby

import msgspec
from rich.text import Text

from holdfast.checkpoint.fault import Fault
from holdfast.cli.runs import open_run
from holdfast.cli.screen import Listing, age, console, metrics_text, print_json, say, when
from holdfast.errors import CorruptError, NotFoundError, printable
from holdfast.format.records import Commit, Diverged, Epoch, Place
from holdfast.reports import size
from holdfast.run.history import Run
from holdfast.run.lost_head import lost_head
from holdfast.wording import count

_UNKNOWN = "unknown whether the head descends from these"


class Row(msgspec.Struct, frozen=True):
    """One checkpoint in the list. `abandoned` says which epoch abandoned it; it is empty on the lineage."""

    place: str
    step: int
    created: float
    nbytes: int
    head: bool
    folder: str
    metrics: dict[str, str | float]
    diverged: Diverged
    abandoned: str = ""


class LsDocument(msgspec.Struct, frozen=True):
    """The document that ``--json`` prints.

    `lineage` is the head and its ancestors, newest first; `abandoned` are all other checkpoints; `findings` are the
    records that cannot be read. `uncommitted` is a text about a sealed checkpoint beyond the head that has no commit,
    or null.
    """

    run: str
    run_id: str
    lineage: list[Row]
    abandoned: list[Row]
    findings: list[Fault]
    uncommitted: str | None = None


def ls(run: str, *, as_json: bool) -> bool:
    """Print all committed checkpoints of the run at the path `run`. Returns True where all records are sound."""
    found = open_run(run)
    listing = _HistoryReader(found)
    lineage, others = listing.lineage(), listing.others()  # both add to `listing.faults`
    faults = list(dict.fromkeys(listing.faults))
    document = LsDocument(found.storage.location.url, found.run_id, lineage, others, faults, listing.uncommitted())
    if as_json:
        print_json(document)
    else:
        _show(document, printable(run))
    return not document.findings


class _HistoryReader:
    """A reader of a run's records that turns unreadable ones into faults and continues."""

    def __init__(self, run: Run) -> None:
        self.faults: list[Fault] = []
        self._run = run
        self._places: list[Place] = []
        self._broken = False
        #: For each epoch, the reason why those of its checkpoints that are not on the lineage were abandoned.
        self._reasons: dict[int, str] = {}

    def lineage(self) -> list[Row]:
        """The head and its ancestors, as far as epochs can be read."""
        try:
            self._places.extend(self._run.lineage_places())
        except (CorruptError, NotFoundError) as error:
            self.faults.append(Fault.of(error))
            self._broken = True
        return [row for number, place in enumerate(self._places) for row in self._rows(place, head=number == 0)]

    def others(self) -> list[Row]:
        """All other committed checkpoints, newest first."""
        known = set(self._places)
        return [
            row
            for place in self._run.places()
            if place not in known
            for row in self._rows(place, abandoned=_UNKNOWN if self._broken else self._reason(place.epoch))
        ]

    def uncommitted(self) -> str | None:
        """A text about a sealed checkpoint beyond the head that has no commit; None where there is none."""
        with suppress(CorruptError, NotFoundError):
            head = self._run.head()
            return None if head is None else lost_head(self._run, head, newest=self._run.newest_epoch() or 0)
        return None  # the head is not known: that is a fault

    def _reason(self, epoch: int) -> str:
        if epoch not in self._reasons:
            self._reasons[epoch] = _left_by(self._run, epoch)
        return self._reasons[epoch]

    def _rows(self, place: Place, *, head: bool = False, abandoned: str = "") -> Iterator[Row]:
        """The row of a place; none where its record is damaged, or was removed just now."""
        try:
            yield _row(self._run.commit(place), head=head, abandoned=abandoned)
        except (CorruptError, NotFoundError) as error:
            if not self._run.is_removed(place):
                self.faults.append(Fault.of(error))


def _left_by(run: Run, epoch: int) -> str:
    """A clause that names the epoch on the head's lineage that did not continue from the end of `epoch`."""
    number = run.epochs()[0]
    while True:
        record = run.epoch(number)
        origin = record.opened_from
        if origin is None or origin.epoch <= epoch:
            first = _first_from(run, record, after=epoch)
            start = f"went on from {origin}" if origin is not None else "began anew"
            return f"epoch {first.epoch} {start} ({first.why})"
        number = origin.epoch


def _first_from(run: Run, record: Epoch, *, after: int) -> Epoch:
    """The first of the consecutive epochs, up to `record`, that were all opened from the same place.

    A rollback is an epoch of its own, and the job that resumes there opens the next one from the same place.
    """
    # The record of an epoch off the lineage may be damaged without harm to it: then name a later epoch.
    with suppress(CorruptError, NotFoundError):
        while record.epoch - 1 > after and (earlier := run.epoch(record.epoch - 1)).opened_from == record.opened_from:
            record = earlier
    return record


def _row(commit: Commit, *, head: bool, abandoned: str = "") -> Row:
    return Row(
        place=str(commit.place),
        step=commit.step,
        created=commit.created,
        nbytes=commit.nbytes,
        head=head,
        folder=commit.checkpoint,
        metrics=dict(commit.metrics),
        diverged=commit.diverged,
        abandoned=abandoned,
    )


def _show(document: LsDocument, name: str) -> None:
    screen = console()
    if document.lineage:
        say(screen, f"{name}: {_total(document.lineage)}")
        screen.print(_table(document.lineage))
    elif not document.findings:
        say(screen, f"{name}: no checkpoint has been committed yet.")
    for reason, group in groupby(document.abandoned, key=lambda row: row.abandoned):
        rows = list(group)
        title = _UNKNOWN if reason == _UNKNOWN else f"abandoned when {reason}"
        say(screen, f"\n{title}: {_total(rows)}")
        screen.print(_table(rows))
    if document.uncommitted is not None:
        say(screen, Text.assemble("\n", ("warning ", "bold"), printable(document.uncommitted)))
    if document.findings:
        screen.print()
    for fault in document.findings:
        words = ("damaged ", "bold red"), printable(fault.message), (f" [{fault.code}]", "dim")
        say(screen, Text.assemble(*words))
    if document.findings:
        command = f"holdfast doctor {shlex.quote(name)}"
        say(screen, f"{command} explains the damage and offers remedies.")


def _total(rows: list[Row]) -> str:
    return f"{count(len(rows), 'checkpoint')}, {size(sum(row.nbytes for row in rows))}"


def _table(rows: list[Row]) -> Listing:
    now = time.time()
    optional = {
        "metrics": [metrics_text(row.metrics) for row in rows],
        "diverged": [_names(row.diverged) for row in rows],
    }
    shown = {name: cells for name, cells in optional.items() if any(cells)}
    columns = ("", "place", "step", "saved", "age", "size", *shown)
    made = Listing(*columns, right=("step", "age", "size"), spare=("saved",))
    for row, *cells in zip(rows, *shown.values(), strict=True):
        head = "head" if row.head else ""
        facts = (row.place, str(row.step), when(row.created), age(now - row.created), size(row.nbytes))
        made.add_row(head, *facts, *cells)
    return made


def _names(diverged: Diverged) -> str:
    """The tensors whose copies differed between ranks when they were saved, in few words."""
    rest = diverged.num_tensors - 1
    return "".join(map(printable, diverged.names[:1])) + (f" and {rest} more" if rest > 0 else "")
