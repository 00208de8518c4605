"""The weights that a trainer publishes: names, dtypes and shapes as an engine's `load_weights` gets them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec
import torch
from torch import nn

import holdfast.view
from holdfast.geometry import Shape
from holdfast.state.flatten import flatten
from holdfast.format.names import component, join
from holdfast.store.base import Location

#: The name under which live weights stand in the state that is transferred.
LIVE: Final = "weights"


class PublishedTensor(NamedTuple):
    """One weight: its name in the engine's checkpoints, its dtype and its whole shape."""

    name: str
    dtype: torch.dtype
    shape: Shape


class WeightTable(msgspec.Struct, frozen=True):
    """The weights as they travel to the engine; one entry of each column for each."""

    names: list[str]
    dtypes: list[str]
    shapes: list[Shape]

    @staticmethod
    def of(weights: list[PublishedTensor]) -> WeightTable:
        """The table of `weights`."""
        return WeightTable(
            [each.name for each in weights],
            [str(each.dtype).removeprefix("torch.") for each in weights],
            [each.shape for each in weights],
        )

    def weights(self) -> list[PublishedTensor]:
        """The weights of this table."""
        return [
            PublishedTensor(name, getattr(torch, dtype), tuple(shape))
            for name, dtype, shape in zip(self.names, self.dtypes, self.shapes, strict=True)
        ]
