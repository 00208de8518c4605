"""Whether the slots of a stored optimizer are quantised in another way than those of a live one of another class.

Such slots would fill the live optimizer without an error, and it would go on with them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from torch.optim import Optimizer

from holdfast.format.names import join
from holdfast.format.values import PlanesNode
from holdfast.frameworks import BindingSource
from holdfast.frameworks.known_types import type_of
from holdfast.frameworks.planes import is_name_of_planed, planed_type


def quantised_otherwise(
    path: str, optimizer: Optimizer, slots: Mapping[str, Collection[str]], source: BindingSource
) -> list[str]:
    """Lines that say how slots stored for the optimizer at `path` are quantised and live ones are not; empty if all are
    as they are here. `slots` has the components of the stored slots of each parameter."""
    stored = set(_stored(path, slots, source))
    live = set(_live(optimizer))
    if stored <= live:
        return []
    here = ", ".join(sorted(live)) or "none"
    if not optimizer.state:
        here = "unknown, until it has taken a step"
    return [f"slots in the checkpoint are quantised, as {', '.join(sorted(stored))}; quantised slots here: {here}"]


def _stored(path: str, slots: Mapping[str, Collection[str]], source: BindingSource) -> Iterator[str]:
    for parameter, texts in slots.items():
        for text in texts:
            name = join(path, "state", parameter, text)
            node, tensor = source.nodes.get(name), source.stored(name)
            if isinstance(node, PlanesNode) and is_name_of_planed(node.name):
                yield node.name.partition("{")[0]
            elif tensor is not None and tensor.shape and tensor.dtype.startswith(("int", "uint")):
                yield tensor.dtype


def _live(optimizer: Optimizer) -> Iterator[str]:
    for kept in optimizer.state.values():
        for slot in kept.values() if isinstance(kept, dict) else ():
            if not isinstance(slot, torch.Tensor):
                continue
            part = getattr(slot, "_local_tensor", slot)  # of a DTensor
            kind = type_of(part)
            if planed_type(kind) is not None:
                yield f"{kind.__module__}.{kind.__qualname__}"
            elif part.dim() and not (part.dtype.is_floating_point or part.dtype.is_complex):
                yield str(part.dtype).removeprefix("torch.")
