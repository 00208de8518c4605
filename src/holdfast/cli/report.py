"""``holdfast report``: the page about a run."""

from __future__ import annotations

import time

from holdfast.cli.recorded import events_folder, events_in, output_of, remarks_about, write_output
from holdfast.cli.screen import console, say
from holdfast.run.by_path import open_run
from holdfast.telemetry.event_files import no_events
from holdfast.telemetry.page import RunPicture, page
from holdfast.telemetry.rank_saves import job_events
from holdfast.telemetry.run_figures import recorded_history
from holdfast.wording import count


def report(run: str, *, events: str, out: str) -> None:
    """Write the page about the run at the path `run`."""
    found = open_run(run)
    folder = events_folder(found, events)
    recorded = events_in(folder)
    history, job = recorded_history(found), job_events(recorded.records)
    remarks = remarks_about(recorded)
    if history.num_unreadable:
        remarks.append(f"{count(history.num_unreadable, 'record')} of the run cannot be read; see holdfast doctor.")
    if job.num_dropped:
        remarks.append(f"{count(job.num_dropped, 'event')} were dropped, because listeners were slow.")
    if not recorded.records:
        missing = no_events(folder, found.storage.location.url)
        remarks.append(f"{missing.message} {missing.action}")
        say(console(stderr=True), f"the page has no times: {missing.message} {missing.action}")
    picture = RunPicture(found.storage.location.url, time.time(), history, job, remarks)
    write_output(output_of(found, out, "-report.html"), page(picture).encode())
