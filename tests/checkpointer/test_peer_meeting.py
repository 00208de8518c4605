"""The meeting in which ranks introduce the keepers of their nodes to each other, and the nodes that they refuse."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist

from holdfast import Checkpointer, Copies, Memory
from holdfast.checkpointer.peer_meeting import _domains, _require_unlike
from holdfast.errors import ConfigurationError
from holdfast.node_memory.peering import PeerNode, PeerPort, note_port, noted_port, noted_table
from tests.checkpointer.test_checkpointer import folder_of
from tests.checkpointer.test_checkpointer_ranks import sharded
from tests.support.keepers import end_keepers
from tests.support.models import start_new_job
from tests.support.ranks import run_ranks


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Path]]:
    paths = [tmp_path / f"node{number}" for number in range(2)]
    for path in paths:
        path.mkdir()
    yield paths
    for path in paths:
        end_keepers(path)


def test_a_node_whose_address_is_also_that_of_another_one_does_not_hold_its_own_copies() -> None:
    nodes = [PeerNode("a", "127.0.0.1:40000"), PeerNode("b", "127.0.0.1:40001")]
    _require_unlike(nodes)
    with pytest.raises(ConfigurationError, match=r"2 nodes give 127\.0\.0\.1:40000") as caught:
        _require_unlike([*nodes, PeerNode("c", "127.0.0.1:40000")])
    assert caught.value.code == "config.protection"


def test_a_file_of_failure_domains_that_is_no_text_is_an_error_with_an_action(tmp_path: Path) -> None:
    path = tmp_path / "domain"
    path.write_bytes(b"block-\xff/rack")
    with pytest.raises(ConfigurationError, match="cannot be read") as caught:
        _domains(path)
    assert caught.value.code == "config.protection"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["fifo", "folder", "device", "large"])
def test_a_file_of_failure_domains_that_is_none_does_not_hold_up_the_first_save(tmp_path: Path, kind: str) -> None:
    """A named pipe was waited for without end, and a device or a large file was read whole."""
    path = tmp_path / "domain"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, 1 << 30)
    why = "has more than 4,096 bytes" if kind == "large" else "is no regular file"
    with pytest.raises(ConfigurationError, match=why) as caught:
        _domains(path)
    assert caught.value.code == "config.protection"


def protection_with_a_full_node(run: str, node_dirs: Sequence[Path]) -> tuple[str, bool]:
    """Save while the second node cannot note who its peers are. Returns why that is not protected, and whether it is
    durable."""
    start_new_job()
    rank = dist.get_rank()
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    memory = Memory(node_dir=node_dirs[rank], protect=Copies(1))
    with (
        patch("holdfast.checkpointer.peer_meeting.note_table", side_effect=full) if rank else nullcontext(),
        Checkpointer(run, sharded(1, dim=0), memory=memory, timeout_s=30.0) as checkpointer,
    ):
        handle = checkpointer.save(1)
        handle.durable.wait(30)
        return str(handle.protected.error), handle.durable.is_done


def test_all_ranks_hear_of_a_node_that_cannot_note_its_peers(tmp_path: Path, nodes: list[Path]) -> None:
    """Only its own ranks heard of it. The others waited in vain for a protection that could not come."""
    found = run_ranks(2, protection_with_a_full_node, str(tmp_path / "run"), nodes)
    assert found[0] == found[1]
    assert "No space left on device" in found[0][0]
    assert found[0][1]


def restore_beside_a_trainer(run: str, node_dirs: Sequence[Path], num_looks: int) -> bool:
    """Save, and restore in another job, beside which one begins to train after it has looked for one some times.
    Returns whether the nodes have the table of the first job."""
    start_new_job()
    node = node_dirs[dist.get_rank()]
    memory = Memory(node_dir=node, protect=Copies(1))
    with Checkpointer(run, sharded(1, dim=0), memory=memory, timeout_s=30.0) as checkpointer:
        checkpointer.save(1).protected.wait(30)
    looks = [False] * num_looks + [True] * 3
    with folder_of(run, node) as folder, patch("holdfast.checkpointer.peer_meeting.has_any_trainer", side_effect=looks):
        before = noted_table(folder)
        start_new_job()
        with Checkpointer(run, sharded(1, dim=0), memory=memory, timeout_s=30.0) as checkpointer:
            checkpointer.restore()
        return before is not None and noted_table(folder) == before


@pytest.mark.parametrize("num_looks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_evaluation_does_not_take_the_peers_of_a_job_that_begins_to_train_beside_it(
    tmp_path: Path, nodes: list[Path], num_looks: int
) -> None:
    """It looked for a trainer once, and introduced the keepers to its own nodes a moment later: nothing that the other
    job saved was protected from then on."""
    assert run_ranks(2, restore_beside_a_trainer, str(tmp_path / "run"), nodes, num_looks) == [True, True]


def met_keeper(run: str, node_dirs: Sequence[Path]) -> list[bool]:
    """Meet at the first save. Returns whether the peers have to meet again: at once, where the keeper does not listen,
    where it listens elsewhere, and where it listens for those of another job."""
    start_new_job()
    memory = Memory(node_dir=node_dirs[dist.get_rank()], protect=Copies(1))
    with Checkpointer(run, sharded(-1, dim=0), memory=memory, timeout_s=20.0) as checkpointer:
        checkpointer.save(1).protected.wait(20)
        tier = checkpointer._tier
        assert tier is not None
        found = [tier.stager.has_to_meet]
        with folder_of(run, node_dirs[dist.get_rank()]) as folder:
            port = noted_port(folder)
            assert port is not None
            others = PeerPort(port.secret_digest, error="no port"), PeerPort(port.secret_digest, port.port + 1)
            for other in (*others, PeerPort(b"another", port.port + 1)):
                note_port(folder, other)
                found.append(tier.stager.has_to_meet)
            note_port(folder, port)
        dist.barrier()
    return found


def test_peers_meet_again_when_a_keeper_listens_at_another_port(tmp_path: Path, nodes: list[Path]) -> None:
    """They never did, so the peers of a keeper whose port somebody had taken did not find the next one."""
    expected = [False, False, True, False]
    assert run_ranks(2, met_keeper, str(tmp_path / "run"), nodes) == [expected, expected]
