"""``holdfast verify`` checks structure, every byte, and whole runs; it names all damage, and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import holdfast
from holdfast.checkpoint.fault import Fault
from holdfast.cli import verify as verifying
from holdfast.format.records import Place, commit_key
from holdfast.run.history import Run
from holdfast.run.leases import want_leases
from holdfast.store.base import Location
from holdfast.store.urls import open_store
from tests.support.command_line import (
    INTERRUPT,
    Stored,
    at_terminal,
    copy_of,
    damage,
    folder_of,
    holdfast_command,
    publish_step,
    rows,
    stored_run,
)
from tests.support.nursery import until
from tests.support.published import EPOCHS, RUN_ID, begin, put

LARGE_NBYTES = 512 << 20


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 1 to 3, of 5 MB each."""
    path = tmp_path_factory.mktemp("runs") / "gpt"
    for step in (1, 2, 3):
        state = {f"w{n}": torch.full((300_000,), float(step + n)) for n in range(4)}
        holdfast.save(path, {**state, "epoch": step}, step)
    return path


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one checkpoint that takes a while to read."""
    path = tmp_path_factory.mktemp("runs") / "large"
    holdfast.save(path, {"w": torch.zeros(LARGE_NBYTES // 4)}, 1)
    return path


@pytest.mark.parametrize("suffix", ["", "@step=2", "@1.1"])
@pytest.mark.parametrize("options", [[], ["--deep"]])
def test_a_sound_checkpoint_is_found_sound(run: Path, suffix: str, options: list[str]) -> None:
    done = holdfast_command("verify", *options, f"{run}{suffix}")
    assert done.status == 0
    assert done.out.startswith("sound: " if options else "structure sound: "), "what was not read is not called sound"
    assert ("every byte checked" in done.out) == bool(options)


@pytest.mark.parametrize("name", ["manifest.hfm", "seal.json"])
def test_damaged_records_are_findings_that_name_the_file(run: Path, tmp_path: Path, name: str) -> None:
    copy = copy_of(run, tmp_path)
    damage(folder_of(copy, 3) / name)
    done = holdfast_command("verify", copy)
    assert done.status == 1
    assert done.out.startswith("1 finding: ")
    assert name in done.out
    assert holdfast_command("verify", f"{copy}@step=2").status == 0


def test_damaged_data_is_found_by_reading_all_of_it(run: Path, tmp_path: Path) -> None:
    copy = copy_of(run, tmp_path)
    data = folder_of(copy, 3) / "data-00000.safetensors"
    damage(data)
    assert holdfast_command("verify", copy).status == 0, "nobody read the data"
    done = holdfast_command("verify", "--deep", copy)
    assert done.status == 1
    assert str(data) in done.out
    assert "1 of 5 blocks of 1 MiB does not match its digest (number 2)" in done.out


def test_all_damage_of_a_file_is_found_at_once_with_its_tensors(run: Path, tmp_path: Path) -> None:
    copy = copy_of(run, tmp_path)
    data = folder_of(copy, 3) / "data-00000.safetensors"
    damage(data, at=0.1)
    damage(data, at=0.9)
    (report,) = holdfast_command("verify", "--deep", "--json", copy).json["checkpoints"]
    (fault,) = report["findings"]
    assert (fault["code"], fault["path"]) == ("corrupt.file", str(data))
    assert "2 of 5 blocks of 1 MiB do not match their digests (number 0, 4)" in fault["message"]
    # Tensors have 1.2 MB each, so the first block lies in the first, and the last in the last.
    assert fault["tensors"] == ["w0", "w3", "@values"]


def test_headers_are_compared_byte_for_byte(run: Path, tmp_path: Path) -> None:
    copy = copy_of(run, tmp_path)
    file = folder_of(copy, 3) / "data-00000.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"F32"', b'"I32"', 1))
    (report,) = holdfast_command("verify", "--json", copy).json["checkpoints"]
    assert [fault["code"] for fault in report["findings"]] == ["corrupt.header"]
    assert report["findings"][0]["tensors"] == [], "no tensor is lost: a load needs no header"


@pytest.mark.parametrize("harm", ["missing", "short", "long", "swapped"])
def test_a_file_that_is_not_the_sealed_one_is_a_finding_with_all_its_tensors(tmp_path: Path, harm: str) -> None:
    tensors = {f"w{n}": Stored("int64", np.arange(8) + n, *rows(2)) for n in range(20)}
    run = stored_run(tmp_path / "run", tensors)
    first, second = sorted(run.rglob("data-*"))
    if harm == "missing":
        second.unlink()
    elif harm == "swapped":
        second.write_bytes(first.read_bytes())
    else:
        data = second.read_bytes()
        second.write_bytes(data[:-1] if harm == "short" else data + b"x")
    done = holdfast_command("verify", "--json", run)
    (report,) = done.json["checkpoints"]
    (fault,) = report["findings"]
    assert (done.status, fault["path"], fault["num_tensors"]) == (1, str(second), 20)
    assert len(fault["tensors"]) == 16
    assert "w0, w1, w10, w11, w12 and 15 more" in holdfast_command("verify", run).out


def test_one_bad_file_does_not_hide_another(tmp_path: Path) -> None:
    run = stored_run(tmp_path / "run", {"w": Stored("int64", np.arange(64), *rows(4))})
    files = sorted(run.rglob("data-*"))
    files[0].unlink()
    damage(files[2], at=0.999)
    (report,) = holdfast_command("verify", "--deep", "--json", run).json["checkpoints"]
    assert [fault["path"] for fault in report["findings"]] == [str(files[0]), str(files[2])]


def test_a_file_that_the_seal_does_not_list_is_a_finding_and_nothing_more(run: Path, tmp_path: Path) -> None:
    copy = copy_of(run, tmp_path)
    extra = folder_of(copy, 3) / "notes.txt"
    extra.write_text("mine")
    done = holdfast_command("verify", copy)
    assert (done.status, "extra.file" in done.out, str(extra) in done.out) == (1, True, True)
    assert holdfast.load(copy, into={f"w{n}": torch.zeros(300_000) for n in range(4)} | {"epoch": 0}).step == 3


def test_json_says_sound_only_of_data_that_was_read(run: Path, tmp_path: Path) -> None:
    assert holdfast_command("verify", "--json", run).json["sound"] is None
    assert holdfast_command("verify", "--json", "--deep", run).json["sound"] is True
    copy = copy_of(run, tmp_path)
    damage(folder_of(copy, 3) / "data-00000.safetensors")
    assert holdfast_command("verify", "--json", copy).json["sound"] is None
    assert holdfast_command("verify", "--json", "--deep", copy).json["sound"] is False


@pytest.mark.parametrize("options", [[], ["--all"], ["--deep"]])
@pytest.mark.parametrize("harm", ["damaged", "missing"])
def test_a_bad_epoch_record_is_reported_by_verify_as_well_as_by_doctor(
    run: Path, tmp_path: Path, options: list[str], harm: str
) -> None:
    copy = copy_of(run, tmp_path)
    into = {f"w{n}": torch.zeros(300_000) for n in range(4)} | {"epoch": 0}
    holdfast.load(f"{copy}@step=2", into=into)
    holdfast.save(copy, into, 3)
    record = copy / "epochs" / "9999999998.json"
    if harm == "damaged":
        damage(record)
    else:
        record.unlink()
    for command in (["verify", *options, str(copy)], ["doctor", str(copy)]):
        done = holdfast_command(*command)
        assert (done.status, str(record) in done.out) == (1, True), command
    (fault,) = holdfast_command("verify", "--json", *options, copy).json["findings"]
    assert fault["path"] == str(record)


def test_a_lost_commit_from_which_an_epoch_was_opened_is_a_finding(run: Path, tmp_path: Path) -> None:
    copy = copy_of(run, tmp_path)
    into = {f"w{n}": torch.zeros(300_000) for n in range(4)} | {"epoch": 0}
    holdfast.load(f"{copy}@step=2", into=into)
    origin = Run.open(open_store(Location(str(copy)))).find(step=2).place
    holdfast.save(copy, into, 3)
    record = copy / commit_key(origin)
    record.unlink()
    done = holdfast_command("verify", copy, "--deep", "--all", "--json")
    assert (done.status, [fault["code"] for fault in done.json["findings"]]) == (1, ["commit.missing"])
    assert done.json["findings"][0]["path"] == str(record)


@pytest.mark.parametrize("lost", ["epochs/9999999997.json", "history"])
@pytest.mark.parametrize("options", [[], ["--deep", "--all"]])
def test_a_run_whose_head_nobody_can_load_is_not_called_sound(
    run: Path, tmp_path: Path, options: list[str], lost: str
) -> None:
    copy = copy_of(run, tmp_path)
    into = {f"w{n}": torch.zeros(300_000) for n in range(4)} | {"epoch": 0}
    holdfast.load(f"{copy}@step=2", into=into)
    holdfast.save(copy, into, 3)
    if lost == "history":
        shutil.rmtree(copy / lost)
    else:
        (copy / lost).unlink()
    with pytest.raises(holdfast.CorruptError, match=r"corrupt\.history"):
        holdfast.load(copy, into=into)
    done = holdfast_command("verify", copy, *options, "--json")
    assert done.status == 1
    assert not done.json["sound"]
    assert done.json["findings"] or done.json["checkpoints"][0]["findings"]


def test_a_damaged_header_is_reported_by_doctor_as_well_as_by_verify(run: Path, tmp_path: Path) -> None:
    copy = copy_of(run, tmp_path)
    file = folder_of(copy, 2) / "data-00000.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"F32"', b'"I32"', 1))
    for command in (["verify", "--all", str(copy)], ["doctor", str(copy)]):
        done = holdfast_command(*command)
        assert (done.status, "corrupt.header" in done.out, str(file) in done.out) == (1, True, True), command


def test_a_lone_folder_is_verified_by_its_seal(run: Path) -> None:
    assert holdfast_command("verify", "--deep", folder_of(run, 1)).status == 0


def test_all_verifies_every_commit_also_abandoned_ones(run: Path, tmp_path: Path) -> None:
    copy = copy_of(run, tmp_path)
    done = holdfast_command("verify", "--all", copy)
    assert done.lines[-1].startswith("3 checkpoints, all sound in structure; files, sizes,")
    assert done.out.count("--deep") == 1
    assert holdfast_command("verify", "--all", "--deep", copy).lines[-1] == "3 checkpoints, all sound"
    (folder_of(copy, 1) / "data-00000.safetensors").unlink()
    damage(folder_of(copy, 2) / "seal.json")
    done = holdfast_command("verify", "--all", copy)
    assert done.status == 1
    assert done.lines[-1].startswith("3 checkpoints, 2 with findings;")
    reports = holdfast_command("verify", "--all", "--json", copy).json["checkpoints"]
    assert [bool(report["findings"]) for report in reports] == [False, True, True]


def test_all_goes_on_after_a_damaged_commit(tmp_path: Path) -> None:
    storage = begin(RUN_ID, EPOCHS[0])
    for seq in (1, 2, 3):
        publish_step(storage, Place(1, seq), {"w": Stored("uint8", np.zeros(2, np.uint8))})
    run = put(storage.objects, tmp_path / "run")
    damage(run / "history" / "9999999998-9999999997.json")
    reports = holdfast_command("verify", "--all", "--json", run).json["checkpoints"]
    assert [(report["step"], len(report["findings"])) for report in reports] == [(103, 0), (None, 1), (101, 0)]


def test_a_run_without_commits_has_nothing_to_verify(tmp_path: Path) -> None:
    run = put(begin(RUN_ID).objects, tmp_path / "run")
    assert holdfast_command("verify", "--all", run).lines == ["0 checkpoints, nothing to verify"]
    assert holdfast_command("verify", run).status == 3


def test_only_a_terminal_gets_a_progress_bar(run: Path) -> None:
    shown = at_terminal("verify", "--deep", str(run)).out
    assert "verifying 1.3" in shown
    assert "of 4.6 MiB" in shown
    assert "verifying" not in at_terminal("verify", "--deep", "--json", str(run)).out
    done = holdfast_command("verify", "--deep", run)
    assert (done.err, len(done.lines)) == ("", 1)


def test_an_interrupt_ends_long_reading_quietly(large: Path) -> None:
    done = at_terminal("verify", "--deep", str(large), answer=INTERRUPT, when="verifying")
    assert done.status == 130
    assert "Error" not in done.out
    assert "sound" not in done.out


def test_verifying_everything_takes_little_memory(large: Path) -> None:
    code = (
        "import re, sys\n"
        "from holdfast.cli import run\n"
        "try: run(['verify', '--deep', sys.argv[1]])\n"
        "finally: print(re.search('VmHWM:\\s*(.*) kB', open('/proc/self/status').read())[1])"
    )
    command = [sys.executable, "-c", code, str(large)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {"COLUMNS": "100"})
    assert int(done.stdout.splitlines()[-1]) << 10 < LARGE_NBYTES / 2


def test_a_folder_in_the_place_of_a_commit_is_a_finding_beside_the_others(run: Path, tmp_path: Path) -> None:
    copy = copy_of(run, tmp_path)
    newest = min((copy / "history").iterdir())
    newest.unlink()
    newest.mkdir()
    done = holdfast_command("verify", "--all", "--json", copy)
    assert done.status == 1
    codes = [[found["code"] for found in each["findings"]] for each in done.json["checkpoints"]]
    assert codes == [["corrupt.history"], [], []]


def test_closed_and_full_outputs_do_not_look_like_a_finding(run: Path) -> None:
    python = [sys.executable, "-m", "holdfast"]
    for command in (["ls", str(run)], ["ls", str(run), "--json"], ["verify", str(run), "--json"]):
        shell = ["/bin/sh", "-c", 'exec "$@" >&-', "sh"]
        closed = subprocess.run([*shell, *python, *command], capture_output=True, check=False)
        assert (closed.returncode, closed.stderr) == (0, b"")
        with Path("/dev/full").open("w") as full:
            done = subprocess.run([*python, *command], stdout=full, stderr=subprocess.PIPE, check=False)
        assert done.returncode == 3
        assert b"[storage.output] standard output takes no more: No space left on device." in done.stderr
        assert b"Traceback" not in done.stderr
    for command, code in ((["show", f"{run}@step=99", "--json"], b"not_found."), (["show", "--json"], b"config.usage")):
        with Path("/dev/full").open("w") as full:
            done = subprocess.run([*python, *command], stdout=full, stderr=subprocess.PIPE, check=False)
        assert done.returncode
        assert code in done.stderr, "an error that standard output does not take is on standard error"


def test_a_policy_deletes_no_checkpoint_while_verify_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holdfast.save(tmp_path / "run", {"w": torch.zeros(10)}, 1)
    storage = open_store(Location(str(tmp_path / "run")))
    want_leases(storage)
    found: list[list[str]] = []

    def read(*_: object, **__: object) -> list[Fault]:
        until(lambda: any(".until-" in name for name in storage.list("pins")))
        found.append(storage.list("pins"))
        return []

    monkeypatch.setattr(verifying, "verify_checkpoint", read)
    assert verifying.verify(str(tmp_path / "run"), deep=True, every=False, as_json=True)
    assert len(found) == 1
    until(lambda: not any(".until-" in name for name in storage.list("pins")))
