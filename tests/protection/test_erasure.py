"""The arithmetic of parity, against an implementation that takes one bit after another."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from holdfast.protection.erasure import STRIP_NBYTES, add_multiple, coefficients, parity_nbytes, product, quotient
from holdfast.store.base import Bytes

ELEMENTS = st.integers(0, 255)


def slow_product(a: int, b: int) -> int:
    """Polynomials of bits, multiplied and then divided by x^8 + x^4 + x^3 + x^2 + 1."""
    found = 0
    for bit in range(8):
        found ^= (a << bit) * (b >> bit & 1)
    for bit in range(14, 7, -1):
        found ^= (0x11D << (bit - 8)) * (found >> bit & 1)
    return found


def elements(block: Bytes) -> list[int]:
    """The elements of a block: bit number k of each lies in packet k."""
    packets = np.unpackbits(block.reshape(8, -1), axis=1)
    return [int(sum(int(bit) << k for k, bit in enumerate(column))) for column in packets.T]


def random_row(nbytes: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def parities(rows: list[Bytes], nbytes: int) -> list[Bytes]:
    """P and Q."""
    found = []
    for parity_row in (len(rows), len(rows) + 1):
        parity = np.zeros(nbytes, np.uint8)
        for row, factor in zip(rows, coefficients(parity_row, tuple(range(len(rows))), len(rows)), strict=True):
            add_multiple(parity, row, factor)
        found.append(parity)
    return found


def test_products_of_all_elements_agree_with_long_multiplication() -> None:
    assert all(product(a, b) == slow_product(a, b) for a in range(256) for b in range(256))


@given(ELEMENTS, st.integers(1, 255))
def test_a_quotient_times_the_divisor_is_the_dividend(a: int, b: int) -> None:
    assert slow_product(quotient(a, b), b) == a


def test_q_has_the_powers_of_two_as_factors_and_p_has_ones() -> None:
    powers, power = [], 1
    for _ in range(255):
        powers.append(power)
        power = slow_product(power, 2)
    assert power == 1
    assert len(set(powers)) == 255
    rows = tuple(range(255))
    assert coefficients(256, rows, 255) == tuple(powers)
    assert coefficients(255, rows, 255) == (1,) * 255


def test_a_multiple_of_a_row_is_the_product_of_each_element() -> None:
    for factor in range(256):
        row, total = random_row(64, factor), random_row(64, 1000)
        expected = [slow_product(factor, a) ^ b for a, b in zip(elements(row), elements(total), strict=True)]
        add_multiple(total, row, factor)
        assert elements(total) == expected


@given(st.integers(0, 2 * STRIP_NBYTES + 100), st.integers(0, 255), st.integers(0, 9), st.integers(0, 9))
def test_a_short_row_counts_as_if_zeros_followed_it_at_any_alignment(
    nbytes: int, factor: int, row_start: int, total_start: int
) -> None:
    total_nbytes = parity_nbytes(2 * STRIP_NBYTES + 100)
    row = random_row(row_start + nbytes)[row_start:]
    memory = random_row(total_start + total_nbytes, 1)
    padded = np.zeros(total_nbytes, np.uint8)
    padded[:nbytes] = row
    expected = memory[total_start:].copy()
    add_multiple(expected, padded, factor)
    before = memory[:total_start].tobytes()
    add_multiple(memory[total_start:], row, factor)
    assert memory[total_start:].tobytes() == expected.tobytes()
    assert memory[:total_start].tobytes() == before


def test_pieces_of_whole_blocks_give_the_same_sum_as_a_whole_row() -> None:
    nbytes = parity_nbytes(2 * STRIP_NBYTES + 12345)
    row, whole, pieces = random_row(nbytes - 5), np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    add_multiple(whole, row, 0x53)
    for begin in reversed(range(0, nbytes, STRIP_NBYTES)):
        add_multiple(pieces[begin : begin + STRIP_NBYTES], row[begin : begin + STRIP_NBYTES], 0x53)
    assert pieces.tobytes() == whole.tobytes()


@given(st.integers(1, 9), st.data())
def test_any_two_rows_come_back_from_the_others(num_data: int, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 100), min_size=num_data, max_size=num_data))
    nbytes = parity_nbytes(max(sizes))
    rows = [random_row(size, seed) for seed, size in enumerate(sizes)]
    rows += parities(rows, nbytes)
    for lost in combinations(range(num_data + 2), 2):
        available = tuple(row for row in range(num_data + 2) if row not in lost)
        for wanted in lost:
            found = np.zeros(nbytes, np.uint8)
            for row, factor in zip(available, coefficients(wanted, available, num_data), strict=True):
                add_multiple(found, rows[row], factor)
            assert found[: rows[wanted].size].tobytes() == rows[wanted].tobytes()
            assert not found[rows[wanted].size :].any()


def test_any_two_rows_of_the_largest_stripe_come_back_from_the_others() -> None:
    """With one element for each row, so that all pairs take little time."""
    num_data = 255
    values = [(37 * row + 11) % 256 for row in range(num_data)]
    q = coefficients(num_data + 1, tuple(range(num_data)), num_data)
    rows = [*values, 0, 0]
    for value, factor in zip(values, q, strict=True):
        rows[num_data] ^= value
        rows[num_data + 1] ^= product(factor, value)
    for lost in [(0, 1), (0, 254), (253, 254), (100, 255), (100, 256), (255, 256)]:
        available = tuple(row for row in range(num_data + 2) if row not in lost)
        for wanted in lost:
            found = 0
            for row, factor in zip(available, coefficients(wanted, available, num_data), strict=True):
                found ^= product(factor, rows[row])
            assert found == rows[wanted]
