"""The permutation has every number once, follows from its key alone, and never changes."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from holdfast.data.permutation import MAX_LENGTH, Numbers, hashed, keys_of, permuted


def numbers(*values: int) -> Numbers:
    return np.array(values, dtype=np.uint64)


@given(length=st.integers(1, 3000), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 2**40))
def test_every_number_has_one_place_and_every_place_one_number(length: int, seed: int, epoch: int) -> None:
    found = permuted(np.arange(length, dtype=np.uint64), length, keys_of(seed, numbers(epoch)))
    assert sorted(found.tolist()) == list(range(length))


@given(length=st.integers(1, 2000), seed=st.integers(0, 2**64 - 1), start=st.integers(0, 2**30))
def test_numbers_with_a_key_each_have_the_places_that_they_have_alone(length: int, seed: int, start: int) -> None:
    wanted = np.arange(start, start + 40, dtype=np.uint64) % np.uint64(length)
    keys = keys_of(seed, np.arange(40, dtype=np.uint64))
    alone = [permuted(wanted[i : i + 1], length, keys[i : i + 1]).tolist() for i in range(40)]
    assert [[place] for place in permuted(wanted, length, keys).tolist()] == alone


def test_the_hash_is_that_of_splitmix64() -> None:
    assert hashed(numbers(0)).tolist() == [0xE220A8397B1DCDAF]


def test_the_order_of_all_versions_is_this_one() -> None:
    ten = np.arange(10, dtype=np.uint64)
    assert keys_of(7, numbers(3)).tolist() == [12359040808785015427]
    assert permuted(ten, 10, keys_of(0, numbers(0))).tolist() == [8, 7, 5, 0, 3, 4, 1, 9, 6, 2]
    assert permuted(ten, 10, keys_of(0, numbers(1))).tolist() == [4, 1, 8, 9, 7, 6, 3, 2, 0, 5]
    key = keys_of(7, numbers(3))
    far = [937442314449, 404286087225, 240418601521, 435149223458]
    assert permuted(numbers(0, 1, 2, 5 * 10**11), 10**12, key).tolist() == far
    longest = [2216584450174566446, 1189476946615777826]
    assert permuted(numbers(0, MAX_LENGTH - 1), MAX_LENGTH, key).tolist() == longest
