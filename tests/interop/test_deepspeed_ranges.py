"""The ranges of one rank's elements in DeepSpeed's flat tensors agree with the places of all ranks' elements."""

from __future__ import annotations

from itertools import accumulate
from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from holdfast.geometry import FlatRange
from holdfast.interop.deepspeed_layout import grouped, own_range, own_share, part_numel, partition

SHAPES = st.lists(st.lists(st.integers(1, 5), max_size=3).map(tuple), min_size=1, max_size=5)


@given(shapes=SHAPES, world_size=st.integers(1, 5))
def test_the_ranges_of_a_group_are_those_of_its_pieces(shapes: list[tuple[int, ...]], world_size: int) -> None:
    numels = [prod(shape) for shape in shapes]
    part = part_numel(numels, [0] * len(shapes), world_size)
    firsts = accumulate(numels, initial=0)
    for numel, first, pieces in zip(numels, firsts, grouped(shapes, [0] * len(shapes), part), strict=False):
        ranges = [own_range(first, numel, rank * part, (rank + 1) * part) for rank in range(world_size)]
        held = [each for each, _ in ranges if each.numel]
        assert [each.start for each in held] == [0, *(each.stop for each in held[:-1])]
        assert held[-1].stop == numel
        for rank, (each, at) in enumerate(ranges):
            mine = pieces.ranks == rank
            assert each.numel == int(pieces.sizes[mine].prod(axis=1).sum())
            assert not each.numel or at == int(pieces.firsts[mine].min())


@given(shape=st.lists(st.integers(1, 7), max_size=3).map(tuple), world_size=st.integers(1, 9))
def test_the_shares_of_a_parameter_are_those_of_its_pieces(shape: tuple[int, ...], world_size: int) -> None:
    pieces = partition(shape, world_size)
    shares = [own_share(shape, rank, world_size) for rank in range(world_size)]
    found = [int(np.prod(pieces.sizes[pieces.ranks == rank], axis=1).sum()) for rank in range(world_size)]
    assert [share.numel for share in shares] == found
    assert sum(found) == prod(shape)


def test_a_rank_with_padding_alone_holds_nothing() -> None:
    assert own_range(0, 1, 2, 4) == (FlatRange(0, 0), 0)
    assert own_share((1,), 2, 3) == FlatRange(1, 1)
