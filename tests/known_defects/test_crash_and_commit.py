"""Defects of publication: what is named as a checkpoint and is none, and what a crash or a failure leaves behind."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import CorruptError, NotFoundError, StorageError
from holdfast.store.posix import PosixStore
from tests.known_defects.saved import content, data_file, failing, folder, record, told_of_calls
from tests.support.models import start_new_job
from tests.support.ranks import RanksFailedError, run_processes


def state(value: float) -> dict[str, object]:
    return {"weight": torch.full((64,), value), "epoch": int(value)}


def value_of_head(run: Path) -> float:
    view = holdfast.open(run)
    weight = view["weight"][:]
    assert bool((weight == weight[0]).all())
    assert view.value("epoch") == weight[0]
    return float(weight[0])


def die_before_the_commit(_: int, run: str) -> None:
    """Save the step that is there already, with other content, and die when all but the commit is written."""
    start_new_job()
    holdfast.load(run, into=state(0), continues=True)
    create = PosixStore.create

    def deadly(self: PosixStore, key: str, data: bytes) -> bool:
        if key.startswith("history/"):
            os.kill(os.getpid(), signal.SIGKILL)
        return create(self, key, data)

    PosixStore.create = deadly  # type: ignore[method-assign]
    holdfast.save(run, state(2), 1)


def test_a_crash_while_overwriting_leaves_old_metadata_over_new_data(tmp_path: Path) -> None:
    """A save under an existing name dies before its metadata: the old metadata now describes new or mixed data.

    Seen in: PyTorch DCP 2.13 (``overwrite=True`` by default), ByteCheckpoint 0.0.3 (overwrites in place).
    """
    run = tmp_path / "run"
    holdfast.save(run, state(1), 1)
    before = content(run)
    with pytest.raises(RanksFailedError, match="killed by SIGKILL"):
        run_processes(1, die_before_the_commit, str(run))
    assert value_of_head(run) == 1
    after = content(run)
    assert {name: after[name] for name in before} == before  # not one byte of it was touched
    assert len(after) > len(before)


def test_a_step_that_is_saved_again_replaces_what_was_there(tmp_path: Path) -> None:
    """The second save of a step overwrites the first, which somebody may be reading.

    Seen in: Megatron-LM (warns "overwriting incomplete" and goes on in place), PyTorch DCP 2.13.
    """
    run = tmp_path / "run"
    first = holdfast.save(run, state(1), 7)
    view = holdfast.open(run)
    second = holdfast.save(run, state(2), 7)
    assert torch.equal(view["weight"][:], torch.full((64,), 1.0))
    assert value_of_head(run) == 2
    assert holdfast.open(f"{run}@{first.place}").value("epoch") == 1
    assert first.path != second.path


class Log:
    """The operations of a save on files, in order: a word and the name that a user knows, or the folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.events: list[tuple[str, str]] = []
        self.durable_nbytes: dict[int, int] = {}

    def __call__(self, call: str, args: tuple[Any, ...], result: Any) -> None:
        if call == "fsync":
            status = os.fstat(args[0])
            path = os.readlink(f"/proc/self/fd/{args[0]}")
            if stat.S_ISDIR(status.st_mode):
                self.events.append(("durable", self.name(path)))
            else:
                self.durable_nbytes[status.st_ino] = status.st_size
        if call == "link":
            status = os.stat(args[1])
            whole = self.durable_nbytes.get(status.st_ino) == status.st_size
            self.events.append(("named" if whole else "named before it was durable", self.name(args[1])))
        if call == "unlink" and ".tmp-" not in str(args[0]):
            self.events.append(("removed", self.name(args[0])))

    def name(self, path: str) -> str:
        return str(Path(path).relative_to(self.root.parent))


@pytest.fixture
def log(tmp_path: Path) -> Log:
    """The operations of the second save of a run."""
    run = tmp_path / "run"
    holdfast.save(run, state(1), 1)
    log = Log(run)
    with told_of_calls(log):
        holdfast.save(run, state(2), 2)
    return log


def test_the_commit_record_is_not_durable(log: Log) -> None:
    """The metadata file is fsynced before Python's buffer is flushed: of 829 bytes 0 are durable at its rename.

    Seen in: PyTorch DCP 2.13, ByteCheckpoint 0.0.3; fsspec variant pytorch/pytorch#183878.
    """
    named = [name for word, name in log.events if word.startswith("named")]
    assert len(named) == 4  # manifest, data, seal, commit
    assert "named before it was durable" not in {word for word, _ in log.events}


def test_folders_are_never_made_durable(log: Log) -> None:
    """Files are fsynced but their folder is not: after a power loss some or all of the names are gone.

    Seen in: PyTorch DCP 2.13, Megatron-LM, nvidia-resiliency-ext, DLRover, Orbax, torch_checkpointing.
    """
    for number, (word, name) in enumerate(log.events):
        if word == "named":
            assert log.events[number + 1] == ("durable", str(Path(name).parent))


def test_the_tracker_is_written_before_the_data(log: Log) -> None:
    """``latest`` names the checkpoint while other ranks still write it, or never will.

    Seen in: DeepSpeed 0.19.6 (before the final barrier), DLRover (``writing_shm``: tracker without any file).
    """
    named = [Path(name).name for word, name in log.events if word == "named"]
    kinds = [name.split(".")[0].split("-")[0] for name in named]
    assert kinds[:3] == ["manifest", "data", "seal"]
    assert log.events[-1] == ("durable", "run/history")


def test_a_window_without_any_metadata(log: Log) -> None:
    """The old metadata is unlinked before the new one is renamed: a crash in between leaves no checkpoint at all.

    Seen in: PyTorch DCP 2.13.
    """
    assert [event for event in log.events if event[0] == "removed"] == []


def test_a_partial_folder_with_the_highest_number_is_resumed_from(tmp_path: Path) -> None:
    """Of a folder of checkpoints the one with the greatest number is taken, though its save never finished.

    Seen in: Lightning-AI/pytorch-lightning#688, huggingface/transformers#35580, vllm-project/speculators#739.
    """
    run = tmp_path / "run"
    holdfast.save(run, state(1), 1)
    partial = run / "checkpoints" / "step-0000000099-0123456789abcdef"
    shutil.copytree(folder(run), partial)
    assert value_of_head(run) == 1
    assert holdfast.open(run).step == 1
    (partial / "seal.json").unlink()
    with pytest.raises(NotFoundError, match="step 99"):
        holdfast.open(f"{run}@step=99")
    with pytest.raises(NotFoundError):
        holdfast.open(partial)


def test_a_copied_checkpoint_is_taken_for_a_leftover(tmp_path: Path) -> None:
    """A checkpoint that was copied with ordinary tools is not recognised and deleted as temporary.

    Seen in: Orbax, google/orbax#394.
    """
    holdfast.save(tmp_path / "run", state(1), 1)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    start_new_job()
    holdfast.load(tmp_path / "copy", into=state(0), continues=True)
    before = content(tmp_path / "copy")
    holdfast.save(tmp_path / "copy", state(2), 2)
    assert before.items() <= content(tmp_path / "copy").items()
    assert value_of_head(tmp_path / "copy") == 2
    assert value_of_head(tmp_path / "run") == 1


def test_an_incomplete_copy_hangs_every_later_resume(tmp_path: Path) -> None:
    """A copy lacks files: each resume picks it, and hangs or fails without saying what is missing.

    Seen in: NVIDIA-NeMo/Automodel#3261, RLinf/RLinf#1469.
    """
    holdfast.save(tmp_path / "run", state(1), 1)
    for pattern in ("seal.json", "manifest*", "*.safetensors"):
        copy = tmp_path / f"copy-without-{pattern.strip('*.')}"
        shutil.copytree(tmp_path / "run", copy, ignore=shutil.ignore_patterns(pattern))
        with pytest.raises((CorruptError, NotFoundError)) as raised:
            holdfast.load(copy, into=state(0))
        path = Path(raised.value.path or "")
        assert path.match(pattern)
        assert copy in path.parents


def test_a_torn_tracker_is_read_as_no_checkpoint(tmp_path: Path) -> None:
    """The tracker is empty or cut short after a crash, and training starts from scratch or from an older state.

    Seen in: Megatron-LM (``latest_checkpointed_iteration.txt`` and ``metadata.json`` are written in place).
    """
    run = tmp_path / "run"
    for step in (1, 2):
        holdfast.save(run, state(step), step)
    newest = record(run, "history")
    for data in (b"", newest.read_bytes()[:40]):
        newest.write_bytes(data)
        with pytest.raises(CorruptError) as raised:
            holdfast.open(run)
        assert raised.value.path == str(newest)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=["full", "broken"])
def test_a_writer_that_failed_counts_as_success(tmp_path: Path, number: int) -> None:
    """A writer thread fails, as on a full disk; `save` returns, the metadata is published, and a load finds nothing.

    Seen in: PyTorch DCP 2.13, pytorch/pytorch#191391; ByteDance-Seed/VeOmni#1162 (exit status 0, no checkpoint).
    """
    run = tmp_path / "run"
    holdfast.save(run, state(1), 1)
    with failing("pwrite", number), pytest.raises(StorageError, match=re.escape(os.strerror(number))):
        holdfast.save(run, state(2), 2)
    assert value_of_head(run) == 1
    assert len(list((run / "history").iterdir())) == 1


def test_one_failed_save_fails_all_later_ones(tmp_path: Path) -> None:
    """After one failed write every later save fails too, although the disk is sound again.

    Seen in: ByteCheckpoint 0.0.3 (stale futures), PyTorch DCP 2.13 (a dead writer process is never started again).
    """
    run = tmp_path / "run"
    holdfast.save(run, state(1), 1)
    for step, call in enumerate(["pwrite", "ftruncate", "fsync", "link"], start=2):
        with failing(call, errno.ENOSPC), pytest.raises(StorageError):
            holdfast.save(run, state(2), step)
        assert list(run.rglob(".tmp-*")) == []
        assert value_of_head(run) == step - 1
        holdfast.save(run, state(step), step)
    assert value_of_head(run) == 5


def test_a_rolled_back_run_goes_on_from_the_abandoned_future(tmp_path: Path) -> None:
    """A job goes back to an older step; the next restart resumes from the greatest step again.

    Seen in: mosaicml/composer#3902 (wrong checkpoint picked by autoresume).
    """
    run = tmp_path / "run"
    for step in (1, 2, 3):
        holdfast.save(run, state(step), step)
    start_new_job()
    into = state(0)
    holdfast.load(f"{run}@step=1", into=into, continues=True)
    holdfast.save(run, state(20), 2)
    assert holdfast.open(run).step == 2
    assert value_of_head(run) == 20


def test_a_job_that_was_replaced_overwrites_its_successor(tmp_path: Path) -> None:
    """A process frees or takes what another one owns by now, both write, and the newer state is lost.

    Seen in: DLRover (the shard lock is released twice and frees the one that another process has taken).
    """
    run = tmp_path / "run"
    holdfast.save(run, state(1), 1)
    assert run_processes(1, resume_and_save, str(run)) == [2]
    with pytest.raises(holdfast.FencedError, match="another job"):
        holdfast.save(run, state(9), 9)
    assert value_of_head(run) == 2


def resume_and_save(_: int, run: str) -> int:
    start_new_job()
    into = state(0)
    step = holdfast.load(run, into=into, continues=True).step
    return holdfast.save(run, state(step + 1), step + 1).step


def test_a_new_job_saves_over_the_history_of_another(tmp_path: Path) -> None:
    """A job that starts from scratch in the folder of an older one mixes its steps with the older ones.

    Seen in: PyTorch DCP 2.13, Megatron-LM (non-empty folders are written into).
    """
    run = tmp_path / "run"
    holdfast.save(run, state(1), 1)
    start_new_job()
    before = content(run)
    with pytest.raises(holdfast.ConfigurationError, match="has a history"):
        holdfast.save(run, state(2), 1)
    assert content(run) == before
    assert data_file(run).exists()
