"""Saves to memory alone: they cost storage nothing, survive the processes, and become durable when the job ends."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

import holdfast
from holdfast import Checkpointer, ConfigurationError, EverySteps, EveryTime, Handle, Memory, OnMetric
from holdfast.node_memory.claims import has_trainer, is_claimed
from holdfast.node_memory.node_folder import NodeFolder
from holdfast.node_memory.slots import Slot, SlotState, slot_names
from tests.checkpointer.test_checkpointer import folder_of
from tests.checkpointer.test_policies import committed
from tests.faults.test_engine_faults import fill
from tests.store.test_posix_storage import mounted
from tests.support.keepers import end_keepers, keepers
from tests.support.models import start_new_job
from tests.support.nursery import run_script, start, until
from tests.support.ranks import run_ranks


def state_of(value: float = -1.0) -> dict[str, object]:
    return {"w": torch.full((1000,), value), "progress": {"step": -1}}


def set_state(state: dict[str, object], step: int) -> None:
    weight, progress = state["w"], state["progress"]
    assert isinstance(weight, torch.Tensor)
    assert isinstance(progress, dict)
    weight.fill_(step)
    progress["step"] = step


def save_held(own: Checkpointer, state: dict[str, object], step: int) -> None:
    """Save `step` to memory alone, and return when it is held there."""
    set_state(state, step)
    handle = own.save(step, memory_only=True)
    until_over(handle)
    assert handle.held, handle


def until_over(handle: Handle) -> None:
    until(lambda: handle.durable.is_over)


def states(run: str, node_dir: Path) -> set[tuple[int, SlotState]]:
    """The steps in memory, with the states of their slots."""
    with folder_of(run, node_dir) as folder:
        slots = [Slot(folder, name) for name in slot_names(folder)]
        found = {(slot.record.contents.step, slot.state) for slot in slots if slot.record.contents is not None}
        for slot in slots:
            slot.close()
        return found


@pytest.fixture
def state() -> dict[str, object]:
    return state_of()


def test_it_stays_in_memory_while_the_job_goes_on(
    run: str, state: dict[str, object], memory: Memory, node_dir: Path
) -> None:
    own = Checkpointer(run, state, memory=memory)
    set_state(state, 0)
    own.save(0).durable.wait(20.0)
    for step in (1, 2, 3):
        save_held(own, state, step)
        time.sleep(0.4)  # more than the keeper's interval of looks
    assert states(run, node_dir) == {(2, SlotState.HELD), (3, SlotState.HELD)}
    assert committed(run) == [0]
    assert len(os.listdir(Path(run) / "checkpoints")) == 1
    own.close()


def test_its_handle_says_that_it_is_held_and_that_it_is_never_durable(
    run: str, state: dict[str, object], memory: Memory
) -> None:
    with Checkpointer(run, state, memory=memory) as own:
        handle = own.save(0, memory_only=True)
        handle.staged.wait(20.0)
        with pytest.raises(ConfigurationError, match="step 0 was saved to memory alone") as error:
            handle.durable.wait(20.0)
        assert error.value.code == "config.memory_only"
        assert handle.held
        assert repr(handle) == "<Handle step 0 at 1.1: held in memory>"
        own.wait(20.0)


def test_a_durable_save_follows_the_ones_in_memory(run: str, state: dict[str, object], memory: Memory) -> None:
    with Checkpointer(run, state, memory=memory) as own:
        for step in range(9):
            set_state(state, step)
            handle = own.save(step, memory_only=step % 3 != 0)
            until_over(handle)
            assert handle.durable.is_done == (step % 3 == 0)
    assert committed(run)[:3] == [0, 3, 6]


def test_the_newest_one_becomes_durable_when_the_job_ends(
    run: str, state: dict[str, object], memory: Memory, node_dir: Path
) -> None:
    with Checkpointer(run, state, memory=memory) as own:
        for step in range(4):
            save_held(own, state, step)
    until(lambda: committed(run) == [3])
    until(lambda: states(run, node_dir) == {(3, SlotState.COMMITTED)})
    end_keepers(node_dir)
    assert holdfast.open(run)["w"].numpy().tolist() == [3.0] * 1000


KILLED = """
import os, signal, sys
from pathlib import Path
from holdfast import Checkpointer, Memory
from tests.checkpointer.test_memory_only import save_held, set_state, state_of
from tests.faults.test_engine_faults import fill
from tests.store.test_posix_storage import mounted
from tests.support.keepers import keepers

state = state_of()
own = Checkpointer(sys.argv[1], state, memory=Memory(node_dir=Path(sys.argv[2])))
own.restore()
set_state(state, 0)
own.save(0).durable.wait()
for step in (1, 2, 3):
    save_held(own, state, step)
for keeper in keepers(sys.argv[2]) if "stop" in sys.argv else ():
    os.kill(keeper, signal.SIGSTOP)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def killed(run: str, node_dir: Path) -> None:
    """A job that SIGKILL ended after step 3, whose newest durable step was 0."""
    job = run_script(KILLED, run, str(node_dir))
    assert job.status == -signal.SIGKILL, job.err


@pytest.mark.usefixtures("killed")
def test_the_next_job_restores_it_from_memory_and_saves_after_it(
    run: str, state: dict[str, object], memory: Memory
) -> None:
    start_new_job()
    with Checkpointer(run, state, memory=memory) as own:
        report = own.restore()
        assert (report.step, report.tier) == (3, "node memory")
        assert state["progress"] == {"step": 3}
        assert torch.equal(torch.as_tensor(state["w"]), torch.full((1000,), 3.0))
        set_state(state, 4)
        own.save(4).durable.wait(20.0)
    assert committed(run) == [0, 3, 4]


@pytest.mark.usefixtures("killed")
def test_a_keeper_that_died_with_the_job_loses_nothing(
    run: str, state: dict[str, object], memory: Memory, node_dir: Path
) -> None:
    end_keepers(node_dir)
    start_new_job()
    with Checkpointer(run, state, memory=memory) as own:
        assert own.restore().step == 3


@pytest.mark.usefixtures("killed")
def test_nobody_comes_back_and_it_is_durable_all_the_same(run: str, state: dict[str, object], node_dir: Path) -> None:
    until(lambda: committed(run) == [0, 3])
    end_keepers(node_dir)
    start_new_job()
    assert holdfast.load(run, state).step == 3


def test_an_evaluation_that_reserved_memory_before_the_run_began_does_not_keep_it_from_becoming_durable(
    run: str, state: dict[str, object], memory: Memory, node_dir: Path
) -> None:
    """It counted as a trainer: what the killed job held stayed in memory as long as the evaluation lived."""
    start_new_job()
    with Checkpointer(run, state, memory=memory) as evaluates:
        assert evaluates.restore().step is None
        with NodeFolder(run, node_dir=node_dir) as folder:
            assert (is_claimed(folder, 0), has_trainer(folder, 0)) == (True, False)
            assert run_script(KILLED, run, str(node_dir)).status == -signal.SIGKILL
            until(lambda: committed(run) == [0, 3])
            assert evaluates.restore().step == 3
            set_state(state, 4)
            evaluates.save(4, memory_only=True)
            assert has_trainer(folder, 0), "it saves now"
    end_keepers(node_dir)


def test_an_exception_loses_no_step_that_is_in_memory(
    run: str, state: dict[str, object], memory: Memory, node_dir: Path
) -> None:
    policy = EverySteps(1, memory_only=True) | EverySteps(100)

    def train(own: Checkpointer) -> None:
        for step in own.steps(200):
            if step == 8:
                raise ZeroDivisionError
            set_state(state, step)
            handle = own.step(step)
            if handle is not None:
                until_over(handle)

    with pytest.raises(ZeroDivisionError), Checkpointer(run, state, memory=memory, save=policy) as own:
        train(own)
    until(lambda: committed(run) == [7])
    end_keepers(node_dir)
    assert holdfast.open(run)["w"].numpy().tolist() == [7.0] * 1000


@pytest.mark.usefixtures("killed")
def test_a_node_that_is_lost_costs_the_steps_since_the_durable_one(
    run: str, state: dict[str, object], tmp_path: Path
) -> None:
    until(lambda: committed(run) == [0, 3])
    other = tmp_path / "other node"
    other.mkdir()
    start_new_job()
    with Checkpointer(run, state, memory=Memory(node_dir=other)) as own:
        assert own.restore().tier == "storage"
    end_keepers(other)


def test_without_a_free_slot_it_is_skipped_at_once(
    run: str, state: dict[str, object], memory: Memory, node_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = Checkpointer(run, state, memory=memory, timeout_s=30.0)
    save_held(own, state, 0)
    (keeper,) = keepers(node_dir)
    os.kill(keeper, signal.SIGSTOP)
    try:
        own.save(1).staged.wait(20.0)  # one slot waits for the keeper, the other one holds the newest whole checkpoint
        begun_s = time.monotonic()
        handle = own.save(2, memory_only=True)
        assert time.monotonic() - begun_s < 5.0
        assert handle.skipped
        told = str(handle.staged.error)
        assert "step 2 was skipped: no slot of rank 0 is free." in told
        assert "Memory(generations=3)" in told
        assert "when_full" not in told, "such a save never waits"
        assert not [record for record in caplog.records if "skipped" in record.message]
    finally:
        os.kill(keeper, signal.SIGCONT)
    own.close()
    assert committed(run) == [1]


def test_right_after_a_restore_it_does_not_wait_for_the_commit_of_what_was_restored(
    run: str, state: dict[str, object], memory: Memory, node_dir: Path
) -> None:
    job = run_script(KILLED, run, str(node_dir), "stop")
    assert job.status == -signal.SIGKILL, job.err
    start_new_job()
    own = Checkpointer(run, state, memory=memory, timeout_s=30.0)
    assert own.restore().step == 3
    begun_s = time.monotonic()
    handle = own.save(4, memory_only=True)
    assert time.monotonic() - begun_s < 5.0
    assert "the checkpoint that was restored from memory is not committed yet" in str(handle.staged.error)
    (keeper,) = keepers(node_dir)
    os.kill(keeper, signal.SIGCONT)
    own.save(5).durable.wait(20.0)
    own.close()
    assert committed(run) == [0, 3, 5]


def test_a_loop_saves_to_memory_between_its_other_saves(run: str, state: dict[str, object], memory: Memory) -> None:
    policy = EverySteps(2, memory_only=True) | EverySteps(6)
    handles = {}
    with Checkpointer(run, state, memory=memory, save=policy) as own:
        for step in own.steps(14):
            set_state(state, step)
            handle = handles[step] = own.step(step)
            if handle is not None:
                until_over(handle)
    saved = {step: handle for step, handle in handles.items() if handle is not None}
    assert [step for step, handle in saved.items() if handle.held] == [2, 4, 8, 10]
    assert committed(run) == [6, 12, 13]


def test_a_wish_for_the_disk_is_not_granted_by_a_save_to_memory(
    run: str, state: dict[str, object], memory: Memory
) -> None:
    policy = EverySteps(1, memory_only=True) | OnMetric("loss")
    with Checkpointer(run, state, memory=memory, save=policy) as own:
        for step, loss in enumerate([3.0, 2.0, 2.5, 1.0]):
            handle = own.step(step, metrics={"loss": loss})
            assert handle is not None
            until_over(handle)
            assert handle.memory_only == (step == 2)
    assert committed(run) == [0, 1, 3]


def wish_on_one_rank(run: str, node: Path) -> list[int]:
    """Ranks save to memory after each third step; rank 0 wants one save to storage, which all agree on."""
    start_new_job()
    durable = []
    policy = EverySteps(3, memory_only=True) | OnMetric("loss")
    with Checkpointer(run, state_of(), memory=Memory(node_dir=node), save=policy, timeout_s=20.0) as own:
        for step in range(60):
            time.sleep(0.02)
            handle = own.step(step, metrics={"loss": 1.0} if dist.get_rank() == 0 else None)
            if handle is not None and not handle.memory_only:
                durable.append(step)
    return durable


def test_ranks_agree_on_a_save_to_storage_beside_saves_to_memory(run: str, node_dir: Path) -> None:
    first, second = run_ranks(2, wish_on_one_rank, run, node_dir)
    assert first == second
    assert len(first) == 1


def test_policies_that_need_memory_are_refused_without_it(run: str, state: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError) as error:
        Checkpointer(run, state, memory=None, save=EverySteps(6) | EveryTime(5.0, memory_only=True))
    assert error.value.code == "config.no_memory"


def test_a_checkpointer_without_memory_refuses_it(run: str, state: dict[str, object]) -> None:
    with Checkpointer(run, state, memory=None) as own, pytest.raises(ConfigurationError) as error:
        own.save(0, memory_only=True)
    assert error.value.code == "config.no_memory"


def test_where_memory_cannot_be_used_it_is_skipped_and_storage_is_left_alone(
    run: str, state: dict[str, object], tmp_path: Path
) -> None:
    with (
        mounted(tmp_path / "shm", "tmpfs", "size=1m") as small,
        Checkpointer(run, state, memory=Memory(node_dir=small)) as own,
    ):
        own.save(0)
        handle = own.save(1, memory_only=True)
        assert handle.skipped
        assert "the memory of a node cannot be used" in str(handle.staged.error)
        end_keepers(small)
    assert committed(run) == [0]


SHAPE = (12, 10)


def sharded(step: int, *, dim: int) -> DTensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(torch.arange(120.0).reshape(SHAPE) * (step + 1), mesh, [Shard(dim)])


def save_rows(run: str, nodes: list[Path]) -> None:
    """Save step 0 durably, and steps 1 to 3 to memory alone; then leave them as they are."""
    start_new_job()
    memory = Memory(node_dir=nodes[dist.get_rank() % len(nodes)])
    state: dict[str, object] = {"w": sharded(-1, dim=0)}
    with Checkpointer(run, state, memory=memory, timeout_s=20.0) as own:
        for step in range(4):
            state["w"] = sharded(step, dim=0)
            handle = own.save(step, memory_only=step > 0)
            until_over(handle)


def restore_columns(run: str, nodes: list[Path]) -> tuple[int | None, str | None, bool]:
    start_new_job()
    memory = Memory(node_dir=nodes[dist.get_rank() % len(nodes)])
    state: dict[str, object] = {"w": sharded(-1, dim=1)}
    with Checkpointer(run, state, memory=memory, timeout_s=20.0) as own:
        report = own.restore()
        assert report.step is not None
        weight = state["w"]
        assert isinstance(weight, DTensor)
        same = torch.equal(weight.to_local(), sharded(report.step, dim=1).to_local())
        own.save(report.step + 1)
    return report.step, report.tier, same


@pytest.mark.parametrize("num_nodes", [1, 2])
@pytest.mark.few(1)
def test_another_number_of_ranks_restores_it(run: str, tmp_path: Path, num_nodes: int) -> None:
    nodes = [tmp_path / f"node{number}" for number in range(num_nodes)]
    for node in nodes:
        node.mkdir()
    run_ranks(2, save_rows, run, nodes)
    assert run_ranks(3, restore_columns, run, nodes) == [(3, "node memory", True)] * 3
    assert committed(run) == [0, 3, 4]
    for node in nodes:
        end_keepers(node)


def evaluate(run: str, node: Path, begin: Path, restored: Path) -> None:
    """An evaluation on that node, once the file `begin` is there; it writes the step that it restores to `restored`."""
    until(begin.exists, timeout_s=60)
    state = state_of() | {"sharded": torch.zeros(SHAPE)}
    with Checkpointer(run, state, memory=Memory(node_dir=node)) as own:
        step = own.restore().step
    restored.with_suffix(".new").write_text(str(step))
    restored.with_suffix(".new").rename(restored)


def train_beside_an_evaluation(run: str, nodes: list[Path], begin: Path, restored: Path) -> set[tuple[int, SlotState]]:
    start_new_job()
    node = nodes[dist.get_rank()]
    state = state_of() | {"sharded": sharded(0, dim=0)}
    with Checkpointer(run, state, memory=Memory(node_dir=node), timeout_s=20.0) as own:
        own.save(0).durable.wait(20.0)
        for step in (1, 2, 3):
            save_held(own, state, step)
        dist.barrier()
        if dist.get_rank() == 0:
            begin.touch()
            until(restored.exists)
            time.sleep(1.0)  # the keeper would act on whatever the evaluation asked for
        dist.barrier()
        return states(run, node)


@pytest.mark.parametrize("num_nodes", [1, 2])
@pytest.mark.few(1)
def test_an_evaluation_beside_the_training_changes_nothing(run: str, tmp_path: Path, num_nodes: int) -> None:
    """One that saw the memory of one node of two gave its part up, as that of a dead job, and the keeper freed it."""
    nodes = [tmp_path / f"node{number}" for number in range(num_nodes)]
    for node in nodes:
        node.mkdir()
    begin, restored = tmp_path / "begin", tmp_path / "restored"
    evaluation = start(evaluate, run, nodes[0], begin, restored, err=tmp_path / "err")
    held, other = run_ranks(2, train_beside_an_evaluation, run, [nodes[0], nodes[-1]], begin, restored)
    assert evaluation.wait() == 0, evaluation.err
    assert restored.read_text() == ("3" if num_nodes == 1 else "0")
    assert held == other == {(2, SlotState.HELD), (3, SlotState.HELD)}
    for node in nodes:
        end_keepers(node)


@pytest.mark.slow
def test_where_memory_has_trouble_the_newest_one_stays_until_storage_has_a_newer_one(
    run: str, state: dict[str, object], tmp_path: Path
) -> None:
    with mounted(tmp_path / "shm", "tmpfs", "size=1g") as node:
        own = Checkpointer(run, state, memory=Memory(node_dir=node), timeout_s=20.0)
        save_held(own, state, 0)
        save_held(own, state, 1)
        fill(node)
        until_over(own.save(2, memory_only=True))  # there is no room for the file of its generation
        assert own.save(3, memory_only=True).skipped
        assert (1, SlotState.HELD) in states(run, node)
        set_state(state, 4)
        own.save(4)
        assert committed(run)[-1] == 4
        until(lambda: (1, SlotState.HELD) not in states(run, node))
        own.close()
        end_keepers(node)


def save_unlike(run: str, node: Path) -> str:
    start_new_job()
    with Checkpointer(run, state_of(), memory=Memory(node_dir=node), timeout_s=20.0) as own:
        with pytest.raises(holdfast.HoldfastError) as error:
            own.save(0, memory_only=dist.get_rank() == 1)
        return error.value.code


def test_ranks_that_disagree_on_it_are_told(run: str, node_dir: Path) -> None:
    assert run_ranks(2, save_unlike, run, node_dir) == ["config.call_order"] * 2
