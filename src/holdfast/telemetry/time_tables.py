"""The ledger of time as tables of the page: the parts of all jobs, and the jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Final

from holdfast.errors import printable
from holdfast.telemetry.goodput_ledger import JobEnd, JobLedger, Part, RunLedger
from holdfast.telemetry.moments import moment_text
from holdfast.wording import count, duration

#: Most jobs that the page shows.
_MOST_JOBS: Final = 100
_MEANINGS: Final = {
    Part.GOODPUT: "steps that a committed checkpoint contains",
    Part.PROVISIONAL: "steps that no committed checkpoint contains yet",
    Part.SLOW_DOWN: "how much longer steps took while a save was under way",
    Part.SAVE: "calls of save, and the wait for saves at the end",
    Part.WASTED: "steps that a later job did again, or left aside",
    Part.RESTORE: "calls of restore, those that raised too",
    Part.RECOVERY: "from the last sign of a job that did not end on purpose to the start of the next one",
    Part.START: "from the start of the process to the first step, without the restore",
    Part.OTHER: "all other time of the jobs",
}
#: The ends of a job, in the words of the page.
ENDS: Final[Mapping[JobEnd, str]] = {"closed": "ended", "early": "ended early", "unknown": "killed, or not closed"}


def time_tables(ledger: RunLedger) -> str:
    """The tables of a ledger that has some time."""
    seconds = ledger.seconds
    parts = [
        (str(part), _MEANINGS[part], duration(seconds[part]), f"{100 * seconds[part] / ledger.wall_s:.2f} %")
        for part in Part
    ]
    whole = ("all", _whole(ledger), duration(ledger.wall_s), "100 %")
    newest = list(enumerate(ledger.jobs, 1))[-_MOST_JOBS:]
    jobs = [_job_row(number, job, is_last=number == len(ledger.jobs)) for number, job in reversed(newest)]
    more = len(ledger.jobs) - len(newest)
    note = f'<p class="note">{more:,} older jobs are not shown.</p>' if more else ""
    return (
        _table(("part", "what", "time", "share"), [*parts, whole], num_texts=2)
        + _comparison(ledger)
        + _table(
            ("job", "end", "ranks", "wall time", "goodput", "good steps", "not yet sure", "wasted"), jobs, num_texts=2
        )
        + note
    )


def goodput_share(ledger: RunLedger | JobLedger) -> str:
    """The share of goodput, with the steps that may still be lost, as text."""
    good_s = ledger.seconds[Part.GOODPUT] + ledger.seconds[Part.PROVISIONAL]
    return f"{100 * good_s / ledger.wall_s:.1f} %" if ledger.wall_s else "-"


def _whole(ledger: RunLedger) -> str:
    told = f"{count(len(ledger.jobs), 'job')}, {count(ledger.num_disruptions, 'disruption')}"
    return f"{told}; without planned pauses of {duration(ledger.paused_s)}" if ledger.paused_s else told


def _comparison(ledger: RunLedger) -> str:
    found = ledger.comparison
    if found is None:
        return ""
    return (
        '<p class="about">The policy Auto expected saves and work done again to take '
        f"<b>{100 * found.predicted:.2f} %</b> of the time of training. They took "
        f"<b>{100 * found.realised:.2f} %</b>.</p>"
    )


def _job_row(number: int, job: JobLedger, *, is_last: bool) -> tuple[str, ...]:
    end = "under way, or killed" if is_last and job.end == "unknown" else ENDS[job.end]
    steps = (f"{job.steps[part]:,}" for part in (Part.GOODPUT, Part.PROVISIONAL, Part.WASTED))
    begun = f"{number:,}: {moment_text(job.begun_s)}"
    return begun, end, f"{job.world_size:,}", duration(job.wall_s), goodput_share(job), *steps


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, num_texts: int) -> str:
    """A table whose first `num_texts` columns are text, and the others numbers."""
    classes = ["" if at < num_texts else ' class="number"' for at in range(len(columns))]
    head = "".join(f"<th{kind}>{name}</th>" for kind, name in zip(classes, columns, strict=True))
    body = "".join(
        "<tr>"
        + "".join(f"<td{kind}>{escape(printable(text))}</td>" for kind, text in zip(classes, row, strict=True))
        + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
