"""``holdfast report``: the page about a run, and its ledger of time as JSON."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import msgspec

from holdfast.cli.recorded import events_folder, events_in, output_of, remarks_about, write_output
from holdfast.cli.screen import console, print_json, say
from holdfast.run.by_path import open_run
from holdfast.telemetry.event_files import no_events
from holdfast.telemetry.goodput_ledger import JobLedger, Part, RunLedger, goodput_ledger
from holdfast.telemetry.page import RunPicture, page
from holdfast.telemetry.rank_saves import job_events
from holdfast.telemetry.run_figures import recorded_history
from holdfast.wording import count


class LedgerDocument(msgspec.Struct):
    """The document that ``--json`` prints: the ledger of time of a run.

    `seconds` has each part of ``wall_s``; ``paused_s``, the planned pauses, is beside it. `jobs` are in their order,
    each with its parts, and with its `end`: "closed", "early" or "unknown" (`JobLedger`). ``num_disruptions`` counts
    the ends other than "closed" that another job followed. The two wastes are null without the policy `Auto`.
    """

    run: str
    wall_s: float
    paused_s: float
    num_disruptions: int
    seconds: Mapping[Part, float]
    steps: Mapping[Part, int]
    predicted_waste: float | None
    realised_waste: float | None
    jobs: Sequence[JobLedger]
    remarks: Sequence[str]


def report(run: str, *, events: str, out: str, as_json: bool) -> None:
    """Write the page about the run at the path `run`; or print its ledger of time, `as_json`."""
    found = open_run(run)
    folder = events_folder(found, events)
    recorded = events_in(folder)
    history, job = recorded_history(found), job_events(recorded.records)
    remarks = remarks_about(recorded)
    if history.num_unreadable:
        remarks.append(f"{count(history.num_unreadable, 'record')} of the run cannot be read; see holdfast doctor.")
    if job.num_dropped:
        remarks.append(f"{count(job.num_dropped, 'event')} were dropped, because listeners were slow.")
    committed = {str(commit.place) for commit in history.commits}
    ledger = goodput_ledger(recorded.records, committed)
    if not recorded.records:
        missing = no_events(folder, found.storage.location.url)
        remarks.append(f"{missing.message} {missing.action}")
        say(console(stderr=True), f"the {'ledger' if as_json else 'page'} has no times: {remarks[-1]}")
    if as_json:
        print_json(_document(found.storage.location.url, ledger, remarks))
        return
    picture = RunPicture(found.storage.location.url, time.time(), history, job, ledger, remarks)
    write_output(output_of(found, out, "-report.html"), page(picture).encode(), is_own=_is_page)


def _is_page(beginning: bytes) -> bool:
    """Whether an earlier file is a page of this command, of whatever run."""
    return beginning.startswith(b"<!DOCTYPE html>") and b" - holdfast</title>" in beginning


def _document(run: str, ledger: RunLedger, remarks: Sequence[str]) -> LedgerDocument:
    found = ledger.comparison
    return LedgerDocument(
        run=run,
        wall_s=ledger.wall_s,
        paused_s=ledger.paused_s,
        num_disruptions=ledger.num_disruptions,
        seconds=ledger.seconds,
        steps=ledger.steps,
        predicted_waste=None if found is None else found.predicted,
        realised_waste=None if found is None else found.realised,
        jobs=ledger.jobs,
        remarks=remarks,
    )
