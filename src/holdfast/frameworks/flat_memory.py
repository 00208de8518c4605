"""Flat memory: one live tensor that holds parts of several logical tensors one after another, as FSDP1 makes it.

An adapter of modules describes such memory once. An adapter of optimizers then finds the same parts in every slot that
lies like the parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch

from holdfast.geometry import Box, FlatRange, Shape, flat_boxes

#: Parts of a logical tensor, each with the memory that holds it.
HeldParts = list[tuple[FlatRange | Box, torch.Tensor]]


class Portion(NamedTuple):
    """The part of one logical tensor that lies in flat memory.

    It is elements ``[start, stop)`` of the tensor, in the order in which the tensor lay in memory before it was
    flattened; they begin at element `first` of the flat memory. `order` has the axes of the tensor from the outermost
    to the innermost one of that memory; None stands for the row-major order. `names` are sorted, and the first one is
    canonical: a tied parameter has several.
    """

    names: tuple[str, ...]
    shape: Shape
    order: tuple[int, ...] | None
    start: int
    stop: int
    first: int

    def parts(self, memory: torch.Tensor) -> HeldParts:
        """The parts of the tensor with their memory, which are views of the 1-d `memory`: one flat range, or the boxes
        of a tensor in another order. Empty where none of its elements are there."""
        if self.start >= self.stop:
            return []
        flat = memory[self.first : self.first + self.stop - self.start]
        if self.order is None:
            return [(FlatRange(self.start, self.stop), flat)]
        turned = tuple(self.shape[axis] for axis in self.order)
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        found: HeldParts = []
        for offset, box in flat_boxes(turned, self.start, self.stop):
            part = Box(tuple(box.start[axis] for axis in back), tuple(box.size[axis] for axis in back))
            found.append((part, flat[offset : offset + box.numel].view(box.size).permute(back)))
        return found


class FlatMemory(NamedTuple):
    """The live tensor `owner`, which an optimizer may train, with the 1-d memory of this rank that stands behind it and
    the portions in that memory. `owner` may show other memory for a while, as between a forward and a backward."""

    owner: torch.Tensor
    memory: torch.Tensor
    portions: tuple[Portion, ...]

    def lies_alike(self, tensor: torch.Tensor) -> bool:
        """Whether a slot has the shape of the memory, so that each of its elements belongs to the parameter's element
        at the same place."""
        return tensor.shape == self.memory.shape


def memory_order(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """The axes of a dense tensor with these strides, from the outermost to the innermost one in memory; None where that
    is the row-major order.

    Raises `ValueError` for strides with which elements overlap, or have gaps between them.
    """
    long = [axis for axis, extent in enumerate(shape) if extent != 1]
    ordered = sorted(long, key=lambda axis: -strides[axis])
    if ordered == long:
        order = None
        axes = list(range(len(shape)))
    else:
        axes = [axis for axis, extent in enumerate(shape) if extent == 1] + ordered
        order = tuple(axes)
    for place, axis in enumerate(axes):
        if shape[axis] != 1 and strides[axis] != prod(shape[other] for other in axes[place + 1 :]):
            raise ValueError(f"a tensor of shape {tuple(shape)} with strides {tuple(strides)} is not dense")
    return order
