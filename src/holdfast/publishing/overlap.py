"""Memory that is source and target at once: what is read would change while it is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from holdfast.errors import StateError
from holdfast.state.gather import LocalTensor
from holdfast.state.match import Target
from holdfast.state.memory import LocalPieces


class _Span(NamedTuple):
    """Memory from the first byte of a tensor to its last one."""

    device: str
    start: int
    stop: int
    name: str
    is_target: bool


def to_fill(sources: Mapping[str, LocalTensor], targets: Sequence[Target], rank: int) -> list[Target]:
    """Those of `targets` that are to be filled: not those that are the very memory of the same part of their source.

    Raises:
        StateError: a target has memory in common with a source; code ``state.overlap``, names both.
    """
    pieces = LocalPieces(rank)
    filled = [each for each in targets if not _is_same(sources.get(each.source), each.local, pieces)]
    last: dict[bool, _Span] = {}
    for span in sorted(_spans(sources, filled)):
        other = last.get(not span.is_target)
        if other is not None and other.device == span.device and other.stop > span.start:
            raise _overlap(span, other, rank)
        mine = last.get(span.is_target)
        if mine is None or mine.device != span.device or mine.stop < span.stop:
            last[span.is_target] = span
    return filled


def _spans(sources: Mapping[str, LocalTensor], targets: Sequence[Target]) -> Iterator[_Span]:
    for name, local in sources.items():
        yield from (_span(view, name, is_target=False) for view in local.memory if view.numel())
    for target in targets:
        yield from (_span(view, target.name, is_target=True) for view in target.local.memory if view.numel())


def _span(view: torch.Tensor, name: str, *, is_target: bool) -> _Span:
    last = sum((extent - 1) * stride for extent, stride in zip(view.shape, view.stride(), strict=True))
    start = view.data_ptr()
    return _Span(str(view.device), start, start + (last + 1) * view.element_size(), name, is_target)


def _is_same(source: LocalTensor | None, target: LocalTensor, pieces: LocalPieces) -> bool:
    """Whether a rank holds the same boxes of both, in the same memory."""
    if source is None or [view.data_ptr() for view in source.memory] != [view.data_ptr() for view in target.memory]:
        return False
    held, wanted = (pieces.of(local.layout, local.memory) for local in (source, target))
    return len(held) == len(wanted) and all(
        box == other and _where(view) == _where(memory)
        for (box, view), (other, memory) in zip(held, wanted, strict=True)
    )


def _where(view: torch.Tensor) -> tuple[object, ...]:
    return view.device, view.data_ptr(), view.dtype, view.stride()


def _overlap(a: _Span, b: _Span, rank: int) -> StateError:
    source, target = (b.name, a.name) if a.is_target else (a.name, b.name)
    return StateError(
        f"On rank {rank} the target tensor {target!r} has memory in common with the source tensor {source!r}: it would "
        "change while it is read.",
        code="state.overlap",
        action="Give the target memory of its own, or leave one of the two out of its state.",
        tensor=target,
        rank=rank,
    )
