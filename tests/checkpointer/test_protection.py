"""Snapshots that other nodes protect, by copies or parity: `Checkpointer`s of ranks on nodes that folders emulate."""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from holdfast import Checkpointer, ConfigurationError, EverySteps, HoldfastError, Memory, RejectedSource
from holdfast.cooperative.network import own_host
from holdfast.node_memory.peering import noted_port
from holdfast.node_memory.slots import WHOLE, Slot, copy_names, parity_names, rank_of, slot_names
from holdfast.protection.policies import Copies, Parity
from tests.checkpointer.test_checkpointer import folder_of
from tests.checkpointer.test_checkpointer_ranks import restored_columns, sharded
from tests.checkpointer.test_damaged_snapshots import continue_keepers, stop_keepers
from tests.store.test_posix_storage import mounted
from tests.support.keepers import end_keepers
from tests.support.models import start_new_job
from tests.support.nursery import until
from tests.support.ranks import run_ranks

COPIES = Copies(1)
TIERS = ["node memory", "peer memory"]
FROM_PEERS = [("peer memory", 4, True, TIERS)]


def save_protected(
    run: str, node_dirs: Sequence[Path], steps: Sequence[int], protect: Copies | Parity = COPIES
) -> list[bool]:
    start_new_job()
    memory = Memory(node_dir=node_dirs[dist.get_rank() % len(node_dirs)], protect=protect)
    state = sharded(-1, dim=0)
    protected = []
    with Checkpointer(run, state, memory=memory, timeout_s=20.0) as checkpointer:
        checkpointer.restore()
        for step in steps:
            state["w"].copy_(sharded(step, dim=0)["w"])  # type: ignore[attr-defined]
            state["progress"]["step"] = step  # type: ignore[index]
            handle = checkpointer.save(step)
            handle.protected.wait(20)
            protected.append(handle.protected.is_done)
    return protected


def restored_tiers(run: str, node_dirs: Sequence[Path]) -> tuple[str | None, int, bool, list[str]]:
    report, same = restored_columns(run, node_dirs)
    return report.tier, report.next_step, same, sorted({source.tier for source in report.sources})


def lose(run: str, node: Path) -> None:
    """The node is gone: its keeper is dead, and its memory empty."""
    end_keepers(node)
    with folder_of(run, node) as folder:
        for name in folder.names():
            folder.remove(name)
        folder.path.rmdir()


def test_a_lost_node_costs_nothing_that_its_peer_has_a_copy_of(tmp_path: Path, nodes: list[Path]) -> None:
    run = str(tmp_path / "run")
    assert run_ranks(4, save_protected, run, nodes[:4], (1, 2, 3)) == [[True, True, True]] * 4
    with folder_of(run, nodes[0]) as folder:
        assert len(slot_names(folder)) == len(copy_names(folder)) == 2
    lose(run, nodes[2])
    assert run_ranks(3, restored_tiers, run, [nodes[0], nodes[1], nodes[3]]) == FROM_PEERS * 3


def holders_of(run: str, node_dirs: Sequence[Path], step: int | None) -> dict[int, list[Path]]:
    """By rank, the nodes that hold its slot of a step, or a copy of it."""
    holders = defaultdict[int, list[Path]](list)
    for node in node_dirs:
        with folder_of(run, node) as folder:
            for name in (*slot_names(folder), *copy_names(folder)):
                with suppress(FileNotFoundError), Slot(folder, name) as slot:
                    contents = slot.record.contents
                    if slot.state in WHOLE and contents is not None and contents.step == step:
                        holders[slot.rank].append(node)
    return holders


def are_on_two_nodes(holders: Mapping[int, Sequence[Path]], num_ranks: int) -> bool:
    return len(holders) == num_ranks and all(len(nodes) >= 2 for nodes in holders.values())


def restore_protected(run: str, node_dirs: Sequence[Path], num_ranks_before: int) -> bool:
    """Restore and save nothing, and wait until each slot of the restored step is on two nodes."""
    start_new_job()
    memory = Memory(node_dir=node_dirs[dist.get_rank() % len(node_dirs)], protect=COPIES)
    with Checkpointer(run, sharded(-1, dim=0), memory=memory, timeout_s=20.0) as checkpointer:
        step = checkpointer.restore().step
        until(lambda: are_on_two_nodes(holders_of(run, node_dirs, step), num_ranks_before), timeout_s=30)
        dist.barrier()
    return True


@pytest.mark.parametrize("replacements", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_second_node_may_be_lost_before_the_first_save_after_the_loss_of_one(
    tmp_path: Path, nodes: list[Path], replacements: int
) -> None:
    """Nodes met at the first save, and nobody copied the copies of lost nodes again: a second loss took them."""
    run = str(tmp_path / "run")
    assert run_ranks(4, save_protected, run, nodes[:4], (1, 2)) == [[True, True]] * 4
    lose(run, nodes[2])
    left = [nodes[0], nodes[1], nodes[3]]
    (holder,) = holders_of(run, left, 2)[2]
    there = [*left, *nodes[4 : 4 + replacements]]
    assert all(run_ranks(len(there), restore_protected, run, there, 4))
    lose(run, holder)
    there.remove(holder)
    assert run_ranks(len(there), restored_tiers, run, there) == [("peer memory", 3, True, TIERS)] * len(there)


@pytest.mark.parametrize("num_left", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_nodes_that_have_no_part_in_the_next_job_send_what_they_hold(
    tmp_path: Path, nodes: list[Path], num_left: int
) -> None:
    """Only the nodes of the job were asked, so a job on fewer nodes went back to storage."""
    run = str(tmp_path / "run")
    assert run_ranks(4, save_protected, run, nodes[:4], (1, 2)) == [[True, True]] * 4
    (holder,) = [node for node in holders_of(run, nodes[:4], 2)[0] if node != nodes[0]]
    left = [nodes[0], holder][:num_left]  # neither holds anything of the other two
    assert run_ranks(num_left, restored_tiers, run, left) == [("peer memory", 3, True, TIERS)] * num_left


def test_a_lost_node_costs_nothing_that_parity_and_the_other_nodes_give(tmp_path: Path, nodes: list[Path]) -> None:
    run = str(tmp_path / "run")
    assert run_ranks(4, save_protected, run, nodes[:4], (1, 2, 3), Parity(1)) == [[True, True, True]] * 4
    with folder_of(run, nodes[0]) as folder:
        assert len(slot_names(folder)) == len(parity_names(folder)) == 2
        assert copy_names(folder) == []
    lose(run, nodes[2])
    assert run_ranks(3, restored_tiers, run, [nodes[0], nodes[1], nodes[3]]) == FROM_PEERS * 3


@pytest.mark.slow
def test_a_new_node_without_memory_for_what_was_lost_leaves_it_to_the_others(tmp_path: Path, nodes: list[Path]) -> None:
    """The snapshot was given up for an older one, or for storage."""
    run = str(tmp_path / "run")
    assert run_ranks(4, save_protected, run, nodes[:4], (1, 2, 3), Parity(1)) == [[True, True, True]] * 4
    lose(run, nodes[1])
    with mounted(tmp_path / "small", "tmpfs", "size=1m") as small:
        there = [nodes[0], small, nodes[2], nodes[3]]
        try:
            assert run_ranks(4, restored_tiers, run, there) == FROM_PEERS * 4
        finally:
            end_keepers(small)
        with folder_of(run, small) as folder:
            assert copy_names(folder) == []


def train_on(run: str, node_dirs: Sequence[Path]) -> list[bool]:
    """Train for two steps, which no policy wants to save. Returns which of them were saved and protected."""
    start_new_job()
    memory = Memory(node_dir=node_dirs[dist.get_rank()], protect=Parity(1))
    state, protected = sharded(-1, dim=0), []
    with Checkpointer(run, state, memory=memory, save=EverySteps(1000), timeout_s=20.0) as checkpointer:
        first = checkpointer.restore().next_step
        for step in (first, first + 1):
            state["w"].copy_(sharded(step, dim=0)["w"])  # type: ignore[attr-defined]
            state["progress"]["step"] = step  # type: ignore[index]
            handle = checkpointer.step(step)
            if handle is not None:
                assert handle.memory_only
                handle.protected.wait(20)
            protected.append(handle is not None and handle.protected.is_done)
    return protected


@pytest.mark.parametrize("replacements", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_second_node_may_be_lost_after_the_first_step_that_follows_the_loss_of_one_with_parity(
    tmp_path: Path, nodes: list[Path], replacements: int
) -> None:
    """Nothing protected the restored checkpoint, or a newer one, until the policy wanted a save."""
    run = str(tmp_path / "run")
    assert run_ranks(4, save_protected, run, nodes[:4], (1, 2), Parity(1)) == [[True, True]] * 4
    lose(run, nodes[1])
    there = [nodes[0], *nodes[2 : 4 + replacements]]
    assert run_ranks(len(there), train_on, run, there) == [[True, False]] * len(there)
    lose(run, there.pop())
    assert run_ranks(len(there), restored_tiers, run, there) == FROM_PEERS * len(there)


@pytest.mark.slow
def test_the_first_step_after_a_restart_of_all_nodes_is_not_saved_for_their_parity(
    tmp_path: Path, nodes: list[Path]
) -> None:
    run = str(tmp_path / "run")
    assert run_ranks(3, save_protected, run, nodes[:3], (1, 2), Parity(1)) == [[True, True]] * 3
    assert run_ranks(3, train_on, run, nodes[:3]) == [[False, False]] * 3


def test_two_lost_nodes_cost_nothing_that_parity_for_two_gives(tmp_path: Path, nodes: list[Path]) -> None:
    run = str(tmp_path / "run")
    assert run_ranks(5, save_protected, run, nodes, (1, 2), Parity(2)) == [[True, True]] * 5
    for lost in (nodes[0], nodes[3]):
        lose(run, lost)
    left = [nodes[1], nodes[2], nodes[4]]
    assert run_ranks(3, restored_tiers, run, left) == [("peer memory", 3, True, TIERS)] * 3
    assert run_ranks(2, restored_tiers, run, left[:2])[0][1:3] == (3, True)


@pytest.mark.parametrize(
    ("losses", "lost", "left"), [(1, [2], [0, 1]), pytest.param(2, [0, 3], [4, 1], marks=pytest.mark.slow)]
)
def test_a_node_without_a_part_in_the_job_has_one_in_rebuilding_what_was_lost(
    tmp_path: Path, nodes: list[Path], losses: int, lost: list[int], left: list[int]
) -> None:
    """A group whose nodes did not all go on was short of them, so the job went back to storage."""
    run, there = str(tmp_path / "run"), nodes[: 3 + losses]
    saved = run_ranks(len(there), save_protected, run, there, (1, 2), Parity(losses))
    assert saved == [[True, True]] * len(there)
    for number in lost:
        lose(run, nodes[number])
    goes_on = [nodes[number] for number in left]
    assert run_ranks(2, restored_tiers, run, goes_on) == [("peer memory", 3, True, TIERS)] * 2


def restore_nothing(run: str, node_dirs: Sequence[Path]) -> list[int]:
    """Begin a run, and wait until this node has memory for the slots of its rank and for two copies of the other's."""
    start_new_job()
    node = node_dirs[dist.get_rank()]
    with Checkpointer(run, sharded(-1, dim=0), memory=Memory(node_dir=node, protect=COPIES), timeout_s=20.0) as each:
        assert each.restore().step is None
        with folder_of(run, node) as folder:
            until(lambda: len(slot_names(folder)) == len(copy_names(folder)) == 2, timeout_s=30)
            dist.barrier()  # a rank that ends removes its slots
            return [rank_of(name) for name in copy_names(folder)]


def test_nodes_take_memory_for_copies_before_the_first_save(tmp_path: Path, nodes: list[Path]) -> None:
    """They took it when the first snapshot was offered, so its protection took seconds per GiB."""
    assert run_ranks(2, restore_nothing, str(tmp_path / "run"), nodes[:2]) == [[1, 1], [0, 0]]


def save_unprotected(run: str, node_dirs: Sequence[Path]) -> bool:
    """Go on without protection, until the node has given the memory for it back."""
    start_new_job()
    node = node_dirs[dist.get_rank()]
    with (
        Checkpointer(run, sharded(-1, dim=0), memory=Memory(node_dir=node), timeout_s=20.0) as checkpointer,
        folder_of(run, node) as folder,
    ):
        checkpointer.restore()
        checkpointer.save(3).durable.wait(20)
        until(lambda: not copy_names(folder) and not parity_names(folder), timeout_s=20)
        dist.barrier()
    return True


@pytest.mark.parametrize("protect", [COPIES, pytest.param(Parity(1), marks=pytest.mark.slow)], ids=str)
def test_a_job_without_protection_does_not_keep_the_memory_that_an_earlier_one_took_for_it(
    tmp_path: Path, nodes: list[Path], protect: Copies | Parity
) -> None:
    """Copies of snapshots that were long behind what storage had stayed until the job had ended."""
    run = str(tmp_path / "run")
    assert run_ranks(2, save_protected, run, nodes[:2], (1, 2), protect) == [[True, True]] * 2
    assert run_ranks(2, save_unprotected, run, nodes[:2]) == [True, True]


def save_where_a_stranger_takes_the_port(run: str, node_dirs: Sequence[Path], number: int) -> bool:
    """Save, kill the keeper of node `number`, and take its port. Returns whether a later save is protected."""
    start_new_job()
    node_dir = node_dirs[dist.get_rank()]
    state = sharded(-1, dim=0)
    memory = Memory(node_dir=node_dir, protect=COPIES)
    with Checkpointer(run, state, memory=memory, timeout_s=20.0) as checkpointer, socket.socket() as stranger:
        checkpointer.save(1).protected.wait(20)
        dist.barrier()
        with folder_of(run, node_dir) as folder:
            port = noted_port(folder)
        assert port is not None
        if dist.get_rank() == number:
            end_keepers(node_dir)
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            stranger.bind((own_host(), port.port))
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        protected = torch.zeros(1)
        for step in range(2, 200):
            handle = checkpointer.save(step)
            with suppress(HoldfastError):
                handle.protected.wait(0.5)
            protected[0] = handle.protected.is_done
            dist.all_reduce(protected)
            if protected.item() == dist.get_world_size():
                break
    return bool(protected.item())


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_a_keeper_whose_port_a_stranger_has_taken_is_found_again(
    tmp_path: Path, nodes: list[Path], number: int
) -> None:
    """The next keeper listened at another port, which its peers never heard of: until the end of the job, no snapshot
    was protected."""
    run = str(tmp_path / "run")
    assert run_ranks(2, save_where_a_stranger_takes_the_port, run, nodes[:2], number) == [True, True]


def want_unlike(run: str, node_dirs: Sequence[Path], unlike: Copies | Parity | None, call: str) -> str:
    """Let ranks ask for different protection. Returns the error."""
    start_new_job()
    rank = dist.get_rank()
    policy = unlike if rank else COPIES
    memory = Memory(node_dir=node_dirs[rank], protect=policy, require_protection=rank == 1 and policy == COPIES)
    with Checkpointer(run, sharded(-1, dim=0), memory=memory, timeout_s=20.0) as checkpointer:
        with pytest.raises(ConfigurationError) as raised:
            checkpointer.restore() if call == "restore" else checkpointer.save(0).durable.wait(20)
        return str(raised.value)


@pytest.mark.parametrize("unlike", [None, Parity(1), COPIES], ids=str)
@pytest.mark.parametrize("call", ["restore", "save"])
def test_ranks_that_want_other_protection_than_others_hear_that_at_once(
    tmp_path: Path, nodes: list[Path], unlike: Copies | Parity | None, call: str
) -> None:
    """Some ranks waited until their time was up, and with two policies, that of rank 0 won without a word. When only
    some ranks required protection, and it could not be had, the others went on alone."""
    error, other = run_ranks(2, want_unlike, str(tmp_path / "run"), nodes[:2], unlike, call)
    assert error == other
    told = "none" if unlike is None else repr(unlike) + " with require_protection=True" * (unlike == COPIES)
    assert (
        f"[config.unlike_protection] the ranks want their snapshots protected in different ways: rank 0 {COPIES!r}"
        in error
    )
    assert f"rank 1 {told}." in error


def damage_copies(run: str, node: Path, step: int) -> int:
    """Flip a bit of each copy of a step that a node holds, behind the back of its keeper, which is stopped."""
    stop_keepers(node)
    num_damaged = 0
    with folder_of(run, node) as folder:
        for name in copy_names(folder):
            with Slot(folder, name) as slot:
                contents = slot.record.contents
                assert contents is not None
                if contents.step == step:
                    slot.data[contents.data_start] ^= 1
                    num_damaged += 1
    return num_damaged


@pytest.mark.parametrize("damaged", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_damaged_copy_on_one_node_leaves_the_sound_one_on_another(
    tmp_path: Path, nodes: list[Path], damaged: int
) -> None:
    """The copies of both nodes were passed over, and the job went back to storage."""
    run = str(tmp_path / "run")
    assert run_ranks(4, save_protected, run, nodes[:4], (1, 2, 3), Copies(2)) == [[True, True, True]] * 4
    lose(run, nodes[3])  # nodes 0 and 1 have its copies
    assert damage_copies(run, nodes[damaged], 3) == 2
    try:
        found = run_ranks(3, restored_tiers, run, nodes[:3])
    finally:
        continue_keepers(nodes[damaged])
    assert found == FROM_PEERS * 3


@pytest.mark.slow
def test_a_replacement_node_gets_what_was_lost_and_damage_in_a_survivor_is_rebuilt_too(
    tmp_path: Path, nodes: list[Path]
) -> None:
    run = str(tmp_path / "run")
    assert run_ranks(4, save_protected, run, nodes[:4], (1, 2), Parity(2)) == [[True, True]] * 4
    lose(run, nodes[1])
    with folder_of(run, nodes[3]) as folder:
        for name in slot_names(folder):
            with Slot(folder, name) as slot:
                contents = slot.record.contents
                assert contents is not None
                slot.data[contents.data_start] ^= 1
    new_nodes = [nodes[0], nodes[4], nodes[2], nodes[3]]
    assert run_ranks(4, restored_tiers, run, new_nodes) == [("peer memory", 3, True, TIERS)] * 4
    for node, num_copies in zip(new_nodes, (0, 2, 0, 0), strict=True):
        with folder_of(run, node) as folder:
            assert len(copy_names(folder)) == num_copies, node


def save_and_lose(run: str, node_dirs: Sequence[Path], lost: int) -> bool:
    """Save to memory alone, and lose a node before its keeper can write anything to the run."""
    start_new_job()
    memory = Memory(node_dir=node_dirs[dist.get_rank()], protect=Parity(1))
    state = sharded(-1, dim=0)
    with Checkpointer(run, state, memory=memory, timeout_s=20.0) as checkpointer:
        checkpointer.restore()
        state["w"].copy_(sharded(2, dim=0)["w"])  # type: ignore[attr-defined]
        state["progress"]["step"] = 2  # type: ignore[index]
        handle = checkpointer.save(2, memory_only=True)
        handle.protected.wait(20)
        dist.barrier()
        if dist.get_rank() == lost:
            lose(run, node_dirs[lost])
        dist.barrier()
    return handle.protected.is_done


@pytest.mark.slow
def test_a_checkpoint_that_needs_parity_is_written_to_the_run(tmp_path: Path, nodes: list[Path]) -> None:
    run = tmp_path / "run"
    assert run_ranks(4, save_protected, str(run), nodes[:4], (1,), Parity(1)) == [[True]] * 4
    assert run_ranks(4, save_and_lose, str(run), nodes[:4], 2) == [True] * 4
    num_committed = len(committed(run))
    left = [nodes[0], nodes[1], nodes[3]]
    expected = ("peer memory", 3, True, TIERS)
    assert run_ranks(3, restored_tiers, str(run), left) == [expected] * 3
    until(lambda: len(committed(run)) == num_committed + 1)


@pytest.mark.slow
def test_the_report_names_a_checkpoint_that_could_not_be_rebuilt_and_was_given_up(
    tmp_path: Path, nodes: list[Path]
) -> None:
    """It was told only if nothing of the older checkpoint had to be rebuilt: the last look had forgotten it."""
    run = str(tmp_path / "run")
    assert run_ranks(4, save_protected, run, nodes[:4], (1,), Parity(1)) == [[True]] * 4
    assert run_ranks(4, save_and_lose, run, nodes[:4], 2) == [True] * 4
    left = [nodes[0], nodes[1], nodes[3]]
    for node in left:
        with folder_of(run, node) as folder:
            for name in parity_names(folder):
                with Slot(folder, name) as row:
                    if row.record.contents is not None and row.record.contents.step == 2:
                        row.data[0] ^= 1
    for tier, rejected in run_ranks(3, rejected_sources, run, left):
        assert tier == "peer memory"
        assert [each.place for each in rejected] == ["2.1"]


def save_and_stop_keepers(run: str, node_dirs: Sequence[Path]) -> bool:
    """Save to memory alone, and stop the keeper before it writes anything to the run, as it would after the job."""
    start_new_job()
    node = node_dirs[dist.get_rank()]
    state = sharded(-1, dim=0)
    with Checkpointer(run, state, memory=Memory(node_dir=node), timeout_s=20.0) as checkpointer:
        checkpointer.restore()
        handle = checkpointer.save(2, memory_only=True)
        handle.staged.wait(20)
        until(lambda: handle.held)
        stop_keepers(node)
        dist.barrier()
    return handle.held


def rejected_sources(run: str, node_dirs: Sequence[Path]) -> tuple[str | None, tuple[RejectedSource, ...]]:
    report, same = restored_columns(run, node_dirs)
    assert same
    return report.tier, report.rejected


def test_the_report_says_why_a_newer_snapshot_was_not_restored(tmp_path: Path, nodes: list[Path]) -> None:
    run = str(tmp_path / "run")
    assert run_ranks(2, save_protected, run, nodes[:2], (1,)) == [[True]] * 2
    assert run_ranks(2, save_and_stop_keepers, run, nodes[:2]) == [True] * 2
    lose(run, nodes[1])
    continue_keepers(nodes[0])
    reason = "no node of this job has 1 of its 2 files, or a sound copy of them"
    expected = ("peer memory", (RejectedSource("node memory", "2.1", reason),))
    assert run_ranks(1, rejected_sources, run, nodes[:1]) == [expected]


def committed(run: Path) -> list[Path]:
    return list((run / "history").iterdir())
