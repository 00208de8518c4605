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
from holdfast.errors import IncompatibleError
from holdfast.geometry import Shape
from holdfast.state.flatten import flatten
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
            PublishedTensor(name, _dtype(dtype), tuple(shape))
            for name, dtype, shape in zip(self.names, self.dtypes, self.shapes, strict=True)
        ]


@dataclass(frozen=True)
class StoredWeights:
    """The weights of a checkpoint: `path` as `load` takes it, and the part of the state that has them (`under`). Empty,
    `under` is the whole state, as of a Hugging Face folder.

    If `path` is a run, each `publish` sends the checkpoint that is its head then.
    """

    path: str | os.PathLike[str] | Location
    under: str = "model"

    def table(self) -> list[PublishedTensor]:
        """The tensors of that part, by their names in it. Reads no tensor.

        Raises `IncompatibleError`, code ``incompatible.select``, where there are none.
        """
        prefix = f"{self.under}/" if self.under else ""
        stored = holdfast.view.open(self.path)
        names = [name for name in stored.names() if name.startswith(prefix)]
        if not names:
            raise IncompatibleError(
                f"'{self.path}' holds no tensors below {self.under!r}.",
                code="incompatible.select",
                action="Name the part of the state that has the weights; `holdfast show` lists the names. "
                'under="" is the whole state, as of a folder of Hugging Face.',
            )
        return [
            PublishedTensor(name.removeprefix(prefix), _dtype(view.dtype), view.shape)
            for name in names
            for view in (stored[name],)
        ]


#: The objects that a trainer publishes: a module or tensors by name, in any layout that `save` takes; or a checkpoint.
Weights = nn.Module | Mapping[str, object] | StoredWeights


def live_table(weights: nn.Module | Mapping[str, object], *, rank: int, world_size: int) -> list[PublishedTensor]:
    """The tensors of live weights, by their names in them. Copies nothing."""
    flat = flatten({LIVE: weights}, rank=rank, world_size=world_size)
    tensors = sorted(flat.tensors.items())
    return [
        PublishedTensor(name.removeprefix(f"{LIVE}/"), _dtype(local.layout.dtype), local.layout.shape)
        for name, local in tensors
    ]


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype of torch")  # noqa: TRY004 - the text is wrong, and has the right type
    return dtype
