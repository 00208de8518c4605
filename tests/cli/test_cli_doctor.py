"""``holdfast doctor`` names and explains the leftovers of crashes, and repairs them on request."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import holdfast
from tests.support.command_line import at_terminal, copy_of, damage, folder_of, holdfast_command


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 1 to 3."""
    path = tmp_path_factory.mktemp("runs") / "gpt"
    for step in (1, 2, 3):
        holdfast.save(path, {"w": torch.arange(step * 10.0)}, step)
    return path


@pytest.fixture
def run(sound: Path, tmp_path: Path) -> Path:
    """A copy of it: the commit of step 3 is missing, and of step 2 everything but the manifest and half a file."""
    copy = copy_of(sound, tmp_path)
    (copy / "history" / "9999999998-9999999996.json").unlink()
    (copy / "history" / "9999999998-9999999997.json").unlink()
    unfinished = folder_of(copy, 2)
    (unfinished / "seal.json").unlink()
    (unfinished / "data-00000.safetensors").rename(unfinished / ".tmp-data-00000.safetensors-0")
    an_hour_ago = time.time() - 3600
    os.utime(unfinished / ".tmp-data-00000.safetensors-0", (an_hour_ago, an_hour_ago))
    return copy


def codes(run: Path) -> list[tuple[str, str]]:
    return sorted((one["code"], one["remedy"]) for one in holdfast_command("doctor", "--json", run).json["left"])


def test_a_sound_run_has_no_findings(sound: Path) -> None:
    done = holdfast_command("doctor", "--deep", sound)
    assert (done.status, done.lines) == (0, [f"{sound}: nothing is wrong; the head is step 3 at 1.3"])


def test_findings_are_explained_with_what_to_do(run: Path) -> None:
    done = holdfast_command("doctor", run)
    assert done.status == 1
    assert done.lines[0].endswith("the head is step 1 at 1.1")
    assert "finish  folder.complete" in done.out
    assert "Finish it: it then becomes the head, unless a later one is finished too." in done.out
    assert "wait  leftover.in_progress" not in done.out
    assert [line.split("  ")[1] for line in done.lines[-3:]] == [
        f"holdfast doctor {run} {options}" for options in ("--finish", "--remove", "--remove --force")
    ]


def test_only_deep_examination_at_a_terminal_shows_that_it_goes_on(sound: Path) -> None:
    assert "verifying 1.3" in at_terminal("doctor", "--deep", str(sound)).out
    assert "examining" not in at_terminal("doctor", str(sound)).out
    assert "examining" not in at_terminal("doctor", "--deep", "--json", str(sound)).out
    assert holdfast_command("doctor", "--deep", sound).err == ""


def test_examining_changes_nothing(run: Path) -> None:
    before = sorted(path for path in run.rglob("*"))
    holdfast_command("doctor", "--deep", run)
    assert sorted(path for path in run.rglob("*")) == before


def test_finish_commits_what_is_complete_and_says_what_became_of_the_head(run: Path) -> None:
    done = holdfast_command("doctor", "--finish", run)
    assert "finished " in done.out
    assert "the head was step 1 at 1.1 and is step 3 at 1.3" in done.out
    assert holdfast.open(run).step == 3
    assert "folder.complete" not in dict(codes(run))


def test_remove_deletes_nothing_without_a_confirmation(run: Path) -> None:
    before = codes(run)
    done = holdfast_command("doctor", "--remove", "--force", run)
    assert (done.status, "--yes" in done.err) == (2, True)
    assert at_terminal("doctor", "--remove", "--force", str(run), answer="n\n").status == 1
    assert codes(run) == before


def test_remove_deletes_what_nobody_can_finish_and_nothing_else(run: Path) -> None:
    done = holdfast_command("doctor", "--remove", "--force", "--yes", "--json", run)
    assert done.json["removed"] != []
    assert codes(run) == [("folder.complete", "finish")]
    assert not list(folder_of(run, 2).glob("data-*"))
    assert holdfast_command("verify", "--deep", run).status == 0


def test_what_may_be_in_progress_is_removed_by_force_only(sound: Path, tmp_path: Path) -> None:
    copy = copy_of(sound, tmp_path)
    (copy / ".tmp-holdfast.json-0").write_text("x")
    assert holdfast_command("doctor", "--remove", "--yes", copy).status == 1
    assert (copy / ".tmp-holdfast.json-0").exists()
    (copy / "notes.txt").write_text("not ours")
    done = holdfast_command("doctor", "--remove", "--force", "--yes", copy)
    assert (done.status, done.err) == (1, ""), "what is not ours stays, and nobody tries"
    assert not (copy / ".tmp-holdfast.json-0").exists()
    assert (copy / "notes.txt").exists()


def test_remove_that_has_to_wait_says_that_it_removed_nothing_and_for_how_long(sound: Path, tmp_path: Path) -> None:
    copy = copy_of(sound, tmp_path)
    (copy / "history" / "9999999998-9999999996.json").unlink()
    failed = folder_of(copy, 3)  # as after a full disk: the save has its manifest, and no data
    (failed / "seal.json").unlink()
    (failed / "data-00000.safetensors").unlink()
    done = holdfast_command("doctor", "--remove", "--yes", copy)
    assert (done.status, failed.exists()) == (1, True)
    assert "removed nothing: a save may still be in progress" in done.out
    (left_s,) = re.findall(r"look again in ([0-9]+) s", done.out)
    assert 0 < int(left_s) <= 900
    assert "removed nothing" not in holdfast_command("doctor", copy).out
    forced = holdfast_command("doctor", "--remove", "--force", "--yes", copy)
    assert (forced.status, "removed nothing" in forced.out) == (0, False)


def test_remove_deletes_at_once_what_a_dead_process_left_and_not_what_a_live_one_writes(
    sound: Path, tmp_path: Path
) -> None:
    copy = copy_of(sound, tmp_path)
    begin = (
        "import sys, time\n"
        "from holdfast.store.posix import PosixStore\n"
        "writer = PosixStore(sys.argv[1]).writer('checkpoints/step-0000000004-0011223344556677/x', nbytes=1 << 20)\n"
        "print('begun', flush=True)\n"
        "time.sleep(100)"
    )
    writers = []
    for _ in range(2):
        with (tmp_path / "log").open("w+") as log:
            writers.append(subprocess.Popen([sys.executable, "-c", begin, str(copy)], stdout=log))
            while not (tmp_path / "log").read_text():
                time.sleep(0.01)
    left = sorted((copy / "checkpoints").rglob(".tmp-*"))
    a_minute_ago = time.time() - 60
    for path in left:
        os.utime(path, (a_minute_ago, a_minute_ago))
    writers[0].kill()
    writers[0].wait()
    done = holdfast_command("doctor", "--remove", "--yes", "--json", copy)
    writers[1].kill()
    writers[1].wait()
    assert len(left) == 2
    assert (len(done.json["removed"]), len(list((copy / "checkpoints").rglob(".tmp-*")))) == (1, 1)
    assert holdfast_command("doctor", "--remove", "--yes", copy).status == 0


def test_both_repairs_together_leave_a_run_without_findings(run: Path) -> None:
    assert at_terminal("doctor", "--finish", "--remove", "--force", str(run), answer="y\n").status == 0
    assert codes(run) == []
    assert holdfast.open(run).step == 3


def test_what_cannot_be_finished_is_said_and_the_rest_is_done(run: Path) -> None:
    damage(folder_of(run, 3) / "data-00000.safetensors", at=0.99)
    done = holdfast_command("doctor", "--finish", run)
    assert (done.status, "corrupt" in done.err) == (1, True)
    assert holdfast.open(run).step == 1


def test_a_damaged_record_of_the_head_does_not_keep_the_doctor_from_looking(sound: Path, tmp_path: Path) -> None:
    copy = copy_of(sound, tmp_path)
    damage(copy / "history" / "9999999998-9999999996.json")
    done = holdfast_command("doctor", copy)
    assert (done.status, "unreadable (corrupt.record)" in done.lines[0]) == (1, True)
    assert "record.damaged" in done.out
