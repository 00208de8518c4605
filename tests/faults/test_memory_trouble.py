"""Memory of a node that cannot be used any more: training goes on, saves go to storage, and to memory again later."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast import Checkpointer, Memory
from holdfast.checkpointer.backoff import Backoff
from holdfast.node_memory.keeper_lock import is_kept
from holdfast.node_memory.slots import slot_names
from tests.checkpointer.test_checkpointer import Loop, folder_of, restored
from tests.store.test_posix_storage import mounted
from tests.support.keepers import end_keepers, keeper_of, keepers
from tests.support.models import start_new_job
from tests.support.nursery import until
from tests.support.ranks import run_ranks

FALLEN_BACK = "saves go to storage, and training waits for them"
AGAIN = "saves go to memory again"


def saved(loop: Loop, checkpointer: Checkpointer, step: int) -> holdfast.Handle:
    loop.step(step)
    return checkpointer.save(step)


def is_in_memory(run: str, node_dir: Path) -> bool:
    with folder_of(run, node_dir) as folder:
        return bool(slot_names(folder))


def test_the_node_folder_is_removed_while_running(run: str, node_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    # As logind does with RemoveIPC=yes, when the last session of the user ends.
    loop = Loop()
    with Checkpointer(run, loop.state, memory=Memory(node_dir=node_dir)) as checkpointer:
        saved(loop, checkpointer, 0).durable.wait(60)
        shutil.rmtree(folder_of(run, node_dir).path.parent)
        assert saved(loop, checkpointer, 1).durable.is_done
        assert FALLEN_BACK in caplog.text
        assert "its folder was removed" in caplog.text
        assert AGAIN not in caplog.text
        saved(loop, checkpointer, 2).durable.wait(60)
        assert AGAIN in caplog.text
        assert is_in_memory(run, node_dir)
        saved(loop, checkpointer, 3)
    assert restored(run, Memory(node_dir=node_dir)) == ("node memory", 4, loop.bits())


def test_what_was_staged_is_durable_although_its_folder_is_removed(run: str, node_dir: Path) -> None:
    loop = Loop()
    with Checkpointer(run, loop.state, memory=Memory(node_dir=node_dir), timeout_s=20) as checkpointer:
        saved(loop, checkpointer, 0).durable.wait(60)
        with folder_of(run, node_dir) as folder:
            keeper = keeper_of(folder.path)
            stored = Path(run) / "checkpoints"
            stored.rename(run + ".away")
            stored.touch()
            handle = saved(loop, checkpointer, 1)
            until(lambda: bool(handle.trouble))  # it is sealed, and storage was asked
            shutil.rmtree(folder.path.parent)
        stored.unlink()
        Path(run + ".away").rename(stored)
        handle.durable.wait(60)
        until(lambda: keeper not in keepers(node_dir))  # nobody can find it any more
        saved(loop, checkpointer, 2)
    for step in range(3):
        assert holdfast.open(f"{run}@step={step}").step == step


def test_what_the_node_and_its_keeper_lost_is_told(run: str, node_dir: Path) -> None:
    loop = Loop()
    checkpointer = Checkpointer(run, loop.state, memory=Memory(node_dir=node_dir), timeout_s=20)
    saved(loop, checkpointer, 0).durable.wait(60)
    with folder_of(run, node_dir) as folder:
        os.kill(keeper_of(folder.path), signal.SIGSTOP)
        lost = saved(loop, checkpointer, 1)
        lost.staged.wait(60)
        shutil.rmtree(folder.path.parent)
    end_keepers(node_dir)
    with pytest.raises(holdfast.StorageError, match="step 1 is lost: its snapshot") as caught:
        lost.durable.wait(60)
    assert caught.value.code == "storage.memory_removed"
    assert saved(loop, checkpointer, 2).durable.is_done
    saved(loop, checkpointer, 3).durable.wait(60)
    checkpointer.close()
    assert holdfast.open(run).step == 3


def test_a_keeper_that_is_dead_and_cannot_be_started(
    run: str, node_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop()
    with Checkpointer(run, loop.state, memory=Memory(node_dir=node_dir)) as checkpointer:
        saved(loop, checkpointer, 0).durable.wait(60)
        with monkeypatch.context() as broken, folder_of(run, node_dir) as folder:
            broken.setattr(sys, "executable", "/bin/false")
            end_keepers(node_dir)
            until(lambda: not is_kept(folder))
            for step in (1, 2):
                assert saved(loop, checkpointer, step).durable.is_done
            assert "config.keeper" in caplog.text
            assert slot_names(folder) == []  # given back at once
        # Tried again by 2, in vain, and after that by the second save.
        assert saved(loop, checkpointer, 3).durable.is_done
        assert AGAIN not in caplog.text
        saved(loop, checkpointer, 4)
        assert AGAIN in caplog.text
    assert restored(run, Memory(node_dir=node_dir)) == ("node memory", 5, loop.bits())


def test_a_keeper_that_cannot_be_executed(run: str, node_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop()
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with Checkpointer(run, loop.state, memory=Memory(node_dir=node_dir)) as checkpointer:
        assert saved(loop, checkpointer, 0).durable.is_done
    assert holdfast.open(run).step == 0


@pytest.mark.parametrize("num_inodes", range(3, 12, 2))
@pytest.mark.few(1)
def test_a_tmpfs_is_out_of_inodes(run: str, tmp_path: Path, num_inodes: int, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop()
    with mounted(tmp_path / "shm", "tmpfs", f"size=400m,nr_inodes={num_inodes}") as node_dir:
        memory = Memory(node_dir=node_dir)
        with Checkpointer(run, loop.state, memory=memory, timeout_s=20) as checkpointer:
            assert checkpointer.restore().step is None
            handles = [saved(loop, checkpointer, step) for step in range(4)]
            until(lambda: all(handle.durable.is_over for handle in handles))
            assert FALLEN_BACK in caplog.text
            assert "No space left" in caplog.text
            # There is room again.
            os.system(f"mount -o remount,nr_inodes=100 {node_dir}")
            for step in range(4, 24):
                saved(loop, checkpointer, step)
            assert AGAIN in caplog.text
        assert restored(run, memory) == ("node memory", 24, loop.bits())
        end_keepers(node_dir)


def test_memory_is_given_back_after_a_fall_back_and_used_again_when_it_is_free(
    run: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop()
    loop.state["large"] = torch.ones(24 << 20, dtype=torch.uint8)
    with mounted(tmp_path / "shm", "tmpfs", "size=340m") as node_dir:
        memory = Memory(node_dir=node_dir)
        with Checkpointer(run, loop.state, memory=memory) as checkpointer:
            handles = [saved(loop, checkpointer, 0)]
            loop.state["more"] = torch.ones(30 << 20, dtype=torch.uint8)
            handles.append(saved(loop, checkpointer, 1))
            assert FALLEN_BACK in caplog.text
            for handle in handles:
                handle.durable.wait(60)
            until(lambda: not is_in_memory(run, node_dir))
            until(lambda: os.statvfs(node_dir).f_bfree > 330 << 20 >> 12)
            for step in (2, 3):
                assert saved(loop, checkpointer, step).durable.is_done
            del loop.state["more"]
            for step in range(4, 8):
                saved(loop, checkpointer, step)
            assert AGAIN in caplog.text
        assert is_in_memory(run, node_dir)
        assert holdfast.open(run).step == 7
        end_keepers(node_dir)


def fall_back_together(run: str, node_dirs: list[Path]) -> list[bool]:
    """Of two nodes, one loses its folder: whether each save was durable when it returned."""
    import torch.distributed as dist

    start_new_job()
    rank = dist.get_rank()
    found = []
    state: dict[str, object] = {"own": holdfast.PerRank(torch.full((1000,), float(rank))), "w": torch.ones(3)}
    with Checkpointer(run, state, memory=Memory(node_dir=node_dirs[rank])) as checkpointer:
        for step in range(4):
            checkpointer.wait()
            dist.barrier()
            if step == 1 and rank == 1:
                shutil.rmtree(folder_of(run, node_dirs[1]).path.parent)
            dist.barrier()
            found.append(checkpointer.save(step).durable.seconds is not None)
            time.sleep(0.05)
    return found


def test_all_nodes_fall_back_and_come_back_together(run: str, tmp_path: Path) -> None:
    node_dirs = [tmp_path / f"node{number}" for number in range(2)]
    for path in node_dirs:
        path.mkdir()
    found = run_ranks(2, fall_back_together, run, node_dirs)
    assert [each[1] for each in found] == [True, True]
    for path in node_dirs:
        assert is_in_memory(run, path)
        end_keepers(path)
    assert holdfast.open(run).step == 3


def test_memory_is_tried_again_by_the_next_save_and_then_ever_more_rarely() -> None:
    backoff = Backoff().after_fall_back()
    tried = []
    for save in range(1, 70):
        if not backoff.num_put_off:
            tried.append(save)
        backoff = backoff.after_fall_back()
    assert tried == [1, 3, 7, 15, 31, 47, 63]


def test_ranks_that_heard_of_trouble_at_different_saves_try_memory_again_at_the_same_one() -> None:
    ranks = [Backoff(), Backoff(2, 8), Backoff(5, 8)]
    for save in range(20):
        together = Backoff.merged(ranks)
        assert bool(together.num_put_off) == (save not in (5, 13)), save
        ranks = [together.after_fall_back() for _ in ranks]
