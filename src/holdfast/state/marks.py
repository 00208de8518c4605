"""Marks by which a copy finds out that tensors were changed or moved to other memory meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch


class Marked:
    """Tensors with the marks of each when it was added: its address, and the number of changes that torch had counted.

    The marks miss writes through ``.data``, and writes of kernels that do not tell torch about them.
    """

    def __init__(self) -> None:
        #: The tensors that were added, in that order.
        self.memory: list[torch.Tensor] = []
        self._then: list[int] = []

    def add(self, memory: Sequence[torch.Tensor]) -> bool:
        """Add tensors with their present marks. Returns False, and adds nothing, if one of them has no marks: torch
        counts no changes of inference tensors, and sparse tensors have no address."""
        try:
            marks = _marks(memory)
        except RuntimeError:
            return False
        self.memory += memory
        self._then += marks
        return True

    def changed(self) -> set[int]:
        """The addresses, then and now, of the tensors whose marks have changed."""
        present = _marks(self.memory)
        if present == self._then:
            return set()
        marks = zip(_pairs(self._then), _pairs(present), strict=True)
        return {address for then, now in marks if then != now for _, address in (then, now)}


class Versions:
    """The versions of tensors, to find those that are written to during a few milliseconds: they tell less than
    `Marked`, in half the time.

    torch counts no changes of inference tensors, so these count as unchanged.
    """

    def __init__(self, memory: Sequence[torch.Tensor]) -> None:
        self._memory = memory
        try:
            self._then = _versions(memory)
        except RuntimeError:
            self._memory = [part for part in memory if not part.is_inference()]
            self._then = _versions(self._memory)

    def changed(self) -> list[torch.Tensor]:
        """The tensors that were written to since."""
        now = _versions(self._memory)
        if now == self._then:
            return []
        return [part for part, then, after in zip(self._memory, self._then, now, strict=True) if then != after]


def _versions(memory: Sequence[torch.Tensor]) -> list[int]:
    return [part._version for part in memory]  # noqa: SLF001


def _marks(memory: Sequence[torch.Tensor]) -> list[int]:
    """The version and the address of each tensor, one after the other."""
    # In one pass, because thousands of tensors do not fit a processor's cache; and as numbers in one list, which the
    # garbage collector does not track one by one.
    return [mark for part in memory for mark in (part._version, part.data_ptr())]  # noqa: SLF001


def _pairs(marks: Sequence[int]) -> Iterable[tuple[int, int]]:
    return zip(marks[::2], marks[1::2], strict=True)
