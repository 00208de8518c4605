"""Loaders run on stand-ins for weights: their boxes are found, and a staged version has the bits of stock loading."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from holdfast import IncompatibleError
from holdfast.inference import PublishedTensor, StagedVersion, discover
from holdfast.inference.strided_views import StridedView, view_parts

Loader = Callable[[torch.Tensor, torch.Tensor], object]
SHAPE = (6, 8)


class Loaded(nn.Module):
    """One parameter, and two weights that `loader` copies into it."""

    def __init__(self, loader: Loader, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape), requires_grad=False)
        self._loader = loader

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        held = dict(weights)
        self.weight.data.copy_(self._loader(held["a"], held["b"]))  # type: ignore[arg-type]


LOADERS: dict[str, Loader] = {
    "narrow": lambda a, b: a.narrow(0, 1, 3),
    "chunk": lambda a, b: a.chunk(2, dim=1)[1],
    "split": lambda a, b: torch.split(b, [2, 4])[1],
    "index": lambda a, b: a[2:4, None, :3],
    "heads": lambda a, b: a.view(2, 3, 8)[1].reshape(-1)[5:20],
    "transposed": lambda a, b: a.t()[1:3].contiguous(),
    "joined": lambda a, b: torch.cat([a, b])[4:9],
    "joined across": lambda a, b: torch.cat([a, b], dim=1).chunk(2)[1].narrow(1, 6, 4),
    "every other": lambda a, b: a[::2],
    "cast": lambda a, b: b.to(torch.bfloat16)[:2].to(torch.float32),
    "broadcast": lambda a, b: a[:1].expand(3, 8),
}


@pytest.mark.parametrize("name", LOADERS)
def test_a_staged_version_loads_the_bits_of_whole_weights(name: str) -> None:
    loader = LOADERS[name]
    whole = {key: torch.randn(SHAPE, generator=torch.Generator().manual_seed(ord(key))) for key in "ab"}
    expected = loader(whole["a"], whole["b"])
    assert isinstance(expected, torch.Tensor)
    model = Loaded(loader, tuple(expected.shape))
    needs = discover(model.load_weights, [PublishedTensor(key, torch.float32, SHAPE) for key in "ab"], model=model)
    assert not model.weight.any()
    distinct = 8 if name == "broadcast" else expected.numel()
    assert needs.nbytes == 4 * distinct
    version = StagedVersion(needs)
    for key, piecewise in version.target().items():
        for box, memory in piecewise.pieces:  # type: ignore[attr-defined]
            memory.copy_(whole[key][box.slices()])
    version.is_whole = True
    version.apply(model.load_weights)
    assert torch.equal(model.weight, expected)


@pytest.mark.parametrize(
    ("loader", "operation"),
    [
        (lambda a, b: a + 1, "aten.add"),
        (lambda a, b: a.t().reshape(-1), "view"),
        (lambda a, b: a[0] if a.sum() > 0 else b[0], "aten.sum"),
        (lambda a, b: torch.cat([a, b]).view(2, 6, 8), "aten.view"),
    ],
)
def test_a_loader_that_cannot_be_followed_is_refused_with_its_operation(loader: Loader, operation: str) -> None:
    model = Loaded(loader, (1,))
    with pytest.raises(IncompatibleError, match=operation) as caught:
        discover(model.load_weights, [PublishedTensor(key, torch.float32, SHAPE) for key in "ab"], model=model)
    assert caught.value.code == "incompatible.loader"
    assert caught.value.tensor == "a"


def test_what_a_loader_writes_besides_leaves_the_serving_model_as_it_is() -> None:
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        model.weight.data.zero_()
        for _, weight in weights:
            model.weight.data.copy_(weight)

    discover(load, [PublishedTensor("weight", torch.float32, (2, 3))], model=model)
    assert torch.equal(model.weight, before)


@st.composite
def views(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor of the numbers of its elements, and a view of it."""
    shape = draw(st.lists(st.sampled_from((1, 2, 3, 4, 6)), max_size=4))
    whole = view = torch.arange(prod(shape)).reshape(shape)
    for kind in draw(st.lists(st.sampled_from(("narrow", "turn", "merge", "divide", "step", "expand")), max_size=5)):
        axis = draw(st.integers(0, view.dim() - 1)) if view.dim() else None
        if kind == "expand":
            view = view.unsqueeze(0).expand(2, *view.shape)
        elif axis is None:
            continue
        elif kind == "narrow":
            start = draw(st.integers(0, view.shape[axis]))
            view = view.narrow(axis, start, draw(st.integers(0, view.shape[axis] - start)))
        elif kind == "turn":
            view = view.transpose(0, axis)
        elif kind == "merge" and view.is_contiguous():
            view = view.view(-1)
        elif kind == "divide" and view.shape[axis] % 2 == 0 and view.shape[axis]:
            view = torch.unflatten(view, axis, (2, -1))
        elif kind == "step":
            view = view[(slice(None),) * axis + (slice(None, None, 2),)]
    return whole, view


@given(views())
def test_the_parts_of_any_view_are_the_view(given_view: tuple[torch.Tensor, torch.Tensor]) -> None:
    whole, view = given_view
    out = torch.full(view.shape, -1)
    for part in view_parts(
        tuple(whole.shape), StridedView(int(view.storage_offset()), tuple(view.shape), tuple(view.stride()))
    ):
        memory = whole[part.box.slices()].contiguous()
        assert (out[part.within.slices()] == -1).all()
        out[part.within.slices()] = memory.as_strided(part.sizes, part.strides).reshape(part.within.size)
    assert torch.equal(out, view)
