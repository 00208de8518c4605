"""Restores from memory whose newest snapshot is damaged: all ranks take the one before it, then storage."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import holdfast
from holdfast import Checkpointer, CorruptError, Memory
from holdfast.node_memory.generations import given_up_ids
from holdfast.node_memory.slots import Slot, SlotState, slot_names
from tests.checkpointer.test_checkpointer import folder_of
from tests.checkpointer.test_memory_only import save_held, set_state, sharded, state_of, states, until_over
from tests.checkpointer.test_policies import committed
from tests.support.keepers import end_keepers, keepers
from tests.support.models import start_new_job
from tests.support.nursery import until
from tests.support.ranks import run_ranks


def stop_keepers(node: Path) -> None:
    """Stop the keepers of a node, before they hash the snapshots there again and find the damage themselves."""
    for keeper in keepers(node):
        os.kill(keeper, signal.SIGSTOP)


def continue_keepers(node: Path) -> None:
    """Let the keepers of a node go on."""
    for keeper in keepers(node):
        os.kill(keeper, signal.SIGCONT)


def damage(run: str, node: Path, step: int, *, file: int = 0) -> int:
    """Flip a bit of a data file of `step` in the memory of a node. Returns the number of slots that hold that file."""
    num_damaged = 0
    with folder_of(run, node) as folder:
        for name in slot_names(folder):
            with Slot(folder, name) as slot:
                contents = slot.record.contents
                if contents is not None and (contents.step, contents.file) == (step, file):
                    slot.data[contents.data_start] ^= 1
                    num_damaged += 1
    return num_damaged


def leave_steps(run: str, node: Path, last: int, *, first_is_durable: bool = True) -> None:
    """Save steps 0 to `last`, all but step 0 to memory alone; then leave them as a job that was killed does."""
    start_new_job()
    state = state_of()
    with Checkpointer(run, state, memory=Memory(node_dir=node), timeout_s=20.0) as own:
        for step in range(last + 1):
            set_state(state, step)
            until_over(own.save(step, memory_only=step > 0 or not first_is_durable))
        stop_keepers(node)
    start_new_job()


def weight_of(state: dict[str, object]) -> set[float]:
    weight = state["w"]
    assert isinstance(weight, torch.Tensor)
    return set(weight.tolist())


def test_the_one_before_it_is_restored_and_the_report_says_why(
    run: str, memory: Memory, node_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    leave_steps(run, node_dir, 3)
    assert damage(run, node_dir, 3) == 1
    state = state_of()
    with Checkpointer(run, state, memory=memory) as own:
        report = own.restore()
        assert (report.step, report.tier) == (2, "node memory")
        assert (weight_of(state), state["progress"]) == ({2.0}, {"step": 2})
        assert report.load is not None
        ((place, reason),) = report.load.skipped
        assert place == "1.4"
        assert "does not match its digest" in reason
        assert "checkpoint 1.4 is damaged in the memory of a node, looking for an older one there: " in caplog.text
        assert "from storage" not in caplog.text
    with folder_of(run, node_dir) as folder:
        assert len(given_up_ids(folder)) == 1  # so no keeper writes the sound parts of it


def test_its_slot_takes_the_next_saves_and_it_never_becomes_durable(run: str, memory: Memory, node_dir: Path) -> None:
    leave_steps(run, node_dir, 3)
    damage(run, node_dir, 3)
    state = state_of()
    with Checkpointer(run, state, memory=memory, timeout_s=20.0) as own:
        assert own.restore().next_step == 3
        continue_keepers(node_dir)
        set_state(state, 13)
        own.save(3).durable.wait(20.0)
        for step in (4, 5):
            save_held(own, state, step)
        assert states(run, node_dir) == {(4, SlotState.HELD), (5, SlotState.HELD)}
        assert committed(run) == [0, 2, 3]
        assert holdfast.open(f"{run}@step=3")["w"].numpy().tolist() == [13.0] * 1000


def test_where_both_are_damaged_storage_is_restored(
    run: str, memory: Memory, node_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    leave_steps(run, node_dir, 3)
    damage(run, node_dir, 3)
    damage(run, node_dir, 2)
    state = state_of()
    with Checkpointer(run, state, memory=memory, timeout_s=20.0) as own:
        report = own.restore()
        assert (report.step, report.tier, weight_of(state)) == (0, "storage", {0.0})
        assert report.load is not None
        assert [place for place, _ in report.load.skipped] == ["1.4", "1.3"]
        assert "cannot be used, restoring from storage instead" in caplog.text
        continue_keepers(node_dir)
        until(lambda: {step for step, _ in states(run, node_dir)} <= {0})
        own.save(1)
    assert committed(run) == [0, 1]


def test_a_head_that_is_damaged_in_memory_alone_is_not_passed_over(run: str, memory: Memory, node_dir: Path) -> None:
    leave_steps(run, node_dir, 0)
    damage(run, node_dir, 0)
    with Checkpointer(run, state_of(), memory=memory) as own:
        report = own.restore()
    assert (report.step, report.tier) == (0, "storage")
    assert report.load is not None
    assert report.load.skipped == ()


def test_where_the_head_is_the_one_before_it_memory_is_as_good_as_storage(
    run: str, memory: Memory, node_dir: Path
) -> None:
    leave_steps(run, node_dir, 1)
    damage(run, node_dir, 1)
    with Checkpointer(run, state_of(), memory=memory) as own:
        report = own.restore()
    assert (report.step, report.tier) == (0, "node memory")
    assert report.load is not None
    assert [place for place, _ in report.load.skipped] == ["1.2"]


def test_where_nothing_is_committed_the_older_one_is_all_that_counts(run: str, memory: Memory, node_dir: Path) -> None:
    leave_steps(run, node_dir, 1, first_is_durable=False)
    damage(run, node_dir, 1)
    with Checkpointer(run, state_of(), memory=memory) as own:
        assert own.restore().step == 0
    continue_keepers(node_dir)
    until(lambda: committed(run) == [0])


def test_where_nothing_is_committed_and_all_are_damaged_restore_says_so_and_gives_nothing_up(
    run: str, memory: Memory, node_dir: Path
) -> None:
    leave_steps(run, node_dir, 0, first_is_durable=False)
    damage(run, node_dir, 0)
    with Checkpointer(run, state_of(), memory=memory) as own, pytest.raises(CorruptError, match="Nothing is committed"):
        own.restore()
    with folder_of(run, node_dir) as folder:
        assert not given_up_ids(folder)


def test_the_one_before_it_is_not_taken_from_a_future_that_was_abandoned(
    run: str, memory: Memory, node_dir: Path
) -> None:
    leave_steps(run, node_dir, 2)
    state = state_of()
    with Checkpointer(run, state, memory=memory, timeout_s=20.0) as own:
        own.restore(at="step=0")
        continue_keepers(node_dir)
        save_held(own, state, 7)
        stop_keepers(node_dir)
    assert {step for step, _ in states(run, node_dir)} in ({1, 7}, {2, 7})
    damage(run, node_dir, 7)
    start_new_job()
    with Checkpointer(run, state, memory=memory) as own:
        report = own.restore()
    assert (report.step, report.tier) == (0, "storage")


def test_beside_a_job_that_trains_the_damaged_one_stays_to_that_job(run: str, memory: Memory, node_dir: Path) -> None:
    state = state_of()
    with Checkpointer(run, state, memory=memory) as own:
        for step in range(3):
            set_state(state, step)
            until_over(own.save(step, memory_only=step > 0))
        damage(run, node_dir, 2)
        assert own.restore().step == 1
        time.sleep(0.5)  # more than the keeper's interval of looks
        assert states(run, node_dir) == {(1, SlotState.HELD), (2, SlotState.HELD)}


def leave_rows(run: str, nodes: list[Path]) -> None:
    """Save step 0 durably, and steps 1 to 3 to memory alone; then leave them as a job that was killed does."""
    start_new_job()
    node = nodes[dist.get_rank() % len(nodes)]
    state: dict[str, object] = {"w": sharded(-1, dim=0)}
    with Checkpointer(run, state, memory=Memory(node_dir=node), timeout_s=20.0) as own:
        for step in range(4):
            state["w"] = sharded(step, dim=0)
            until_over(own.save(step, memory_only=step > 0))
        dist.barrier()
        stop_keepers(node)
        dist.barrier()


def restore_columns(run: str, nodes: list[Path]) -> tuple[int | None, str | None, list[str], bool]:
    start_new_job()
    memory = Memory(node_dir=nodes[dist.get_rank() % len(nodes)])
    state: dict[str, object] = {"w": sharded(-1, dim=1)}
    with Checkpointer(run, state, memory=memory, timeout_s=20.0) as own:
        report = own.restore()
        assert report.step is not None
        assert report.load is not None
        weight = state["w"]
        assert isinstance(weight, DTensor)
        same = torch.equal(weight.to_local(), sharded(report.step, dim=1).to_local())
        continue_keepers(memory.node_dir)
        own.save(report.step + 1)
    return report.step, report.tier, [place for place, _ in report.load.skipped], same


@pytest.mark.parametrize(("num_nodes", "file"), [(1, 0), (2, 1)])
def test_all_ranks_of_another_layout_agree_on_it_whichever_node_has_the_damage(
    run: str, tmp_path: Path, num_nodes: int, file: int
) -> None:
    nodes = [tmp_path / f"node{number}" for number in range(num_nodes)]
    for node in nodes:
        node.mkdir()
    run_ranks(2, leave_rows, run, nodes)
    assert sum(damage(run, node, 3, file=file) for node in nodes) == 1
    assert run_ranks(3, restore_columns, run, nodes) == [(2, "node memory", ["1.4"], True)] * 3
    assert committed(run) == [0, 2, 3]
    for node in nodes:
        end_keepers(node)


def test_damage_of_each_one_on_another_node_leads_all_ranks_to_storage(run: str, tmp_path: Path) -> None:
    nodes = [tmp_path / "node0", tmp_path / "node1"]
    for node in nodes:
        node.mkdir()
    run_ranks(2, leave_rows, run, nodes)
    assert sum(damage(run, node, 3, file=0) for node in nodes) == 1
    assert sum(damage(run, node, 2, file=1) for node in nodes) == 1
    assert run_ranks(3, restore_columns, run, nodes) == [(0, "storage", ["1.4", "1.3"], True)] * 3
    assert committed(run) == [0, 1]
    for node in nodes:
        end_keepers(node)
