"""Saves to memory alone are many: what shows saves counts them, and keeps the durable ones in view."""

from __future__ import annotations

import dataclasses
import re
import time
from html import unescape
from pathlib import Path

import msgspec
import pytest
import torch

import holdfast
from holdfast.observing import JsonLines
from holdfast.telemetry.event_files import read_events
from holdfast.telemetry.event_record import EventRecord
from holdfast.telemetry.page import page
from holdfast.telemetry.rank_saves import JobEvents, job_events
from holdfast.telemetry.run_figures import JobSave, job_saves, memory_points, newest_in_memory, recovery_points
from tests.support.command_line import holdfast_command
from tests.support.recorded_history import picture_of
from tests.support.recorded_job import BEGUN_S, RankClock, recorded_save, write_records

POLICY = holdfast.EverySteps(2, memory_only=True) | holdfast.EverySteps(10)
STEP_S = 0.02


@pytest.fixture
def recorded(run: str, memory: holdfast.Memory) -> str:
    """A run of 36 steps with its events beside it; the last save is of step 35."""
    state, listeners = {"w": torch.ones(1000)}, [JsonLines()]
    with holdfast.Checkpointer(run, state, memory=memory, save=POLICY, listeners=listeners) as own:
        for step in own.steps(36):
            time.sleep(STEP_S)
            handle = own.step(step)
            if handle is not None and not handle.memory_only:
                handle.durable.wait(60)
    return run


def job_on(run: str) -> JobEvents:
    return job_events(read_events(Path(f"{run}.events")).records)


def held_and_others(saves: list[JobSave]) -> tuple[list[int], list[int]]:
    """The steps of the saves to memory alone that were held, and those of the others."""
    held = [save.step for save in saves if save.outcome == "held"]
    return held, [save.step for save in saves if not save.memory_only]


def test_a_real_run_has_both_kinds_and_the_pages_keep_them_apart(recorded: str, tmp_path: Path) -> None:
    job = job_on(recorded)
    saves = job_saves(job.saves)
    held, others = held_and_others(saves)
    assert others == [10, 20, 30, 35]
    assert len(held) >= 4
    assert all(save.outcome in ("held", "skipped") for save in saves if save.memory_only)
    path = tmp_path / "page.html"
    assert holdfast_command("report", recorded, "--out", path).status == 0
    text = path.read_text()
    rows = [unescape(each) for each in re.findall(r"<td>(\d+ saves? to memory alone|saved? [^<]*)</td>", text)]
    assert [row for row in rows if row.startswith("saved")] == [f"saved step {step}" for step in (35, 30, 20, 10)]
    assert [row for row in rows if "alone" in row] == [f"{len(saves) - 4} saves to memory alone"]
    tiles = {what: value for value, what in re.findall("<li><b>(.*?)</b><span>(.*?)</span></li>", text)}
    assert tiles["saves failed or were skipped"] == "0 of 4"
    assert tiles["saves to memory alone failed or were skipped"].endswith(f" of {len(saves) - 4}")
    assert "age of the newest state in memory" in tiles
    titles = re.findall("<summary>(.*?)</summary>", text)
    assert len(titles) == 5
    assert sum("to memory alone: held" in title for title in titles) == 1


def test_top_counts_those_since_the_newest_durable_save(recorded: str) -> None:
    lines = holdfast_command("top", recorded).lines
    head = next(at for at, line in enumerate(lines) if "outcome" in line)
    assert [line.split()[0] for line in lines[head + 1 :]] == ["35", "30", "20", "10"]
    assert "to memory alone" not in lines[1]


def test_the_state_in_memory_is_younger_than_the_one_in_storage() -> None:
    clock = RankClock(0, 1)
    records = [each for number in range(4) for each in recorded_save(clock, number)]
    records += [each for at_s in range(5, 235, 10) for each in held_save(clock, at_s, at_s)]
    saves = job_saves(job_events(records).saves)
    in_memory, in_storage = memory_points(saves), recovery_points(saves)
    assert len(in_memory) > len(in_storage) >= 7
    oldest_s = [max(point.age_s for point in each) for each in (in_memory, in_storage)]
    assert oldest_s[0] < 15
    assert oldest_s[1] > 55


def held_save(clock: RankClock, at_s: float, step: int) -> list[EventRecord]:
    """The events of a save to memory alone, which is held after 2 s on rank 0, and 1 s later on each further rank."""
    place = f"7.{step}"  # an epoch that no real run of these tests reaches
    return [
        clock.record("SaveBegun", at_s, step=step, tier="node memory", numbers={"memory_only": 1}),
        clock.record("SavePlaced", at_s + 0.5, step=step, place=place),
        clock.record("SaveStaged", at_s + 1.0, step=step, numbers={"nbytes": 10}),
        clock.record("SaveHeld", at_s + 2.0 + clock.rank, step=step, numbers={"nbytes": 10}),
    ]


def test_a_state_is_in_memory_when_the_part_of_the_last_rank_is() -> None:
    clocks = [RankClock(rank, 2) for rank in (0, 1)]
    job = job_events(record for clock in clocks for record in held_save(clock, 60.0, 100))
    (save,) = job_saves(job.saves)
    assert (save.memory_only, save.outcome, save.durable_at_s) == (True, "held", None)
    assert save.in_memory_at_s == BEGUN_S + 63.0
    assert newest_in_memory([save], []) is save
    part = job_events(held_save(clocks[0], 60.0, 100) + held_save(clocks[1], 60.0, 100)[:3])
    assert [save.in_memory_at_s for save in job_saves(part.saves)] == [None]


def test_what_lay_in_memory_before_a_restore_of_the_job_counts_for_nothing() -> None:
    clock = RankClock(0, 1)
    restored = clock.record("StateRestored", 80.0, step=50, place="1.1", tier="storage", seconds={"read": 1.0})
    evaluates = msgspec.structs.replace(restored, process=7)
    job = job_events([*held_save(clock, 60.0, 100), evaluates])
    assert newest_in_memory(job_saves(job.saves), job.restores) is not None
    job = job_events([*held_save(clock, 60.0, 100), restored])
    assert newest_in_memory(job_saves(job.saves), job.restores) is None
    job = job_events([*held_save(clock, 60.0, 100), restored, *held_save(clock, 90.0, 60)])
    newest = newest_in_memory(job_saves(job.saves), job.restores)
    assert newest is not None
    assert newest.step == 60


def test_top_shows_the_age_of_the_newest_state_in_memory_beside_that_in_storage(recorded: str) -> None:
    clock = RankClock(0, 1)
    late_s, place = time.time() - BEGUN_S - 60.0, holdfast.ls(recorded)[0].place
    durable = [msgspec.structs.replace(each, place=each.place and place) for each in recorded_save(clock, 0)]
    records = [*durable, *(each for at_s in range(5, 50, 5) for each in held_save(clock, at_s, at_s))]
    write_records(Path(recorded).parent / "live", [_later(record, late_s) for record in records])
    lines = holdfast_command("top", recorded, "--events", str(Path(recorded).parent / "live")).lines
    told = re.fullmatch(
        r"newest durable state: ([0-9.]+) s old, \d+ steps back; newest in memory: ([0-9.]+) s old, after 9 saves to "
        r"memory alone",
        lines[1],
    )
    assert told is not None, lines[1]
    assert 60 <= float(told[1]) < 75
    assert 15 <= float(told[2]) < 30
    head = next(at for at, line in enumerate(lines) if "outcome" in line)
    assert len(lines) == head + 2


def test_many_saves_to_memory_alone_are_few_rows_of_the_page() -> None:
    clock = RankClock(0, 1)
    restored = clock.record("StateRestored", 400.0, step=50, place="1.1", tier="storage", seconds={"read": 1.0})
    records = [each for step in range(100) for each in held_save(clock, 4.0 * step, step)]
    records += [restored, *(each for step in range(100, 103) for each in held_save(clock, 4.0 * step + 5.0, step))]
    picture = dataclasses.replace(picture_of(num_ranks=1, num_saves=0), job=job_events(records))
    text = page(picture)
    assert re.findall(r"<td>(\d+) saves to memory alone</td>", text) == ["3", "100"]
    assert "steps 0 to 99: 100 held" in text
    assert "<td>restored step 50</td>" in text


def _later(record: EventRecord, seconds: float) -> EventRecord:
    return msgspec.structs.replace(record, unix_s=record.unix_s + seconds)
