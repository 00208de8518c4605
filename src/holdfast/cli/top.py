"""``holdfast top``: the saves of a running job, live."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
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
from holdfast.errors import HoldfastError, printable
from holdfast.format.records import Place
from holdfast.reports import size
from holdfast.run.by_path import open_run
from holdfast.run.history import Run
from holdfast.telemetry.event_files import no_events
from holdfast.telemetry.rank_saves import UNDER_WAY, JobEvents, job_events
from holdfast.telemetry.run_figures import (
    JobSave,
    job_saves,
    last_job_restored_s,
    missed_in_a_row,
    newest_in_memory,
    protection_figures,
    step_figures,
)
from holdfast.wording import count, duration

_PAUSE_S: Final = 1.0
#: The bytes of the files of events that each look reads: some hundred of the newest events of each rank.
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
    # After a job was killed, its keeper commits what nobody records.
    committed = {str(place) for place in run.places()}
    return Group(*_head(run, job, saves), *time_so_far.shown(), *_now(job, saves, committed), _table(saves, committed))


def _head(run: Run, job: JobEvents, saves: Sequence[JobSave]) -> Iterator[Text]:
    head = RunHead.of(run)
    yield Text.assemble((printable(run.storage.location.url), "bold"), f": the head is {head}")
    durable_s = _durable_s(run, head, saves)
    told = [] if durable_s is None else [f"newest durable state: {_old(durable_s)}{_steps_back(job, saves, head)}"]
    if (num_missed := missed_in_a_row(saves)) > 0:
        told.append(f"{count(num_missed, 'save')} missed since")
    held = [save for save in saves if save.outcome == "held" and save.begun_s > (durable_s or 0.0)]
    newest = newest_in_memory(saves, job.restores)
    if held and newest is not None:
        told.append(f"newest in memory: {_old(newest.begun_s)}, after {count(len(held), 'save')} to memory alone")
    steps = step_figures(job.steps)
    if steps is not None:
        told.append(f"steps: {duration(steps.quiet_s)}, slow-down during saves {steps.slowdown_text}")
    if told:
        yield Text("; ".join(told))
    yield from _protection(job, saves)


def _protection(job: JobEvents, saves: Sequence[JobSave]) -> Iterator[Text]:
    """The line about the protection of the newest job's saves; none if the job asked for no protection."""
    since_s = last_job_restored_s(job.restores)
    own = [save for save in saves if save.begun_s >= since_s]
    figures = protection_figures(own)
    if figures is not None:
        newest_s = max((save.begun_s for save in own if save.protected_s is not None), default=None)
        newest = "none" if newest_s is None else _old(newest_s)
        yield Text(printable(f"newest state that other nodes protect: {newest}; {figures}"))


def _durable_s(run: Run, head: RunHead, saves: Sequence[JobSave]) -> float | None:
    """The time at which the newest durable state was taken: that of the head, which a keeper may have committed after
    the job was killed, when nobody recorded it; where the head cannot be read, the newest one that was recorded."""
    recorded = [save for save in saves if (save.durable_s is not None if head.damage else save.place == head.place)]
    if head.place is not None and not recorded:
        with suppress(HoldfastError):  # it was removed just now
            return run.commit(Place.parse(head.place)).created
    return max((save.begun_s for save in recorded), default=None)


def _steps_back(job: JobEvents, saves: Sequence[JobSave], head: RunHead) -> str:
    """By how many steps the job is ahead of the head, if that is known."""
    since_s = last_job_restored_s(job.restores)
    known = [steps.step for steps in job.steps if steps.at_s >= since_s]
    known += [save.step for save in saves if save.begun_s >= since_s]
    num_steps = max(known, default=0) - (0 if head.step is None else head.step)
    return f", {count(num_steps, 'step')} back" if head.step is not None and num_steps > 0 else ""


def _old(begun_s: float) -> str:
    return f"{duration(max(time.time() - begun_s, 0.0))} old"


def _now(job: JobEvents, saves: Sequence[JobSave], committed: Collection[str]) -> Iterator[Text]:
    """A line for each save that is under way: how many ranks are in which phase. What began before the newest restore
    is that of a job which was killed, and what the history has `committed` is over."""
    since_s = last_job_restored_s(job.restores)
    for save in saves:
        if save.begun_s < since_s or save.place in committed:
            continue
        now = [each for each in save.ranks if each.outcome == UNDER_WAY]
        if save.durable_s is None and now:
            doing = Counter(each.doing_now for each in now)
            ranks = ", ".join(f"{count(number, 'rank')} {what}" for what, number in doing.items())
            yield Text(f"step {save.step:,} since {age(time.time() - save.begun_s)}: {ranks}", "yellow")
            why = next((each.waits_for for each in now if not each.spans and each.waits_for), "")
            if why:
                yield Text(f"  {printable(why)}", "yellow")
            if save.trouble:
                yield Text(f"  {printable(save.trouble)}", "red")


def _table(saves: Sequence[JobSave], committed: Collection[str]) -> Listing:
    made = Listing(
        *("step", "place", "size", "blocked", "durable after", "outcome"),
        right=("step", "size", "blocked", "durable after"),
    )
    for save in reversed([save for save in saves if not save.memory_only][-_NUM_SAVES:]):
        durable = "" if save.durable_s is None else duration(save.durable_s)
        blocked = duration(save.blocked_s) if save.blocked_s else ""
        outcome = "committed" if save.place in committed else save.outcome
        made.add_row(f"{save.step:,}", save.place, size(save.nbytes), blocked, durable, outcome)
    return made
