"""Tensors without elements that stand for the weights an engine loads, and follow what its loaders do with them.

A loader of an inference engine takes a whole weight, selects the part of this worker by torch's view operations, and
copies it into a parameter. A `LoadedWeight` lets it do so: it follows each view by the numbers of the elements that the
view selects, and hands the copy to a `CopySink`. One sink records the boxes that are needed, another one copies them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from holdfast.errors import IncompatibleError
from holdfast.geometry import Shape
from holdfast.inference.strided_views import StridedView
from holdfast.inference.weights import PublishedTensor

_aten = torch.ops.aten
#: Operations after which the elements are the same, in the same order.
_SAME = frozenset((_aten.detach.default, _aten.alias.default, _aten.clone.default, _aten.lift_fresh.default))
_CASTS = frozenset((_aten._to_copy.default, _aten.to.dtype))  # noqa: SLF001 - names of operations
#: Operations that select and order elements whatever memory these lie in. Torch makes all others of its methods that
#: select (narrow, chunk, reshape, flatten, movedim, indexing by numbers and slices) of these.
_VIEWS = frozenset(
    (
        _aten.select.int,
        _aten.slice.Tensor,
        _aten.split.Tensor,
        _aten.split_with_sizes.default,
        _aten.unbind.int,
        _aten.view.default,
        _aten._unsafe_view.default,  # noqa: SLF001
        _aten.permute.default,
        _aten.transpose.int,
        _aten.t.default,
        _aten.squeeze.default,
        _aten.squeeze.dim,
        _aten.squeeze.dims,
        _aten.unsqueeze.default,
        _aten.expand.default,
    )
)
_FOLLOWED = _SAME | _CASTS | _VIEWS | {_aten.view.dtype}
#: The calls that reach the memory of a tensor past torch's operations.
MEMORY_ACCESS = {
    torch.Tensor.data.__set__: "Tensor.data =",  # type: ignore[attr-defined]
    torch.Tensor.tolist: "Tensor.tolist",
    torch.Tensor.numpy: "Tensor.numpy",
    torch.Tensor.__array__: "Tensor.__array__",
    torch.Tensor.__dlpack__: "Tensor.__dlpack__",
    torch.Tensor.data_ptr: "Tensor.data_ptr",
    torch.Tensor.untyped_storage: "Tensor.untyped_storage",
    torch.Tensor.storage: "Tensor.storage",
    torch.Tensor.share_memory_: "Tensor.share_memory_",
}


class WeightPart:
    """Elements of one weight, as a view selects them: `view` is a tensor on the meta device whose offset and strides
    count elements of the weight. They are cast to each of `casts` in turn."""

    def __init__(self, weight: PublishedTensor, view: torch.Tensor, casts: tuple[torch.dtype, ...] = ()) -> None:
        self.weight = weight
        self.view = view
        self.casts = casts

    @property
    def shape(self) -> Shape:
        """The shape of the view."""
        return tuple(self.view.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype after the casts."""
        return self.casts[-1] if self.casts else self.view.dtype

    @property
    def strided(self) -> StridedView:
        """The elements of the weight."""
        return StridedView(int(self.view.storage_offset()), self.shape, tuple(self.view.stride()))


class JoinedParts:
    """Parts one after another along axis `dim`, as `torch.cat` joins them."""

    def __init__(self, parts: Sequence[LoadedWeight], dim: int) -> None:
        self.parts = tuple(parts)
        self.dim = dim


class CopySink(Protocol):
    """Takes the copies that loaders make."""

    def copied(self, target: torch.Tensor, weight: LoadedWeight) -> None:
        """A loader copied `weight` into `target`."""


class LoadedWeight(torch.Tensor):
    """A weight, or a part of it, as a loader sees it: it has a shape, strides and a dtype, and no elements.

    `memory` is a tensor on the meta device that lies in memory as the loader's tensor would. After a copy it is another
    one than the view in `content`, and no element is found by it.
    """

    content: WeightPart | JoinedParts
    memory: torch.Tensor
    sink: CopySink

    @staticmethod
    def whole(weight: PublishedTensor, sink: CopySink) -> LoadedWeight:
        """The stand-in for the whole `weight`, on the CPU as a weight that was read from a file."""
        view = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
        return LoadedWeight(WeightPart(weight, view), sink, memory=view)

    @staticmethod
    def __new__(  # noqa: PYI034 - torch makes the object, and knows its class only at run time
        cls, content: WeightPart | JoinedParts, sink: CopySink, *, memory: torch.Tensor
    ) -> LoadedWeight:
        """Make a stand-in that has the shape, strides and dtype of `memory`."""
        made: LoadedWeight = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001 - torch's own name for it
            cls,
            memory.shape,
            strides=memory.stride(),
            storage_offset=memory.storage_offset(),
            dtype=memory.dtype,
            device=torch.device("cpu"),
            requires_grad=False,
        )
        made.content = content
        made.memory = memory
        made.sink = sink
        return made

    def __init__(self, *args: object, **kwargs: object) -> None:
        """Do nothing: `__new__` has set everything, and that of torch takes no arguments."""

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"LoadedWeight({', '.join(self.names())}, {tuple(self.shape)}, {self.dtype})"

    def names(self) -> list[str]:
        """The names of the weights that it has elements of."""
        if isinstance(self.content, WeightPart):
            return [self.content.weight.name]
        return [name for part in self.content.parts for name in part.names()]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in MEMORY_ACCESS:
            raise refusal(MEMORY_ACCESS[func], list(stand_ins(args)))
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - as torch documents for such classes
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _follow(func, args, kwargs or {})


def _follow(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a loader's operation on stand-ins. Raises `IncompatibleError` for one that is not listed above."""
    if func is _aten.copy_.default and isinstance(args[1], LoadedWeight) and not isinstance(args[0], LoadedWeight):
        args[1].sink.copied(args[0], args[1])
        return args[0]
    if func is _aten.cat.default:
        return _joined(args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0), func)
    weight = args[0] if args else None
    if func not in _FOLLOWED:  # where autograd is off, as in inference mode, torch leaves to us what it makes it of
        made = func.decompose(*args, **kwargs)
        if made is not NotImplemented:
            return made
    if func not in _FOLLOWED or not isinstance(weight, LoadedWeight):
        raise refusal(func, list(stand_ins((*args, *kwargs.values()))))
    if func in _SAME:
        return LoadedWeight(weight.content, weight.sink, memory=func(weight.memory, *args[1:], **kwargs))
    if func in _CASTS:
        return _cast(weight, func, args[1:], kwargs)
    if func is _aten.view.dtype:
        if args[1] != weight.dtype:
            raise refusal(func, [weight])
        return LoadedWeight(weight.content, weight.sink, memory=weight.memory)
    try:
        memory = _listed(func(weight.memory, *args[1:], **kwargs))
        if isinstance(weight.content, JoinedParts):
            contents: list[WeightPart | JoinedParts] = [*_narrowed(weight, weight.content, func, args[1:], kwargs)]
        else:
            part = weight.content
            views = _listed(func(part.view, *args[1:], **kwargs))
            contents = [WeightPart(part.weight, view, part.casts) for view in views]
    except RuntimeError as error:
        raise refusal(func, [weight]) from error
    found = [LoadedWeight(content, weight.sink, memory=each) for content, each in zip(contents, memory, strict=True)]
    return found if func in (_aten.split.Tensor, _aten.split_with_sizes.default, _aten.unbind.int) else found[0]


def _listed(found: Any) -> list[torch.Tensor]:
    return list(found) if isinstance(found, list | tuple) else [found]


def _cast(weight: LoadedWeight, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LoadedWeight:
    if kwargs.get("layout") not in (None, torch.strided) or torch.device(kwargs.get("device") or "cpu").type == "meta":
        raise refusal(func, [weight])
    kwargs = {**kwargs, "device": torch.device("meta"), "pin_memory": False} if "device" in kwargs else kwargs
    return _cast_to(weight, func(weight.memory, *args, **kwargs))


def _cast_to(weight: LoadedWeight, memory: torch.Tensor) -> LoadedWeight:
    content = weight.content
    if isinstance(content, JoinedParts):
        parts = [_cast_to(part, part.memory.to(memory.dtype)) for part in content.parts]
        return LoadedWeight(JoinedParts(parts, content.dim), weight.sink, memory=memory)
    casts = content.casts if memory.dtype == content.dtype else (*content.casts, memory.dtype)
    return LoadedWeight(WeightPart(content.weight, content.view, casts), weight.sink, memory=memory)


def _joined(given: Sequence[torch.Tensor], dim: int, func: Any) -> LoadedWeight:
    parts = [each for each in given if isinstance(each, LoadedWeight)]
    alike = len({(part.dtype, part.dim()) for part in parts}) == 1 and parts[0].dim() > 0
    if len(parts) != len(given) or not alike:
        raise refusal(func, parts)
    memory = torch.cat([part.memory for part in parts], dim)
    return LoadedWeight(JoinedParts(parts, dim % memory.dim()), parts[0].sink, memory=memory)


def _narrowed(
    weight: LoadedWeight, joined: JoinedParts, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[JoinedParts]:
    """Slices and splits of joined parts. Other views of them are refused."""
    if func is _aten.slice.Tensor and not kwargs and (len(args) < 4 or args[3] == 1):
        dim = args[0] % weight.dim() if args else 0
        start, stop, _ = slice(*args[1:3]).indices(weight.shape[dim])
        return [_slice(joined, dim, start, max(start, stop))]
    if func in (_aten.split.Tensor, _aten.split_with_sizes.default):
        dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % weight.dim()
        extent = weight.shape[dim]
        sizes = args[0]
        if isinstance(sizes, int):
            sizes = [min(sizes, extent - at) for at in range(0, extent, sizes)] or [0]
        starts = [sum(sizes[:number]) for number in range(len(sizes))]
        return [_slice(joined, dim, start, start + size) for start, size in zip(starts, sizes, strict=True)]
    raise refusal(func, [weight])


def _slice(joined: JoinedParts, dim: int, start: int, stop: int) -> JoinedParts:
    parts: list[Any] = []
    begin = 0
    for part in joined.parts:
        if dim != joined.dim:
            parts.append(part.narrow(dim, start, stop - start))
            continue
        first, last = max(start - begin, 0), min(stop - begin, part.shape[dim])
        if first < last:
            parts.append(part.narrow(dim, first, last - first))
        begin += part.shape[dim]
    return JoinedParts(parts or [joined.parts[0].narrow(dim, 0, 0)], joined.dim)


def stand_ins(given: Sequence[object]) -> Iterator[LoadedWeight]:
    """The stand-ins among the arguments of an operation."""
    for each in given:
        if isinstance(each, LoadedWeight):
            yield each
        elif isinstance(each, list | tuple):
            yield from stand_ins(each)


def refusal(func: object, weights: Sequence[LoadedWeight]) -> IncompatibleError:
    """The error for an operation on stand-ins that is not followed."""
    names = sorted({name for weight in weights for name in weight.names()})
    return IncompatibleError(
        f"load_weights calls {func} on {', '.join(map(repr, names))}, which needs its elements, their bits or their "
        "memory, or an order of them that no view of the weight has, so the parts that this worker needs cannot be "
        "found without the weight.",
        code="incompatible.loader",
        action="Publish through a backend that sends whole weights (a PublishedSource feeds those of vLLM), or have "
        "the loader select with views, and copy.",
        tensor=names[0] if names else None,
    )
