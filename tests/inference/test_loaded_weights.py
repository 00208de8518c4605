"""Loaders run on stand-ins for weights: their boxes are found, and a staged version has the bits of stock loading."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod

import pytest
import torch
from hypothesis import given, settings
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


REFUSED: list[tuple[str, Loader]] = [
    ("aten.add", lambda a, b: a + 1),
    ("view", lambda a, b: a.t().reshape(-1)),
    ("aten.sum", lambda a, b: a[0] if a.sum() > 0 else b[0]),
    ("aten.view", lambda a, b: torch.cat([a, b]).view(2, 6, 8)),
    ("aten._conj", lambda a, b: a.to(torch.complex64).conj()),
    ("aten._conj", lambda a, b: a.to(torch.complex64).mH),
    ("aten._neg_view", lambda a, b: torch._neg_view(a)),
    ("aten.view.dtype", lambda a, b: a.to(torch.int32).view(torch.float32)),
    ("aten.view.dtype", lambda a, b: a.view(torch.int32)),
    ("aten.as_strided", lambda a, b: a[2:].clone().as_strided((4,), (1,), 0)),
    ("aten.as_strided", lambda a, b: a.t().contiguous().as_strided((48,), (1,))),
    ("aten.as_strided", lambda a, b: a[2:].as_strided((4,), (3,))),
    ("aten.view_as_real", lambda a, b: torch.view_as_real(a.to(torch.complex64))),
    ("aten.zero_", lambda a, b: a[:1].zero_()),
    ("aten._assert_async", lambda a, b: torch._assert_async(a[0, 0])),
    ("Tensor.data =", lambda a, b: setattr(a, "data", b)),
    ("Tensor.tolist", lambda a, b: a.tolist()),
    ("Tensor.numpy", lambda a, b: a.numpy()),
]


@pytest.mark.parametrize(("operation", "loader"), REFUSED)
def test_a_loader_that_cannot_be_followed_is_refused_with_its_operation(loader: Loader, operation: str) -> None:
    model = Loaded(loader, (1,))
    with pytest.raises(IncompatibleError, match=operation) as caught:
        discover(model.load_weights, [PublishedTensor(key, torch.float32, SHAPE) for key in "ab"], model=model)
    assert caught.value.code == "incompatible.loader"
    assert caught.value.tensor == "a"


@pytest.mark.parametrize("first", [torch.Tensor.numpy, torch.sum])
def test_a_loader_that_goes_another_way_after_a_refusal_is_refused(first: Callable[[torch.Tensor], object]) -> None:
    def loader(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        try:
            first(a)
        except IncompatibleError:
            return b  # a real weight is not refused
        return a

    model = Loaded(loader, SHAPE)
    with pytest.raises(IncompatibleError, match="load_weights calls"):
        discover(model.load_weights, [PublishedTensor(key, torch.float32, SHAPE) for key in "ab"], model=model)


def test_a_copy_of_a_stand_in_lies_in_memory_as_that_of_a_weight_does() -> None:
    seen: list[list[tuple[object, ...]]] = []

    def loader(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        made = [a[2:].t(), a.t().contiguous(), a.t().clone(), a[:, 2:].to(torch.float64), torch.cat([a, b])[:, 3:]]
        seen.append([(each.stride(), each.storage_offset(), each.is_contiguous(), each.dtype) for each in made])
        return made[1]

    model = Loaded(loader, (8, 6))
    discover(model.load_weights, [PublishedTensor(key, torch.float32, SHAPE) for key in "ab"], model=model)
    loader(torch.zeros(SHAPE), torch.zeros(SHAPE))
    assert seen[0] == seen[1]


class Writes:
    """Writes of loaders to a model that do not copy a weight into it. None may reach a model that serves."""

    def add(self, model: nn.Linear, weight: torch.Tensor) -> None:
        model.weight.add_(1)

    def into(self, model: nn.Linear, weight: torch.Tensor) -> None:
        torch.mul(torch.ones(2, 3), 2, out=model.weight)

    def many(self, model: nn.Linear, weight: torch.Tensor) -> None:
        torch._foreach_mul_([torch.ones(2), model.weight], 2)

    def resize(self, model: nn.Linear, weight: torch.Tensor) -> None:
        model.weight.resize_(1)

    def statistics(self, model: nn.Linear, weight: torch.Tensor) -> None:
        torch.batch_norm(torch.ones(2, 3), None, None, model.weight[0], torch.ones(3), True, 0.1, 1e-5, False)

    def data(self, model: nn.Linear, weight: torch.Tensor) -> None:
        model.weight.data = weight

    def doubled(self, model: nn.Linear, weight: torch.Tensor) -> None:
        model.weight.data = model.weight.data * 2

    def array(self, model: nn.Linear, weight: torch.Tensor) -> None:
        model.weight.numpy()[0] = 1

    def storage(self, model: nn.Linear, weight: torch.Tensor) -> None:
        model.weight.untyped_storage().resize_(0)

    def parameter(self, model: nn.Linear, weight: torch.Tensor) -> None:
        model.weight = nn.Parameter(weight, requires_grad=False)

    def buffer(self, model: nn.Linear, weight: torch.Tensor) -> None:
        model.register_buffer("another", torch.zeros(1))

    def table(self, model: nn.Linear, weight: torch.Tensor) -> None:
        model.scale = torch.zeros(1)

    def fails(self, model: nn.Linear, weight: torch.Tensor) -> None:
        del model.weight
        raise KeyError("no such weight")


@pytest.mark.parametrize("write", [name for name in vars(Writes) if not name.startswith("_")])
def test_whatever_a_loader_does_the_serving_model_stays_as_it_is(write: str) -> None:
    model = nn.Linear(3, 2).requires_grad_(False)
    model.scale = torch.ones(1)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    held, given = [*model.parameters(), model.scale], torch.ones(1, 3)
    answer = model(given)

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        model.weight.data.zero_()
        for _, weight in weights:
            model.weight.data.copy_(weight)
            getattr(Writes(), write)(model, weight)

    refused: type[Exception] | None = None
    try:
        discover(load, [PublishedTensor("weight", torch.float32, (2, 3))], model=model)
    except (IncompatibleError, KeyError) as error:
        refused = type(error)
    silent = ("add", "into", "many", "resize")
    assert refused is (None if write in silent else IncompatibleError)
    assert [id(each) for each in (*model.parameters(), model.scale)] == [id(each) for each in held]
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert torch.equal(model.scale, torch.ones(1))
    assert torch.equal(model(given), answer)


Step = Callable[[torch.Tensor], torch.Tensor]


@st.composite
def chains(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Step], bool]:
    """A shape; operations that are followed, which apply to a tensor of that shape; and whether one is a copy."""
    shape = tuple(draw(st.lists(st.sampled_from((1, 2, 3, 4, 6)), max_size=3)))
    now, steps, copies = torch.zeros(shape), list[Step](), False
    for kind in draw(st.lists(st.sampled_from(("select", "order", "shape", "copy")), max_size=6)):
        axis = draw(st.integers(0, now.dim() - 1)) if now.dim() else None
        size = 0 if axis is None else now.shape[axis]
        start = draw(st.integers(0, max(size - 1, 0)))
        options: dict[str, list[Step]] = {
            "select": []
            if axis is None or not size
            else [
                lambda x, d=axis, s=start, n=size: x.narrow(d, s, n - s),  # type: ignore[misc]
                lambda x, d=axis, s=start: x.select(d, s),  # type: ignore[misc]
                lambda x, d=axis: x.chunk(2, d)[-1],  # type: ignore[misc]
                lambda x, d=axis, s=start, n=size: x.split([s, n - s], d)[1],  # type: ignore[misc]
                lambda x, d=axis, s=start: x.unbind(d)[s],  # type: ignore[misc]
                lambda x, s=start: x[s % len(x) :: 2],  # type: ignore[misc]
            ],
            "order": [lambda x: x.permute(tuple(reversed(range(x.dim()))))]
            + ([] if axis is None else [lambda x, d=axis: x.transpose(0, d), lambda x, d=axis: x.movedim(d, 0)]),  # type: ignore[misc]
            "shape": [
                torch.Tensor.squeeze,
                lambda x: x.unsqueeze(0),
                lambda x: x[None].expand(2, *x.shape),
                *([lambda x: x.view(-1), lambda x: x.reshape(-1)] if now.is_contiguous() else []),
            ],
            "copy": [torch.Tensor.clone, torch.Tensor.contiguous, torch.Tensor.detach, lambda x: x.to(torch.bfloat16)],
        }
        if options[kind] and now.dim() < 6:
            steps.append(draw(st.sampled_from(options[kind])))
            now = steps[-1](now)
            copies |= kind == "copy"
    return shape, steps, copies


def after(steps: Sequence[Step], tensor: torch.Tensor) -> torch.Tensor:
    for step in steps:
        tensor = step(tensor)
    return tensor


def run_chain(shape: tuple[int, ...], steps: Sequence[Step]) -> tuple[torch.Tensor, torch.Tensor]:
    """The results of `steps` on a weight of `shape`, when they run on it, and by way of a staged version."""
    whole = torch.arange(1.0, prod(shape) + 1).mul(1.7).reshape(shape)
    expected = after(steps, whole)
    made = torch.zeros(expected.shape)

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, weight in weights:
            made.copy_(after(steps, weight))

    version = StagedVersion(discover(load, [PublishedTensor("a", whole.dtype, shape)], model=nn.Module()))
    for box, memory in version.target()["a"].pieces:  # type: ignore[attr-defined]
        memory.copy_(whole[box.slices()])
    version.is_whole = True
    version.apply(load)
    return expected.float(), made


@settings(max_examples=60)
@given(chains(), st.booleans())
def test_chains_of_followed_operations_have_the_bits_of_the_loader(
    chain: tuple[tuple[int, ...], list[Step], bool], is_inference: bool
) -> None:
    shape, steps, copies = chain
    try:
        with torch.inference_mode(is_inference):
            expected, made = run_chain(shape, steps)
    except IncompatibleError as error:  # elements in a row in a copy need not be so in the weight
        assert copies, error  # noqa: PT017 - which chains are refused depends on them
        assert "view" in str(error)  # noqa: PT017
    else:
        assert torch.equal(expected, made)


OTHERS: list[Step] = [
    lambda x: x + 0,
    lambda x: x.as_strided(x.shape, x.stride()),
    torch._neg_view,
    lambda x: x.view(torch.uint8),
    lambda x: x.roll(1),
    lambda x: x.repeat(*(1 for _ in x.shape)) if x.dim() else x * 1,
    torch.zeros_like,
    lambda x: x.take(torch.zeros(1, dtype=torch.int64)),
    lambda x: x.to(torch.complex64).conj(),
]


@settings(max_examples=30)
@given(chains(), st.sampled_from(OTHERS), st.integers(0, 6))
def test_a_chain_with_any_other_operation_is_refused(
    chain: tuple[tuple[int, ...], list[Step], bool], other: Step, at: int
) -> None:
    shape, steps, _ = chain
    model = Loaded(lambda a, b: after([*steps[:at], other], a), shape)
    with pytest.raises(IncompatibleError, match="load_weights calls"):
        discover(model.load_weights, [PublishedTensor(key, torch.float32, shape) for key in "ab"], model=model)


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
