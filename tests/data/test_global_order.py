"""Any number of ranks continues one order of samples, and every sample comes once in each epoch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import ConfigurationError, IncompatibleError
from holdfast.data import GlobalOrder

BATCH = 120


def orders(world_size: int, length: int = 1000, *, batch: int = BATCH, fingerprint: str = "") -> list[GlobalOrder]:
    return [
        GlobalOrder(length, global_batch_size=batch, rank=rank, world_size=world_size, seed=5, fingerprint=fingerprint)
        for rank in range(world_size)
    ]


def ahead(order: GlobalOrder, depth: int) -> Iterator[list[int]]:
    """The batches of `order`, of which `depth` are drawn before the first one is given, as workers do."""
    batches = iter(order)
    drawn = list(islice(batches, depth))
    while True:
        drawn.append(next(batches))
        yield drawn.pop(0)


def trained(ranks: list[GlobalOrder], num_steps: int, depth: int = 0) -> list[int]:
    """The samples that a job trains on in its next steps: those of each global batch in the order of the ranks."""
    loops = [order.follow(ahead(order, depth)) for order in ranks]
    return [sample for _ in range(num_steps) for loop in loops for sample in next(loop)]


@given(length=st.integers(1, 200), num_epochs=st.integers(1, 4))
def test_every_epoch_has_every_sample_once(length: int, num_epochs: int) -> None:
    samples = trained(orders(3, length, batch=6), -(-length * num_epochs // 6))
    for epoch in range(num_epochs):
        assert sorted(samples[epoch * length : (epoch + 1) * length]) == list(range(length))


@given(
    length=st.integers(1, 2000),
    lives=st.lists(st.tuples(st.sampled_from([8, 3, 5, 1, 2]), *[st.integers(0, 9)] * 3), min_size=1, max_size=6),
)
def test_a_job_that_is_killed_and_goes_on_with_other_ranks_trains_on_the_samples_of_one_that_is_not(
    length: int, lives: list[tuple[int, int, int, int]]
) -> None:
    state, kept = orders(1, length)[0].state_dict(), list[int]()
    for world_size, num_saved, num_lost, depth in lives:
        ranks = orders(world_size, length)
        for order in ranks:
            order.load_state_dict(state)
        kept += trained(ranks, num_saved, depth)
        assert all(order.state_dict() == ranks[0].state_dict() for order in ranks)
        state = ranks[0].state_dict()
        trained(ranks, num_lost, depth)  # killed before the next save
    assert kept == trained(orders(1, length), len(kept) // BATCH)


def test_another_size_of_batches_goes_on_with_the_next_sample() -> None:
    whole = trained(orders(1), 5)
    (before,), (after,) = orders(1), orders(1, batch=60)
    first = trained([before], 2)
    after.load_state_dict(before.state_dict())
    assert first + trained([after], 6) == whole
    assert (after.position, after.epoch) == (600, 0)


def test_batches_that_were_drawn_ahead_and_not_trained_on_come_again_after_a_break() -> None:
    (order,) = orders(1)
    samples = [sample for _ in range(4) for sample in trained([order], 1, depth=7)]
    assert samples == trained(orders(1), 4)


@pytest.mark.parametrize(
    ("other", "what"), [(orders(1, 1001), "length"), (orders(1, fingerprint="second"), "fingerprint")]
)
def test_a_changed_dataset_is_refused_and_nothing_changes(other: list[GlobalOrder], what: str) -> None:
    (order,) = orders(1, fingerprint="" if what == "length" else "first")
    trained([order], 2)
    before = order.state_dict()
    with pytest.raises(IncompatibleError, match=rf"(?s)incompatible\.dataset.*{what}: .*leave the order out") as caught:
        order.load_state_dict(other[0].state_dict())
    assert (caught.value.code, order.state_dict()) == ("incompatible.dataset", before)


def test_an_iteration_that_began_before_a_load_is_refused() -> None:
    (order,) = orders(1)
    loop = order.follow(order)
    next(loop)
    order.load_state_dict(order.state_dict())
    with pytest.raises(ConfigurationError, match="Start a new iteration"):
        next(loop)


def test_ranks_that_do_not_divide_the_batch_are_refused() -> None:
    with pytest.raises(ValueError, match="global_batch_size is 120, no multiple of 7 ranks"):
        orders(7)
