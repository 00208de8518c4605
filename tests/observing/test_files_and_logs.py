"""Listeners that write files, logs and the line at a terminal."""

from __future__ import annotations

import io
import json
import logging
import sys
from pathlib import Path

import pytest

import holdfast
from holdfast.errors import ConfigurationError
from holdfast.observing import EventListener, JsonLines, RestoreFailed, SaveBegun, StructuredLog, TerminalLine
from holdfast.telemetry.event_files import read_events
from holdfast.telemetry.rank_saves import job_events
from tests.observing.heard import DURABLE_SAVE, EVENTS, FULL, SOURCE, tell


def test_every_event_becomes_one_line_of_json(tmp_path: Path) -> None:
    tell(JsonLines(tmp_path / "events"))
    (path,) = (tmp_path / "events").iterdir()
    assert path.name.startswith("rank-00000-41-")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["event"] for line in lines] == [type(event).__name__ for event in EVENTS]
    assert all((line["rank"], line["host"], line["run"]) == (0, "node0", "/runs/gpt") for line in lines)


def test_lines_are_read_as_the_saves_that_they_tell_of(tmp_path: Path) -> None:
    tell(JsonLines(tmp_path))
    job = job_events(read_events(tmp_path).records)
    durable, failed = job.saves
    assert durable.seconds() == pytest.approx({"agree": 0.01, "copy": 0.49, "seal": 0.25, "store": 1.25})
    assert (durable.place, durable.nbytes, durable.num_delays) == ("1.2", 1000, 1)
    assert (failed.outcome, failed.trouble) == ("failed", "the disk is full.")
    assert job.num_dropped == 3


def test_without_a_folder_lines_lie_beside_the_run(tmp_path: Path) -> None:
    tell(JsonLines(), source=SOURCE._replace(run=str(tmp_path / "gpt")))
    assert len(list((tmp_path / "gpt.events").iterdir())) == 1
    assert not (tmp_path / "gpt").exists()


def test_a_run_that_is_in_no_folder_needs_one_for_its_events() -> None:
    with pytest.raises(ConfigurationError, match="is in no folder") as caught:
        tell(JsonLines(), source=SOURCE._replace(run="memory://gpt"))
    assert caught.value.code == "config.events"


@pytest.mark.parametrize("url", ["s3://bucket/events", "S3://bucket/events"])
def test_events_are_not_written_to_a_folder_here_that_is_named_after_a_bucket(url: str) -> None:
    with pytest.raises(ConfigurationError, match="is no folder of a file system") as caught:
        JsonLines(url)
    assert caught.value.code == "config.events"
    with pytest.raises(ConfigurationError, match="join the slashes") as caught:
        JsonLines(Path("s3://bucket/events"))
    assert caught.value.code == "config.path"


def test_a_run_in_a_bucket_began_without_its_events_and_only_the_log_said_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="is in no folder") as caught:
        holdfast.Checkpointer("s3://bucket/run", {}, listeners=[JsonLines()])
    assert caught.value.code == "config.events"
    holdfast.Checkpointer("s3://bucket/run", {}, listeners=[JsonLines(f"file://{tmp_path}/events")]).close()


def test_a_folder_that_is_removed_meanwhile_is_made_again(tmp_path: Path) -> None:
    listener = JsonLines(tmp_path / "events")
    tell(listener, EVENTS[:1])
    (path,) = (tmp_path / "events").iterdir()
    path.unlink()
    path.parent.rmdir()
    tell(listener, EVENTS[1:2])
    assert len(path.read_text().splitlines()) == 1


def test_a_line_is_as_long_as_the_documents_say(tmp_path: Path) -> None:
    tell(JsonLines(tmp_path), DURABLE_SAVE)
    (path,) = tmp_path.iterdir()
    assert path.stat().st_size / len(DURABLE_SAVE) < 250


def test_the_log_has_lines_for_people_and_fields_for_programs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "holdfast.events"):
        tell(StructuredLog())
    by_event = {record.message.split()[0]: record for record in caplog.records}
    assert by_event["event=SaveStaged"].message == "event=SaveStaged rank=0 step=99 nbytes=1000"
    assert by_event["event=SaveReturned"].message == "event=SaveReturned rank=0 step=99 blocked_s=0.004"
    failed = by_event["event=SaveFailed"]
    assert failed.message.endswith('error=storage.full message="the disk is full."')
    assert failed.levelno == logging.WARNING
    assert by_event["event=SaveSealed"].levelno == logging.INFO
    assert vars(failed)["holdfast"]["error"] == "storage.full"


def test_a_restore_that_failed_has_its_reason_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "holdfast.events"):
        tell(StructuredLog(), [RestoreFailed(2.0, FULL), RestoreFailed(0.5, KeyboardInterrupt())])
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert [record.message for record in caplog.records] == [
        'event=RestoreFailed rank=0 took_s=2 error=storage.full message="the disk is full."',
        "event=RestoreFailed rank=0 took_s=0.5 error=KeyboardInterrupt",
    ]


def test_the_log_costs_nothing_where_nobody_listens(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "holdfast.events"):
        tell(StructuredLog())
    assert caplog.records == []


class Terminal(io.StringIO):
    """A standard error that is a terminal."""

    def isatty(self) -> bool:
        return True


def shown_by(listener: EventListener, monkeypatch: pytest.MonkeyPatch, *, rank: int = 0, columns: int = 100) -> str:
    terminal = Terminal()
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "stderr", terminal)
    tell(listener, DURABLE_SAVE, SOURCE._replace(rank=rank))
    return terminal.getvalue()


def test_the_line_follows_the_save_and_is_gone_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown_by(TerminalLine(), monkeypatch).split("\r\x1b[2K")
    assert lines == [
        "",
        "holdfast: saving step 99 to node memory",
        "holdfast: saving step 99: all ranks agree on 1.2; copying",
        "holdfast: saving step 99: 1000 B copied; training goes on",
        "holdfast: saving step 99: hashed; storage is written",
        "holdfast: saving step 99: trying again after: no answer",
        "",
    ]


def test_a_save_that_falls_back_to_storage_has_its_bar_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    listener = TerminalLine()
    tell(listener, [DURABLE_SAVE[0], SaveBegun(99, "storage", is_first_rank=True), *DURABLE_SAVE[1:]])
    assert terminal.getvalue().split("\r\x1b[2K") == ["", "holdfast: saving step 99 to node memory", ""]


def test_the_line_is_never_wider_than_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown_by(TerminalLine(), monkeypatch, columns=40).split("\r\x1b[2K")
    assert max(map(len, lines)) == 39


def test_other_ranks_and_logs_have_no_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tell(TerminalLine())
    assert capsys.readouterr().err == ""
    assert shown_by(TerminalLine(), monkeypatch, rank=1) == ""
