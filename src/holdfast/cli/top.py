"""``holdfast top``: the saves of a running job, live."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from holdfast.cli.recorded import events_folder, events_in
from holdfast.cli.runs import RunHead
from holdfast.cli.screen import Listing, age, console
from holdfast.cli.time_so_far import TimeSoFar
from holdfast.errors import printable
from holdfast.reports import size
from holdfast.run.by_path import open_run
from holdfast.run.history import Run
from holdfast.telemetry.event_files import no_events
from holdfast.telemetry.rank_saves import UNDER_WAY, JobEvents, job_events
from holdfast.telemetry.run_figures import JobSave, job_saves, step_figures
from holdfast.wording import count, duration

_PAUSE_S: Final = 1.0
#: What is read of the files of events at each look: some hundred of the newest events of each rank.
_MOST_NBYTES: Final = 2**20
_NUM_SAVES: Final = 8


def top(run: str, *, events: str) -> None:
    """Show the saves of the job on `run` until Ctrl-C; where standard output is no terminal, once."""
    found = open_run(run)
    folder = events_folder(found, events)
    if not events_in(folder, most_nbytes=_MOST_NBYTES).records:
        raise no_events(folder, found.storage.location.url)
    time_so_far = TimeSoFar(found, folder)
    screen = console()
    if not screen.is_terminal:
        screen.print(_picture(found, folder, time_so_far))
        return
    with suppress(KeyboardInterrupt), Live(console=screen, auto_refresh=False) as live:
        while True:
            live.update(_picture(found, folder, time_so_far), refresh=True)
            time.sleep(_PAUSE_S)


def _picture(run: Run, folder: Path | None, time_so_far: TimeSoFar) -> RenderableType:
    """The screen as it is now."""
    job = job_events(events_in(folder, most_nbytes=_MOST_NBYTES).records)
    saves = job_saves(job.saves)
    return Group(*_head(run, job, saves), *time_so_far.shown(), *_now(saves), _table(saves))


def _head(run: Run, job: JobEvents, saves: Sequence[JobSave]) -> Iterator[Text]:
    yield Text.assemble((printable(run.storage.location.url), "bold"), f": the head is {RunHead.of(run)}")
    durable = [save.begun_s for save in saves if save.durable_s is not None]
    told = f"newest durable state: {duration(max(time.time() - max(durable), 0.0))} old" if durable else ""
    steps = step_figures(job.steps)
    if steps is not None:
        told += f"{'; ' if told else ''}steps: {duration(steps.quiet_s)}, {100 * steps.slowdown:+.1f} % during saves"
    if told:
        yield Text(told)


def _now(saves: Sequence[JobSave]) -> Iterator[Text]:
    """A line for each save that is under way: how many ranks are in which phase."""
    for save in saves:
        now = [each for each in save.ranks if each.outcome == UNDER_WAY]
        if save.durable_s is None and now:
            phases = Counter(each.phase_now for each in now)
            ranks = ", ".join(f"{count(number, 'rank')} in {phase}" for phase, number in phases.items())
            yield Text(f"step {save.step:,} since {age(time.time() - save.begun_s)}: {ranks}", "yellow")
            if save.trouble:
                yield Text(f"  {printable(save.trouble)}", "red")


def _table(saves: Sequence[JobSave]) -> Listing:
    made = Listing(
        "step", "place", "size", "blocked", "durable", "outcome", right=("step", "size", "blocked", "durable")
    )
    for save in reversed(saves[-_NUM_SAVES:]):
        durable = "" if save.durable_s is None else duration(save.durable_s)
        blocked = duration(save.blocked_s) if save.blocked_s else ""
        made.add_row(f"{save.step:,}", save.place, size(save.nbytes), blocked, durable, save.outcome)
    return made
