"""Local memory as bytes: small sources give the same bytes packed as one by one."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import given

from holdfast.state.local_memory import MemorySource, PackedSource, packed

SIZES = st.sampled_from([0, 1, 3, 100, 1025, 9000])
DTYPES = st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.complex128])


@st.composite
def sources(draw: st.DrawFn) -> list[MemorySource]:
    """Parts of tensors of one element size after another, as in a data file: contiguous or not, with any bits."""
    found = []
    for dtype in sorted(draw(st.lists(DTYPES, max_size=4)), key=lambda dtype: -dtype.itemsize):
        for numel in draw(st.lists(SIZES, max_size=5)):
            generator = torch.Generator().manual_seed(draw(st.integers(0, 9)))
            bits = torch.randint(0, 256, (2 * numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
            pairs = bits.view(dtype).view(numel, 2)
            view = draw(st.sampled_from([pairs, pairs.T, pairs[:, 0]]))
            first = draw(st.integers(0, view.numel()))
            found.append(MemorySource(view, first, view.numel() - first))
    return found


def alone(parts: list[MemorySource]) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """The bytes of all sources, each read for itself."""
    out = np.zeros(sum(part.nbytes for part in parts), np.uint8)
    at = 0
    for part in parts:
        part.read_into(0, out[at : at + part.nbytes])
        at += part.nbytes
    return out


@given(sources(), st.data())
def test_packed_sources_give_the_same_bytes_from_any_offset(parts: list[MemorySource], data: st.DataObject) -> None:
    expected = alone(parts)
    at = 0
    for source in packed(parts):
        step = max(data.draw(st.sampled_from([source.nbytes, 16, 1 << 14])), 16)
        for start in range(0, source.nbytes, step):
            out = np.zeros(min(step, source.nbytes - start), np.uint8)
            source.read_into(start, out)
            assert np.array_equal(out, expected[at : at + len(out)])
            at += len(out)
    assert at == len(expected)


def test_small_sources_are_packed_up_to_a_bound_and_large_ones_stand_alone() -> None:
    small, large = torch.zeros(1024), torch.zeros(1 << 20)
    parts = [MemorySource(view, 0, view.numel()) for view in [*[small] * 600, large, small]]
    nbytes = [(type(source), source.nbytes) for source in packed(parts)]
    megabyte = 1 << 20
    assert nbytes == [
        *[(PackedSource, megabyte)] * 2,
        (PackedSource, 88 * 4096),
        (MemorySource, 4 * megabyte),
        (PackedSource, 4096),
    ]
