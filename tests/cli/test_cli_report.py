"""``holdfast report``, ``trace`` and ``top``: from a real run with recorded events."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import msgspec
import pytest
import torch

import holdfast
from holdfast.observing import JsonLines
from holdfast.run.history import Run
from holdfast.store.base import Location
from holdfast.store.urls import open_store
from tests.support.command_line import INTERRUPT, at_terminal, holdfast_command
from tests.support.recorded_job import BEGUN_S, RankClock, recorded_save, write_records


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run with three checkpoints, and its events beside it."""
    monkeypatch.chdir(tmp_path)
    state = {"w": torch.ones(1000)}
    policy = holdfast.EverySteps(10)
    with holdfast.Checkpointer("runs/gpt", state, memory=None, save=policy, listeners=[JsonLines()]) as checkpointer:
        for step in checkpointer.steps(30):
            checkpointer.step(step)
    return "runs/gpt"


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run without checkpoints."""
    monkeypatch.chdir(tmp_path)
    return Run.create(open_store(Location(str(tmp_path / "begun")))).storage.location.url


def test_the_page_is_written_and_named(recorded: str) -> None:
    done = holdfast_command("report", recorded)
    assert (done.status, done.lines) == (0, ["wrote gpt-report.html"])
    text = Path("gpt-report.html").read_text()
    assert "<h2>Ranks and phases</h2>" in text
    assert "step 29" in text


def test_the_page_goes_where_it_is_wanted_from_events_that_were_moved(recorded: str) -> None:
    Path("runs/gpt.events").rename("elsewhere")
    done = holdfast_command("report", recorded, "--events", "elsewhere", "--out", "page.html")
    assert (done.status, done.lines) == (0, ["wrote page.html"])
    assert "<h2>Timelines</h2>" in Path("page.html").read_text()


def test_events_are_found_when_a_link_leads_to_the_run(recorded: str) -> None:
    Path("newest").symlink_to("runs/gpt")
    done = holdfast_command("report", "newest")
    assert (done.status, done.lines) == (0, ["wrote newest-report.html"])
    assert "<h2>Timelines</h2>" in Path("newest-report.html").read_text()


def test_a_page_without_events_says_how_to_record_them(recorded: str) -> None:
    Path("runs/gpt.events").rename("elsewhere")
    done = holdfast_command("report", recorded)
    assert done.status == 0
    assert "the page has no times" in done.err
    assert "listeners=[JsonLines()] from holdfast.observing" in Path("gpt-report.html").read_text()


def test_a_page_that_cannot_be_written_is_an_error(recorded: str) -> None:
    done = holdfast_command("report", recorded, "--out", "no/such/folder.html")
    assert done.status == 3
    assert "storage.output" in done.err


@pytest.mark.parametrize("command", ["report", "trace"])
def test_only_an_older_output_of_the_same_command_is_overwritten(recorded: str, command: str) -> None:
    Path("empty").touch()
    for out in ("new", "new", "empty"):
        assert holdfast_command(command, recorded, "--out", out).lines == [f"wrote {out}"]
    for text in ("<!DOCTYPE html>\n<title>my page</title>", '{"mine": 1}', "import torch\n"):
        Path("mine").write_text(text)
        done = holdfast_command(command, recorded, "--out", "mine")
        assert done.status == 2
        assert "[config.output] 'mine' holds something else" in done.err
        assert Path("mine").read_text() == text


def test_events_that_cannot_be_read_are_an_error(recorded: str) -> None:
    Path("runs/gpt.events/rank-00009.jsonl").mkdir()
    done = holdfast_command("report", recorded)
    assert done.status == 3
    assert "storage.events" in done.err


def test_the_trace_has_the_phases_of_all_saves(recorded: str) -> None:
    done = holdfast_command("trace", recorded)
    assert (done.status, done.lines) == (0, ["wrote gpt-trace.json"])
    events = json.loads(Path("gpt-trace.json").read_text())["traceEvents"]
    assert [each["name"] for each in events].count("write") == 3
    assert [each["name"] for each in events if each["cat"] == "whole"] == [
        "nothing to restore",
        *(f"step {step}" for step in (10, 20, 29)),
    ]


@pytest.mark.parametrize("command", ["trace", "top"])
def test_without_events_there_is_nothing_to_show(recorded: str, command: str) -> None:
    Path("runs/gpt.events").rename("elsewhere")
    done = holdfast_command(command, recorded)
    assert done.status == 3
    assert "not_found.events" in done.err


def test_top_shows_the_newest_saves_once_where_there_is_no_terminal(recorded: str) -> None:
    done = holdfast_command("top", recorded)
    assert done.status == 0
    assert done.lines[0].endswith("runs/gpt: the head is step 29 at 1.3")
    assert done.lines[1].startswith("newest durable state: ")
    head = next(at for at, line in enumerate(done.lines) if "outcome" in line)
    rows = [line.split()[:2] for line in done.lines[head + 1 :]]
    assert rows == [["29", "1.3"], ["20", "1.2"], ["10", "1.1"]]


def shares_shown(lines: list[str]) -> dict[str, float]:
    """The shares of the time that `top` shows."""
    head = next(at for at, line in enumerate(lines) if "goodput" in line)
    found = [float(share) for share in re.findall(r"([0-9.]+) %", lines[head + 1])]
    return dict(zip(lines[head].split(), found, strict=True))


def test_top_shows_the_shares_of_the_time_so_far(recorded: str) -> None:
    done = holdfast_command("top", recorded)
    ledger = holdfast_command("report", recorded, "--json").json
    shares = shares_shown(done.lines)
    assert list(shares) == ["goodput", "provisional", "wasted", "saves", "restores", "recovery", "start", "other"]
    assert sum(shares.values()) == pytest.approx(100, abs=0.4)
    assert shares["goodput"] == pytest.approx(100 * ledger["seconds"]["GOODPUT"] / ledger["wall_s"], abs=0.051)
    saves = ledger["seconds"]["UNPRODUCTIVE_CHECKPOINT_SAVE_TIME"] / ledger["wall_s"]
    assert shares["saves"] == pytest.approx(100 * saves, abs=0.051)
    (about,) = (line for line in done.lines if line.startswith("time so far: "))
    assert about.endswith(" in 1 job, with 0 disruptions")


def test_top_counts_the_steps_of_a_running_job_as_provisional_until_the_run_has_a_commit(recorded: str) -> None:
    clock, times = RankClock(0, 1), {"quiet": 1.0, "saving": 0.0, "quiet_total": 40.0, "saving_total": 0.0}
    records = [
        clock.record("CheckpointerOpened", 0.0),
        clock.record("StepsTimed", 40.0, step=40, seconds=times, numbers={"quiet": 40, "saving": 0}),
        clock.record("SavePlaced", 40.0, step=20, place="1.2"),
        clock.record("SavePlaced", 40.0, step=40, place="1.4"),
    ]
    write_records(Path("live"), records)
    shares = shares_shown(holdfast_command("top", recorded, "--events", "live").lines)
    assert (shares["goodput"], shares["provisional"]) == (50.0, 50.0)


def test_top_shows_what_ranks_do_for_the_save_under_way(begun: str) -> None:
    records = [
        *list(recorded_save(RankClock(0, 3), 0))[:5],  # sealed
        *list(recorded_save(RankClock(1, 3), 0))[:3],  # agreed
        *list(recorded_save(RankClock(2, 3), 0))[:2],  # begun
    ]
    write_records(Path("live"), records)
    done = holdfast_command("top", begun, "--events", "live")
    assert done.status == 0
    assert any(line.endswith(": 1 rank in store, 1 rank in copy, 1 rank in agree") for line in done.lines)


def test_top_says_that_a_save_waits_for_a_slot_and_what_keeps_it(begun: str) -> None:
    """It said that the ranks agreed."""
    why = "the newest snapshots of ranks 0, 1 are not protected by other nodes yet"
    clock = RankClock(0, 2)
    waiting = [next(recorded_save(clock, 0)), clock.record("SaveWaiting", 5.0, step=99, message=why)]
    write_records(Path("live"), [*waiting, next(recorded_save(RankClock(1, 2), 0))])
    lines = holdfast_command("top", begun, "--events", "live").lines
    assert any(line.endswith(": 1 rank waiting for a slot, 1 rank in agree") for line in lines)
    assert f"  {why}" in lines
    write_records(Path("later"), [*waiting, clock.record("SavePlaced", 6.0, step=99, place="1.1")])
    lines = holdfast_command("top", begun, "--events", "later").lines
    assert any(line.endswith(": 1 rank in copy") for line in lines)
    assert f"  {why}" not in lines


def test_top_shows_no_save_of_a_job_that_was_killed_as_under_way(begun: str) -> None:
    clock = RankClock(0, 1)
    records = [
        *list(recorded_save(clock, 0))[:3],
        clock.record("StateRestored", 50.0),
        *list(recorded_save(clock, 1))[:3],
    ]
    write_records(Path("live"), records)
    lines = holdfast_command("top", begun, "--events", "live").lines
    assert [line.split(" since")[0] for line in lines if " since " in line] == ["step 199"]


def test_top_knows_of_a_checkpoint_that_a_keeper_committed_after_its_job_was_killed(recorded: str) -> None:
    """It told the age of the newest commit that the killed job had recorded, and called this one under way."""
    late_s = time.time() - 3600.0 - BEGUN_S - 60.0
    records = [*recorded_save(RankClock(0, 1), 1), *list(recorded_save(RankClock(0, 1), 2))[:5]]  # 1.2, sealed at 1.3
    write_records(Path("live"), [msgspec.structs.replace(each, unix_s=each.unix_s + late_s) for each in records])
    lines = holdfast_command("top", recorded, "--events", "live").lines
    assert lines[1].startswith("newest durable state: 59 min old"), "and not 60 min, as that of 1.2"
    assert [(*line.split()[:2], line.split()[-1]) for line in lines[-2:]] == [
        ("299", "1.3", "committed"),
        ("199", "1.2", "committed"),
    ]
    assert not any(" since " in line for line in lines)


def test_top_tells_the_age_of_a_head_that_no_event_names(recorded: str) -> None:
    late_s = time.time() - 3600.0 - BEGUN_S
    records = [msgspec.structs.replace(each, unix_s=each.unix_s + late_s) for each in recorded_save(RankClock(0, 1), 0)]
    write_records(Path("live"), records)  # at 1.1, an hour ago
    lines = holdfast_command("top", recorded, "--events", "live").lines
    assert lines[1].startswith("newest durable state: ")
    assert "min old" not in lines[1], "that of 1.3 is younger"


def test_top_goes_on_at_a_terminal_until_somebody_interrupts_it(recorded: str) -> None:
    done = at_terminal("top", recorded, answer=INTERRUPT, when="outcome")
    assert done.status == 0
    assert "the head is step 29 at 1.3" in " ".join(done.out.split())  # a long path breaks the line elsewhere
    assert "Traceback" not in done.out


def test_the_ledger_of_time_as_json_adds_up_and_no_page_is_written(recorded: str) -> None:
    ledger = holdfast_command("report", recorded, "--json").json
    assert not Path("gpt-report.html").exists()
    assert ledger["run"].endswith("runs/gpt")
    (job,) = ledger["jobs"]
    assert job["end"] == "closed"
    assert ledger["steps"] == {"GOODPUT": 30, "PROVISIONAL": 0, "WASTED_PROGRESS_FROM_DISRUPTION": 0}
    assert sum(ledger["seconds"].values()) == pytest.approx(ledger["wall_s"], rel=1e-3)
    assert ledger["seconds"]["UNPRODUCTIVE_CHECKPOINT_SAVE_TIME"] > 0
    assert (ledger["predicted_waste"], ledger["num_disruptions"], ledger["remarks"]) == (None, 0, [])


def test_the_ledger_of_a_run_without_events_is_empty(recorded: str) -> None:
    Path("runs/gpt.events").rename("elsewhere")
    done = holdfast_command("report", recorded, "--json")
    assert (done.json["wall_s"], done.json["jobs"]) == (0, [])
    (remark,) = done.json["remarks"]
    assert "listeners=[JsonLines()]" in remark
    assert f"the ledger has no times: {remark}" in " ".join(done.err.split())


def test_the_page_has_the_ledger_of_time(recorded: str) -> None:
    holdfast_command("report", recorded)
    text = Path("gpt-report.html").read_text()
    assert "<h2>Ledger of time</h2>" in text
    assert "UNPRODUCTIVE_CHECKPOINT_SAVE_TIME" in text
    assert re.search(r"<b>[0-9.]+ %</b><span>goodput of ", text)
