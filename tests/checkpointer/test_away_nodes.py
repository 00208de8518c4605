"""Nodes of the last job that have no part in the next one: a restore gets from them what they still hold."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch.distributed as dist

from holdfast import Checkpointer, Memory
from holdfast.node_memory.slots import Slot, slot_names
from tests.checkpointer.test_checkpointer import folder_of
from tests.checkpointer.test_checkpointer_ranks import sharded
from tests.checkpointer.test_damaged_snapshots import continue_keepers, stop_keepers
from tests.checkpointer.test_protection import COPIES, TIERS, holders_of, lose, restored_tiers
from tests.store.test_posix_storage import mounted
from tests.support.keepers import end_keepers
from tests.support.models import start_new_job
from tests.support.ranks import run_ranks


def save_to_memory(run: str, node_dirs: Sequence[Path]) -> bool:
    """Save step 1 to the run, and step 2 to memory alone. Then the keepers are stopped, so that they do not write that
    to the run when the job has ended."""
    start_new_job()
    rank = dist.get_rank()
    state = sharded(-1, dim=0)
    memory = Memory(node_dir=node_dirs[rank], protect=COPIES)
    with Checkpointer(run, state, memory=memory, timeout_s=20.0) as checkpointer:
        checkpointer.restore()
        checkpointer.save(1).durable.wait(20)
        state["w"].copy_(sharded(2, dim=0)["w"])  # type: ignore[attr-defined]
        state["progress"]["step"] = 2  # type: ignore[index]
        handle = checkpointer.save(2, memory_only=True)
        handle.protected.wait(20)
        dist.barrier()
        stop_keepers(node_dirs[rank])
        dist.barrier()
    return handle.protected.is_done


def saved_to_memory(run: str, nodes: Sequence[Path]) -> Path:
    """A job on four nodes, which has ended. Returns the node that holds the copy of what node 1 saved."""
    assert run_ranks(4, save_to_memory, run, nodes[:4]) == [True] * 4
    (holder,) = [node for node in holders_of(run, nodes[:4], 2)[1] if node != nodes[1]]
    return holder


@pytest.mark.parametrize("away", ["the owner", pytest.param("the holder", marks=pytest.mark.slow)])
def test_nodes_that_have_no_part_in_the_next_job_send_their_copies_of_lost_ones(
    tmp_path: Path, nodes: list[Path], away: str
) -> None:
    """They sent only what was their own, so the copies that they alone held were lost with the owners."""
    run = str(tmp_path / "run")
    holder = saved_to_memory(run, nodes)
    lost = nodes[1] if away == "the holder" else holder
    lose(run, lost)
    for node in nodes[:4]:
        if node != lost:
            continue_keepers(node)
    left = [node for node in nodes[:4] if node not in (nodes[1], holder)]
    assert run_ranks(2, restored_tiers, run, left) == [("peer memory", 3, True, TIERS)] * 2


@pytest.mark.slow
def test_nodes_without_a_part_are_asked_though_the_first_node_is_new(tmp_path: Path, nodes: list[Path]) -> None:
    """The first rank looked for their addresses on its own node alone, and went back to storage."""
    run = str(tmp_path / "run")
    saved_to_memory(run, nodes)
    for node in nodes[:4]:
        continue_keepers(node)
    assert run_ranks(2, restored_tiers, run, [nodes[4], nodes[1]]) == [("peer memory", 3, True, TIERS)] * 2


@pytest.mark.slow
def test_a_full_node_leaves_what_nodes_without_a_part_send_to_another_one(tmp_path: Path, nodes: list[Path]) -> None:
    """The node that sent was blamed for the refusal of the full one. Storage was restored."""
    run = str(tmp_path / "run")
    holder = saved_to_memory(run, nodes)
    for node in nodes[:4]:
        continue_keepers(node)
    left = [node for node in nodes[:4] if node not in (nodes[1], holder)]
    with mounted(tmp_path / "small", "tmpfs", "size=1m") as small:
        try:
            assert run_ranks(2, restored_tiers, run, [small, left[0]]) == [("peer memory", 3, True, TIERS)] * 2
        finally:
            end_keepers(small)


@pytest.mark.slow
def test_damage_on_a_node_without_a_part_leaves_the_copy_on_another_one(tmp_path: Path, nodes: list[Path]) -> None:
    """One node that could not send what it had ended the search, though another one had it too."""
    run = str(tmp_path / "run")
    holder = saved_to_memory(run, nodes)
    with folder_of(run, nodes[1]) as folder:
        for name in slot_names(folder):
            with Slot(folder, name) as slot:
                assert slot.record.contents is not None
                slot.data[slot.record.contents.data_start] ^= 1
    for node in nodes[:4]:
        continue_keepers(node)
    left = [node for node in nodes[:4] if node not in (nodes[1], holder)]
    assert run_ranks(2, restored_tiers, run, left) == [("peer memory", 3, True, TIERS)] * 2
