"""``holdfast advise`` says how often to save, on screen and as JSON."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.run.history import Run
from holdfast.store.base import Location
from holdfast.store.urls import open_store
from tests.support.command_line import Done, holdfast_command
from tests.support.recorded_job import recorded_job, write_records

MEMORY = ("--memory", "0.05s,0.1s,10s")
PEERS = ("--peers", "300ms, 5s, 1min")
DURABLE = ("--durable", "3s,3min,5min")
LLAMA3 = ("--failures", "llama3", "--nodes", "2048")


def advised(*arguments: str) -> Done:
    done = holdfast_command("advise", *arguments)
    assert done.status == 0, done.err
    return done


def test_each_tier_gets_its_interval_and_the_job_its_waste() -> None:
    done = advised(*MEMORY, *PEERS, *DURABLE, *LLAMA3)
    assert done.lines[0].startswith("One failure every 3.09 h (Llama 3 405B: 419 failures")
    rows = {line.split()[0]: " ".join(line.split()) for line in done.lines[3:6]}
    assert rows["memory"].startswith("memory 69.6 s 1.79 34.9 s 69 s - the least waste")
    assert rows["peers"].startswith("peers 94.4 s")
    assert rows["durable"].startswith("durable 30.5 min 0.16 18.2 min 33.2 min")
    assert "2.19 % of the time is lost:" in done.lines


def test_the_plot_is_longest_far_from_the_advice() -> None:
    done = advised(*DURABLE, "--mttf", "3h")
    bars = [line.count("#") for line in done.lines if line.lstrip().startswith("x ")]
    assert len(bars) == 7
    assert bars[3] == min(bars)
    assert max(bars) == 40


def test_a_job_that_fails_too_often_is_told_so() -> None:
    lines = advised(*DURABLE, "--mttf", "5min").out
    assert "The job makes no progress" in lines
    assert "Changes and what they buy" in lines
    assert "other intervals" not in lines, "no interval is better than another one"
    assert "Other rules" not in lines
    assert "The job makes no progress" not in advised(*DURABLE, "--mttf", "1h").out


def test_changes_and_rules_are_compared_with_the_advice() -> None:
    found = advised(*MEMORY, *DURABLE, "--mttf", "3.09h", "--json").json
    now = sum(found["waste"].values())
    changes = {each["what"]: each["waste"] for each in found["changes"]}
    assert changes["copies in the memory of other nodes"] == pytest.approx(0.022, abs=0.0005)
    assert all(each < now for each in changes.values())
    rules = {each["what"]: each["waste"] for each in found["rules"]}
    assert min(rules.values()) > now


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ((), "the least waste"),
        (("--step", "400s"), "no interval is shorter than a step"),
        (("--max-overhead", "0.1%"), "the budget for saves"),
        (("--shares", "0%,0%,100%", *MEMORY), "no failure needs it"),
        (("--durable", "0,10min,5min"), "a save takes so long to complete"),
        (("--durable", "0,0,5min"), "no interval is shorter than a second"),
        (("--memory", "100s,1s,1s"), "no interval is shorter than that of a nearer tier"),
    ],
)
def test_the_limit_that_sets_an_interval_is_named(options: tuple[str, ...], reason: str) -> None:
    found = advised(*DURABLE, "--mttf", "3h", *options, "--json").json
    assert reason in [tier["reason"] for tier in found["tiers"]]


def test_steps_are_nested_and_a_budget_holds() -> None:
    found = advised(*MEMORY, *PEERS, *DURABLE, *LLAMA3, "--step", "7s", "--max-overhead", "0.3%", "--json").json
    memory, peers, durable = (tier["steps"] for tier in found["tiers"])
    assert (peers % memory, durable % peers) == (0, 0)
    assert found["tiers"][0]["interval_s"] == memory * 7
    assert 0.0015 < found["waste"]["stall"] <= 0.003


def test_bytes_and_money_are_told_where_their_price_is_known() -> None:
    found = advised(*DURABLE, "--mttf", "3h", "--size", "2TB", "--cost-per-hour", "1000", "--json").json
    (tier,) = found["tiers"]
    assert tier["nbytes_per_day"] == pytest.approx(2e12 * 86400 / tier["interval_s"])
    assert found["cost_per_day"] == pytest.approx(24_000 * sum(found["waste"].values()))
    text = advised(*DURABLE, "--mttf", "3h", "--size", "2TiB", "--cost-per-hour", "1000")
    assert "written/day" in text.lines[2]
    assert ", 1,7" in next(line for line in text.lines if "of the time is lost" in line)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ((), "the failures of the job must be given once"),
        (("--mttf", "3h", *LLAMA3), "the failures of the job must be given once"),
        (("--mttf", "3 hours"), "'3 hours', which is no such time"),
        (("--mttf", "0s"), "'0s', which is no such time"),
        (("--mttf", "-3h"), "which is no such time"),
        (("--failures", "lama3", "--nodes", "8"), "called 'lama3'"),
        (("--failures", "llama3"), "need the number of nodes"),
        (("--mttf", "3h", "--durable", "3s,3min"), "2 numbers, but a tier has three or four"),
        (("--mttf", "3h", "--durable", "3s,3min,5min,2"), "'2', which is no such share"),
        (("--mttf", "3h", "--memory", "x,1s,1s"), "'x', which is no such time"),
        (("--mttf", "3h", "--shares", "50%,20%,20%"), "are not three shares that make 100 %"),
        (("--mttf", "3h", "--shares", "50%,50%"), "are not three shares that make 100 %"),
        (("--mttf", "3h", "--step", "0s"), "'0s', which is no such time"),
        (("--mttf", "3h", "--max-overhead", "0%"), "'0%', which is no such share"),
        (("--mttf", "3h", "--max-overhead", "1e999%"), "'1e999%', which is no such share"),
        (("--mttf", "3h", "--size", "2 lots"), "--size 2 lots is no size"),
        (("--mttf", "3h", "--cost-per-hour", "inf"), "--cost-per-hour inf is no price"),
        (("--mttf", "3h", "--durable", "3s"), "1 number, but a tier has three or four"),
        (("--mttf", "3h", "--durable", ""), "nothing says what a save to storage costs"),
    ],
)
def test_a_number_that_makes_no_sense_is_explained(options: tuple[str, ...], problem: str) -> None:
    done = holdfast_command("advise", *DURABLE, *options)
    assert done.status == 2
    assert problem in done.err
    assert "[config.advice]" in done.err


class TestFromARun:
    @pytest.fixture
    def run(self, tmp_path: Path) -> str:
        """A run with a job that restored from storage and saved every minute, with steps of half a second."""
        run = tmp_path / "gpt"
        Run.create(open_store(Location(str(run))))
        write_records(tmp_path / "gpt.events", recorded_job())
        return str(run)

    def test_what_its_jobs_measured_are_the_numbers(self, run: str) -> None:
        measured = advised("--from", run, "--mttf", "3h")
        tiers = "--memory 0.004s,0.26s,0.26s --durable 0.004s,1.26s,1s,10.0% --step 0.5s"
        assert measured.lines[0] == f"Measured: {tiers}"
        assert "No job has restored from memory" in measured.out
        given = advised(*tiers.split(), "--mttf", "3h")
        assert measured.out.endswith(given.out)

    def test_what_the_user_gives_counts_and_json_has_nothing_else(self, run: str) -> None:
        told = advised("--from", run, *DURABLE, "--step", "2s", "--mttf", "3h", "--json").json
        assert [tier["name"] for tier in told["tiers"]] == ["memory", "durable"]
        given = ("--memory", "0.004s,0.26s,0.26s", *DURABLE, "--step", "2s", "--mttf", "3h", "--json")
        assert told == advised(*given).json

    def test_a_run_without_events_and_one_without_saves_are_errors(self, run: str, tmp_path: Path) -> None:
        no_saves = [each for each in recorded_job() if not each.event.startswith("Save")]
        write_records(tmp_path / "none", no_saves)
        for arguments, status, text in [
            (["--from", run, "--events", str(tmp_path / "none")], 2, "became durable"),
            (["--from", run, "--events", str(tmp_path / "gone")], 3, "JsonLines"),
            ([], 2, "--from RUN"),
        ]:
            done = holdfast_command("advise", *arguments, "--mttf", "3h")
            assert done.status == status
            assert text in done.err
