"""The result of a `PerRank`'s function is put into the live value, so that the job's own variables go on with it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, cast

import numpy as np
import torch

from holdfast.format.names import component, join
from holdfast.format.values import is_record
from holdfast.frameworks.known_types import unwrapped
from holdfast.frameworks.registry import adapter_of
from holdfast.state.containers import maker, refill
from holdfast.state.registered_types import registered

#: The text about an object that `objects_in` finds.
INSIDE: Final = "an object in a container, which a function as on_resize cannot fill: give it a PerRank of its own"


def objects_in(path: str, live: object) -> Iterator[str]:
    """The paths of the objects inside a live container that a result could only replace, because they are neither
    values nor tensors."""
    live = unwrapped(live)
    if registered(live) is not None:
        return
    if isinstance(live, dict):
        for key, item in live.items():
            yield from objects_in(join(path, component(key, path=path)), item)
    elif isinstance(live, list | tuple) and not isinstance(live, torch.Size):
        names = live._fields if is_record(live) else map(str, range(len(live)))
        for name, item in zip(names, live, strict=True):
            yield from objects_in(join(path, name), item)
    elif adapter_of(live) is not None:
        yield path


def put(live: object, new: object) -> object:
    """Put `new` into `live`, and return what belongs in its place: `live` itself, filled, where it is a list, a dict,
    or a tensor, array or generator that `new` fits; else `new`. Containers are filled item by item."""
    if isinstance(live, dict) and isinstance(new, dict):
        return refill(live, {key: put(live[key], item) if key in live else item for key, item in new.items()})
    if isinstance(live, list) and isinstance(new, list):
        kept = [put(old, item) for old, item in zip(live, new, strict=False)]
        return refill(live, [*kept, *new[len(kept) :]])
    if isinstance(live, tuple) and type(new) is type(live) is not torch.Size and len(new) == len(live):
        return maker(type(live))(*map(put, live, new))
    if not _fits(live, new):
        return new
    if isinstance(live, torch.Tensor):
        with torch.no_grad():
            live.copy_(cast("torch.Tensor", new))
    elif isinstance(live, np.ndarray):
        live[...] = new
    elif isinstance(live, torch.Generator):
        live.set_state(cast("torch.Generator", new).get_state())
    return live


def _fits(live: object, new: object) -> bool:
    """Whether `live` is a tensor, array or generator that can take the contents of `new`."""
    if isinstance(live, torch.Tensor) and isinstance(new, torch.Tensor):
        is_plain = not live.is_meta and registered(live) is None
        return is_plain and live.shape == new.shape and live.dtype is new.dtype
    if isinstance(live, np.ndarray) and isinstance(new, np.ndarray):
        return live.flags.writeable and live.shape == new.shape and live.dtype == new.dtype
    is_generator = isinstance(live, torch.Generator) and isinstance(new, torch.Generator)
    return is_generator and cast("torch.Generator", live).device.type == cast("torch.Generator", new).device.type
