"""`torchrun --max-restarts` on one node starts all ranks again with the store of those that died."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from holdfast.control.torch_store import member_of


def keys_begin_with(monkeypatch: pytest.MonkeyPatch, *, restart: int, ranks: int, on_this_node: int) -> str:
    """How the keys of a job begin, of which torchrun has started `ranks` ranks, for the time `restart`."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restart))
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(on_this_node))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        member = member_of(None)
        assert member is not None
        return member.name
    finally:
        dist.destroy_process_group()


def test_a_restart_does_not_read_what_the_ranks_before_it_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank took the verdict on a save of the last attempt for that on its own, and the restarted job died of it."""
    names = {keys_begin_with(monkeypatch, restart=number, ranks=2, on_this_node=2) for number in range(3)}
    assert len(names) == 3


def test_the_ranks_of_several_nodes_meet_although_each_node_counts_its_own_restarts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = {keys_begin_with(monkeypatch, restart=number, ranks=4, on_this_node=2) for number in range(3)}
    assert len(names) == 1
