"""Worlds of several groups: what they ask of the store, which all ranks share, and how they hear of ranks that end."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
import torch.distributed as dist

from holdfast.control.channel import Channel
from holdfast.control.channel_members import ChannelMembers
from holdfast.control.deadline import Deadline
from holdfast.control.key_value_store import KeyValueStore
from holdfast.control.node_board import NodeBoard
from holdfast.control.torch_store import TorchMeeting, TorchStore, member_of
from holdfast.errors import DeadlineError, StateError
from tests.control.test_channel import LABEL, MetRank, meeting, met, num_messages, on_ranks, payload, soon, state_error
from tests.support.ranks import RankDiedError, RanksFailedError, run_ranks

T = TypeVar("T")
GROUP_SIZE, NODE_SIZE = 8, 4
#: The requests whose answer a rank waits for.
ANSWERED = ("get", "get_all", "wait", "check", "add", "delete", "claim")


class CountedStore:
    """A store that counts its requests, and the bytes that are sent to it."""

    def __init__(self, store: KeyValueStore, requests: Counter[str]) -> None:
        self._store = store
        self._requests = requests

    def __getattr__(self, name: str) -> Any:
        self._requests[name] += 1

        def request(*args: Any) -> Any:
            self._requests["sent"] += sum(len(arg) for arg in args if isinstance(arg, bytes))
            return getattr(self._store, name)(*args)

        return request


class PlayedMeeting(TorchMeeting):
    """The meeting of one of many ranks that a single thread plays."""

    def __init__(self, job: MetRank, requests: Counter[str], board: NodeBoard) -> None:
        super().__init__(met(job), deadline=soon())
        self._requests = requests
        self._node_board = board

    @property
    def store(self) -> KeyValueStore:
        return cast("KeyValueStore", CountedStore(super().store, self._requests))

    @property
    def board(self) -> NodeBoard:
        return self._node_board

    @property
    def root(self) -> KeyValueStore:
        return cast("KeyValueStore", CountedStore(super().root, self._requests))

    def ask(self, call: Callable[[], T], timeout_s: float, *, meanwhile: Callable[[], None]) -> T:
        return call()


class PlayedWorld:
    """All ranks of a world, one after the other in one thread; they exchange messages of `nbytes` each way."""

    def __init__(self, world_size: int, memory: Path, *, nbytes: int) -> None:
        self.world_size = world_size
        self.store = dist.HashStore()
        self._nbytes = nbytes
        self._jobs = [MetRank(self.store) for _ in range(world_size)]
        self._boards = []
        for node in range(-(-world_size // NODE_SIZE)):
            (memory / str(node)).mkdir()
            self._boards.append(NodeBoard(memory / str(node)))

    def exchange(self, num_exchanges: int) -> list[Counter[str]]:
        """Do one operation, and return the requests of each rank."""
        requests = [Counter[str]() for _ in range(self.world_size)]
        channels = [
            Channel(
                PlayedMeeting(self._jobs[rank], requests[rank], self._boards[rank // NODE_SIZE]),
                rank=rank,
                world_size=self.world_size,
                label=LABEL,
                group_size=GROUP_SIZE,
            )
            for rank in range(self.world_size)
        ]
        # A rank comes after those for which it waits.
        upwards = sorted(channels, key=lambda channel: (channel.rank % GROUP_SIZE == 0, channel.rank == 0))
        message = bytes(self._nbytes)
        for number in range(num_exchanges):
            for channel in upwards:
                gathered = channel.gather(f"phase {number}", message, soon())
                assert gathered is None or gathered == [message] * self.world_size
            for channel in channels:
                down = message if channel.rank == 0 else None
                assert channel.broadcast(f"phase {number}", down, soon()) == message
        channels[0].await_readers(soon())
        return requests


def most(requests: list[Counter[str]], ranks: range, names: tuple[str, ...] = ANSWERED) -> int:
    return max(sum(requests[rank][name] for name in names) for rank in ranks)


@pytest.fixture(scope="module")
def requests(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Counter[str]]]:
    """The requests of each rank in an operation of two exchanges, as a later save is one, by the size of the world."""
    found = {}
    for world_size in (64, 256):
        world = PlayedWorld(world_size, tmp_path_factory.mktemp(str(world_size)), nbytes=300)
        for _ in range(3):
            found[world_size] = world.exchange(2)
        assert num_messages(world.store, world_size) == 0
    return found


def test_rank_0_asks_the_store_for_each_group_and_not_for_each_rank(requests: dict[int, list[Counter[str]]]) -> None:
    few, many = most(requests[64], range(1)), most(requests[256], range(1))
    more_groups = (256 - 64) // GROUP_SIZE
    # Per exchange, rank 0 removes the message of each group, and reads all with one request.
    assert many - few == 2 * more_groups
    assert few < 2 * (64 // GROUP_SIZE) + 40


def test_the_requests_of_other_ranks_do_not_grow_with_the_world(requests: dict[int, list[Counter[str]]]) -> None:
    for found in requests.values():
        assert most(found, range(1, len(found))) <= 2 * 10
        # Most ranks wait for no answer of the store at all: one rank of a node reads for the others. (Rank 0 does not.)
        waiting = [rank for rank in range(1, len(found)) if most(found, range(rank, rank + 1))]
        assert len(waiting) == len(found) // NODE_SIZE
        assert most(found, range(len(found)), ("append", "set")) <= 2 * 3


def test_the_bytes_of_a_rank_do_not_grow_with_the_world(requests: dict[int, list[Counter[str]]]) -> None:
    for found in requests.values():
        members = [rank for rank in range(len(found)) if rank % GROUP_SIZE]
        assert max(found[rank]["sent"] for rank in members) < 2 * (300 + 200)
        # A group's first rank forwards little more than the payloads of its group.
        leaders = range(GROUP_SIZE, len(found), GROUP_SIZE)
        assert max(found[rank]["sent"] for rank in leaders) < 2 * (GROUP_SIZE * 310 + 300)


def test_the_store_holds_nothing_of_earlier_operations(tmp_path: Path) -> None:
    world = PlayedWorld(32, tmp_path, nbytes=100)
    for _ in range(20):
        world.exchange(3)
        assert num_messages(world.store, 32) == 0


def test_contributions_of_any_size_arrive(tmp_path: Path) -> None:
    world = PlayedWorld(20, tmp_path, nbytes=100_000)
    world.exchange(2)
    assert num_messages(world.store, 20) == 0


def test_an_operation_removes_the_last_broadcast_of_the_one_before() -> None:
    store = dist.HashStore()
    jobs = [MetRank(store) for _ in range(4)]

    def body(channel: Channel) -> bytes:
        place = meeting(store, jobs[channel.rank])
        there = Channel(place, rank=channel.rank, world_size=4, label=LABEL, group_size=2)
        return there.exchange("plan", b"", b"".join, soon())

    for _ in range(5):
        assert set(on_ranks(4, body).values()) == {b""}
        assert num_messages(store, 4) <= 4  # the broadcast and its marks, of this operation and the last one


def exchange_in_pairs(killed: int, phase: int) -> tuple[str, float]:
    """Exchange three times, in groups of two ranks; the rank `killed` ends before the given one."""
    member = member_of(None)
    assert member is not None
    place = TorchMeeting(member, deadline=soon())
    channel = Channel(place, rank=member.rank, world_size=member.world_size, label=LABEL, group_size=2)
    start_s = time.monotonic()
    for number in range(3):
        if number == phase and member.rank == killed:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == phase:
            start_s = time.monotonic()
        try:
            channel.exchange(f"phase {number}", b"", b"".join, soon())
        except DeadlineError as error:
            return str(error), time.monotonic() - start_s
    return "", 0.0


@pytest.mark.parametrize("killed", [1, *(pytest.param(rank, marks=pytest.mark.slow) for rank in (0, 2, 3))])
def test_a_rank_that_is_killed_is_noticed_at_once_whatever_its_part_in_the_tree(killed: int) -> None:
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(4, exchange_in_pairs, killed, 1)
    assert isinstance(caught.value.by_rank[killed], RankDiedError)
    assert len(caught.value.results) == 3
    for result in caught.value.results.values():
        message, waited_s = cast("tuple[str, float]", result)
        # The first rank of another group is absent for rank 0, as one that did not come in time.
        assert f"rank {killed} " in message
        assert waited_s < 6


@pytest.mark.parametrize("given_up", [3, *(pytest.param(rank, marks=pytest.mark.slow) for rank in (1, 5))])
def test_a_rank_that_is_given_up_ends_the_wait_of_its_group(given_up: int) -> None:
    store = dist.HashStore()

    def body(channel: Channel) -> None:
        members = ChannelMembers()
        if channel.rank == 0:
            members.given_up[given_up] = state_error(given_up)
        there = Channel(meeting(store), rank=channel.rank, world_size=6, label=LABEL, group_size=2, members=members)
        there.confirm("plan", b"", Deadline(20))

    start_s = time.monotonic()
    results = on_ranks(6, body, absent=(given_up,))
    assert time.monotonic() - start_s < 5
    assert all(isinstance(error, StateError) and f"tensor of {given_up}" in error.message for error in results.values())


def test_values_grow_by_what_several_threads_append_to_a_store_that_cannot_append(tmp_path: Path) -> None:
    file = dist.FileStore(str(tmp_path / "store"), 1)

    def body(channel: Channel) -> None:
        store = TorchStore(file, blocking=False)
        for number in range(5):
            store.append("key", b"%d%d." % (channel.rank, number))

    on_ranks(3, body)
    store = TorchStore(file, blocking=False)
    found = store.get("key").decode().split(".")
    assert sorted(found) == ["", *(f"{rank}{number}" for rank in range(3) for number in range(5))]
    assert store.get_all(["key", "key"]) == [store.get("key")] * 2


def test_ranks_exchange_messages_in_groups_over_a_tcp_store() -> None:
    server = dist.TCPStore("localhost", 0, None, is_master=True, wait_for_workers=False)
    stores = [dist.TCPStore("localhost", server.port, None, is_master=False) for _ in range(5)]

    def body(channel: Channel) -> bytes:
        there = Channel(meeting(stores[channel.rank]), rank=channel.rank, world_size=5, label=LABEL, group_size=2)
        first = there.exchange("plan", payload(channel.rank), b"|".join, soon())
        second = there.in_background().exchange("write", first, lambda answers: answers[4], soon())
        there.await_readers(soon())
        return second

    assert set(on_ranks(5, body).values()) == {b"|".join(map(payload, range(5)))}
