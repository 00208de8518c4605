"""The doctor of a run: its findings, its advice, and its repairs."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from holdfast.errors import ConfigurationError, CorruptError
from holdfast.format import records
from holdfast.format.records import Commit, Place
from holdfast.run.diagnosis import Finding, examine, finish, remove
from holdfast.run.history import Run
from holdfast.run.rollback import rollback
from holdfast.store.base import Location
from holdfast.store.urls import open_store
from tests.support.checkpoints import begin, check, names, publish_manifest, save, write, write_data

LONG_AGO_S = 3600.0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def run(root: Path) -> Run:
    """A sound run with the steps 10 and 20."""
    run = Run.create(open_store(Location(str(root))))
    begin(run)
    save(run, Place(1, 1), 10)
    save(run, Place(1, 2), 20)
    return run


def the(run: Run, *, deep: bool = False) -> Finding:
    (finding,) = examine(run, deep=deep)
    return finding


def file_of(root: Path, commit: Commit, name: str) -> Path:
    return root / "checkpoints" / commit.checkpoint / name


def begun(run: Run, place: Place, step: int, *, age_s: float = LONG_AGO_S) -> str:
    """The folder of a save that came as far as its first data file."""
    folder = publish_manifest(run, place, step, created=time.time() - age_s)
    write_data(run, folder, 0)
    return folder


def test_nothing_is_found_in_a_sound_run(run: Run) -> None:
    assert examine(run) == examine(run, deep=True) == []
    rollback(run, 10)
    assert examine(run) == []


def test_a_checkpoint_with_all_its_files_can_be_finished(run: Run) -> None:
    folder = write(run, Place(1, 3), 30)
    finding = the(run)
    assert (finding.code, finding.remedy, finding.folder) == ("folder.complete", "finish", folder)
    assert finding.path == run.storage.path(f"checkpoints/{folder}")
    assert "lacks a seal and a commit" in finding.text
    assert "the head" in finding.text
    commit = finish(run, finding)
    assert run.head() == commit
    check(run, commit)
    assert examine(run) == []


def test_a_sealed_one_lacks_only_its_commit_and_an_old_one_does_not_become_the_head(run: Run) -> None:
    head = save(run, Place(1, 4), 40)
    commit = save(run, Place(1, 3), 30)
    run.storage.delete(records.commit_key(commit.place))
    finding = the(run)
    assert finding.remedy == "finish"
    assert "lacks a commit" in finding.text
    assert "appears at its place" in finding.text
    assert finish(run, finding) == commit
    assert run.head() == head


def test_data_is_read_before_a_checkpoint_is_finished(run: Run, root: Path) -> None:
    folder = write(run, Place(1, 3), 30)
    path = root / "checkpoints" / folder / "data-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(CorruptError, match=r"data-00001\.safetensors"):
        finish(run, the(run))
    finding = the(run, deep=True)
    assert (finding.code, finding.remedy) == ("folder.damaged", "remove")
    remove(run, finding)
    assert examine(run) == []
    assert run.head() == run.find(step=20)


def test_an_unfinished_save_is_removed_and_can_never_be_finished_afterwards(run: Run) -> None:
    folder = begun(run, Place(1, 3), 30)
    finding = the(run)
    assert (finding.code, finding.remedy) == ("folder.unfinished", "remove")
    assert "lacks data-00001.safetensors" in finding.text
    with pytest.raises(ConfigurationError, match="cannot finish"):
        finish(run, finding)
    remove(run, finding)
    assert names(run, folder) == ["seal.json"]
    assert examine(run) == []
    remove(run, finding)  # again: there is nothing left to do


def test_a_save_that_may_be_at_work_is_removed_by_force_only(run: Run) -> None:
    folder = begun(run, Place(1, 3), 30, age_s=5.0)
    finding = the(run)
    assert (finding.code, finding.remedy) == ("folder.in_progress", "none")
    assert "may be in progress" in finding.text
    with pytest.raises(ConfigurationError, match="cannot remove"):
        remove(run, finding)
    assert len(names(run, folder)) == 2
    remove(run, finding, force=True)
    assert examine(run) == []


def test_a_save_of_an_older_epoch_is_not_at_work_any_more_unless_somebody_writes(run: Run, root: Path) -> None:
    folder = begun(run, Place(1, 3), 30, age_s=5.0)
    rollback(run, 10)
    assert the(run).code == "folder.unfinished"
    (root / "checkpoints" / folder / ".tmp-0123456789abcdef").write_bytes(b"half")
    assert [finding.code for finding in examine(run)] == ["folder.in_progress", "leftover.in_progress"]


def test_a_finding_that_is_old_news_does_no_harm(run: Run) -> None:
    folder = begun(run, Place(1, 3), 30)
    finding = the(run)
    write_data(run, folder, 1)
    with pytest.raises(ConfigurationError, match="has all its files"):
        remove(run, finding)
    finish(run, the(run))
    with pytest.raises(ConfigurationError, match="is a committed checkpoint"):
        remove(run, finding)
    head = run.head()
    assert head is not None
    check(run, head)


def test_leftovers_are_removed_once_nobody_writes_to_them(run: Run, root: Path) -> None:
    head = run.find(step=20)
    paths = [root / ".tmp-1", root / "history" / ".tmp-2", file_of(root, head, ".tmp-3")]
    for path in paths:
        path.write_bytes(b"half")
    assert {(finding.code, finding.remedy) for finding in examine(run)} == {("leftover.in_progress", "none")}
    with pytest.raises(ConfigurationError, match="is writing"):
        remove(run, examine(run)[0])
    for path in paths:
        os.utime(path, (time.time() - LONG_AGO_S,) * 2)
    findings = examine(run)
    assert {finding.path for finding in findings} == {str(path) for path in paths}
    for finding in findings:
        assert (finding.code, finding.remedy) == ("leftover", "remove")
        remove(run, finding)
    assert examine(run) == []
    check(run, head)


@pytest.mark.parametrize("name", ["seal.json", "manifest.hfm", "data-00001.safetensors", ""])
def test_a_commit_that_lost_a_file_is_said_and_left_alone(run: Run, root: Path, name: str) -> None:
    head = run.find(step=20)
    if name:
        file_of(root, head, name).unlink()
    else:
        for path in file_of(root, head, "").iterdir():
            path.unlink()
    finding = the(run)
    assert (finding.code, finding.remedy, finding.folder) == ("commit.damaged", "none", head.checkpoint)
    assert (name or "seal.json") in finding.path
    assert "1.2 (step 20) was committed" in finding.text
    assert "Restore" in finding.text
    for act in (finish, remove):
        with pytest.raises(ConfigurationError, match="the doctor cannot"):
            act(run, finding)


def test_a_file_that_was_cut_is_found_at_once_and_a_flipped_bit_by_reading_all(run: Run, root: Path) -> None:
    path = file_of(root, run.find(step=10), "data-00000.safetensors")
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    assert the(run).code == "commit.damaged"
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert the(run, deep=True).code == "commit.damaged"


def test_records_that_are_missing_or_bad_are_said(run: Run, root: Path) -> None:
    rollback(run, 10)
    (root / records.commit_key(Place(1, 2))).write_bytes(b"{}")
    (root / records.commit_key(Place(1, 1))).unlink()
    (root / records.epoch_key(1)).unlink()
    findings = examine(run)
    codes = [finding.code for finding in findings]
    assert sorted(codes[:3]) == ["commit.missing", "epoch.missing", "record.damaged"]
    # The checkpoints themselves are sound: one only lost its commit, and one says what its damaged record was.
    assert {each.code for each in findings[:3] if each.remedy == "finish"} == {"record.damaged"}
    assert [finding.code for finding in findings[3:]] == ["folder.complete"]


def test_what_belongs_to_another_run_is_left_alone(run: Run, tmp_path: Path) -> None:
    other = Run.create(open_store(Location(str(tmp_path / "other"))))
    folder = write(other, Place(1, 3), 30)
    (tmp_path / "other/checkpoints" / folder).rename(tmp_path / "run/checkpoints" / folder)
    finding = the(run)
    assert (finding.code, finding.remedy) == ("folder.foreign", "none")
    assert "belongs to another run" in finding.text


def test_a_second_checkpoint_of_a_place_is_left_alone(run: Run) -> None:
    write(run, Place(1, 2), 30)
    assert (the(run).code, the(run).remedy) == ("folder.superseded", "none")


def test_unknown_names_are_said_and_left_alone(run: Run, root: Path) -> None:
    head = run.find(step=20)
    paths = [root / "notes.txt", root / "checkpoints/best", root / "epochs/x", root / "history/y"]
    paths.append(file_of(root, head, "z"))
    for path in paths:
        path.write_text("mine")
    findings = examine(run)
    assert {finding.path for finding in findings} == {str(path) for path in paths}
    assert {(finding.code, finding.remedy) for finding in findings} == {("unknown.name", "none")}


def test_a_run_inside_of_a_run_is_called_one(run: Run, root: Path) -> None:
    inner = Run.create(open_store(Location(str(root / "inner"))))
    (finding,) = examine(run)
    assert (finding.code, finding.path) == ("unknown.name", inner.storage.location.url)
    assert "a run of its own inside this run" in finding.text


def test_a_copy_that_was_made_during_a_save_is_understood(run: Run, root: Path) -> None:
    folder = write(run, Place(1, 3), 30)
    commit = finish(run, the(run))
    for name in names(run, folder):
        file_of(root, commit, name).unlink()
    file_of(root, commit, "").rmdir()
    finding = the(run)
    assert (finding.code, finding.remedy) == ("commit.damaged", "none")
    assert "this copy of the run is incomplete" in finding.text


def test_a_folder_that_is_empty_or_lost_its_manifest_is_nothing_to_finish(run: Run, root: Path) -> None:
    (root / "checkpoints" / records.folder_name(30, "ab" * 8)).mkdir()
    assert examine(run) == []
    folder = write(run, Place(1, 3), 40)
    (root / "checkpoints" / folder / "manifest.hfm").unlink()
    finding = the(run)
    assert (finding.code, finding.remedy) == ("folder.unfinished", "remove")
    remove(run, finding)
    assert examine(run) == []


def test_a_sealed_checkpoint_that_lost_a_file_is_removed_so_that_nobody_can_commit_it(run: Run, root: Path) -> None:
    commit = save(run, Place(1, 3), 30)
    run.storage.delete(records.commit_key(commit.place))
    file_of(root, commit, "data-00000.safetensors").unlink()
    os.utime(file_of(root, commit, "seal.json"))
    rollback(run, 10)
    finding = the(run)
    assert (finding.code, finding.remedy) == ("folder.unfinished", "remove")
    remove(run, finding)
    run.publish(commit)  # by somebody who had found it complete and slept
    assert run.places() == [Place(1, 2), Place(1, 1)]
