"""Local tensor memory as a place for what a reader delivers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from holdfast.geometry import Box
from holdfast.state.memory import carried

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class MemoryTarget:
    """The local memory of one box of a tensor, as a place to put elements."""

    box: Box
    view: torch.Tensor

    def put(self, at: Box, elements: Array) -> None:
        """Copy `elements` (an array of the carrier type) to `at`, relative to the box. Safe for disjoint boxes."""
        view = carried(self.view)
        if view.device.type == "cpu":
            view.numpy()[at.slices()] = elements
        else:
            view[at.slices()].copy_(torch.from_numpy(np.asarray(elements)))
