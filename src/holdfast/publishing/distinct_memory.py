"""The check that source and target share no memory: a source would change while it is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from holdfast.errors import StateError
from holdfast.state.collect import LocalTensor
from holdfast.state.local_memory import LocalPieces
from holdfast.state.match import BoundTensor
from holdfast.state.overlap import MemorySpan


class _Named(NamedTuple):
    """The memory span of a tensor of the source or the target."""

    span: MemorySpan
    name: str
    is_target: bool


def to_fill(sources: Mapping[str, LocalTensor], targets: Sequence[BoundTensor], rank: int) -> list[BoundTensor]:
    """The `targets` to fill: all except those that share their memory with the same part of their source.

    Raises:
        StateError: another target shares memory with a source; code ``state.overlap``, and the error names both.
    """
    pieces = LocalPieces(rank)
    filled = [each for each in targets if not _is_same(sources.get(each.source), each.local, pieces)]
    last: dict[bool, _Named] = {}
    for named in sorted(_named(sources, filled)):
        span = named.span
        other = last.get(not named.is_target)
        if other is not None and other.span.device == span.device and other.span.stop > span.start:
            raise _overlap(named, other, rank)
        mine = last.get(named.is_target)
        if mine is None or mine.span.device != span.device or mine.span.stop < span.stop:
            last[named.is_target] = named
    return filled


def _named(sources: Mapping[str, LocalTensor], targets: Sequence[BoundTensor]) -> Iterator[_Named]:
    for name, local in sources.items():
        yield from (_Named(MemorySpan.of(view), name, is_target=False) for view in local.memory if view.numel())
    for target in targets:
        memory = target.local.memory
        yield from (_Named(MemorySpan.of(view), target.name, is_target=True) for view in memory if view.numel())


def _is_same(source: LocalTensor | None, target: LocalTensor, pieces: LocalPieces) -> bool:
    """Whether this rank holds the same boxes of both tensors, in the same memory."""
    if source is None or [view.data_ptr() for view in source.memory] != [view.data_ptr() for view in target.memory]:
        return False
    held, wanted = (pieces.of(local.layout, local.memory) for local in (source, target))
    return len(held) == len(wanted) and all(
        box == other and _where(view) == _where(memory)
        for (box, view), (other, memory) in zip(held, wanted, strict=True)
    )


def _where(view: torch.Tensor) -> tuple[object, ...]:
    return view.device, view.data_ptr(), view.dtype, view.stride()


def _overlap(a: _Named, b: _Named, rank: int) -> StateError:
    source, target = (b.name, a.name) if a.is_target else (a.name, b.name)
    return StateError(
        f"On rank {rank} the target tensor {target!r} shares memory with the source tensor {source!r}: the transfer "
        "would overwrite the source while reading it.",
        code="state.overlap",
        action="Give the target memory of its own, or leave one of the two out of its state.",
        tensor=target,
        rank=rank,
    )
