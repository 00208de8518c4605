"""``holdfast gc`` says what it deletes, its bytes, and why; asks first, and deletes; on disks and in buckets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.format.records import SEAL_NAME, Place
from holdfast.run.history import Run
from holdfast.store.urls import location_of, open_store
from tests.run.test_garbage import OLD, cut_off
from tests.support.checkpoints import begin, names
from tests.support.command_line import at_terminal, holdfast_command
from tests.support.servers.s3 import Bucket


def littered(run: str) -> str:
    """Save the steps 1 and 2 into `run`, and leave the parts of a killed save; returns their folder."""
    for step in (1, 2):
        holdfast.save(run, {"w": torch.arange(step * 10.0)}, step)
    found = opened(run)
    folder = cut_off(found, Place(1, 3))
    begin(found, opened_from=Place(1, 2))
    return folder


def opened(run: str) -> Run:
    return Run.open(open_store(location_of(run)))


def steps(run: str) -> list[int]:
    return [each.step for each in holdfast.ls(run)]


def test_a_dry_run_says_what_would_go_its_bytes_and_why_and_changes_nothing(run: str) -> None:
    folder = littered(run)
    under_way = cut_off(opened(run), Place(2, 1))
    Path(run, "notes.txt").write_bytes(b"mine")
    before = sorted(Path(run).rglob("*"))
    done = holdfast_command("gc", run, "--dry-run")
    size = sum(file.stat().st_size for file in Path(run, "checkpoints", folder).iterdir())
    assert done.status == 0
    assert done.lines[0].startswith(f"{run}: would delete {size / 1024:.1f} KiB; keeps ")
    assert [line.split()[:3] for line in done.lines[2:]] == [
        ["delete", f"checkpoints/{folder}", "2"],
        ["keep", f"checkpoints/{under_way}", "2"],
        ["keep", "notes.txt", "1"],
    ]
    assert "parts of a save or copy that was cut off" in done.lines[2]
    assert "its epoch, 2, is the newest" in done.lines[3]
    assert sorted(Path(run).rglob("*")) == before


def test_it_deletes_and_then_finds_nothing(run: str) -> None:
    folder = littered(run)
    done = holdfast_command("gc", run, "--yes")
    assert done.status == 0
    assert done.lines[0].startswith(f"{run}: deletes ")
    assert done.lines[-1].startswith("deleted 2 files, ")
    assert (steps(run), names(opened(run), folder)) == ([2, 1], [SEAL_NAME])
    assert holdfast_command("gc", run, "--yes").lines == [f"{run}: no garbage"]
    assert holdfast_command("doctor", run).status == 0


@pytest.mark.parametrize(("answer", "left"), [("y\n", 1), ("n\n", 2)])
def test_it_asks_first(run: str, answer: str, left: int) -> None:
    folder = littered(run)
    done = at_terminal("gc", run, answer=answer)
    assert "This cannot be undone." in done.out
    assert len(names(opened(run), folder)) == left
    assert (done.status == 0) == (left == 1)


def test_without_a_terminal_it_needs_a_yes(run: str) -> None:
    folder = littered(run)
    done = holdfast_command("gc", run)
    assert (done.status, len(names(opened(run), folder))) == (2, 2)
    assert "config.confirmation" in done.err


def test_as_json_it_is_one_document(run: str) -> None:
    folder = littered(run)
    planned = holdfast_command("gc", run, "--dry-run", "--json").json
    done = holdfast_command("gc", run, "--yes", "--json").json
    assert [(each["path"], each["kind"]) for each in done["deleted"]] == [(f"checkpoints/{folder}", "parts")]
    assert (planned["dry_run"], done["dry_run"]) == (True, False)
    assert planned["deleted"] == done["deleted"]
    assert done["deleted_nbytes"] == sum(each["nbytes"] for each in done["deleted"]) > 0
    assert (done["left"], done["kept"], done["kept_nbytes"], done["remark"]) == ([], [], 0, "")


def test_a_longer_time_of_grace_keeps_more(run: str) -> None:
    folder = littered(run)
    temporary = Path(run, "history", ".tmp-0123456789abcdef")
    temporary.write_bytes(b"half")
    os.utime(temporary, (OLD, OLD))
    found = holdfast_command("gc", run, "--yes", "--json", "--grace", "1h").json
    assert [(each["path"], each["kind"]) for each in found["deleted"]] == [("history", "temporary")]
    assert [(each["path"], each["kind"]) for each in found["kept"]] == [(f"checkpoints/{folder}", "young")]


@pytest.mark.parametrize("text", ["soon", "0s", "59s", "-1h"])
def test_a_time_of_grace_that_is_none_or_too_short_is_refused(run: str, text: str) -> None:
    folder = littered(run)
    done = holdfast_command("gc", run, "--yes", f"--grace={text}")
    assert (done.status, len(names(opened(run), folder))) == (2, 2)
    assert "config.option" in done.err


def test_in_a_bucket_it_does_the_same_and_names_the_rule_for_uploads(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    run = f"{bucket.url}/runs/a"
    folder = littered(run)
    begin(opened(run), opened_from=Place(1, 2))
    under_way = cut_off(opened(run), Place(3, 1))
    assert "AbortIncompleteMultipartUpload" in holdfast_command("gc", run, "--dry-run").lines[-1]
    done = holdfast_command("gc", run, "--yes", "--json").json
    assert [each["path"] for each in done["deleted"]] == [f"checkpoints/{folder}"]
    assert [each["kind"] for each in done["kept"]] == ["newest_epoch"]
    assert (names(opened(run), folder), len(names(opened(run), under_way))) == ([SEAL_NAME], 2)
    assert steps(run) == [2, 1]
