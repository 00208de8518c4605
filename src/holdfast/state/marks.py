"""What shows that tensors were changed, or are other memory now."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch


class Marked:
    """Tensors, and how each of them was when it was added: the number of changes that torch had counted, its address.

    What does not show: writes through ``.data``, and kernels that do not tell torch what they write to.
    """

    def __init__(self) -> None:
        #: The tensors that were added, in that order.
        self.memory: list[torch.Tensor] = []
        self._then: list[int] = []

    def add(self, memory: Sequence[torch.Tensor]) -> bool:
        """Mark tensors as they are now. False, and nothing is added, if one of them is an inference tensor, of which
        torch counts no changes, or has no address, as sparse ones."""
        try:
            marks = _marks(memory)
        except RuntimeError:
            return False
        self.memory += memory
        self._then += marks
        return True

    def changed(self) -> set[int]:
        """The addresses, then and now, of those that are not as they were."""
        present = _marks(self.memory)
        if present == self._then:
            return set()
        marks = zip(_pairs(self._then), _pairs(present), strict=True)
        return {address for then, now in marks if then != now for _, address in (then, now)}


class Versions:
    """Which tensors of a few milliseconds are written to: less than `Marked` tells, in half the time.

    Of inference tensors torch counts no changes, so they count as unchanged.
    """

    def __init__(self, memory: Sequence[torch.Tensor]) -> None:
        self._memory = memory
        try:
            self._then = _versions(memory)
        except RuntimeError:
            self._memory = [part for part in memory if not part.is_inference()]
            self._then = _versions(self._memory)

    def changed(self) -> list[torch.Tensor]:
        """Those that were written to since."""
        now = _versions(self._memory)
        if now == self._then:
            return []
        return [part for part, then, after in zip(self._memory, self._then, now, strict=True) if then != after]


def _versions(memory: Sequence[torch.Tensor]) -> list[int]:
    return [part._version for part in memory]  # noqa: SLF001


def _marks(memory: Sequence[torch.Tensor]) -> list[int]:
    """Two numbers for each tensor."""
    # In one pass, for thousands of tensors are more than a processor's cache holds; and as numbers in one list, which
    # the garbage collector does not look at.
    return [mark for part in memory for mark in (part._version, part.data_ptr())]  # noqa: SLF001


def _pairs(marks: Sequence[int]) -> Iterable[tuple[int, int]]:
    return zip(marks[::2], marks[1::2], strict=True)
