"""The measured speed at which a node sends copies."""

from __future__ import annotations

import pytest

from holdfast.keeper.send_meter import SendMeter

MIB = 1 << 20


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def meter(clock: Clock) -> SendMeter:
    return SendMeter(clock)


def send(meter: SendMeter, clock: Clock, peer: int, nbytes: int, took_s: float) -> None:
    with meter.sending(peer, nbytes):
        clock.now_s += took_s


def test_the_speed_is_that_of_the_last_transfer(meter: SendMeter, clock: Clock) -> None:
    assert meter.bytes_per_s == 0
    send(meter, clock, 1, 8 * MIB, 2.0)
    send(meter, clock, 1, 8 * MIB, 4.0)
    assert meter.bytes_per_s == 2 * MIB


def test_transfers_that_overlap_count_as_one(meter: SendMeter, clock: Clock) -> None:
    with meter.sending(1, 8 * MIB):
        clock.now_s += 1.0
        send(meter, clock, 1, 8 * MIB, 1.0)
        assert meter.bytes_per_s == 0
    assert meter.bytes_per_s == 8 * MIB


def test_a_slow_peer_does_not_make_this_node_slow(meter: SendMeter, clock: Clock) -> None:
    send(meter, clock, 1, 8 * MIB, 1.0)
    send(meter, clock, 2, 8 * MIB, 100.0)
    assert meter.bytes_per_s == 8 * MIB


def test_failed_and_small_transfers_say_nothing(meter: SendMeter, clock: Clock) -> None:
    send(meter, clock, 1, MIB, 0.001)
    with pytest.raises(ValueError, match="broken"), meter.sending(1, 8 * MIB):
        raise ValueError("broken")
    assert meter.bytes_per_s == 0
