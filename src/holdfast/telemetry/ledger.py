"""The ledger of a run: its checkpoints, restores and epochs, newest first."""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby
from statistics import median
from typing import Final, NamedTuple

from holdfast.errors import printable
from holdfast.reports import size
from holdfast.telemetry.moments import moment_text
from holdfast.telemetry.rank_saves import JobEvents, RankRestore
from holdfast.telemetry.run_figures import JobSave, RecordedHistory, protection_figures
from holdfast.wording import count, duration

#: Most rows of the ledger.
_MOST_ROWS: Final = 300
_COLUMNS: Final = ("when", "what", "place", "size", "blocked", "durable after", "remark")
_RIGHT: Final = ("size", "blocked", "durable after")


class _LedgerRow(NamedTuple):
    at_s: float
    what: str
    place: str = ""
    size: str = ""
    blocked: str = ""
    durable: str = ""
    remark: str = ""


def ledger(history: RecordedHistory, saves: Sequence[JobSave], job: JobEvents) -> str:
    """The ledger as a table."""
    rows = sorted(_rows(history, saves, job), key=lambda row: row.at_s, reverse=True)
    if not rows:
        return '<p class="none">Nothing is recorded.</p>'
    head = "".join(f"<th{_class(name)}>{name}</th>" for name in _COLUMNS)
    body = "".join(f"<tr>{_cells(row)}</tr>" for row in rows[:_MOST_ROWS])
    more = len(rows) - _MOST_ROWS
    note = f'<p class="note">{more:,} older rows are not shown.</p>' if more > 0 else ""
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll">{table}</div>{note}'


def _rows(history: RecordedHistory, saves: Sequence[JobSave], job: JobEvents) -> Iterable[_LedgerRow]:
    recorded = {save.place: save for save in saves if save.place}
    committed = set()
    for commit in history.commits:
        place = str(commit.place)
        committed.add(place)
        save = recorded.get(place)
        durable_s = None if save is None else save.durable_s
        yield _LedgerRow(
            commit.created,
            f"saved step {commit.step:,}",
            place,
            size(commit.nbytes),
            "" if save is None else duration(save.blocked_s),
            "" if durable_s is None else duration(durable_s),
            "; ".join(["head"] * (commit.place == history.head) + ([] if save is None else _protection([save]))),
        )
    restores = [restore for restore in job.restores if restore.rank == 0 and restore.step is not None]
    yield from _save_rows([save for save in saves if save.place not in committed], restores)
    for epoch in history.epochs:
        origin = f" from {epoch.opened_from}" if epoch.opened_from is not None else ""
        remark = f"{epoch.why}{origin}, {epoch.world_size:,} ranks"
        yield _LedgerRow(epoch.created, f"epoch {epoch.epoch} begins", remark=remark)
    for restore in restores:
        took = f"{duration(sum(span.seconds for span in restore.spans))} on rank 0"
        yield _LedgerRow(
            restore.begun_s, f"restored step {restore.step:,}", restore.place, remark=f"from {restore.tier}, {took}"
        )


def _save_rows(saves: Iterable[JobSave], restores: Iterable[RankRestore]) -> Iterable[_LedgerRow]:
    """The rows of saves that are not committed. There may be thousands to memory alone: those between two restores of
    jobs share a row."""
    begins = sorted(restore.begun_s for restore in restores if restore.is_of_job)
    for (is_one_of_many, _), group in groupby(
        saves, key=lambda save: (_is_one_of_many(save), bisect(begins, save.begun_s))
    ):
        if is_one_of_many:
            yield _memory_row(list(group))
            continue
        for save in group:
            gone = "; removed since" if save.outcome == "committed" else ""
            remark = f"{save.outcome}{gone}{f': {save.trouble}' if save.trouble else ''}"
            yield _LedgerRow(
                save.begun_s, f"save of step {save.step:,}", save.place, blocked=duration(save.blocked_s), remark=remark
            )


def _is_one_of_many(save: JobSave) -> bool:
    """Whether it is a save to memory alone that went as usual."""
    return save.memory_only and save.outcome in ("held", "skipped")


def _memory_row(saves: Sequence[JobSave]) -> _LedgerRow:
    """Saves to memory alone in one row."""
    first, last = saves[0], saves[-1]
    steps = f"steps {first.step:,} to {last.step:,}" if len(saves) > 1 else f"step {first.step:,}"
    outcomes = Counter(save.outcome for save in saves)
    told = ", ".join(f"{number:,} {outcome}" for outcome, number in outcomes.items())
    return _LedgerRow(
        last.begun_s,
        f"{count(len(saves), 'save')} to memory alone",
        blocked=duration(median(save.blocked_s for save in saves)),
        remark="; ".join([f"{steps}: {told}", *_protection(saves)]),
    )


def _protection(saves: Sequence[JobSave]) -> list[str]:
    """The protection of saves, where a job asked for it."""
    figures = protection_figures(saves)
    return [] if figures is None else [str(figures)]


def _cells(row: _LedgerRow) -> str:
    cells = zip(_COLUMNS, (moment_text(row.at_s), *row[1:]), strict=True)
    return "".join(f"<td{_class(name)}>{escape(printable(text))}</td>" for name, text in cells)


def _class(column: str) -> str:
    return ' class="number"' if column in _RIGHT else ""
