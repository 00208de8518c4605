"""Registers in a job's store: the first value stays, and each use has its own."""

from __future__ import annotations

import torch.distributed as dist

from holdfast.control.registers import SharedRegisters
from holdfast.control.torch_store import GroupStore, Member


def registers_in(store: dist.Store) -> SharedRegisters:
    """The registers of the only rank of a job, whose process group was just made."""
    return SharedRegisters(Member(GroupStore(store), "holdfast", rank=0, world_size=1), "saves", timeout_s=10.0)


def test_the_first_value_that_is_claimed_stays() -> None:
    store = dist.HashStore()
    registers = registers_in(store)
    assert registers.background.read("verdict") is None
    assert registers.foreground.claim("verdict", b"yes") == b"yes"
    assert registers.background.claim("verdict", b"no") == b"yes"
    assert registers.background.read("verdict") == b"yes"
    registers.background.forget("verdict")
    assert registers.foreground.read("verdict") is None


def test_counters_count() -> None:
    store = dist.HashStore()
    registers = registers_in(store)
    assert [registers.foreground.count("promises") for _ in range(3)] == [1, 2, 3]


def test_ranks_that_make_their_process_group_again_do_not_find_the_values_of_an_earlier_loop() -> None:
    store = dist.HashStore()
    earlier = registers_in(store)
    earlier.foreground.claim("verdict", b"yes")
    earlier.leave()
    assert registers_in(store).foreground.read("verdict") is None


def test_each_loop_of_a_job_has_registers_of_its_own() -> None:
    store = dist.HashStore()
    member = Member(GroupStore(store), "holdfast", rank=0, world_size=1)
    earlier, later = (SharedRegisters(member, "saves", timeout_s=10.0) for _ in range(2))
    earlier.foreground.claim("verdict", b"yes")
    assert later.foreground.read("verdict") is None
