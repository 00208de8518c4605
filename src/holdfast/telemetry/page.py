"""The page about a run: one HTML file that holds everything it shows, and loads nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from statistics import median
from typing import Final

from holdfast.errors import printable
from holdfast.reports import size
from holdfast.telemetry.charts import Curve, line_chart
from holdfast.telemetry.goodput_ledger import RunLedger
from holdfast.telemetry.heat_map import heat_map
from holdfast.telemetry.ledger import ledger
from holdfast.telemetry.moments import moment_text
from holdfast.telemetry.rank_saves import JobEvents
from holdfast.telemetry.run_figures import (
    JobSave,
    RecordedHistory,
    heat_rows,
    job_saves,
    memory_points,
    newest_in_memory,
    protection_figures,
    recovery_points,
    step_figures,
)
from holdfast.telemetry.time_tables import goodput_share, time_tables
from holdfast.telemetry.timeline import timeline
from holdfast.wording import count, duration

#: Number of saves whose timelines the page shows.
_NUM_TIMELINES: Final = 5
#: Saves over which the heat map takes its medians: the newest ones, so that it shows the present machines.
_NUM_HEAT_SAVES: Final = 20


@dataclass(frozen=True)
class RunPicture:
    """The content of a page: the location, the history, the events and the ledger of time of a run, and remarks about
    missing parts."""

    run: str
    now_s: float
    history: RecordedHistory
    job: JobEvents
    ledger: RunLedger
    remarks: Sequence[str]


def page(picture: RunPicture) -> str:
    """The page as HTML. All text that comes from files is escaped."""
    saves = job_saves(picture.job.saves)
    style = files("holdfast.telemetry").joinpath("page.css").read_text(encoding="utf-8")
    made = moment_text(picture.now_s)
    name = escape(printable(picture.run))
    body = [
        f"<h1>{name}</h1>",
        f'<p class="about">as it was on {escape(made)}; made by <code>holdfast report</code></p>',
        *(f'<p class="alarm">{escape(printable(remark))}</p>' for remark in picture.remarks),
        _tiles(picture, saves),
        *_sections(picture, saves),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{name} - holdfast</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _tiles(picture: RunPicture, saves: Sequence[JobSave]) -> str:
    commits = picture.history.commits
    head = next((commit for commit in commits if commit.place == picture.history.head), None)
    tiles = [
        (f"step {head.step:,}" if head else "none", "newest checkpoint"),
        (duration(max(picture.now_s - head.created, 0.0)) if head else "-", "age of its state"),
        (f"{len(commits):,}", f"checkpoints, {size(sum(commit.nbytes for commit in commits))}"),
    ]
    alone = [save for save in saves if save.memory_only]
    to_storage = [save for save in saves if not save.memory_only]
    blocked = [save.blocked_s for save in to_storage or alone if save.blocked_s]
    durable = [save.durable_s for save in saves if save.durable_s is not None]
    if blocked:
        tiles.append((duration(median(blocked)), "training blocked by a save (median)"))
    if durable:
        tiles.append((duration(median(durable)), "until a save is durable (median)"))
    protection = protection_figures(saves)
    if protection is not None:
        shown = f"{protection.num_protected:,} of {protection.num_known:,}"
        tiles.append((shown, "saves protected against the loss of nodes"))
        if protection.protected_s is not None:
            tiles.append((duration(protection.protected_s), "until a save is protected (median)"))
    steps = step_figures(picture.job.steps)
    if steps is not None:
        during = f"longer step time while a save is under way ({count(steps.num_saving, 'step')})"
        tiles.append((steps.slowdown_text, during))
    if to_storage:
        tiles.append((f"{_num_lost(to_storage):,} of {len(to_storage):,}", "saves failed or were skipped"))
    if alone:
        tiles.append((f"{_num_lost(alone):,} of {len(alone):,}", "saves to memory alone failed or were skipped"))
        newest = newest_in_memory(saves, picture.job.restores)
        age = "-" if newest is None else duration(max(picture.now_s - newest.begun_s, 0.0))
        tiles.append((age, "age of the newest state in memory"))
    if picture.ledger.wall_s:
        tiles.append((goodput_share(picture.ledger), f"goodput of {duration(picture.ledger.wall_s)}"))
    items = "".join(f"<li><b>{escape(value)}</b><span>{escape(what)}</span></li>" for value, what in tiles)
    return f'<ul class="tiles">{items}</ul>'


def _num_lost(saves: Iterable[JobSave]) -> int:
    return sum(save.outcome in ("failed", "skipped") for save in saves)


def _sections(picture: RunPicture, saves: Sequence[JobSave]) -> list[str]:
    sizes = sorted((float(commit.step), float(commit.nbytes)) for commit in picture.history.commits)
    sections = []
    if saves:
        sections += [*_heat(saves), *_timelines(saves), *_times(saves), *_steps(picture.job), *_ages(saves)]
    sections += [
        "<h2>Sizes</h2>",
        line_chart(
            "Size of each checkpoint",
            [Curve("size", sizes)],
            x_text=_step,
            y_text=lambda nbytes: size(round(nbytes)),
            y_base=1024,
        ),
        "<h2>Ledger</h2>",
        ledger(picture.history, saves, picture.job),
    ]
    if picture.ledger.wall_s:
        sections += ["<h2>Ledger of time</h2>", time_tables(picture.ledger)]
    return sections


def _heat(saves: Sequence[JobSave]) -> list[str]:
    newest = [save for save in saves if save.durable_s is not None][-_NUM_HEAT_SAVES:]
    about = (
        f"Median times of {count(len(newest), 'save')} on each rank (columns). A strong colour marks a rank that is "
        "slower than others in this phase. <b>blocked</b> is the time for which training stood still."
    )
    rows = heat_rows(each for save in newest for each in save.ranks)
    return ["<h2>Ranks and phases</h2>", f'<p class="about">{about}</p>', heat_map(rows)]


def _timelines(saves: Sequence[JobSave]) -> list[str]:
    shown = []
    newest = [save for save in saves if not save.memory_only][-_NUM_TIMELINES:]
    newest += [save for save in saves if save.outcome == "held"][-1:]
    for number, save in enumerate(sorted(newest, key=lambda save: save.begun_s, reverse=True)):
        durable = f"durable after {duration(save.durable_s)}" if save.durable_s is not None else save.outcome
        alone = ", to memory alone" if save.memory_only else ""
        title = escape(printable(f"step {save.step:,} at {save.place or 'no place'}{alone}: {durable}"))
        is_open = " open" if number == 0 else ""
        shown.append(f"<details{is_open}><summary>{title}</summary>{timeline(save)}</details>")
    return ["<h2>Timelines</h2>", *shown]


def _times(saves: Sequence[JobSave]) -> list[str]:
    durable = [(float(save.step), save.durable_s) for save in saves if save.durable_s is not None]
    alone = [save for save in saves if save.memory_only]
    kinds = ("durable save", [save for save in saves if not save.memory_only]), ("memory alone", alone)
    blocked = [
        Curve(name, [(float(save.step), save.blocked_s) for save in kind], number)
        for number, (name, kind) in enumerate(kinds)
        if kind
    ]
    protected = [(float(save.step), save.protected_s) for save in saves if save.protected_s is not None]
    lines = [Curve("until durable", durable)]
    if protected:
        lines.append(Curve("until other nodes protect it", protected, 1))
    return [
        "<h2>Time until durable</h2>",
        line_chart("Time until each save is durable", lines, x_text=_step, y_text=duration),
        "<h2>Training blocked</h2>",
        '<p class="about">The time of the call of <code>save</code> on the slowest rank.</p>',
        line_chart("Time for which saves blocked training", blocked, x_text=_step, y_text=duration),
    ]


def _steps(job: JobEvents) -> list[str]:
    first = min((each.rank for each in job.steps), default=None)
    mine = [each for each in job.steps if each.rank == first]
    if not mine:
        return []
    quiet = [(float(each.step), each.quiet_s) for each in mine if each.num_quiet]
    saving = [(float(each.step), each.saving_s) for each in mine if each.num_saving]
    lines = [Curve("no save under way", quiet, 0), Curve("a save under way", saving, 1)]
    return [
        "<h2>Step time</h2>",
        f'<p class="about">Medians of the steps between saves, on rank {first}.</p>',
        line_chart("Step time with and without a save under way", lines, x_text=_step, y_text=duration),
    ]


def _ages(saves: Sequence[JobSave]) -> list[str]:
    points = {"age": recovery_points(saves)}
    title = "Age of the newest durable state"
    about = "The training that a failure of the whole job would lose: it falls when a checkpoint becomes durable."
    if any(save.memory_only for save in saves):
        points = {"in storage": points["age"], "in memory": memory_points(saves)}
        title = "Age of the newest state in storage and in memory"
        about += " A failure that leaves the memory of the nodes loses what came after the newest state in memory."
    begun_s = min((each[0].at_s for each in points.values() if each), default=0.0)
    lines = [
        Curve(name, [(point.at_s - begun_s, point.age_s) for point in each], number)
        for number, (name, each) in enumerate(points.items())
    ]
    chart = line_chart(title, lines, x_text=duration, y_text=duration)
    return ["<h2>Age of the recovery point</h2>", f'<p class="about">{about}</p>', chart]


def _step(x: float) -> str:
    return f"step {x:,.0f}"
