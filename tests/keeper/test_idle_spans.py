"""Idle spans that are foretold, and pieces that fill them, beside training that is simulated."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from typing import NamedTuple

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from holdfast.keeper.idle_spans import QUIET_S, IdleSpans, expected_span_s
from holdfast.keeper.piece_pacer import (
    DELAY_S,
    GRACE_S,
    GUARANTEED_SHARE,
    MAX_PIECE_NBYTES,
    MIN_PIECE_NBYTES,
    LinkSpeed,
    PieceOnLink,
    PiecePacer,
)

_LOOK_S = 0.001


class Burst(NamedTuple):
    """Training computes for `idle_s`, then sends so many bytes."""

    idle_s: float
    nbytes: float


class Found(NamedTuple):
    """Of a simulation: bytes of copies, idle time that training left, time that it lost, and the number of bursts."""

    copied: int
    idle_s: float
    lost_s: float
    num_bursts: int
    seconds: float
    pacer: PiecePacer


def looked_at(pacer: PiecePacer, nbytes: int, start_s: float, link: float) -> PieceOnLink:
    """A piece, after looks at it while it is on the link."""
    piece = PieceOnLink(nbytes, start_s)
    piece.look(start_s, nbytes)
    after_s = nbytes / pacer.speed.bytes_per_s
    if (left := nbytes - link * after_s) > 0:
        piece.look(start_s + after_s, int(left))
    return piece


def simulate(bursts: Sequence[Burst], link: float, *, skip: int = 0) -> Found:
    """A link of `link` bytes per second that carries one message at a time: a burst waits for the end of the piece that
    it finds there. Copies have no end. The count begins after `skip` bursts."""
    now = piece_ends = 0.0
    pacer = PiecePacer(now)
    copied, idle_s, lost_s, counted_from = 0, 0.0, 0.0, 0.0
    for number, burst in enumerate(bursts):
        if number == skip:
            copied, idle_s, lost_s, counted_from = 0, 0.0, 0.0, now
        idle_s += burst.idle_s
        begins = max(now, piece_ends - _LOOK_S) + burst.idle_s
        while now < begins:
            nbytes = pacer.next_nbytes(now, 1 << 40)
            stop = now + (nbytes / link if nbytes else min(_LOOK_S, begins - now))
            pacer.watch(now, stop, 0, own_nbytes=nbytes)
            if nbytes:
                pacer.sent(looked_at(pacer, nbytes, now, link), stop, carried_nbytes=nbytes)
                copied += nbytes
            now = stop
        lost_s += now - begins
        left = burst.nbytes
        while left > 0:
            nbytes = pacer.next_nbytes(now, 1 << 40)
            carried = min(left, link * _LOOK_S)
            stop = now + (nbytes + carried) / link
            lost_s += nbytes / link
            pacer.watch(now, stop, round(carried), own_nbytes=nbytes)
            if nbytes:
                piece = looked_at(pacer, nbytes, now, link)
                pacer.sent(piece, stop, carried_nbytes=nbytes + round(carried))
                copied += nbytes
            left -= carried
            now = stop
        piece_ends = now
    return Found(copied, idle_s, lost_s, len(bursts) - skip, now - counted_from, pacer)


def periodic(spans: Sequence[float], busy: float, *, num: int, std: float, seed: int) -> Iterator[Burst]:
    chance = random.Random(seed)
    for span in islice(cycle(spans), num):
        yield Burst(span * max(chance.gauss(1, std), 0.2), busy)


seeds = st.integers(0, 1 << 32)
#: Simulations take a tenth of a second.
few = settings(max_examples=5, phases=[Phase.explicit, Phase.generate])


@few
@given(
    spans=st.lists(st.floats(0.03, 0.1), min_size=1, max_size=3),
    std=st.floats(0, 0.08),
    link=st.floats(3e7, 1e10),
    seed=seeds,
)
def test_beside_periodic_training_copies_fill_the_idle_time_and_almost_nothing_is_lost(
    spans: list[float], std: float, link: float, seed: int
) -> None:
    bursts = list(periodic(spans, link * 0.03, num=100, std=std, seed=seed))
    found = simulate(bursts, link, skip=60)
    assert found.lost_s <= 0.015 * found.seconds
    assert found.copied >= 0.6 * link * found.idle_s
    assert found.pacer.spans.expected_s is not None


@few
@given(std=st.floats(0, 0.1), seed=seeds)
def test_training_that_computes_and_sends_in_turn_loses_no_time_to_most_of_its_copies(std: float, seed: int) -> None:
    found = simulate(list(periodic([0.12], 25e6 * 0.05, num=80, std=std, seed=seed)), 25e6, skip=30)
    assert found.lost_s <= 0.003 * found.seconds
    assert found.copied >= 0.65 * 25e6 * found.idle_s


@few
@given(link=st.floats(1e8, 1e10), seed=seeds)
def test_beside_irregular_training_each_message_waits_for_two_pieces_at_most(link: float, seed: int) -> None:
    chance = random.Random(seed)
    bursts = [Burst(chance.expovariate(1 / 0.05), link * chance.expovariate(1 / 0.02)) for _ in range(80)]
    found = simulate(bursts, link, skip=20)
    assert found.lost_s <= found.num_bursts * 2 * 1.3 * DELAY_S
    assert found.copied >= 0.3 * link * found.idle_s


@few
@given(link=st.floats(1e7, 1e10))
def test_without_training_copies_take_the_link(link: float) -> None:
    found = simulate([Burst(5.0, 1.0)], link)
    assert found.copied >= 0.98 * link * found.idle_s
    assert found.pacer.spans.quiet_s > 4.9


@few
@given(link=st.floats(1e7, 1e10))
def test_training_that_leaves_no_idle_time_leaves_copies_a_small_share(link: float) -> None:
    found = simulate([Burst(0.0, link * 3 * GRACE_S)], link)
    late = found.seconds - GRACE_S
    assert (
        0.7 * GUARANTEED_SHARE * link * late <= found.copied <= 1.6 * GUARANTEED_SHARE * link * late + MIN_PIECE_NBYTES
    )


def test_a_pause_of_training_is_used_once_it_is_longer_than_any_idle_span() -> None:
    bursts = [*[Burst(0.1, 25e6 * 0.05)] * 30, Burst(2.0, 1.0)]
    found = simulate(bursts, 25e6, skip=30)
    assert found.copied >= 0.9 * 25e6 * found.idle_s


@few
@given(lengths=st.lists(st.floats(0.01, 10.0), min_size=1, max_size=4), num=st.integers(6, 30))
def test_the_span_that_comes_next_is_foretold_exactly_where_periods_are_alike(lengths: list[float], num: int) -> None:
    spans = list(islice(cycle(lengths), num * len(lengths)))
    longest = max(lengths)
    foretold = expected_span_s(spans)
    assert foretold is not None
    assert any(foretold == each for each in lengths)
    if min(lengths) > 0.9 * longest or len(set(lengths)) == 1:
        assert foretold >= 0.9 * lengths[0]


def test_spans_of_a_period_are_told_apart() -> None:
    for shift in range(3):
        spans = list(islice(cycle((0.1, 0.3, 0.9)), 30 + shift))
        assert expected_span_s(spans) == (0.1, 0.3, 0.9)[shift] or shift == 0  # 0.1 counts as a pause


@few
@given(seed=seeds)
def test_spans_of_chance_are_hardly_ever_foretold(seed: int) -> None:
    chance = random.Random(seed)
    spans = [chance.expovariate(10) for _ in range(400)]
    foretold = sum(expected_span_s(spans[:end]) is not None for end in range(40, 400, 10))
    assert foretold <= 8


def test_gaps_within_a_message_are_no_idle_spans() -> None:
    spans = IdleSpans()
    now = 0.0
    for number in range(1000):
        spans.note(now, now + 0.001, is_busy=number % 4 == 0)
        now += 0.001
        assert not spans.is_idle
    spans.note(now, now + QUIET_S, is_busy=False)
    assert spans.is_idle


def test_what_was_not_watched_is_not_idle() -> None:
    pacer = PiecePacer(0.0)
    pacer.watch(0.0, 0.05, 0)
    assert pacer.next_nbytes(0.05, 10)
    pacer.watch(1.0, 1.001, 0)
    assert not pacer.next_nbytes(1.001, 10)


def carry(speed: LinkSpeed, link: float, *, bucket: float = 0.0, late_s: float = 0.0) -> float:
    """A link of so many bytes per second, beyond those in a bucket of tokens, carries a piece. Looks at it are late.
    Returns the bytes that are left in the bucket."""
    nbytes = speed.piece_nbytes
    takes_s = max(nbytes - bucket, 0) / link + 0.0002
    piece = PieceOnLink(nbytes, 0.0)
    now_s = 0.00005
    while now_s < takes_s:
        left = nbytes if now_s <= 0.0002 else round(link * (takes_s - now_s))
        piece.look(now_s, min(left, nbytes))
        now_s += left / speed.bytes_per_s + late_s + 0.00005
    speed.note(piece, now_s, nbytes)
    return max(bucket - nbytes, 0)


@pytest.mark.parametrize(("link", "piece"), [(1e6, MIN_PIECE_NBYTES), (1e9, 2e6), (1e12, MAX_PIECE_NBYTES)])
@pytest.mark.parametrize("late_s", [0.0, 0.004])
def test_pieces_take_two_milliseconds_within_limits_or_as_long_as_looks_are_late(
    link: float, piece: float, late_s: float
) -> None:
    speed, sizes = LinkSpeed(), []
    for _ in range(500):
        carry(speed, link, late_s=late_s)
        sizes.append(speed.piece_nbytes)
    assert 0.7 * piece <= sum(sizes[-100:]) / 100 <= 1.4 * min(max(piece, link * late_s), MAX_PIECE_NBYTES)


def test_a_bucket_of_tokens_that_is_full_does_not_make_pieces_large() -> None:
    speed, sizes = LinkSpeed(), []
    for _ in range(30):
        bucket = 250_000.0
        for _ in range(30):
            sizes.append(speed.piece_nbytes)
            bucket = carry(speed, 25e6, bucket=bucket)
    assert max(sizes) <= 256 << 10
    assert sum(sizes[-300:]) / 300 < 80_000


def test_pieces_do_not_become_tiny_after_one_during_which_the_process_had_no_processor() -> None:
    speed, link = LinkSpeed(), 2e9
    for _ in range(500):
        carry(speed, link)
    before = speed.piece_nbytes
    piece = PieceOnLink(before, 0.0)
    piece.look(0.1, before)
    piece.look(0.11, before // 3)
    speed.note(piece, 0.12, before)
    assert speed.piece_nbytes >= 0.7 * before


def test_pieces_that_are_larger_than_the_buffer_of_the_connection_do_not_grow_forever() -> None:
    speed, link, buffer = LinkSpeed(), 4e9, 4 << 20
    for _ in range(500):
        nbytes = speed.piece_nbytes
        piece = PieceOnLink(nbytes, 0.0)
        sent_s = max(nbytes - buffer, 0) / link
        piece.look(sent_s, min(nbytes, buffer))
        tail = nbytes // 2
        if min(nbytes, buffer) > tail:
            sent_s = (nbytes - tail) / link
            piece.look(sent_s, tail)
        speed.note(piece, sent_s, nbytes - piece.left_nbytes)
    assert speed.piece_nbytes <= 1.4 * link * DELAY_S


def test_a_piece_may_take_a_small_share_of_the_time_for_which_the_link_was_idle() -> None:
    pacer = PiecePacer(0.0)
    pacer.speed.bytes_per_s = 1e9
    sizes = []
    for number in range(20):
        pacer.watch(0.05 * number, 0.05 * (number + 1), 0)
        sizes.append(pacer.next_nbytes(0.05 * (number + 1), 1 << 40))
    assert sizes[0] == 2e6
    assert 0.03e9 <= sizes[-1] <= 0.05e9
