"""`Checkpointer`s of several ranks on nodes that folders emulate: restores, lost memory, copies that fail."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

import holdfast
from holdfast import Checkpointer, Memory, RestoreReport, StateError
from holdfast.node_memory.arena import Arena
from holdfast.node_memory.slots import Slot, slot_names
from tests.checkpointer.test_checkpointer import Loop, folder_of, holdfast_rollback, late_copies
from tests.faults.test_engine_faults import fill
from tests.store.test_posix_storage import mounted
from tests.support.keepers import end_keepers
from tests.support.models import start_new_job
from tests.support.nursery import until
from tests.support.ranks import run_ranks

SHAPE = (12, 10)


def full(step: int) -> torch.Tensor:
    return torch.arange(120.0).reshape(SHAPE) * (step + 1)


def sharded(step: int, *, dim: int) -> dict[str, object]:
    """A tensor over all ranks, and one that all hold."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"w": distribute_tensor(full(step), mesh, [Shard(dim)]), "progress": {"step": step}}


def save_steps(run: str, node_dirs: Sequence[Path], steps: Sequence[int]) -> None:
    start_new_job()
    memory = Memory(node_dir=node_dirs[dist.get_rank() % len(node_dirs)])
    state = sharded(-1, dim=0)
    with Checkpointer(run, state, memory=memory, timeout_s=20.0) as checkpointer:
        checkpointer.restore()
        for step in steps:
            state["w"].copy_(sharded(step, dim=0)["w"])  # type: ignore[attr-defined]
            state["progress"]["step"] = step  # type: ignore[index]
            checkpointer.save(step).staged.wait(60)


def restore_columns(run: str, node_dirs: Sequence[Path]) -> tuple[str | None, int, bool]:
    report, same = restored_columns(run, node_dirs)
    return report.tier, report.next_step, same


def restored_columns(run: str, node_dirs: Sequence[Path]) -> tuple[RestoreReport, bool]:
    """The report of a restore, by columns, and whether all bits are those of the restored step."""
    start_new_job()
    memory = Memory(node_dir=node_dirs[dist.get_rank() % len(node_dirs)])
    state = sharded(-1, dim=1)
    with Checkpointer(run, state, memory=memory) as checkpointer:
        report = checkpointer.restore()
    assert report.step is not None
    wanted = sharded(report.step, dim=1)
    weight, other = state["w"], wanted["w"]
    assert isinstance(weight, DTensor)
    assert isinstance(other, DTensor)
    return report, torch.equal(weight.to_local(), other.to_local()) and state["progress"] == wanted["progress"]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Path]]:
    paths = [tmp_path / f"node{number}" for number in range(3)]
    for path in paths:
        path.mkdir()
    yield paths
    for path in paths:
        end_keepers(path)


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_ranks_of_another_layout_restore_from_the_memory_of_several_nodes(
    run: str, nodes: list[Path], world_size: int
) -> None:
    run_ranks(2, save_steps, run, nodes[:2], (1, 2))
    # One rank is on one node, and cannot see the other's memory.
    tier = "storage" if world_size == 1 else "node memory"
    assert run_ranks(world_size, restore_columns, run, nodes[:2]) == [(tier, 3, True)] * world_size


def save_in_memory(run: str, node_dirs: Sequence[Path], step: int) -> bool:
    start_new_job()
    memory = Memory(node_dir=node_dirs[dist.get_rank() % len(node_dirs)])
    state = sharded(-1, dim=0)
    with Checkpointer(run, state, memory=memory, timeout_s=20.0) as checkpointer:
        checkpointer.restore()
        state["w"].copy_(sharded(step, dim=0)["w"])  # type: ignore[attr-defined]
        state["progress"]["step"] = step  # type: ignore[index]
        checkpointer.save(step, memory_only=True).staged.wait(20)
    return True


def test_a_job_on_some_of_the_nodes_that_saves_nothing_leaves_the_newest_snapshot_to_one_on_all(
    run: str, nodes: list[Path]
) -> None:
    """Its restore gave up what lacked the memory of the other nodes, so the next job found nothing of it either."""
    run_ranks(2, save_steps, run, nodes[:2], (1, 2))
    assert all(run_ranks(2, save_in_memory, run, nodes[:2], 3))
    assert run_ranks(1, restore_columns, run, nodes[:1]) == [("storage", 3, True)]
    assert run_ranks(2, restore_columns, run, nodes[:2]) == [("node memory", 4, True)] * 2
    run_ranks(1, save_steps, run, nodes[:1], (4,))  # the run goes on without it
    assert run_ranks(2, restore_columns, run, nodes[:2]) == [("node memory", 5, True)] * 2


def lose_a_slot_once(run: str, node: Path) -> list[int]:
    """Rank 0 finds no slot for step 1, though all have agreed that there is one. Returns the steps that are durable."""
    start_new_job()
    state = sharded(-1, dim=0)
    with Checkpointer(run, state, memory=Memory(node_dir=node), timeout_s=20.0) as checkpointer:
        handles = [checkpointer.save(0)]
        handles[0].durable.wait(20.0)
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 0:
                patch.setattr(Arena, "take", lambda *_: None)
            handles.append(checkpointer.save(1))
            time.sleep(1.0)  # the copy has failed on rank 0 by then
        handles += [checkpointer.save(step) for step in (2, 3)]
        for handle in handles:
            until(lambda handle=handle: handle.durable.is_over)  # type: ignore[misc]
    return [handle.step for handle in handles if handle.durable.is_done]


def test_a_rank_that_alone_gives_its_memory_back_does_not_keep_the_others_waiting(run: str, nodes: list[Path]) -> None:
    """It looked at its slots once more than the others, and all of them waited for `timeout_s`."""
    first, second = run_ranks(2, lose_a_slot_once, run, nodes[0])
    assert first == second == [0, 2, 3]


def test_when_a_node_has_lost_its_memory_all_restore_from_storage(run: str, nodes: list[Path]) -> None:
    run_ranks(2, save_steps, run, nodes[:2], (1, 2))
    with folder_of(run, nodes[1]) as folder:
        for name in slot_names(folder):
            folder.remove(name)
    assert run_ranks(4, restore_columns, run, nodes[:2]) == [("storage", 3, True)] * 4


def test_of_what_is_in_memory_the_newest_that_is_whole_is_restored(run: str, nodes: list[Path]) -> None:
    run_ranks(2, save_steps, run, nodes[:2], (1, 2))
    with folder_of(run, nodes[1]) as folder:
        held = {name: Slot(folder, name) for name in slot_names(folder)}
        newest = max(held, key=lambda name: held[name].record.contents.place)  # type: ignore[union-attr]
        held[newest].remove()
        for slot in held.values():
            slot.close()
    holdfast_rollback(run, "step=1")
    assert run_ranks(4, restore_columns, run, nodes[:2]) == [("node memory", 2, True)] * 4


def test_a_rank_that_was_not_in_the_last_job_does_not_hold_up_saves_with_the_old_snapshots_of_its_node(
    run: str, nodes: list[Path]
) -> None:
    run_ranks(2, save_steps, run, nodes[:2], (1, 2))
    run_ranks(1, save_steps, run, nodes[:1], (3, 4))
    run_ranks(2, save_steps, run, nodes[:2], (5, 6, 7))
    assert run_ranks(2, restore_columns, run, nodes[:2]) == [("node memory", 8, True)] * 2


@pytest.mark.slow
def test_a_node_that_comes_back_does_not_hold_up_saves_when_no_checkpoint_is_whole_in_memory(
    run: str, nodes: list[Path]
) -> None:
    first, second, third = nodes
    run_ranks(2, save_steps, run, [first, second], (1, 2))
    run_ranks(2, save_steps, run, [first, third], (3, 4))
    run_ranks(2, save_steps, run, [first, second], (5, 6, 7))
    assert run_ranks(2, restore_columns, run, [first, second]) == [("node memory", 8, True)] * 2


class LeftError(Exception):
    """Ends a block of a `Checkpointer` that is to wait for nothing."""


def save_small(
    run: str, node_dirs: Sequence[Path], steps: Sequence[int], disk: Path | None = None
) -> tuple[str | None, int, bool]:
    """Restore a state that one rank writes alone, and save it again; leave without waiting for storage. When the first
    save is durable, no other fits on `disk`."""
    start_new_job()
    memory = Memory(node_dir=node_dirs[dist.get_rank()])
    state = {"w": torch.zeros(100)}
    with suppress(LeftError), Checkpointer(run, state, memory=memory, timeout_s=20.0) as checkpointer:
        report = checkpointer.restore()
        same = torch.equal(state["w"], torch.full((100,), float(-1 if report.step is None else report.step)))
        for step in steps:
            state["w"].fill_(step)
            checkpointer.save(step).staged.wait(60)
            if disk is not None and step == steps[0]:
                checkpointer.wait()
                if dist.get_rank() == 0:
                    fill(disk)
        raise LeftError
    return report.tier, report.next_step, same


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (2, 0), (0, 2)])
def test_a_node_without_a_file_of_a_small_checkpoint_restores_it_from_the_memory_of_another(
    run: str, nodes: list[Path], order: tuple[int, ...]
) -> None:
    run_ranks(2, save_small, run, nodes[:2], (1, 2))
    assert run_ranks(2, save_small, run, [nodes[number] for number in order], (3,)) == [("node memory", 3, True)] * 2


def test_a_snapshot_that_is_not_durable_survives_when_rank_0_comes_back_on_a_node_without_a_file_of_it(
    run: str, nodes: list[Path], tmp_path: Path
) -> None:
    with mounted(tmp_path / "disk", "tmpfs", "size=16m") as disk:
        run = str(disk / "run")
        run_ranks(2, save_small, run, nodes[:2], (1, 2), disk)
        assert run_ranks(2, save_small, run, nodes[1::-1], ()) == [("node memory", 3, True)] * 2
        assert holdfast.open(run).step == 1
        (disk / "other").unlink()
        until(lambda: holdfast.open(run).step == 2)


def test_later_saves_send_no_manifest_and_all_checkpoints_are_sound(run: str, nodes: list[Path]) -> None:
    run_ranks(2, save_steps, run, nodes[:2], range(5))
    run_ranks(2, save_steps, run, nodes[:2], range(5, 8))
    command = [sys.executable, "-m", "holdfast.cli", "verify", run, "--deep", "--all"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def save_unlike(run: str, node_dir: Path) -> list[str | None]:
    start_new_job()
    rank = dist.get_rank()
    memory = Memory(node_dir=node_dir)
    state: dict[str, object] = {"own": holdfast.PerRank(torch.full((100 + rank,), float(rank))), "w": torch.ones(3)}
    tiers: list[str | None] = []
    with Checkpointer(run, state, memory=memory) as checkpointer:
        tiers.append(checkpointer.restore().tier)
        for step in range(3):
            if step == 2:
                state[f"new-{rank}"] = torch.ones(1000 * (rank + 1))  # another layout, and a larger one
            checkpointer.save(step)
    return tiers


def test_a_layout_that_changes_gets_a_new_plan_and_larger_slots(run: str, memory: Memory) -> None:
    assert run_ranks(2, save_unlike, run, memory.node_dir) == [[None]] * 2
    view = holdfast.open(run)
    assert view.step == 2
    assert view["new-1"].shape == (2000,)


def fail_on_one_rank(run: str, node_dir: Path) -> list[str]:
    start_new_job()
    rank = dist.get_rank()
    weight = nn.Parameter(torch.full((1000,), float(rank)))
    weight.grad = torch.zeros_like(weight)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    state = {f"part{rank}": {"m": nn.ParameterList([weight]), "o": optimizer}}
    told = []
    with Checkpointer(run, state, memory=Memory(node_dir=node_dir)) as checkpointer:
        checkpointer.save(1).durable.wait(60)
        with late_copies():
            handle = checkpointer.save(2)
            if rank == 1:
                with torch.no_grad():
                    weight.mul_(2)
            with pytest.raises(StateError) if rank == 1 else nullcontext():
                handle.staged.wait(60)
        last = checkpointer.save(3)
        last.durable.wait(60)
        with pytest.raises(StateError) as caught:
            handle.durable.wait(60)
        told.append(caught.value.code)
        if handle in checkpointer._handles._handles:
            checkpointer._handles._handles.remove(handle)
    return told


def test_a_copy_that_fails_on_one_rank_is_given_up_by_all(run: str, memory: Memory) -> None:
    assert run_ranks(2, fail_on_one_rank, run, memory.node_dir) == [["state.incomplete"], ["state.changed"]]
    assert holdfast.open(run).step == 3


def save_side_by_side(folder: str) -> list[bool]:
    loops = [Loop(seed=seed) for seed in (1, 2)]
    memory = Memory(node_dir=Path(folder) / "node")
    done: list[bool] = []
    with ExitStack() as stack:
        both = [
            stack.enter_context(Checkpointer(f"{folder}/run-{name}", loop.state, memory=memory, timeout_s=20))
            for name, loop in zip("ab", loops, strict=True)
        ]
        for step in range(6):
            handles = [checkpointer.save(step) for checkpointer in both]
            for loop in loops:
                loop.step(step)
            for handle in handles:
                handle.durable.wait(20)
                done.append(handle.durable.is_done)
    return done


def descriptors_of_saves(folder: str) -> int:
    """The number of descriptors that 30 saves add to those of the first few, without the garbage collector."""
    start_new_job()
    state = sharded(0, dim=0)
    memory = Memory(node_dir=Path(folder))
    gc.disable()
    try:
        with Checkpointer(f"{folder}/run", state, memory=memory, timeout_s=20.0) as checkpointer:
            for step in range(5):
                checkpointer.save(step).durable.wait(60)
            before = len(os.listdir("/proc/self/fd"))
            for step in range(5, 35):
                checkpointer.save(step).durable.wait(60)
            return len(os.listdir("/proc/self/fd")) - before
    finally:
        gc.enable()


@pytest.mark.slow
def test_saves_in_the_background_leave_no_connection_behind_though_nobody_collects_garbage(tmp_path: Path) -> None:
    try:
        assert max(run_ranks(2, descriptors_of_saves, str(tmp_path))) <= 3
    finally:
        end_keepers(tmp_path)


@pytest.mark.slow
def test_two_checkpointers_of_one_job_save_in_the_background_side_by_side(tmp_path: Path) -> None:
    # They had one connection to the store of the job, which takes one request at a time.
    (tmp_path / "node").mkdir()
    try:
        assert run_ranks(2, save_side_by_side, str(tmp_path)) == [[True] * 12] * 2
    finally:
        end_keepers(tmp_path / "node")
