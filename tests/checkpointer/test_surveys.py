"""The survey of the memory of all nodes finds the newest whole checkpoint, and shares the reading of lost files."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from bench.layouts import fsdp
from bench.lost_nodes import NEWER, OLDER, SimulatedJob, after_losses, simulated_job
from holdfast.checkpoint.catalogue import Tier
from holdfast.checkpointer.rebuild_plan import AwayShare
from holdfast.node_memory.parity_records import GroupNode, ParityGroup, ParityRecord, SlotDigests
from holdfast.node_memory.slots import SlotFile


@pytest.fixture
def job(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[SimulatedJob]:
    world_size, num_nodes = request.param
    with simulated_job(fsdp(world_size), num_nodes, tmp_path) as job:
        yield job


@pytest.mark.parametrize("job", [(16, 4)], indirect=True, ids=["4 nodes"])
def test_the_copies_of_a_lost_node_are_read_on_all_nodes_that_hold_them(job: SimulatedJob) -> None:
    nodes, copies = job.held(NEWER, Tier.NODE_MEMORY), job.held(NEWER, Tier.PEER_MEMORY)[3]
    found = job.choice(job.inventories([nodes[0], nodes[1] + copies, nodes[2] + copies, ()]))
    assert found.copied == (12, 13, 14, 15)
    assert found.tier == "peer memory"
    assert found.owners[:12] == tuple(range(12))
    assert Counter(rank // 4 for rank in found.owners[12:]) == {1: 2, 2: 2}


@pytest.mark.parametrize("job", [(16, 4)], indirect=True, ids=["4 nodes"])
def test_a_node_that_sent_its_copies_slowly_is_not_asked_for_those_that_another_has_too(job: SimulatedJob) -> None:
    nodes, copies = job.held(NEWER, Tier.NODE_MEMORY), job.held(NEWER, Tier.PEER_MEMORY)[3]
    speeds = {"node-0": 1e9, "node-1": 1e6, "node-2": 1e9}
    found = job.inventories([nodes[0], nodes[1] + copies, nodes[2] + copies, ()])
    told = [structs.replace(each, sent_bytes_per_s=speeds.get(each.node, 0.0)) for each in found]
    assert Counter(rank // 4 for rank in job.choice(told).owners[12:]) == {2: 4}


@pytest.mark.parametrize("job", [(16, 4)], indirect=True, ids=["4 nodes"])
def test_ranks_of_a_node_that_tell_different_files_are_all_heard(job: SimulatedJob) -> None:
    found = job.inventories(job.held(NEWER, Tier.NODE_MEMORY))
    parts = [structs.replace(each, held=each.held[rank % 4 :][:1]) for rank, each in enumerate(found)]
    assert job.choice(parts).owners == tuple(range(16))


@pytest.mark.parametrize("job", [(16, 4)], indirect=True, ids=["4 nodes"])
def test_a_generation_that_lacks_a_file_is_passed_over(job: SimulatedJob) -> None:
    newer = job.held(NEWER, Tier.NODE_MEMORY)
    newer[0] = newer[0][1:]
    nodes = [older + files for older, files in zip(job.held(OLDER, Tier.NODE_MEMORY), newer, strict=True)]
    found = job.choice(job.inventories(nodes))
    assert found.folder.endswith(OLDER)
    assert (found.parts, found.given_up) == ((NEWER,), ())


@pytest.mark.parametrize("job", [(16, 4)], indirect=True, ids=["4 nodes"])
@pytest.mark.parametrize(
    ("files", "digests"),
    [
        ((SlotFile(0, 0, 4096, 5000), SlotFile(99, 8192, 4096, 5000)), ("a" * 32, "b" * 32)),
        ((SlotFile(0, 0, 4096, 5000), SlotFile(-1, 8192, 4096, 5000)), ("a" * 32, "b" * 32)),
        ((SlotFile(0, 0, 4096, 5000), SlotFile(1, 8192, 4096, 5000)), ("a" * 32,)),
        ((SlotFile(0, 0, 4096, 5000),), ("a" * 32,)),
    ],
    ids=["no such file", "a negative number", "a digest too few", "another size"],
)
def test_a_node_without_a_part_that_lists_nonsense_does_not_end_the_restore(
    job: SimulatedJob, monkeypatch: pytest.MonkeyPatch, files: tuple[SlotFile, ...], digests: tuple[str, ...]
) -> None:
    """Rank 0 looked for a file that the checkpoint does not have, and all ranks raised an `IndexError`."""
    slot = SlotDigests(0, files, digests)
    row = ParityRecord(ParityGroup((GroupNode("node-9", ()), GroupNode("node-0", (slot,))), 1), 0, 1)
    listed = {NEWER: [AwayShare("node-9", [slot], [slot], [row])]}
    monkeypatch.setattr("holdfast.checkpointer.choosing.away_shares", lambda *_: listed)
    newer = job.held(NEWER, Tier.NODE_MEMORY)
    newer[0] = newer[0][1:]
    nodes = [older + files for older, files in zip(job.held(OLDER, Tier.NODE_MEMORY), newer, strict=True)]
    assert job.choice(job.inventories(nodes)).folder.endswith(OLDER)


@pytest.mark.parametrize("job", [(8960, 2048)], indirect=True, ids=["2,048 nodes"])
def test_the_choice_of_2048_nodes_that_lost_5_percent_takes_less_than_a_second(job: SimulatedJob) -> None:
    inventories = after_losses(job)
    started = time.thread_time()
    found = job.choice(inventories)
    assert time.thread_time() - started < 1
    assert found.folder.endswith(NEWER)
    lost = {int(each.node.removeprefix("node-")) for each in inventories if not each.held}
    assert len(lost) == 103
    assert found.copied == tuple(file for file in range(job.num_files) if job.node_of[file] in lost)
    assert {job.node_of[found.owners[file]] for file in found.copied} == {node + 1024 for node in lost}
