"""Integer sequences: they come back exactly, regular ones take no room, malformed ones are refused."""

from __future__ import annotations

from itertools import accumulate

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from holdfast.errors import CorruptError
from holdfast.format import sequences
from holdfast.format.sequences import Affine, Block, DifferencePlanes, Sequence
from holdfast.geometry import Int64s, chunk_cuts

int64s = st.integers(-(2**63), 2**63 - 1)
small = st.integers(-5, 5)


def int64_arrays(elements: st.SearchStrategy[int]) -> st.SearchStrategy[Int64s]:
    return arrays(np.int64, st.integers(0, 300), elements=elements)


@st.composite
def affine_blocks(draw: st.DrawFn) -> Int64s:
    """``start + sum(index * step)`` over a grid of up to four axes."""
    values = np.asarray([draw(int64s | small)], np.int64)
    for _ in range(draw(st.integers(0, 4))):
        count, step = draw(st.integers(1, 6)), np.int64(draw(int64s | small))
        with np.errstate(over="ignore"):
            values = (values[:, None] + np.arange(count, dtype=np.int64) * step).reshape(-1)
    return values


rising = st.lists(st.integers(1, 2**40), max_size=200).map(lambda steps: np.asarray([0, *accumulate(steps)], np.int64))
concatenated = st.lists(affine_blocks(), min_size=1, max_size=5).map(np.concatenate)
any_values = st.one_of(int64_arrays(int64s), int64_arrays(small), affine_blocks(), concatenated, rising)


def decoded(sequence: Sequence, blob: bytes = b"") -> Int64s:
    """Decoded from what a manifest carries."""
    packed = msgspec.msgpack.decode(msgspec.msgpack.encode(sequence), type=Sequence)
    return sequences.decode(packed, memoryview(blob))


@given(any_values)
def test_what_was_encoded_is_decoded(values: Int64s) -> None:
    sequence, blob = sequences.encode(values)
    assert len(blob) == (sequence.nbytes if isinstance(sequence, DifferencePlanes) else 0)
    assert np.array_equal(decoded(sequence, blob), values)


@given(
    st.lists(st.integers(-(2**62), 2**62), min_size=2, max_size=2), st.lists(st.integers(1, 9), min_size=1, max_size=3)
)
def test_a_regular_grid_is_one_block(ends: list[int], counts: list[int]) -> None:
    start, step = ends[0] // 2**10, ends[1] // 2**20
    values = np.asarray([start], np.int64)
    for scale, count in enumerate(counts):
        values = (values[:, None] + np.arange(count) * (step * 10**scale)).reshape(-1)
    sequence, blob = sequences.encode(values)
    assert isinstance(sequence, Affine)
    assert len(sequence.blocks) == 1
    assert not blob


@pytest.mark.parametrize("size", [10, 1000, 100_000])
def test_regular_sequences_take_the_same_room_whatever_their_length(size: int) -> None:
    owners_of_a_mesh = (np.arange(size)[:, None] * 8 + np.arange(8)).T.reshape(-1)
    for values in (np.arange(size), np.zeros(size, np.int64), chunk_cuts(3 * size + 1, size), owners_of_a_mesh):
        sequence, blob = sequences.encode(values)
        assert not blob
        assert len(msgspec.msgpack.encode(sequence)) < 100


def test_random_cuts_take_about_the_bytes_of_their_differences() -> None:
    cuts = np.sort(np.random.default_rng(1).integers(0, 2**24, 10_000)).astype(np.int64)
    sequence, blob = sequences.encode(cuts)
    assert isinstance(sequence, DifferencePlanes)
    assert sequence.width == 2
    assert len(blob) == 2 * (len(cuts) - 1)


@pytest.mark.parametrize(
    ("sequence", "blob", "values"),
    [
        (Affine((Block(0, (4,), (10,)),)), "", [0, 10, 20, 30]),
        (Affine((Block(0, (2, 3), (100, 1)),)), "", [0, 1, 2, 100, 101, 102]),
        (Affine((Block(5, (), ()), Block(7, (2,), (-7,)))), "", [5, 7, 0]),
        (Affine((Block(5, (0,), (1,)), Block(6, (), ()))), "", [6]),
        (Affine(()), "", []),
        (DifferencePlanes(4, 0, 3, 2), "000102000001", [0, 3, 7, 268]),
        (DifferencePlanes(1, -9, 0, 8), "", [-9]),
        (DifferencePlanes(2, 2**63 - 1, 1, 1), "00", [2**63 - 1, -(2**63)]),
    ],
)
def test_sequences_mean_what_the_specification_says(sequence: Sequence, blob: str, values: list[int]) -> None:
    assert decoded(sequence, bytes.fromhex(blob)).tolist() == values


@pytest.mark.parametrize(
    "sequence",
    [
        Affine((Block(0, (2,), (1, 1)),)),
        Affine((Block(0, (2, 2), (1,)),)),
        Affine((Block(0, (-1,), (1,)),)),
        Affine((Block(0, (-2, -3), (1, 1)),)),
        Affine((Block(0, (2**27 + 1,), (1,)),)),
        Affine((Block(0, (2**40, 2**40), (1, 1)),)),
        Affine((Block(0, (3, 0), (1, 1)),)),
        Affine((Block(0, (2**62, 0), (1, 1)),)),
        Affine((Block(0, (0, 2**62), (1, 1)),)),
        Affine((Block(0, (2**26,), (1,)),) * 3),
        Affine((Block(0, (1,) * 33, (1,) * 33),)),
        Affine((Block(0, (), ()),) * 4097),
        DifferencePlanes(0, 0, 0, 1),
        DifferencePlanes(-1, 0, 0, 1),
        DifferencePlanes(2**27 + 1, 0, 0, 1),
        DifferencePlanes(3, 0, 0, 0),
        DifferencePlanes(3, 0, 0, 9),
    ],
    ids=lambda sequence: str(sequence)[:80],
)
def test_malformed_sequences_are_refused_before_memory_is_taken(sequence: Sequence) -> None:
    with pytest.raises(CorruptError, match=r"corrupt\.manifest"):
        sequences.decode(sequence, memoryview(b""))


@pytest.mark.parametrize("number", [2**63, 2**64 - 1])
@pytest.mark.parametrize("where", ["start", "count", "step", "first", "base", "length"])
def test_numbers_beyond_64_signed_bits_are_no_sequence(where: str, number: int) -> None:
    at = {name: number if name == where else 1 for name in ("start", "count", "step", "first", "base", "length")}
    affine = ["a", [[at["start"], [at["count"]], [at["step"]]]]]
    planes = ["p", at["length"], at["first"], at["base"], 1]
    wire = msgspec.msgpack.encode(affine if where in ("start", "count", "step") else planes)
    with pytest.raises((CorruptError, msgspec.ValidationError)):
        sequences.decode(msgspec.msgpack.decode(wire, type=Sequence), memoryview(b""))


@given(st.builds(DifferencePlanes, st.integers(-2, 5), small, small, st.integers(-1, 9)), st.data())
def test_planes_of_any_numbers_are_decoded_or_refused(sequence: DifferencePlanes, data: st.DataObject) -> None:
    nbytes = max(sequence.nbytes, 0)
    blob = data.draw(st.binary(min_size=nbytes, max_size=nbytes))
    if sequence.length >= 1 and 1 <= sequence.width <= 8:
        assert len(decoded(sequence, blob)) == sequence.length
    else:
        with pytest.raises(CorruptError):
            decoded(sequence, blob)
