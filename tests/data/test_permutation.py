"""The permutation has every number once, follows from its key alone, and never changes."""

from __future__ import annotations

from itertools import permutations
from math import factorial, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.data.permutation import MAX_LENGTH, Grids, Numbers, hashed, keys_of, permuted, samples_at


def numbers(*values: int) -> Numbers:
    return np.array(values, dtype=np.uint64)


def key(seed: int, number: int) -> Numbers:
    return keys_of(numbers(seed), numbers(number))


@given(length=st.integers(1, 3000), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 2**40))
def test_every_number_has_one_place_and_every_place_one_number(length: int, seed: int, epoch: int) -> None:
    found = permuted(np.arange(length, dtype=np.uint64), Grids.of([length]), key(seed, epoch))
    assert sorted(found.tolist()) == list(range(length))


@given(lengths=st.lists(st.integers(1, 2000), min_size=2, max_size=40), seed=st.integers(0, 2**64 - 1))
def test_numbers_with_a_length_and_a_key_each_have_the_places_that_they_have_alone(
    lengths: list[int], seed: int
) -> None:
    wanted = numbers(*(seed % length for length in lengths))
    keys = keys_of(numbers(seed), np.arange(len(lengths), dtype=np.uint64))
    alone = [
        permuted(wanted[index : index + 1], Grids.of([length]), keys[index : index + 1]).tolist()
        for index, length in enumerate(lengths)
    ]
    assert [[place] for place in permuted(wanted, Grids.of(lengths), keys).tolist()] == alone


@pytest.mark.parametrize("length", [2, 3, 4, 5, 6])
def test_all_orders_of_a_few_numbers_are_about_as_frequent(length: int) -> None:
    num_keys = 40_000
    keys = keys_of(numbers(1), np.arange(num_keys, dtype=np.uint64))
    grid = Grids.of([length])
    columns = [permuted(np.full(num_keys, number, dtype=np.uint64), grid, keys) for number in range(length)]
    found, counts = np.unique(np.stack(columns, axis=1), axis=0, return_counts=True)
    assert found.tolist() == [list(order) for order in permutations(range(length))]
    expected, freedom = num_keys / factorial(length), factorial(length) - 1
    deviation = (((counts - expected) ** 2 / expected).sum() - freedom) / sqrt(2 * freedom)
    assert deviation < 5


def test_neighbours_in_an_order_are_not_correlated() -> None:
    order = samples_at(np.arange(100_000, dtype=np.uint64), numbers(1), Grids.of([100_000])).astype(np.float64)
    for distance in (1, 2, 316, 317, 1000):
        assert abs(np.corrcoef(order[:-distance], order[distance:])[0, 1]) < 0.016


def test_the_hash_is_that_of_splitmix64() -> None:
    assert hashed(numbers(0)).tolist() == [0xE220A8397B1DCDAF]


def test_the_order_of_all_versions_is_this_one() -> None:
    ten = np.arange(10, dtype=np.uint64)
    assert key(7, 3).tolist() == [12359040808785015427]
    assert permuted(ten, Grids.of([10]), key(0, 0)).tolist() == [2, 7, 5, 3, 6, 4, 9, 0, 1, 8]
    assert permuted(ten, Grids.of([10]), key(0, 1)).tolist() == [6, 1, 3, 9, 5, 2, 7, 0, 8, 4]
    far = [225498584674, 635184917502, 465401909176, 223226311697]
    assert permuted(numbers(0, 1, 2, 5 * 10**11), Grids.of([10**12]), key(7, 3)).tolist() == far
    longest = [487234553560973992, 2364011353598148550]
    assert permuted(numbers(0, MAX_LENGTH - 1), Grids.of([MAX_LENGTH]), key(7, 3)).tolist() == longest


def test_an_endless_order_has_the_epochs_one_after_another() -> None:
    places = np.arange(20, dtype=np.uint64)
    assert samples_at(places, numbers(0), Grids.of([10])).tolist() == [
        *(2, 7, 5, 3, 6, 4, 9, 0, 1, 8),
        *(6, 1, 3, 9, 5, 2, 7, 0, 8, 4),
    ]
