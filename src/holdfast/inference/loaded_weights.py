"""Tensors without elements that stand for the weights an engine loads, and follow what its loaders do with them.

A loader of an inference engine takes a whole weight, selects the part of this worker by torch's view operations, and
copies it into a parameter. A `LoadedWeight` lets it do so: it follows each view by the numbers of the elements that the
view selects, and hands the copy to a `CopySink`. One sink records the boxes that are needed, another one copies them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast.errors import IncompatibleError
from holdfast.geometry import Shape
from holdfast.inference.strided_views import StridedView
from holdfast.inference.weights import PublishedTensor

_aten = torch.ops.aten
#: Operations that make other memory with the same elements in the same order.
_SAME = frozenset((_aten.detach.default, _aten.alias.default, _aten.clone.default, _aten.lift_fresh.default))
_CASTS = frozenset((_aten._to_copy.default, _aten.to.dtype))  # noqa: SLF001 - names of operations


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
    """A weight, or a part of it, as a loader sees it: it has a shape and a dtype, and no elements."""

    content: WeightPart | JoinedParts
    sink: CopySink

    @staticmethod
    def whole(weight: PublishedTensor, sink: CopySink) -> LoadedWeight:
        """The stand-in for the whole `weight`, on the CPU as a weight that was read from a file."""
        view = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
        return LoadedWeight(WeightPart(weight, view), sink, like=view, dtype=weight.dtype)

    @staticmethod
    def __new__(  # noqa: PYI034 - torch makes the object, and knows its class only at run time
        cls, content: WeightPart | JoinedParts, sink: CopySink, *, like: torch.Tensor, dtype: torch.dtype
    ) -> LoadedWeight:
        """Make a stand-in with the shape and strides of `like`."""
        made: LoadedWeight = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001 - torch's own name for it
            cls, like.shape, strides=like.stride(), dtype=dtype, device=torch.device("cpu"), requires_grad=False
        )
        made.content = content
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
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _follow(func, args, kwargs or {})


def _follow(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a loader's operation on stand-ins. Raises `IncompatibleError` for one that needs elements."""
    if func is _aten.copy_.default and isinstance(args[1], LoadedWeight) and not isinstance(args[0], LoadedWeight):
        args[1].sink.copied(args[0], args[1])
        return args[0]
    if func is _aten.cat.default:
        return _joined(args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0), func)
    weight = args[0] if args else None
    if not isinstance(weight, LoadedWeight):
        raise _refusal(func, list(_tensors((*args, *kwargs.values()))))
    if func in _SAME:
        return _like(weight, weight.content)
    if func in _CASTS:
        return _cast(weight, func, kwargs.get("dtype") or (args[1] if len(args) > 1 else weight.dtype))
    if isinstance(weight.content, JoinedParts):
        return _narrowed(weight, weight.content, func, args[1:], kwargs)
    if not _is_view(func):
        raise _refusal(func, [weight])
    try:
        found = func(weight.content.view, *args[1:], **kwargs)
    except RuntimeError as error:
        raise _refusal(func, [weight]) from error
    views = list(found) if isinstance(found, list | tuple) else [found]
    if any(view.dtype != weight.content.view.dtype for view in views):
        raise _refusal(func, [weight])
    parts = [_of_view(weight, weight.content, view) for view in views]
    return parts if isinstance(found, list | tuple) else parts[0]


def _is_view(func: Any) -> bool:
    returns = func._schema.returns  # noqa: SLF001 - torch says nowhere else whether an operation makes a view
    return func is _aten._unsafe_view.default or all(  # noqa: SLF001
        each.alias_info is not None and not each.alias_info.is_write for each in returns
    )


def _of_view(weight: LoadedWeight, part: WeightPart, view: torch.Tensor) -> LoadedWeight:
    content = WeightPart(part.weight, view, part.casts)
    return LoadedWeight(content, weight.sink, like=view, dtype=weight.dtype)


def _like(weight: LoadedWeight, content: WeightPart | JoinedParts) -> LoadedWeight:
    return LoadedWeight(content, weight.sink, like=weight, dtype=weight.dtype)


def _cast(weight: LoadedWeight, func: Any, dtype: torch.dtype) -> LoadedWeight:
    if not isinstance(weight.content, WeightPart):
        parts = [_cast(part, func, dtype) for part in weight.content.parts]
        return LoadedWeight(JoinedParts(parts, weight.content.dim), weight.sink, like=weight, dtype=dtype)
    part = weight.content
    casts = part.casts if dtype == part.dtype else (*part.casts, dtype)
    return LoadedWeight(WeightPart(part.weight, part.view, casts), weight.sink, like=weight, dtype=dtype)


def _joined(given: Sequence[torch.Tensor], dim: int, func: Any) -> LoadedWeight:
    parts = [each for each in given if isinstance(each, LoadedWeight)]
    if len(parts) != len(given) or len({part.dtype for part in parts}) > 1 or any(part.dim() == 0 for part in parts):
        raise _refusal(func, parts)
    like = torch.cat([torch.empty(part.shape, device="meta") for part in parts], dim)
    content = JoinedParts(parts, dim % like.dim())
    return LoadedWeight(content, parts[0].sink, like=like, dtype=parts[0].dtype)


def _narrowed(
    weight: LoadedWeight, joined: JoinedParts, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> LoadedWeight | list[LoadedWeight]:
    """Slices and splits of joined parts. Other views of them are refused."""
    if func is _aten.slice.Tensor and not kwargs and (len(args) < 4 or args[3] == 1):
        dim = args[0] % weight.dim() if args else 0
        start, stop, _ = slice(*args[1:3]).indices(weight.shape[dim])
        return _slice(joined, dim, start, max(start, stop))
    if func in (_aten.split.Tensor, _aten.split_with_sizes.default):
        dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % weight.dim()
        extent = weight.shape[dim]
        sizes = args[0]
        if isinstance(sizes, int):
            sizes = [min(sizes, extent - at) for at in range(0, extent, sizes)]
        starts = [sum(sizes[:number]) for number in range(len(sizes))]
        return [_slice(joined, dim, start, start + size) for start, size in zip(starts, sizes, strict=True)]
    raise _refusal(func, [weight])


def _slice(joined: JoinedParts, dim: int, start: int, stop: int) -> LoadedWeight:
    parts: list[torch.Tensor] = []
    begin = 0
    for part in joined.parts:
        if dim != joined.dim:
            parts.append(part.narrow(dim, start, stop - start))
            continue
        first, last = max(start - begin, 0), min(stop - begin, part.shape[dim])
        if first < last:
            parts.append(part.narrow(dim, first, last - first))
        begin += part.shape[dim]
    if not parts:
        parts.append(joined.parts[0].narrow(dim, 0, 0))
    return _joined(parts, joined.dim, _aten.cat.default)


def _tensors(given: Sequence[object]) -> Iterator[LoadedWeight]:
    for each in given:
        if isinstance(each, LoadedWeight):
            yield each
        elif isinstance(each, list | tuple):
            yield from _tensors(each)


def _refusal(func: Any, weights: Sequence[LoadedWeight]) -> IncompatibleError:
    names = sorted({name for weight in weights for name in weight.names()})
    return IncompatibleError(
        f"load_weights calls {func} on {', '.join(map(repr, names))}, which needs its elements, or an order of them "
        "that no view of the weight has, so the parts that this worker needs cannot be found without the weight.",
        code="incompatible.loader",
        action="Publish through a backend that sends whole weights (a PublishedSource feeds those of vLLM), or have "
        "the loader select with views, and copy.",
        tensor=names[0] if names else None,
    )


class ProtectedMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it, operations that would write to the given `tensors` do nothing."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages = {each.untyped_storage()._cdata for each in tensors}  # noqa: SLF001 - the storage's identity

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func`, unless it writes to protected memory."""
        written = args[0] if args and func._schema.is_mutable else None  # type: ignore[attr-defined]  # noqa: SLF001
        if (
            isinstance(written, torch.Tensor)
            and not isinstance(written, LoadedWeight)
            and written.untyped_storage()._cdata in self._storages  # noqa: SLF001
            and not any(True for _ in _tensors(args))
        ):
            return written
        return func(*args, **(kwargs or {}))
