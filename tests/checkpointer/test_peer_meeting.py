"""What ranks refuse when they introduce the keepers of their nodes to each other."""

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
from holdfast.node_memory.peering import PeerNode
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
