"""``holdfast trace``: the saves and restores of a run as a trace for Perfetto."""

from __future__ import annotations

import msgspec

from holdfast.cli.recorded import events_folder, events_in, output_of, remarks_about, write_output
from holdfast.cli.screen import console, say
from holdfast.run.by_path import open_run
from holdfast.telemetry.event_files import no_events
from holdfast.telemetry.perfetto import trace_of
from holdfast.telemetry.rank_saves import job_events


def trace(run: str, *, events: str, out: str) -> None:
    """Write the trace of the run at the path `run`."""
    found = open_run(run)
    folder = events_folder(found, events)
    recorded = events_in(folder)
    if not recorded.records:
        raise no_events(folder, found.storage.location.url)
    for remark in remarks_about(recorded):
        say(console(stderr=True), remark)
    document = msgspec.json.encode(trace_of(job_events(recorded.records)))
    write_output(output_of(found, out, "-trace.json"), document, is_own=_is_trace)


def _is_trace(beginning: bytes) -> bool:
    """Whether an earlier file is a trace."""
    return beginning.startswith(b'{"traceEvents":[')
