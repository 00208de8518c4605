"""The binding of a checkpoint to a live state: the memory to fill, the names that differ, and the last steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from holdfast.frameworks import Finish
from holdfast.geometry import Shape
from holdfast.state.match import BoundTensor


@dataclass(frozen=True)
class Binding:
    """The result of `bind`. Lists of names are sorted, and contain names of tensors and of values.

    `loaded` and `unexpected` are stored names, `missing` are live ones. A live object that the checkpoint does not have
    at all is missing under its path. `missing_shapes` are the shapes of the missing tensors. Names that belong to other
    ranks alone are not unexpected. Unexpected names of this rank's own part (see ``own_part``) are unexpected for the
    whole job, whatever other ranks expect. `on_meta` are live tensors that stay on the meta device, and `unfillable`
    the selected ones among them that no checkpoint can have. `reseeded` are the `RandomState` entries that were saved
    by another number of ranks, and `num_lost` counts the live tensors that the checkpoint does not have.
    """

    targets: list[BoundTensor]
    #: The local memory of all targets.
    memory: Sequence[torch.Tensor]
    loaded: list[str]
    missing: list[str]
    missing_shapes: dict[str, Shape]
    unexpected: list[str]
    on_meta: list[str]
    unfillable: list[str]
    reseeded: list[str]
    num_lost: int
    allocate: Callable[[], None]
    """Gives targets on the meta device uninitialised memory, in place. Call it once, before any target is filled."""
    finish: Finish
    """Puts the values in place and returns the whole tree. Call it once, after all targets were filled.

    Order: containers and extra states, optimizers, objects with ``load_state_dict``, and random generators last. First
    it raises `IncompatibleError`, code ``incompatible.tied``, if stored tensors differ that fill one live tensor.
    """
