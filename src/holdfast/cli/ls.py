"""``holdfast ls``: the checkpoints of a run, on the lineage of its head and off it."""

from __future__ import annotations

import shlex
import time
from contextlib import suppress
from itertools import groupby

import msgspec
from rich.text import Text

from holdfast.checkpoint.fault import Fault
from holdfast.cli.screen import Listing, age, console, metrics_text, print_json, say, when
from holdfast.errors import CorruptError, NotFoundError, printable
from holdfast.format.records import Diverged, Fork
from holdfast.reports import size
from holdfast.run.by_path import open_run
from holdfast.run.history import Run
from holdfast.run.listing import REPEAT_CALL, UNKNOWN_LINEAGE, HistoryReader, ListedCheckpoint, fork_of
from holdfast.run.lost_head import lost_head
from holdfast.run.resumes import WARNED_FROM
from holdfast.wording import count


class LsDocument(msgspec.Struct, frozen=True):
    """The document that ``--json`` prints.

    `lineage` is the head and its ancestors, newest first; `abandoned` are all other checkpoints; `findings` are the
    records that cannot be read. `uncommitted` is a text about a sealed checkpoint beyond the head that has no commit,
    or null. `forked_from` is the checkpoint of another run that this one went on from, or null.
    """

    run: str
    run_id: str
    lineage: list[ListedCheckpoint]
    abandoned: list[ListedCheckpoint]
    findings: list[Fault]
    uncommitted: str | None = None
    forked_from: Fork | None = None


def ls(run: str, *, as_json: bool) -> bool:
    """Print all committed checkpoints of the run at the path `run`. Returns True where all records are sound."""
    found = open_run(run)
    listing = HistoryReader(found)
    lineage, others = listing.lineage(), listing.others()  # both add to `listing.faults`
    faults = list(dict.fromkeys(map(Fault.of, listing.faults)))
    root, fork = found.storage.location.url, fork_of(found)
    document = LsDocument(root, found.run_id, lineage, others, faults, _uncommitted(found), fork)
    if as_json:
        print_json(document)
    else:
        _show(document, printable(document.run))
    return not document.findings


def _uncommitted(run: Run) -> str | None:
    """A text about a sealed checkpoint beyond the head that has no commit; None where there is none."""
    with suppress(CorruptError, NotFoundError):
        head = run.head()
        return None if head is None else lost_head(run, head, newest=run.newest_epoch() or 0)
    return None  # the head is not known: that is a fault


def _show(document: LsDocument, name: str) -> None:
    screen = console()
    if document.lineage:
        say(screen, f"{name}: {_total(document.lineage)}")
        screen.print(_table(document.lineage))
    elif not document.findings:
        say(screen, f"{name}: no checkpoint has been committed yet. {REPEAT_CALL}")
    if document.forked_from is not None:
        fork = document.forked_from
        say(screen, f"\na fork of step {fork.step} at {fork.place} of run {fork.run_id}: {printable(fork.path)}")
    for reason, group in groupby(document.abandoned, key=lambda row: row.abandoned):
        rows = list(group)
        title = UNKNOWN_LINEAGE if reason == UNKNOWN_LINEAGE else f"abandoned when {reason}"
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


def _total(rows: list[ListedCheckpoint]) -> str:
    return f"{count(len(rows), 'checkpoint')}, {size(sum(row.nbytes - row.referenced_nbytes for row in rows))}"


def _table(rows: list[ListedCheckpoint]) -> Listing:
    now = time.time()
    optional = {
        "of it in earlier ones": [size(row.referenced_nbytes) if row.referenced_nbytes else "" for row in rows],
        "pinned": ["pinned" if row.pinned else "" for row in rows],
        "quarantine": ["damaged" if row.quarantined else "" for row in rows],
        "resumed in vain": [f"{row.resumes} times" if row.resumes >= WARNED_FROM else "" for row in rows],
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
