"""The attempts of a job that share one store: torchrun starts ranks again with what the dead ones have left there."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import TypeVar

import pytest
import torch.distributed as dist

from holdfast.control.attempt import Attempt
from holdfast.control.channel import Channel
from holdfast.control.channel_members import ChannelMembers
from holdfast.control.deadline import Deadline
from holdfast.control.key_value_store import KeyValueStore
from holdfast.control.registers import SharedRegisters
from holdfast.control.torch_store import GroupStore, Member, TorchMeeting, TorchStore
from holdfast.errors import DeadlineError, HoldfastError
from tests.control.test_channel import soon, state_error

T = TypeVar("T")
WORLD_SIZE = 4
#: Two groups, so that every part of the tree takes part.
GROUP_SIZE = 2
#: More requests than any rank makes in an operation.
MANY = 100


class KilledError(BaseException):
    """Stands for a SIGKILL of all ranks."""


class MortalStore:
    """A store of a rank that is killed before the request that follows `num_requests` others; `killed` then ends the
    other ranks."""

    def __init__(self, store: KeyValueStore, num_requests: list[int], killed: Event) -> None:
        self._store = store
        self._left = num_requests
        self._killed = killed

    def __getattr__(self, name: str) -> Callable[..., object]:
        def request(*args: object) -> object:
            if self._left[0] == 0:
                self._killed.set()
            self._left[0] -= 1
            self._end_if_killed()
            return getattr(self._store, name)(*args)

        return request

    def wait(self, keys: Sequence[str], timeout_s: float) -> bool:
        end_s = time.monotonic() + timeout_s
        while time.monotonic() < end_s:
            self._end_if_killed()
            if all(self._store.check(key) for key in keys):
                return True
            time.sleep(0.001)
        return False

    def _end_if_killed(self) -> None:
        if self._killed.is_set():
            raise KilledError


class MortalMeeting(TorchMeeting):
    """The meeting of a rank that is killed."""

    def __init__(self, member: Member, num_requests: int, killed: Event) -> None:
        self._mortal = [num_requests], killed
        super().__init__(member, deadline=soon())

    def _at(self, prefix: str) -> MortalStore:  # type: ignore[override]  # it has all methods of a store
        return MortalStore(super()._at(prefix), *self._mortal)

    def ask(self, call: Callable[[], T], timeout_s: float, *, meanwhile: Callable[[], None]) -> T:
        return call()


def on_all_ranks(call: Callable[[int], T]) -> list[T]:
    with ThreadPoolExecutor(WORLD_SIZE) as threads:
        return list(threads.map(call, range(WORLD_SIZE)))


def member(store: dist.Store, rank: int) -> Member:
    """A rank of a new process group."""
    return Member(GroupStore(store), "holdfast", rank, WORLD_SIZE)


def channel(meeting: TorchMeeting, rank: int, label: str) -> Channel:
    return Channel(meeting, rank=rank, world_size=WORLD_SIZE, label=label, group_size=GROUP_SIZE)


def killed_attempt(store: dist.Store, victim: int, num_requests: int, label: str) -> bool:
    """An attempt of a job that is killed when the rank `victim` has made so many requests. Returns False if its
    operation ended before."""
    killed = Event()

    def rank_main(rank: int) -> bool:
        meeting = MortalMeeting(member(store, rank), num_requests if rank == victim else MANY, killed)
        here = channel(meeting, rank, label)
        try:
            for phase in ("plan", "commit"):
                here.exchange(phase, b"old %d" % rank, b"|".join, soon())
        except KilledError:
            return True
        return False

    return any(on_all_ranks(rank_main))


def exchange_all(store: dist.Store, label: str) -> list[str]:
    """The answers of an operation of a new attempt, in which no rank dies."""

    def rank_main(rank: int) -> str:
        here = channel(TorchMeeting(member(store, rank), deadline=soon()), rank, label)
        return "".join(
            here.exchange(phase, f"{phase} of {rank} ".encode(), b"".join, soon()).decode()
            for phase in ("plan", "commit")
        )

    return on_all_ranks(rank_main)


@pytest.mark.parametrize("label", ["save of step 700", "save of step 900"])
@pytest.mark.parametrize("victim", [0, 1, *(pytest.param(rank, marks=pytest.mark.slow) for rank in (2, 3))])
def test_a_restarted_job_reads_nothing_that_the_killed_one_has_left(victim: int, label: str) -> None:
    """A rank took the verdict on a save of the last attempt for that on its own, and the restarted job died of it."""
    store = dist.HashStore()
    expected = "".join(f"{phase} of {rank} " for phase in ("plan", "commit") for rank in range(WORLD_SIZE))
    num_requests = 0
    while killed_attempt(store, victim, num_requests, "save of step 700"):
        assert exchange_all(store, label) == [expected] * WORLD_SIZE
        num_requests += 1
    assert num_requests > 3


def test_a_store_does_not_fill_up_with_the_ids_of_ranks_that_have_joined() -> None:
    store = dist.HashStore()
    for _ in range(3):
        exchange_all(store, "save of step 700")
    sizes = set()
    for _ in range(3):
        before = store.num_keys()
        exchange_all(store, "save of step 700")
        sizes.add(store.num_keys() - before)
    # The last broadcast of each attempt and its marks, and where each rank was.
    assert sizes <= {WORLD_SIZE, WORLD_SIZE + 1, WORLD_SIZE + 2}


def test_a_rank_that_comes_after_the_others_gave_up_on_it_joins_their_next_operation() -> None:
    store = dist.HashStore()
    members = [member(store, rank) for rank in range(WORLD_SIZE)]

    def call(rank: int, step: int, timeout_s: float) -> str:
        label = f"save of step {step}"
        here = Channel(
            TorchMeeting(members[rank], deadline=Deadline(timeout_s)),
            rank=rank,
            world_size=WORLD_SIZE,
            label=label,
            step=step,
        )
        try:
            return here.exchange("plan", b"%d" % rank, b"".join, Deadline(timeout_s)).decode()
        except HoldfastError as error:
            return error.message

    with ThreadPoolExecutor(WORLD_SIZE) as threads:
        for message in threads.map(lambda rank: call(rank, 100, 0.5), (0, 1, 2)):
            assert message.startswith("rank 3 did not reach 'plan' of save of step 100 within 0.5 s")
        start_s = time.monotonic()
        assert set(threads.map(lambda rank: call(rank, 200, 20), range(WORLD_SIZE))) == {"0123"}
        assert time.monotonic() - start_s < 5


@pytest.mark.parametrize("absent", [0, 1])
def test_the_ranks_of_a_first_operation_name_the_one_that_makes_no_call(absent: int) -> None:
    store = dist.HashStore()

    def rank_main(rank: int) -> str | None:
        if rank == absent:
            return None
        here = channel(TorchMeeting(member(store, rank), deadline=soon()), rank, "load")
        with pytest.raises(DeadlineError) as caught:
            here.exchange("plan", b"", b"".join, Deadline(0.3))
        assert caught.value.absent == (absent,)
        return caught.value.message

    messages = [message for message in on_all_ranks(rank_main) if message]
    assert all(message.startswith(f"rank {absent} did not reach 'plan' of load within 0.3 s") for message in messages)


def test_a_rank_stops_waiting_for_a_first_rank_that_is_given_up() -> None:
    store, members = dist.HashStore(), ChannelMembers()
    meeting = TorchMeeting(member(store, 1), deadline=soon())
    here = Channel(meeting, rank=1, world_size=2, label="update", members=members)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(here.exchange, "plan", b"", b"".join, soon())
        time.sleep(0.3)
        members.given_up[0] = state_error(0)
        start_s = time.monotonic()
        error = waiting.exception(timeout=20)
    assert error is members.given_up[0]
    assert time.monotonic() - start_s < 5


def test_a_restarted_job_does_not_find_the_wishes_of_the_killed_one() -> None:
    store = dist.HashStore()

    def wishes(rank: int) -> SharedRegisters:
        mine = member(store, rank)
        channel(TorchMeeting(mine, deadline=soon()), rank, "load").confirm("plan", b"", soon())
        return SharedRegisters(mine, "saves", timeout_s=10.0)

    killed = on_all_ranks(wishes)
    assert killed[2].foreground.claim("proposal", b"step 7") == b"step 7"
    assert [each.background.read("proposal") for each in killed] == [b"step 7"] * WORLD_SIZE
    restarted = on_all_ranks(wishes)
    assert [each.background.read("proposal") for each in restarted] == [None] * WORLD_SIZE


def test_a_rank_knows_the_registers_of_a_job_when_it_has_joined() -> None:
    store = dist.HashStore()
    first, second = (SharedRegisters(member(store, rank), "saves", timeout_s=10.0) for rank in range(2))
    assert first.has_joined
    assert not second.has_joined


def test_operations_are_counted_from_the_one_in_which_a_rank_joined() -> None:
    store = TorchStore(dist.HashStore(), blocking=False)
    first, other = Attempt.new(), Attempt()
    assert [first.next_count() for _ in range(3)] == [0, 1, 2]
    count = other.next_count()
    assert not other.join(store, count, 0.01)
    first.await_ranks(store, 2, lambda _: [], 1.0)
    assert other.join(store, count, 1.0)
    assert (first.number_of(2), other.number_of(count)) == (2, 2)
    assert (first.number_of(first.next_count()), other.number_of(other.next_count())) == (3, 3)


def test_a_first_operation_may_begin_before_another_one_inside_it_lets_ranks_join() -> None:
    """A save of a state whose ``state_dict`` loads something: in a job's first save, the ranks waited for each other
    until the deadline."""
    store = dist.HashStore()

    def rank_main(rank: int) -> tuple[bytes, ...]:
        mine = member(store, rank)
        outer, inner = (
            channel(TorchMeeting(mine, deadline=soon()), rank, label) for label in ("save of step 700", "load")
        )
        return tuple(
            each.exchange("plan", b"%d" % rank, b"".join, Deadline(5.0))
            for each in (inner, outer, channel(TorchMeeting(mine, deadline=soon()), rank, "load"))
        )

    assert on_all_ranks(rank_main) == [(b"0123",) * 3] * WORLD_SIZE


def test_a_call_that_was_interrupted_while_it_waited_for_rank_0_does_not_join_beside_the_next() -> None:
    """After Ctrl-C, the thread of the first call took the answer and sent its message; the next call waited for the
    answer until "the store of the process group does not answer"."""
    store = TorchStore(dist.HashStore(), blocking=False)
    first, other = Attempt.new(), Attempt()
    with ThreadPoolExecutor(2) as threads:
        interrupted = threads.submit(other.join, store, other.next_count(), 20.0)
        while not store.check("hello"):
            time.sleep(0.001)
        said, count = len(store.get("hello")), other.next_count()
        following = threads.submit(other.join, store, count, 5.0)
        while len(store.get("hello")) == said and not following.done():
            time.sleep(0.001)
        number = first.number_of(first.next_count())
        first.await_ranks(store, number, lambda _: [] if following.done() and interrupted.done() else [1], 20.0)
        assert (interrupted.result(), following.result()) == (False, True)
    assert other.number_of(count) == number


def test_a_call_of_rank_0_that_was_interrupted_before_all_ranks_came_lets_nobody_join_it() -> None:
    """After Ctrl-C, the thread of rank 0's first call went on answering beside its second one. A rank that read its
    answer waited in the first call, and rank 0 in the second, until their deadlines."""
    store = dist.HashStore()
    first = member(store, 0)
    interrupted, late = TorchMeeting(first, deadline=soon()), TorchMeeting(member(store, 1), deadline=soon())
    waiting, come = Event(), Event()

    def awaited(limit_s: float) -> list[int]:
        waiting.set()
        return [] if come.wait(limit_s) else [1]

    def ctrl_c() -> None:
        if waiting.is_set():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted.ask(lambda: interrupted.await_ranks(awaited, 20.0), 20.0, meanwhile=ctrl_c)
    assert not late.join(0.5)
    following = TorchMeeting(first, deadline=soon())
    with ThreadPoolExecutor(1) as threads:
        answered = threads.submit(
            following.ask, lambda: following.await_ranks(awaited, 20.0), 20.0, meanwhile=lambda: None
        )
        assert late.join(20.0)
        come.set()
        assert answered.result() == []
    assert late.name == following.name
