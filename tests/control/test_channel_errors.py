"""Errors on the channel: every rank hears of them, and absent ranks are named, with the call that they missed."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from holdfast.control.channel import Channel
from holdfast.control.deadline import Deadline
from holdfast.errors import ConfigurationError, DeadlineError, HoldfastError, StateError
from tests.control.test_channel import LABEL, MetRank, meeting, num_messages, on_ranks, payload, soon, state_error

# ---- errors of ranks


@pytest.mark.parametrize("group_size", [2, 64])
def test_the_error_of_the_lowest_failed_rank_is_raised_on_every_rank(group_size: int) -> None:
    store = dist.HashStore()
    failed = {3: state_error(3), 5: state_error(5)}
    results = on_ranks(
        6,
        lambda c: c.confirm("write", failed.get(c.rank, b"fine"), soon()),
        store=store,
        group_size=group_size,
    )
    for error in results.values():
        assert isinstance(error, StateError)
        assert error.message == f"rank 3 failed in 'write' of {LABEL} (2 of 6 ranks failed): tensor of 3."
        assert (error.code, error.tensor, error.rank) == ("state.example", "w", 3)
    assert results[3] is failed[3], "where it failed, the error has the traceback"
    assert results[5].__cause__ is failed[5]  # type: ignore[union-attr]
    assert num_messages(store, 6) == 0


def test_an_unexpected_error_of_a_rank_reaches_every_rank_and_keeps_its_traceback_there() -> None:
    bug = KeyError("w")
    results = on_ranks(3, lambda c: c.confirm("write", bug if c.rank == 1 else b"", soon()))
    for error in results.values():
        assert isinstance(error, HoldfastError)
        assert "rank 1 failed" in error.message
        assert "KeyError: 'w'" in error.message
    assert isinstance(results[1], HoldfastError)
    assert results[1].__cause__ is bug


def test_an_error_of_the_coordinator_while_it_answers_reaches_every_rank() -> None:
    def fail(_: list[bytes]) -> bytes:
        raise state_error(0)

    results = on_ranks(3, lambda c: c.exchange("plan", b"", fail, soon()))
    assert [str(error) for error in results.values()] == [str(state_error(0))] * 3


def test_a_bug_of_the_coordinator_while_it_answers_reaches_every_rank() -> None:
    def fail(_: list[bytes]) -> bytes:
        return b"x"[7:8] + bytes([1 // 0])

    results = on_ranks(2, lambda c: c.exchange("plan", b"", fail, soon()))
    assert isinstance(results[0], ZeroDivisionError)
    assert isinstance(results[1], HoldfastError)
    assert "ZeroDivisionError" in results[1].message


def test_an_error_that_the_coordinator_broadcasts_is_raised_on_every_rank() -> None:
    results = on_ranks(3, lambda c: c.broadcast("commit", state_error(0) if c.rank == 0 else None, soon()))
    assert all(isinstance(error, StateError) for error in results.values())


def test_a_coordinator_that_fails_between_calls_is_heard_at_the_next_broadcast_whatever_comes_before() -> None:
    def body(channel: Channel) -> bytes:
        channel.gather("plan", b"", soon())
        if channel.rank == 0:
            return channel.broadcast("plan", state_error(0), soon())
        channel.gather("write", b"", soon())
        return channel.broadcast("commit", None, soon())

    assert all(isinstance(error, StateError) for error in on_ranks(3, body).values())


def test_ranks_that_make_different_calls_are_told_so_at_once() -> None:
    results = on_ranks(3, lambda c: c.exchange("plan" if c.rank < 2 else "load", b"", b"".join, soon()))
    for error in results.values():
        assert isinstance(error, ConfigurationError)
        assert error.message == f"rank 2 is in 'load' of {LABEL} while rank 0 is in 'plan' of {LABEL}."


def test_a_broadcast_that_a_rank_takes_for_another_one_is_refused_there() -> None:
    results = on_ranks(2, lambda c: c.broadcast("a" if c.rank else "b", None if c.rank else b"", soon()))
    assert results[0] == b""
    assert isinstance(results[1], ConfigurationError)


# ---- deadlines


@pytest.mark.parametrize("group_size", [2, 3, 64])
def test_absent_ranks_are_named_on_every_rank(group_size: int) -> None:
    results = on_ranks(8, lambda c: c.confirm("plan", b"", Deadline(0.5)), group_size=group_size, absent=(2, 3, 4, 7))
    for error in results.values():
        assert isinstance(error, DeadlineError)
        assert error.absent == (2, 3, 4, 7)
        assert (
            error.message
            == f"ranks 2-4, 7 did not reach 'plan' of {LABEL} within 0.5 s (ranks 2-4, 7 made no call yet)."
        )


def test_a_missing_group_leader_is_named_without_its_members() -> None:
    results = on_ranks(6, lambda c: c.confirm("plan", b"", Deadline(0.5)), group_size=3, absent=(3,))
    assert {error.absent for error in results.values() if isinstance(error, DeadlineError)} == {(3,)}
    assert len(results) == 5


def test_a_group_leader_that_died_half_way_is_named() -> None:
    store = dist.HashStore()
    store.set("test/0/up/0/2", "")
    results = on_ranks(4, lambda c: c.confirm("plan", b"", Deadline(0.3)), store=store, group_size=2, absent=(2,))
    assert {error.absent for error in results.values() if isinstance(error, DeadlineError)} == {(2,)}
    assert len(results) == 3


def test_a_missing_coordinator_is_named_by_the_others() -> None:
    results = on_ranks(4, lambda c: c.exchange("plan", b"", b"".join, Deadline(0.3)), group_size=2, absent=(0,))
    for error in results.values():
        assert isinstance(error, DeadlineError)
        assert error.absent == (0,)
        assert error.message == f"rank 0 did not reach 'plan' of {LABEL} within 0.3 s (rank 0 made no call yet)."


def test_who_does_not_come_is_named_long_before_the_time_is_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("holdfast.control.channel._PATIENCE_S", 0.1)
    on_ranks(4, lambda c: c.confirm("plan", b"", Deadline(0.5)), absent=(2, 3))
    told = [record.getMessage() for record in caplog.records if "has waited for" in record.getMessage()]
    assert len(told) == 1
    assert "has waited for ranks 2, 3 for 0 s: every rank must make this call" in told[0]


def test_a_late_rank_finds_the_verdict_and_does_not_wait() -> None:
    store = dist.HashStore()

    def body(channel: Channel) -> None:
        channel.confirm("plan", b"", Deadline(0.3))

    on_ranks(3, body, store=store, absent=(2,))
    start = time.monotonic()
    late = on_ranks(3, body, store=store, absent=(0, 1))[2]
    assert isinstance(late, DeadlineError)
    assert late.absent == (2,)
    assert time.monotonic() - start < 10


# ---- ranks that skip an operation

Calls = dict[int, list[int]]


def operations(calls: Calls, *, timeout_s: float, group_size: int = 64) -> dict[int, list[str]]:
    """Make operations in turn; return the answer of each, or the message of its error."""
    store = dist.HashStore()
    jobs = [MetRank(store) for _ in calls]

    def rank_main(rank: int) -> list[str]:
        got = []
        for step in calls[rank]:
            channel = Channel(
                meeting(store, jobs[rank]),
                rank=rank,
                world_size=len(calls),
                label=f"save of step {step}",
                step=step,
                group_size=group_size,
            )
            try:
                got.append(channel.exchange("plan", payload(rank), b"|".join, Deadline(timeout_s)).decode())
                background = channel.in_background()
                assert background.exchange("copy", payload(rank), b"|".join, Deadline(timeout_s)).decode() == got[-1]
            except HoldfastError as error:
                got.append(error.message)
        return got

    with ThreadPoolExecutor(len(calls)) as threads:
        return dict(enumerate(threads.map(rank_main, range(len(calls)))))


@pytest.mark.parametrize("skipping", [0, 1, 2, 3])
def test_a_rank_that_skips_a_save_meets_the_others_at_the_next_and_is_named_with_where_it_is(skipping: int) -> None:
    steps = (100, 200, 300, 400)
    calls = {rank: [step for step in steps if rank != skipping or step != 200] for rank in range(4)}
    got = operations(calls, timeout_s=20, group_size=2)
    everything = "|".join(payload(rank).decode() for rank in range(4))
    for rank, answers in got.items():
        if rank != skipping:
            error = answers.pop(1)
            other = skipping or 1  # rank 0 tells who is elsewhere than itself
            assert f"rank {other} is in 'plan' of save of step {300 if skipping else 200}" in error
        assert answers == [everything] * 3


@pytest.mark.slow
def test_a_rank_that_skips_saves_after_the_others_gave_up_on_it_joins_their_next_without_a_time_out() -> None:
    store = dist.HashStore()
    jobs = [MetRank(store) for _ in range(3)]

    def call(rank: int, step: int, timeout_s: float) -> str:
        channel = Channel(meeting(store, jobs[rank]), rank=rank, world_size=3, label=f"save of step {step}", step=step)
        try:
            return channel.exchange("plan", payload(rank), b"|".join, Deadline(timeout_s)).decode()
        except HoldfastError as error:
            return error.message

    for skipping in range(3):
        others = [rank for rank in range(3) if rank != skipping]
        with ThreadPoolExecutor(3) as threads:
            for step in (100, 200):
                for message in threads.map(call, others, [step] * 2, [0.6] * 2):
                    told = "made no call yet" if skipping == 0 else "was last in save of step 300"
                    if not (skipping == 0 and step == 200):
                        assert message.startswith(f"rank {skipping} did not reach 'plan' of save of step {step} within")
                        assert f"(rank {skipping} {told})" in message
            start = time.monotonic()
            answers = set(threads.map(call, range(3), [300] * 3, [20.0] * 3))
        assert answers == {"from 0|from 1|from 2"}
        assert time.monotonic() - start < 5


@pytest.mark.parametrize("label", ["load", "save of step 0"])
@pytest.mark.parametrize("skipping", [0, 1, 2])
@pytest.mark.few(1)
def test_a_rank_that_skips_a_call_meets_the_others_when_all_try_the_same_again(skipping: int, label: str) -> None:
    store = dist.HashStore()
    jobs = [MetRank(store) for _ in range(3)]
    step = 0 if label.startswith("save") else None

    def call(rank: int, timeout_s: float) -> str:
        channel = Channel(meeting(store, jobs[rank]), rank=rank, world_size=3, label=label, step=step)
        try:
            answer = channel.exchange("plan", payload(rank), b"|".join, Deadline(timeout_s))
            return channel.exchange("go on", answer, lambda answers: answers[0], Deadline(timeout_s)).decode()
        except HoldfastError as error:
            return error.message

    others = [rank for rank in range(3) if rank != skipping]
    with ThreadPoolExecutor(3) as threads:
        for _ in range(2):
            for message in threads.map(call, others, [0.6] * 2):
                assert f"rank {skipping} did not reach" in message
            start = time.monotonic()
            for _ in range(2):
                assert set(threads.map(call, range(3), [20.0] * 3)) == {"from 0|from 1|from 2"}
            assert time.monotonic() - start < 5
