"""How a checkpoint meets a live state: the memory to fill, the names on one side only, and how to finish."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from holdfast.frameworks import Finish
from holdfast.geometry import Shape
from holdfast.state.match import BoundTensor


@dataclass(frozen=True)
class Binding:
    """What `bind` found. Name lists are sorted and hold tensors and values alike.

    `loaded` and `unexpected` are stored names, `missing` are live ones; a live object that the checkpoint lacks wholly
    is missing under its path; `missing_shapes` are those of missing tensors.
    What belongs to other ranks alone is not unexpected; names of this rank's own part
    (``own_part`` says which) are unexpected for the whole job, whatever other ranks expect. `on_meta` are live tensors
    that stay on the meta device, and `unfillable` those of them that are selected, but that no checkpoint has.
    `reseeded` are the `RandomState` entries that another number of ranks saved, `num_lost` counts live tensors that the
    checkpoint lacks.
    """

    targets: list[BoundTensor]
    loaded: list[str]
    missing: list[str]
    missing_shapes: dict[str, Shape]
    unexpected: list[str]
    on_meta: list[str]
    unfillable: list[str]
    reseeded: list[str]
    num_lost: int
    allocate: Callable[[], None]
    """Gives targets on the meta device memory, uninitialised, in place; to be called once, before any is filled."""
    finish: Finish
    """Puts the values in place and returns the whole tree; to be called once, after all targets were filled.

    Order: containers and extra states, optimizers, objects with ``load_state_dict``, and random generators last. Before
    any of it, raises `IncompatibleError`, code ``incompatible.tied``, when tensors that are one live tensor differ.
    """
