"""Messages between ranks: they arrive, or the error tells of the lost store or process; keys are cleaned up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, cast

import msgspec
import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.control.attempt import Attempt
from holdfast.control.channel import Channel
from holdfast.control.deadline import Deadline
from holdfast.control.torch_store import GroupStore, Member, TorchMeeting, TorchStore, default_channel
from holdfast.errors import DeadlineError, HoldfastError, StateError, StorageError
from tests.support.ranks import RankDiedError, RanksFailedError, run_ranks

T = TypeVar("T")
LABEL = "save of step 700"


class MetRank(GroupStore):
    """The store of a rank that has met all the others."""

    def attempt(self, members: str, rank: int) -> Attempt:
        return self._attempts.setdefault(members, Attempt("met"))


def meeting(store: dist.Store, job: MetRank | None = None) -> TorchMeeting:
    return TorchMeeting(met(job or MetRank(store)), deadline=soon())


def met(job: MetRank) -> Member:
    return Member(job, "test", rank=0, world_size=1)


def on_ranks(
    world_size: int,
    body: Callable[[Channel], T],
    *,
    store: dist.Store | None = None,
    group_size: int = 64,
    absent: tuple[int, ...] = (),
) -> dict[int, T | Exception]:
    """Run `body` on every rank, a thread each, and give what each returned or raised."""
    shared = store or dist.HashStore()

    def rank_main(rank: int) -> T | Exception:
        channel = Channel(meeting(shared), rank=rank, world_size=world_size, label=LABEL, group_size=group_size)
        try:
            return body(channel)
        except Exception as error:  # noqa: BLE001 - it is the test that judges it
            return error

    ranks = [rank for rank in range(world_size) if rank not in absent]
    with ThreadPoolExecutor(len(ranks)) as threads:
        return dict(zip(ranks, threads.map(rank_main, ranks), strict=True))


def num_messages(store: dist.Store, world_size: int) -> int:
    """The keys in `store` beside those that say which operation each rank came to last."""
    return store.num_keys() - (world_size if world_size > 1 else 0)


def soon() -> Deadline:
    return Deadline(30)


def payload(rank: int) -> bytes:
    return f"from {rank}".encode()


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def state_error(rank: int) -> StateError:
    return StateError(f"tensor of {rank}.", code="state.example", action="Change it.", tensor="w", rank=rank)


# ---- what arrives


@settings(max_examples=20)
@given(world_size=st.integers(1, 12), group_size=st.integers(1, 5))
def test_rank_0_gathers_all_payloads_in_rank_order_for_every_shape_of_the_tree(
    world_size: int, group_size: int
) -> None:
    store = dist.HashStore()
    results = on_ranks(
        world_size, lambda c: c.gather("plan", payload(c.rank), soon()), store=store, group_size=group_size
    )
    assert results.pop(0) == [payload(rank) for rank in range(world_size)]
    assert set(results.values()) <= {None}
    assert num_messages(store, world_size) == 0


def test_a_broadcast_reaches_every_rank() -> None:
    results = on_ranks(5, lambda c: c.broadcast("plan", b"go" if c.rank == 0 else None, soon()))
    assert set(results.values()) == {b"go"}


def test_an_exchange_brings_rank_0s_answer_to_every_rank() -> None:
    results = on_ranks(5, lambda c: c.exchange("plan", payload(c.rank), b"|".join, soon()), group_size=2)
    assert set(results.values()) == {b"from 0|from 1|from 2|from 3|from 4"}


class Here(msgspec.Struct, frozen=True):
    """A message of a rank."""

    rank: int


class Highest(msgspec.Struct, frozen=True, tag="highest"):
    """One kind of answer."""

    rank: int


class Nobody(msgspec.Struct, frozen=True, tag="nobody"):
    """Another one."""


def test_an_exchange_takes_and_gives_structs() -> None:
    def highest(ranks: list[Here]) -> Highest | Nobody:
        return Highest(max(each.rank for each in ranks)) if ranks[0].rank == 0 else Nobody()

    def ask(first: int) -> Callable[[Channel], object]:
        return lambda c: c.exchange("plan", Here(c.rank + first), highest, soon(), takes=Here, gives=Highest | Nobody)

    assert set(on_ranks(3, ask(0)).values()) == {Highest(2)}
    assert set(on_ranks(3, ask(1)).values()) == {Nobody()}


def test_a_message_that_cannot_be_sent_is_an_error_on_every_rank() -> None:
    results = on_ranks(
        2,
        lambda c: c.exchange("plan", object() if c.rank else b"", lambda _: b"", soon(), takes=bytes, gives=bytes),
    )
    for error in results.values():
        assert isinstance(error, HoldfastError)
        assert "rank 1 failed in 'plan'" in error.message


def test_confirm_returns_when_no_rank_has_failed() -> None:
    assert on_ranks(3, lambda c: c.confirm("write", "done", soon())) == {0: None, 1: None, 2: None}


def test_a_world_of_one_needs_no_store() -> None:
    channel = Channel(None, rank=0, world_size=1, label=LABEL)
    assert channel.gather("plan", b"a", soon()) == [b"a"]
    assert channel.broadcast("plan", b"b", soon()) == b"b"
    assert channel.exchange("plan", b"c", b"".join, soon()) == b"c"
    with pytest.raises(StateError):
        channel.confirm("plan", state_error(0), soon())


@pytest.fixture
def tcp_stores() -> list[dist.Store]:
    server = dist.TCPStore("localhost", 0, None, is_master=True, wait_for_workers=False)
    return [server, *(dist.TCPStore("localhost", server.port, None, is_master=False) for _ in range(2))]


def test_payloads_may_be_larger_than_what_a_tcp_store_takes_at_once(tcp_stores: list[dist.Store]) -> None:
    large = os.urandom(9 * 2**20)

    def rank_main(rank: int) -> tuple[list[bytes] | None, bytes]:
        channel = Channel(meeting(tcp_stores[rank]), rank=rank, world_size=3, label=LABEL)
        gathered = channel.gather("plan", large if rank == 2 else b"", soon())
        return gathered, channel.broadcast("shares", large[::-1] if rank == 0 else None, soon())

    with ThreadPoolExecutor(3) as threads:
        results = list(threads.map(rank_main, range(3)))
    assert [gathered for gathered, _ in results] == [[b"", b"", large], None, None]
    assert all(shares == large[::-1] for _, shares in results)
    assert num_messages(tcp_stores[0], 3) == 0


@pytest.mark.parametrize("alarming", [0, 1])
def test_an_alarm_reaches_ranks_before_the_next_exchange_and_leaves_no_key_behind(alarming: int) -> None:
    def body(channel: Channel) -> bool:
        if channel.rank == alarming:
            channel.raise_alarm(soon())
        else:
            while not channel.is_alarmed(soon()):
                time.sleep(0.001)
        outcome = state_error(alarming) if channel.rank == alarming else b""
        with pytest.raises(StateError):
            channel.exchange("commit", outcome, lambda _: b"", soon())
        channel.exchange("again", b"", lambda _: b"", soon())
        return channel.is_alarmed(soon())

    store = dist.HashStore()
    assert on_ranks(3, body, store=store) == dict.fromkeys(range(3), False)
    assert num_messages(store, 3) == 0


@pytest.mark.slow
def test_the_store_does_not_grow_over_a_thousand_rounds() -> None:
    store = dist.HashStore()
    largest = 0

    def body(channel: Channel) -> int:
        nonlocal largest
        for number in range(1000):
            answer = channel.exchange(f"round {number}", b"x", lambda all_: b"%d" % len(all_), soon())
            assert answer == b"3"
            largest = max(largest, store.num_keys())
        channel.await_readers(soon())
        return 1000

    assert on_ranks(3, body, store=store, group_size=2) == {0: 1000, 1: 1000, 2: 1000}
    assert num_messages(store, 3) == 0
    assert largest < 12


def test_a_deadline_counts_down_by_its_clock_and_never_to_zero() -> None:
    clock = Clock()
    deadline = Deadline(600, clock=clock)
    assert deadline.remaining_s() == 600
    assert deadline.remaining_s(graces=2) == 660
    clock.now += 590
    assert deadline.remaining_s() == 10
    clock.now += 100
    assert deadline.remaining_s() == 0.001
    assert Deadline(1, clock=clock).remaining_s(graces=1) == 2
    with pytest.raises(ValueError, match="positive"):
        Deadline(0)


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_outside_its_world_is_refused(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match="world"):
        Channel(meeting(dist.HashStore()), rank=rank, world_size=world_size, label=LABEL)


def test_a_world_of_several_ranks_without_a_store_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a store"):
        Channel(None, rank=0, world_size=2, label=LABEL)


# ---- torch's stores


@pytest.mark.parametrize("blocking", [True, False])
def test_waiting_ends_with_the_key_or_with_the_time(blocking: bool) -> None:
    store = TorchStore(dist.HashStore(), blocking=blocking)
    assert not store.wait(["a"], 0.05)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(store.wait, ["a", "b"], 20)
        store.set("a", b"\x00\xff")
        store.set("b", b"")
        assert waiting.result()
    assert store.get("a") == b"\x00\xff"


def test_a_store_that_is_gone_is_a_storage_error() -> None:
    server = dist.TCPStore("localhost", 0, None, is_master=True, wait_for_workers=False)
    client = TorchStore(dist.TCPStore("localhost", server.port, None, is_master=False), blocking=True)
    client.set("a", b"")
    del server
    calls: list[Callable[[], object]] = [
        lambda: client.check("a"),
        lambda: client.set("b", b""),
        lambda: client.wait(["a"], 5),
        lambda: client.get("a"),
        lambda: client.add("n", 1),
        lambda: client.delete("a"),
    ]
    for call in calls:
        with pytest.raises(StorageError, match=r"storage\.control"):
            call()


SERVER = """
import time
import torch.distributed as dist
store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(100)
"""


@pytest.fixture
def server() -> Iterator[tuple[subprocess.Popen[str], dist.Store]]:
    """A process that serves a store, as rank 0 does, and a client of it."""
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, dist.TCPStore("localhost", int(process.stdout.readline()), None, is_master=False)
        process.kill()


def exchange_within_a_second(job: MetRank) -> None:
    place = TorchMeeting(met(job), deadline=Deadline(1))
    Channel(place, rank=1, world_size=2, label=LABEL).exchange("plan", b"", b"".join, Deadline(1))


@pytest.mark.parametrize("when", ["before the first call", "after it"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.few(2)
def test_no_call_outlasts_its_time_when_the_process_of_the_store_is_killed_or_stopped(
    server: tuple[subprocess.Popen[str], dist.Store], number: signal.Signals, when: str
) -> None:
    process, store = server
    job = MetRank(store)
    if when == "after it":
        meeting(store, job)
    process.send_signal(number)
    time.sleep(0.2)
    codes: list[str] = []

    def exchange() -> None:
        with pytest.raises(HoldfastError) as caught:
            exchange_within_a_second(job)
        codes.append(caught.value.code)

    for _ in range(2):  # the second call must not wait for what hangs since the first
        caller = threading.Thread(target=exchange, daemon=True)
        caller.start()
        caller.join(2 if number == signal.SIGKILL else 6)
    assert codes == ["storage.control"] * 2


# ---- ranks that are killed


def save_one_after_another(killed: int, phase: int) -> tuple[str, float]:
    """Exchange three times; the rank `killed` ends before the given one."""
    channel = default_channel(LABEL, deadline=soon())
    start = time.monotonic()
    for number in range(3):
        if number == phase and dist.get_rank() == killed:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == phase:
            start = time.monotonic()
        try:
            channel.exchange(f"phase {number}", b"", b"".join, soon())
        except DeadlineError as error:
            return str(error), time.monotonic() - start
    return "", 0.0


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_is_killed_on_this_node_is_noticed_at_once(killed: int) -> None:
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(3, save_one_after_another, killed, 1)
    assert isinstance(caught.value.by_rank[killed], RankDiedError)
    assert len(caught.value.results) == 2
    for result in caught.value.results.values():
        message, waited_s = cast("tuple[str, float]", result)
        assert "[timeout.rank_ended]" in message
        assert f"the process of rank {killed} has ended" in message
        assert waited_s < 5


def test_without_a_process_group_the_channel_is_of_one_process() -> None:
    channel = default_channel(LABEL, deadline=soon())
    assert (channel.rank, channel.world_size, channel.label) == (0, 1, LABEL)


def exchange_three_times() -> list[str]:
    return [
        default_channel(f"save of step {step}", deadline=soon())
        .exchange("plan", payload(dist.get_rank()) + b" at %d" % step, b"|".join, soon())
        .decode()
        for step in range(3)
    ]


def test_the_ranks_of_a_process_group_exchange_messages_and_a_new_group_counts_anew() -> None:
    for _ in range(2):
        for answers in run_ranks(2, exchange_three_times):
            assert answers == [f"from 0 at {step}|from 1 at {step}" for step in range(3)]


def make_a_group_while_the_channel_waits() -> str:
    channel = default_channel("load", deadline=soon())
    channel.confirm("start", b"", soon())
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(channel.broadcast, "plan", None, soon()) if dist.get_rank() == 1 else None
        time.sleep(0.2)
        dist.barrier(dist.new_group([0, 1]))  # goes through the store of the process group
        return (waiting.result() if waiting else channel.broadcast("plan", b"late", soon())).decode()


def test_a_wait_on_the_channel_does_not_block_torchs_own_use_of_the_store() -> None:
    assert run_ranks(2, make_a_group_while_the_channel_waits) == ["late", "late"]
