"""Signed checkpoints that leave still files to earlier ones: what is signed and what is not never share a file."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast import Checkpointer, ConfigurationError, CorruptError, Memory
from holdfast.checkpoint.stored_checkpoint import Checkpoint
from holdfast.checkpoint.verification import verify_checkpoint
from holdfast.format.container import TABLE_OFFSET
from holdfast.format.records import REFERENCES
from holdfast.run.diagnosis import examine
from holdfast.signing import KEYS, REQUIRED, SIGNED
from tests.saving.test_references import Job, assert_equal, folder_of, loaded, opened, run, still_in
from tests.support.keepers import end_keepers
from tests.support.models import start_new_job
from tests.support.ranks import run_ranks

__all__ = ["run"]

KEY = "ab" * 32
STILL, MARK = "still-00001.safetensors", "still-00001.same.json"


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(KEYS, KEY)
    monkeypatch.setenv(REQUIRED, "1")
    return KEY


def sealed(run: str, step: int) -> dict[str, object]:
    """The seal of a checkpoint, as JSON."""
    found = json.loads((folder_of(run, step) / "seal.json").read_text())
    assert isinstance(found, dict)
    return found


def still_seal(run: str, step: int) -> dict[str, object]:
    files = sealed(run, step)["files"]
    assert isinstance(files, list)
    (found,) = (file for file in files if file["name"] == STILL)
    assert isinstance(found, dict)
    return found


def assert_sound(run: str, step: int) -> None:
    checkpoint = Checkpoint(opened(run).locate(opened(run).find(step=step)))
    assert verify_checkpoint(checkpoint, deep=True) == []


def test_a_signed_checkpoint_refers_to_a_signed_one_by_a_digest_that_nobody_can_match(run: str, key: str) -> None:
    job = Job()
    job.save(run, 1)
    assert job.save(run, 2).referenced_nbytes > 0
    assert still_in(run, 2) == [MARK]
    assert sealed(run, 2)["reader_features"] == [SIGNED, REFERENCES]
    data, own = (folder_of(run, 1) / STILL).read_bytes(), folder_of(run, 1).name.rpartition("-")[2]
    header = data[: int.from_bytes(data[:8], "little") + 8].replace(own.encode(), b"0" * 16, 1)
    content = hashlib.sha256(header).hexdigest()
    assert [still_seal(run, step)["content"] for step in (1, 2)] == [content, content]
    assert still_seal(run, 2)["checkpoint"] == folder_of(run, 1).name
    assert_sound(run, 2)
    assert_equal(loaded(run), job.bits())
    assert examine(opened(run)) == []


def test_a_bit_of_the_shared_file_that_somebody_changes_with_its_digest_is_found(run: str, key: str) -> None:
    job = Job()
    for step in (1, 2):
        job.save(run, step)
    path = folder_of(run, 1) / STILL
    data = bytearray(path.read_bytes())
    start = int.from_bytes(data[:8], "little") + 8
    data[start] ^= 1
    data[TABLE_OFFSET : TABLE_OFFSET + 64] = hashlib.sha256(data[start : start + (1 << 20)]).hexdigest().encode()
    path.write_bytes(data)
    for step in (1, 2):
        with pytest.raises(CorruptError) as error:
            loaded(f"{run}@step={step}")
        assert error.value.code == "corrupt.file"
    # The next save refers to what was sealed, or writes its own bytes: it never takes over what was changed.
    job.save(run, 3)
    assert still_seal(run, 3)["content"] == still_seal(run, 1)["content"]


def test_the_first_signed_checkpoint_takes_no_file_of_those_before(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    for step in (1, 2):
        job.save(run, step)
    monkeypatch.setenv(KEYS, KEY)
    assert job.save(run, 3).referenced_nbytes == 0
    assert still_in(run, 3) == [STILL]
    assert not list(Path(run, "references").glob(f"*.{folder_of(run, 3).name}.*"))
    assert job.save(run, 4).referenced_nbytes > 0
    assert still_seal(run, 4)["checkpoint"] == folder_of(run, 3).name
    for step in (1, 2, 3, 4):
        assert_sound(run, step)
    assert_equal(loaded(run), job.bits())


def test_a_checkpoint_that_is_not_signed_takes_no_file_of_a_signed_one(
    run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job()
    job.save(run, 1)
    monkeypatch.setenv(KEYS, KEY)
    job.save(run, 2)
    # Somebody goes on from a checkpoint that is not signed, and has no key any more.
    holdfast.load(f"{run}@step=1", job.state)
    monkeypatch.delenv(KEYS)
    third = job.save(run, 3)
    assert sealed(run, 3)["reader_features"] in ([], [REFERENCES])
    assert still_seal(run, 3).get("checkpoint") in (None, folder_of(run, 1).name)
    assert third.written_nbytes > 0
    assert_equal(loaded(run), job.bits())
    assert_sound(run, 3)


def test_a_job_that_lost_its_key_does_not_go_on_from_a_signed_head(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    monkeypatch.setenv(KEYS, KEY)
    job.save(run, 1)
    monkeypatch.delenv(KEYS)
    with pytest.raises(ConfigurationError) as error:
        job.save(run, 2)
    assert error.value.code == "config.signing_key"


def test_a_compacted_signed_checkpoint_needs_no_other_one(run: str, key: str) -> None:
    job = Job()
    for step in (1, 2):
        job.save(run, step)
    assert holdfast.compact(run) > 0
    shutil.rmtree(folder_of(run, 1))
    assert_sound(run, 2)
    assert_equal(loaded(str(folder_of(run, 2))), job.bits())


def test_the_keeper_refers_to_signed_files_and_memory_has_all_of_them(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (node_dir := tmp_path / "memory").mkdir()
    job = Job()

    def save(*steps: int) -> None:
        with Checkpointer(run, job.state, memory=Memory(node_dir=node_dir)) as own:
            for step in steps:
                job.train()
                job.state["step"] = step
                own.save(step).durable.wait(60.0)

    save(1)
    start_new_job()
    end_keepers(node_dir)  # the keeper has no key
    monkeypatch.setenv(KEYS, KEY)
    with Checkpointer(run, job.state, memory=Memory(node_dir=node_dir)) as own:
        own.restore()
    save(2, 3)
    assert [still_in(run, step) for step in (1, 2, 3)] == [[STILL], [STILL], [MARK]]
    for step in (1, 2, 3):
        assert_sound(run, step)
    start_new_job()
    again = Job(seed=7)
    again.train()
    with Checkpointer(run, again.state, memory=Memory(node_dir=node_dir)) as own:
        assert own.restore().tier == "node memory"
    assert_equal(again.bits(), job.bits())
    end_keepers(node_dir)
    assert_equal(loaded(run), job.bits())


def save_on_ranks(run: str, key: str) -> list[int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEYS, key)
        state = {"base": holdfast.Still(torch.arange(1 << 20, dtype=torch.float32)), "w": torch.zeros(8)}
        return [holdfast.save(run, state, step).referenced_nbytes for step in (1, 2)]


def test_ranks_sign_what_they_refer_to(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The processes of the ranks live on, so they get the key for this call alone, and not from this process.
    first, second = map(sum, zip(*run_ranks(2, save_on_ranks, run, KEY), strict=True))
    assert first == 0 < second
    start_new_job()
    monkeypatch.setenv(KEYS, KEY)
    assert_sound(run, 2)
    assert torch.equal(holdfast.open(run)["base"][...], torch.arange(1 << 20, dtype=torch.float32))
