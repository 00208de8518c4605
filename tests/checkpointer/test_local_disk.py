"""Saves that go to a disk of the node before they go to the run, and restores that find them there."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from errno import EIO
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from holdfast import Checkpointer, ConfigurationError, Memory, StateError, Still, StorageError, remove
from holdfast.checkpointer import found_on_node, watcher
from holdfast.checkpointer.handle import Handle
from holdfast.checkpointer.save_machine import SaveMachine
from holdfast.checkpointer.watcher import Watcher
from holdfast.node_disk.disk_folder import DiskPart, found_parts, part_of
from holdfast.node_memory.node_folder import NodeFolder
from holdfast.node_memory.noted_disks import NotedDisk
from holdfast.node_memory.slots import Slot, SlotRecord, SlotState, slot_names
from holdfast.run.history import Run
from holdfast.store.base import Bytes
from holdfast.store.posix import PosixReader, PosixStore
from holdfast.store.urls import location_of
from tests.checkpointer.test_checkpointer import folder_of
from tests.checkpointer.test_policies import committed
from tests.keeper.test_persist import Saved
from tests.store.test_posix_storage import mounted
from tests.support.keepers import end_keepers
from tests.support.models import start_new_job
from tests.support.nursery import until
from tests.support.ranks import RankDiedError, RanksFailedError, run_ranks
from tests.support.servers.fault_proxy import FaultProxy
from tests.support.servers.faults import on
from tests.support.servers.s3 import Bucket

NUMEL = 24_000


def steps_on(disk: Path, run: str) -> dict[int, bool]:
    """The steps on a disk, and whether the run has them too."""
    if not disk.exists():
        return {}
    return {part.generation.step: part.is_drained for part in parts_on(disk, run)}


def parts_on(disk: Path, run: str) -> Iterator[DiskPart]:
    return found_parts(NotedDisk(str(disk), location_of(run).url))


def goes_down(node_dir: Path) -> None:
    """The node goes down: its keeper dies, and its memory is lost."""
    end_keepers(node_dir)
    shutil.rmtree(node_dir)
    node_dir.mkdir()
    start_new_job()


def data_file(disk: Path, step: int) -> Path:
    (found,) = disk.glob(f"*/checkpoints/step-{step:010}-*/data-00000.safetensors")
    return found


def data_files(disk: Path, step: int) -> list[Path]:
    return list(disk.glob(f"*/checkpoints/step-{step:010}-*/*.safetensors"))


def lose_from_run(run: str, step: int) -> None:
    """Take a checkpoint from the run, as one that was never brought there."""
    (commit,) = [path for path in Path(run).glob("history/*.json") if f'"step":{step}' in path.read_text()]
    commit.unlink()
    (folder,) = Path(run).glob(f"checkpoints/step-{step:010}-*")
    shutil.rmtree(folder)


def flip(path: Path) -> None:
    """Flip a bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) * 3 // 4] ^= 1
    path.write_bytes(data)


class OneRank:
    """A job of one process, with a disk."""

    def __init__(self, run: str, node_dir: Path, disk: Path) -> None:
        self.run, self.node_dir, self.disk = run, node_dir, disk
        start_new_job()
        self.state: dict[str, object] = {"w": torch.zeros(NUMEL), "step": -1}
        self.own = Checkpointer(run, self.state, memory=Memory(node_dir=node_dir), local=disk, timeout_s=30.0)

    def save(self, *steps: int) -> OneRank:
        for step in steps:
            self.state.update(w=torch.full((NUMEL,), float(step)), step=step)
            self.own.save(step).durable.wait(30)
        return self

    def restore(self) -> tuple[int | None, str | None]:
        report = self.own.restore()
        weight = self.state["w"]
        assert isinstance(weight, torch.Tensor)
        assert set(weight.tolist()) == {float(report.step or 0)}
        return report.step, report.tier


def test_the_disk_has_the_files_of_the_run_byte_for_byte_and_keeps_the_newest_two(
    run: str, node_dir: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    with OneRank(run, node_dir, disk).save(0, 1, 2).own:
        until(lambda: steps_on(disk, run) == {1: True, 2: True})
    (below,) = disk.iterdir()
    assert below.stat().st_mode & 0o777 == 0o700
    for path in below.glob("checkpoints/*/[!.]*"):
        assert path.read_bytes() == (Path(run) / path.relative_to(below)).read_bytes()
    assert len(list(below.glob("checkpoints/*/[!.]*"))) == 6


def test_after_the_node_went_down_the_disk_is_read_and_not_the_run(run: str, node_dir: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with OneRank(run, node_dir, disk).save(0, 1).own:
        pass
    goes_down(node_dir)
    for path in Path(run).glob("checkpoints/step-0000000001-*/data-*"):
        path.unlink()
    job = OneRank(run, node_dir, disk)
    with job.own:
        assert job.restore() == (1, "node disk")


def test_a_file_that_is_damaged_on_the_disk_is_read_from_the_run(
    run: str, node_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = tmp_path / "disk"
    with OneRank(run, node_dir, disk).save(0, 1).own:
        pass
    goes_down(node_dir)
    flip(data_file(disk, 1))
    job = OneRank(run, node_dir, disk)
    with job.own:
        assert job.restore() == (1, "storage")  # it was the only file
    assert "a copy of a file of checkpoint 1.2 is damaged, looking for another one" in caplog.text


def test_a_file_that_is_damaged_in_memory_is_read_from_the_disk(run: str, node_dir: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with OneRank(run, node_dir, disk).save(0, 1).own:
        pass
    with folder_of(run, node_dir) as folder:
        for name in slot_names(folder):
            with Slot(folder, name) as slot:
                if slot.record.contents is not None:
                    slot.data[slot.record.contents.data_start] ^= 1
    for path in Path(run).glob("checkpoints/step-0000000001-*/data-*"):
        path.unlink()
    job = OneRank(run, node_dir, disk)
    with job.own:
        assert job.restore() == (1, "node disk")


def test_a_file_that_the_disk_cannot_read_is_read_from_the_run(
    run: str, node_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path / "disk"
    with OneRank(run, node_dir, disk).save(0, 1).own:
        pass
    goes_down(node_dir)
    bad, read_at = str(data_file(disk, 1)), PosixReader.read_at

    def failing(self: PosixReader, offset: int, out: Bytes) -> None:
        if self._path == bad and offset:  # beyond the header
            raise StorageError(f"cannot read {bad}: {os.strerror(EIO)}.", code="storage.io", action="", path=bad)
        read_at(self, offset, out)

    monkeypatch.setattr(PosixReader, "read_at", failing)
    job = OneRank(run, node_dir, disk)
    with job.own:
        assert job.restore() == (1, "storage")  # it was the only file


def test_a_disk_that_vanishes_ends_no_save_of_a_state_that_grows_later(
    run: str, node_dir: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    job = OneRank(run, node_dir, disk).save(0)
    with job.own:
        shutil.rmtree(disk)
        job.save(1)
        job.state["more"] = torch.ones(9 * NUMEL)
        job.save(2)
    assert sorted(committed(run)) == [0, 1, 2]


def ends(job: OneRank, slot: Slot | None, part: DiskPart) -> bool:
    """Have the job watch a save that only `part` on its disk has by now. Returns whether it ends, as committed."""
    handle = Handle(part.generation.step)
    machine = SaveMachine(handle.step, handle.hear)
    machine.put(part.place)
    machine.stage(0)
    assert job.own._tier is not None
    job.own._tier.stager._watcher.add(machine, part.checkpoint_id, slot, part=part)
    handle.durable.wait(30)
    return machine.is_over


def test_a_save_ends_although_the_disk_takes_no_note_of_its_commit(
    run: str, node_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watcher, "_LOOK_BACK_S", 0.1)
    disk = tmp_path / "disk"
    job = OneRank(run, node_dir, disk).save(0, 1)
    with job.own, folder_of(run, node_dir) as folder, ExitStack() as stack:
        (part,) = [each for each in parts_on(disk, run) if each.generation.step == 0]
        seal = Path(part.store.path(part.key("seal.json")))
        seal.unlink()
        seal.mkdir()  # no file can take its place
        slots = [stack.enter_context(Slot(folder, name)) for name in slot_names(folder)]
        slot = next(slot for slot in slots if slot.record.contents and slot.record.contents.step == 1)
        assert ends(job, slot, part)


def test_a_save_ends_although_its_commit_was_removed_before_this_rank_looked(
    run: str, node_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watcher, "_LOOK_BACK_S", 0.1)
    disk = tmp_path / "disk"
    job = OneRank(run, node_dir, disk).save(0, 1)
    with job.own:
        (part,) = [each for each in parts_on(disk, run) if each.generation.step == 0]
        remove(f"{run}@step=0")
        assert ends(job, None, part)


def test_a_save_whose_file_left_memory_unwritten_ends_although_the_disk_has_files_of_other_ranks(
    node_dir: Path, tmp_path: Path
) -> None:
    run = Run.create(PosixStore(str(tmp_path / "run")))
    with NodeFolder(run.storage.location.url, node_dir=node_dir) as folder, ExitStack() as stack:
        saved = Saved(run, [folder, folder], stack, disk=str(tmp_path))
        part = part_of(tmp_path, run.run_id, saved.generation)
        part.begin()
        part.store.create(part.key("data-00000.safetensors"), b"of rank 0")
        handle = Handle(7)
        machine = SaveMachine(handle.step, handle.hear)
        machine.put(part.place)
        machine.stage(0)
        watching = Watcher(run.storage.location, node_dir, rank=1)
        watching.add(machine, part.checkpoint_id, saved.slots[1], part=part)
        saved.slots[1].advance(SlotRecord(SlotState.FREE))  # as the keeper does where it cannot hash it
        watching.begin()
        with pytest.raises(StateError, match="its node has lost it"):
            handle.durable.wait(10)
        watching.close()


def test_a_rollback_leaves_what_the_disk_has_of_the_abandoned_future(run: str, node_dir: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with OneRank(run, node_dir, disk).save(0, 1, 2).own:
        pass
    goes_down(node_dir)
    job = OneRank(run, node_dir, disk)
    with job.own:
        assert job.own.restore(at="step=0").step == 0
        job.save(7)
    goes_down(node_dir)
    job = OneRank(run, node_dir, disk)
    with job.own:
        assert job.restore() == (7, "node disk")


def test_a_disk_that_an_earlier_job_used_and_that_is_gone_ends_no_restore(
    run: str, node_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = tmp_path / "disk"
    with OneRank(run, node_dir, disk).save(0).own:
        pass
    end_keepers(node_dir)
    shutil.rmtree(disk)
    start_new_job()
    state = {"w": torch.ones(NUMEL), "step": -1}
    with Checkpointer(run, state, memory=Memory(node_dir=node_dir), timeout_s=30.0) as own:
        assert own.restore().step == 0
        own.save(1).durable.wait(30)
    assert f"'{disk}' cannot take the files" in caplog.text


@pytest.mark.parametrize("has_leftovers", [False, True])
def test_a_disk_that_has_become_read_only_ended_a_job_whose_newest_checkpoint_it_has(
    run: str, node_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, *, has_leftovers: bool
) -> None:
    with mounted(tmp_path / "mounted", "tmpfs", "size=64m") as root:
        disk = root / "disk"
        with OneRank(run, node_dir, disk).save(0, 1).own:
            pass
        goes_down(node_dir)
        lose_from_run(run, 1)
        (seal,) = disk.glob("*/checkpoints/step-0000000001-*/seal.json")
        seal.unlink()
        if has_leftovers:  # a keeper died in the middle of a removal
            (manifest,) = disk.glob("*/checkpoints/step-0000000000-*/manifest.*")
            for path in (manifest, *data_files(disk, 0)):
                path.unlink()
        subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True)
        job = OneRank(run, node_dir, disk)
        with job.own:
            assert job.restore() == (1, "node disk")
            assert f"user 0 may not write to '{disk}': its checkpoints are read" in caplog.text
            job.save(2)
        goes_down(node_dir)
        job = OneRank(run, node_dir, disk)  # the disk could take no note that the run has all of it
        with job.own:
            assert job.restore() == (2, "storage")
            job.save(3)
        assert sorted(committed(run)) == [0, 1, 2, 3]
        end_keepers(node_dir)


def test_a_folder_without_checkpoints_that_is_read_only_is_an_error(run: str, node_dir: Path, tmp_path: Path) -> None:
    with mounted(tmp_path / "mounted", "tmpfs", "size=64m,ro") as root:
        job = OneRank(run, node_dir, root)
        with job.own, pytest.raises(ConfigurationError, match="user 0 may not write to it") as raised:
            job.own.restore()
        assert raised.value.code == "config.local"


@pytest.mark.parametrize("where", ["the run itself", "in the run", "above the run", "a file", "no parent"])
def test_a_folder_that_cannot_be_used_is_an_error_of_the_restore_and_of_the_first_save(
    run: str, node_dir: Path, tmp_path: Path, where: str
) -> None:
    (tmp_path / "file").touch()
    disk = {
        "the run itself": Path(run),
        "in the run": Path(run) / "local",
        "above the run": tmp_path,
        "a file": tmp_path / "file",
        "no parent": tmp_path / "not" / "mounted",
    }[where]
    for call in ("restore", "save"):
        job = OneRank(run, node_dir, disk)
        with job.own, pytest.raises(ConfigurationError, match="before the run does") as raised:
            job.own.restore() if call == "restore" else job.own.save(0)
        assert raised.value.code == "config.local"


def test_another_users_folder_of_the_same_run_is_an_error_of_the_first_save(
    run: str, node_dir: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    with OneRank(run, node_dir, disk).save(0).own:
        pass
    (theirs,) = disk.iterdir()
    os.chown(theirs, 4242, 4242)
    job = OneRank(run, node_dir, disk)
    with job.own:
        job.own.restore()
        with pytest.raises(ConfigurationError, match="belongs to user 4242") as raised:
            job.own.save(1)
    assert raised.value.code == "config.local"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"memory": None}, "needs memory"),
        ({"takeover": "always"}, "takeover='always'"),
        ({"local": "s3://bucket/x"}, "a disk of each node"),
        ({"local": 5}, "a disk of each node"),
    ],
)
def test_options_that_do_not_fit_are_told_at_once(run: str, options: dict[str, object], error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        Checkpointer(run, {}, **{"local": "/nvme", **options})  # type: ignore[arg-type]


# --- jobs of several ranks, on two nodes, whose bucket does not answer for three saves


def node_of(root: Path, number: int) -> tuple[Memory, Path]:
    """The memory of a node, and its disk."""
    (root / f"memory{number}").mkdir(exist_ok=True)
    return Memory(node_dir=root / f"memory{number}"), root / f"disk{number}"


def sharded(step: int) -> dict[str, object]:
    """A tensor that the ranks share among them, a table that no step changes, and a value."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(NUMEL, dtype=torch.float32) * (step + 1)
    table = torch.full((NUMEL,), 0.5 if step >= 0 else 0.0)
    return {"w": distribute_tensor(whole, mesh, [Shard(0)]), "table": Still(table), "step": step}


def weight_of(state: Mapping[str, object]) -> torch.Tensor:
    weight = state["w"]
    assert isinstance(weight, DTensor)
    return weight.to_local()


def table_of(state: Mapping[str, object]) -> torch.Tensor:
    table = state["table"]
    assert isinstance(table, Still)
    assert isinstance(table.value, torch.Tensor)
    return table.value


def save_while_the_store_is_down(root: Path, environment: dict[str, str], run: str) -> None:
    os.environ.update(environment)
    start_new_job()
    rank = dist.get_rank()
    memory, disk = node_of(root, rank)
    state = sharded(-1)
    own = Checkpointer(run, state, memory=memory, local=disk, timeout_s=60.0)
    own.restore()
    table_of(state).fill_(0.5)
    for step in range(4):
        weight_of(state).copy_(weight_of(sharded(step)))
        state["step"] = step
        handle = own.save(step)
        if step == 0:
            handle.durable.wait(60)
            (root / f"saved-{rank}").touch()
            until((root / "down").exists, timeout_s=90)
        else:
            handle.staged.wait(60)
            until(lambda: step in steps_on(disk, run))  # noqa: B023 - at once
    until(lambda: len(data_files(disk, 3)) == len(data_files(disk, 0)))
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def train_on_two_nodes(root: Path, environment: dict[str, str], run: str) -> None:
    run_ranks(2, save_while_the_store_is_down, root, environment, run, timeout_s=180)


def restore_on(
    root: Path, environment: dict[str, str], run: str, nodes: list[int], then_saves: int | None
) -> tuple[int | None, str | None, bool]:
    """Restore on ranks of these nodes. Returns the step, the tier, and whether every bit is right."""
    os.environ.update(environment)
    start_new_job()
    memory, disk = node_of(root, nodes[dist.get_rank()])
    state = sharded(-1)
    with Checkpointer(run, state, memory=memory, local=disk, timeout_s=60.0) as own:
        report = own.restore()
        assert report.step is not None
        is_right = torch.equal(weight_of(state), weight_of(sharded(report.step))) and state["step"] == report.step
        is_right = is_right and torch.equal(table_of(state), torch.full((NUMEL,), 0.5))
        if then_saves is not None:
            weight_of(state).copy_(weight_of(sharded(then_saves)))
            state["step"] = then_saves
            own.save(then_saves).durable.wait(60)
    return report.step, report.tier, is_right


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_three_saves_while_the_store_is_down_survive_both_nodes_and_are_drained_when_it_is_back(
    bucket: Bucket, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = dict(bucket.behind(proxy.endpoint).environment)
    run = f"{bucket.url}/run"
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(train_on_two_nodes, tmp_path, environment, run)
        until(lambda: all((tmp_path / f"saved-{rank}").exists() for rank in (0, 1)), timeout_s=90)
        with proxy.faults(on().breaks_the_connection()):
            (tmp_path / "down").touch()
            with pytest.raises(RanksFailedError) as killed:
                training.result()
            assert all(isinstance(error, RankDiedError) for error in killed.value.exceptions), killed.value
            for number in (0, 1):
                goes_down(tmp_path / f"memory{number}")
                assert steps_on(tmp_path / f"disk{number}", run) == {0: True, 1: False, 2: False, 3: False}
    # Without the disk of one node, the head is the newest that there is. The ranks read the parts of it that the other
    # disk lacks from the run, and do not give up what that disk has of newer ones.
    assert (
        run_ranks(2, restore_on, tmp_path, environment, run, [0, 7], None, timeout_s=120)
        == [(0, "node disk", True)] * 2
    )
    # Another number of ranks, one of them on a node without a disk of the last job.
    restored = run_ranks(3, restore_on, tmp_path, environment, run, [0, 1, 8], 4, timeout_s=120)
    assert restored == [(3, "node disk", True)] * 3
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert sorted(committed(run)) == [0, 1, 2, 3, 4]
    # One file that a disk has damaged is read from the run, and the others from the disks.
    for number in (0, 1, 8):
        goes_down(tmp_path / f"memory{number}")
    (damaged,) = (tmp_path / "disk1").glob("*/checkpoints/step-0000000004-*/data-*.safetensors")
    flip(damaged)
    assert (
        run_ranks(3, restore_on, tmp_path, environment, run, [8, 0, 1], None, timeout_s=120)
        == [(4, "node disk", True)] * 3
    )
    for number in (0, 1, 7, 8):
        end_keepers(tmp_path / f"memory{number}")


def save_on(root: Path, run: str, steps: list[int]) -> None:
    """Save steps on two nodes, each of which has a disk."""
    start_new_job()
    memory, disk = node_of(root, dist.get_rank())
    state = sharded(-1)
    with Checkpointer(run, state, memory=memory, local=disk, timeout_s=60.0) as own:
        own.restore()
        table_of(state).fill_(0.5)
        for step in steps:
            weight_of(state).copy_(weight_of(sharded(step)))
            state["step"] = step
            own.save(step).durable.wait(60)


def restore_before_keepers_write(
    root: Path, run: str, nodes: list[int], then_saves: int
) -> tuple[int | None, str | None, bool]:
    """As `restore_on`, by a job that looks at what there is before any keeper brings more to the run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(found_on_node, "ensure_keeper", lambda *_: None)
        return restore_on(root, {}, run, nodes, then_saves)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_checkpoint_was_passed_over_when_the_run_had_one_file_and_a_disk_the_other(tmp_path: Path) -> None:
    """The first node had brought its file to the run, and lost its disk before the second one came to its own."""
    run = str(tmp_path / "run")
    run_ranks(2, save_on, tmp_path, run, [0, 1])
    for number in (0, 1):
        goes_down(tmp_path / f"memory{number}")
    shutil.rmtree(tmp_path / "disk0")
    (commit,) = [path for path in Path(run).glob("history/*.json") if '"step":1' in path.read_text()]
    commit.unlink()
    (theirs,) = data_files(tmp_path / "disk1", 1)
    (folder,) = Path(run).glob("checkpoints/step-0000000001-*")
    (folder / theirs.name).unlink()
    for seal in (folder / "seal.json", theirs.parent / "seal.json"):
        seal.unlink()
    assert run_ranks(2, restore_before_keepers_write, tmp_path, run, [0, 1], 2) == [(1, "node disk", True)] * 2
    assert sorted(committed(run)) == [0, 1, 2]
    for number in (0, 1):
        end_keepers(tmp_path / f"memory{number}")
