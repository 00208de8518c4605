"""Several `Checkpointer`s of one process save into one run: they share the memory of their rank."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast import Checkpointer, ConfigurationError, DeadlineError, Memory, PerRank
from tests.checkpointer.test_checkpointer import Loop, folder_of, late_copies
from tests.support.bound import bits
from tests.support.keepers import keeper_of
from tests.support.models import start_new_job
from tests.support.ranks import run_ranks


@pytest.fixture
def run(tmp_path: Path) -> str:
    start_new_job()
    return str(tmp_path / "run")


def rows(step: int, num_rows: int) -> torch.Tensor:
    return torch.full((num_rows, 1000), float(step))


def save_in_turns(run: str, node_dir: Path) -> list[int]:
    """Two Checkpointers save a small and a large state in turns; nobody waits for what is durable."""
    start_new_job()
    states = [{"small": rows(-1, 3)}, {"large": rows(-1, 500), "small": rows(-1, 3)}]
    with ExitStack() as stack:
        both = [
            stack.enter_context(Checkpointer(run, state, memory=Memory(node_dir=node_dir), timeout_s=60))
            for state in states
        ]
        handles = []
        for step, number in enumerate((0, 0, 1, 1, 0, 0, 1, 0, 1, 0)):
            with both[number].guard():
                for tensor in states[number].values():
                    tensor.fill_(step)
            handles.append(both[number].save(step))
    return [handle.step for handle in handles if handle.durable.is_done]


def save_where_a_rank_has_nothing_to_write(folder: str, case: str) -> list[int]:
    """Each second save has no part for rank 1, which holds nothing but its own value in the others."""
    start_new_job()
    memory = Memory(node_dir=Path(folder) / "node")
    shared: dict[str, object] = {"w": torch.zeros(1000)}
    own = {"mine": PerRank({"rank": dist.get_rank()})}
    handles = []
    with ExitStack() as stack:
        whole = {**shared, **own}
        first = stack.enter_context(Checkpointer(f"{folder}/run", whole, memory=memory, timeout_s=20))
        second = first
        if case == "two":
            second = Checkpointer(f"{folder}/run", shared, memory=memory, timeout_s=20)
        elif case == "select":
            second = Checkpointer(f"{folder}/run", whole, select="w", memory=memory, timeout_s=20)
        if second is not first:
            stack.enter_context(second)
        for step in range(8):
            if case == "comes and goes":
                whole.pop("mine", None)
                whole.update(own if step % 2 == 0 else {})
            handles.append((first, second)[step % 2].save(step))
            handles[-1].durable.wait(60)
    return [handle.step for handle in handles if handle.durable.is_done]


@pytest.mark.parametrize("case", ["comes and goes", "select", "two"])
@pytest.mark.few(1)
def test_a_rank_that_has_nothing_to_write_in_some_saves_does_not_hold_up_the_others(
    tmp_path: Path, memory: Memory, case: str
) -> None:
    done = run_ranks(2, save_where_a_rank_has_nothing_to_write, str(tmp_path), case)
    assert done == [list(range(8))] * 2


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_saves_of_two_in_turns_are_all_durable_and_hold_the_right_bytes(
    run: str, memory: Memory, num_ranks: int
) -> None:
    if num_ranks == 1:
        assert save_in_turns(run, memory.node_dir) == list(range(10))
    else:
        assert run_ranks(num_ranks, save_in_turns, run, memory.node_dir) == [list(range(10))] * num_ranks
    for step, has_large in enumerate((0, 0, 1, 1, 0, 0, 1, 0, 1, 0)):
        view = holdfast.open(f"{run}@step={step}")
        assert view.names() == (["large", "small"] if has_large else ["small"])
        assert all(bits(view[name][...]) == bits(torch.full(view[name].shape, float(step))) for name in view)


def test_a_loop_that_is_begun_anew_without_closing_the_last_checkpointer_goes_on(run: str, memory: Memory) -> None:
    loop = Loop()
    checkpointer = Checkpointer(run, loop.state, memory=memory)
    handles = [checkpointer.save(0)]
    with late_copies():
        for step in range(1, 4):
            checkpointer = Checkpointer(run, loop.state, memory=memory)  # as in a cell of a notebook
            loop.step(step)
            handles.append(checkpointer.save(step))
    checkpointer.close()
    for handle in handles:
        handle.durable.wait(60)
    assert holdfast.open(run).step == 3


def test_the_last_one_that_is_closed_closes_the_memory(run: str, memory: Memory) -> None:
    loop = Loop()
    threads = set(threading.enumerate())
    first, second = (Checkpointer(run, loop.state, memory=memory) for _ in range(2))
    first.save(1)
    second.save(2)
    first.close()
    second.save(3).durable.wait(60)
    second.close()
    assert set(threading.enumerate()) <= threads


def test_one_that_keeps_more_generations_has_them(run: str, memory: Memory) -> None:
    loop = Loop()
    more = Memory(generations=4, node_dir=memory.node_dir)
    with Checkpointer(run, loop.state, memory=memory) as first, Checkpointer(run, loop.state, memory=more) as second:
        for step in range(3):
            first.save(step).durable.wait(60)
        with folder_of(run, memory.node_dir) as folder:
            keeper = keeper_of(folder.path)
            os.kill(keeper, signal.SIGSTOP)
            try:
                # One holds the newest durable checkpoint; a save that found no slot would wait for its time-out.
                handles = [second.save(step) for step in (3, 4, 5)]
                assert not any(handle.durable.is_over for handle in handles)
            finally:
                os.kill(keeper, signal.SIGCONT)


def test_a_thread_that_saves_with_the_other_one_meanwhile_is_refused(run: str, memory: Memory) -> None:
    loop = Loop()
    first, second = (Checkpointer(run, loop.state, memory=memory) for _ in range(2))
    with (
        ThreadPoolExecutor(1) as other,
        first._turn.taken("save"),
        pytest.raises(ConfigurationError, match=r"config\.threads"),
    ):
        other.submit(second.save, 1).result(60)
    second.save(1)
    second.close()


def test_who_waits_for_a_save_that_nobody_watches_any_more_is_told(run: str, memory: Memory) -> None:
    loop = Loop()
    checkpointer = Checkpointer(run, loop.state, memory=memory)
    checkpointer.save(1).durable.wait(60)
    with folder_of(run, memory.node_dir) as folder:
        keeper = keeper_of(folder.path)
        os.kill(keeper, signal.SIGSTOP)
        try:
            handle = checkpointer.save(2)
            handle.staged.wait(60)
            with pytest.raises(ZeroDivisionError), checkpointer:
                raise ZeroDivisionError
            with pytest.raises(DeadlineError, match=r"timeout\.closed.*step 2 was staged, but not yet durable"):
                handle.durable.wait()
        finally:
            os.kill(keeper, signal.SIGCONT)
    with Checkpointer(run, loop.state, memory=memory) as after:
        assert after.restore().step == 2
