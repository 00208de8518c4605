"""A mark around a part of a state whose tensors training leaves alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(eq=False)
class Still(Generic[T]):
    """A part of a state whose tensors do not change from save to save, such as a table of a data loader.

    Its tensors go into files of their own, which later checkpoints refer to as long as their bytes are the same. If
    they do change, the next save finds that and writes them again. Names in the checkpoint are those of `value` alone,
    so a load may have the `Still` or not. Frozen parameters of modules need no mark.
    """

    value: T
