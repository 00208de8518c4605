"""Ragged shards: each rank holds a range of a tensor, of any size, that need not end with a row."""

from __future__ import annotations

from math import prod
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import holdfast
from tests.support.ranks import run_ranks

SHAPES = {"weight": (7, 5), "bias": (11,), "experts": (3, 4, 2)}
#: The share of each rank: some hold nothing, or less than a row.
SHARES, OTHER_SHARES = (0, 13, 1, 6), (9, 2, 4)


def numbered(name: str) -> torch.Tensor:
    return torch.arange(prod(SHAPES[name]), dtype=torch.float32).reshape(SHAPES[name]) + len(name)


def ragged(shares: tuple[int, ...], rank: int, *, filled: bool) -> dict[str, holdfast.Piecewise]:
    """This rank's parts of all tensors, in one flat memory, as a ragged layout keeps them."""
    state = {}
    for name, shape in SHAPES.items():
        cuts = [prod(shape) * sum(shares[:number]) // sum(shares) for number in range(len(shares) + 1)]
        part = holdfast.FlatRange(cuts[rank], cuts[rank + 1])
        held = numbered(name).flatten()[part.start : part.stop].clone()
        memory = held if filled else torch.zeros_like(held)
        state[name] = holdfast.Piecewise(shape, [(part, memory)] if part.numel else [], dtype=torch.float32)
    return state


def save_ragged(run: str) -> None:
    holdfast.save(run, {"model": ragged(SHARES, torch.distributed.get_rank(), filled=True)}, 0)


def load_ragged(run: str, again: str) -> bool:
    """Load into other ragged shards, and save uneven DTensors for the way back."""
    rank = torch.distributed.get_rank()
    state = ragged(OTHER_SHARES, rank, filled=False)
    holdfast.load(run, into={"model": state})
    expected = ragged(OTHER_SHARES, rank, filled=True)
    mesh = init_device_mesh("cpu", (3,))
    whole = {name: distribute_tensor(numbered(name), mesh, [Shard(0)]) for name in SHAPES}
    holdfast.save(again, {"model": whole}, 0)
    pairs = ((state[name].pieces, expected[name].pieces) for name in SHAPES)
    return all(
        torch.equal(mine[1], other[1]) for held, wanted in pairs for mine, other in zip(held, wanted, strict=True)
    )


def load_both(run: str, again: str) -> bool:
    """Load the ragged shards into uneven DTensors, and the DTensors into ragged shards."""
    rank = torch.distributed.get_rank()
    mesh = init_device_mesh("cpu", (4,))
    model = nn.ParameterDict(
        {name: nn.Parameter(distribute_tensor(torch.zeros(SHAPES[name]), mesh, [Shard(0)])) for name in SHAPES}
    )
    holdfast.load(run, into={"model": model})
    state, expected = ragged(SHARES, rank, filled=False), ragged(SHARES, rank, filled=True)
    holdfast.load(again, into={"model": state})
    for name in SHAPES:
        held = model[name]
        assert isinstance(held, DTensor)
        assert torch.equal(held.full_tensor(), numbered(name))
        pairs = zip(state[name].pieces, expected[name].pieces, strict=True)
        assert all(torch.equal(mine[1], other[1]) for mine, other in pairs)
    return True


def test_ragged_shards_load_into_other_ragged_ones_and_into_uneven_dtensors_and_back(tmp_path: Path) -> None:
    run, again = str(tmp_path / "ragged"), str(tmp_path / "even")
    run_ranks(4, save_ragged, run)
    assert run_ranks(3, load_ragged, run, again) == [True] * 3
    assert run_ranks(4, load_both, run, again) == [True] * 4
