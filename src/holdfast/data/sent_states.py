"""States that go from a worker of a loader to its rank by value: they stay as long as the job trains."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch


class SentTensor(NamedTuple):
    """The content of a tensor on its way. A tensor itself would keep a file of shared memory open as long as it lives,
    and a stream has at least one for each shard: more than a process may have."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    content: bytes


def sent(state: object) -> object:
    """`state` with the content of its tensors in place of the tensors, as far as they lie in plain memory."""
    if type(state) is torch.Tensor and _is_plain(state):
        elements = state.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        return SentTensor(state.dtype, tuple(state.shape), elements.view(torch.uint8).numpy().tobytes())
    return _of_each(state, sent)


def received(state: object) -> object:
    """The state of which `sent` made `state`."""
    if isinstance(state, SentTensor):
        made = torch.empty(state.shape, dtype=state.dtype)
        if state.content:
            made.copy_(torch.frombuffer(bytearray(state.content), dtype=state.dtype).reshape(state.shape))
        return made
    return _of_each(state, received)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout == torch.strided and not tensor.is_quantized


def _of_each(state: object, change: Callable[[object], object]) -> object:
    """A container as `state` with each of its items changed; `state` itself if it is none."""
    if isinstance(state, dict) and type(state) in (dict, OrderedDict):
        return type(state)((key, change(item)) for key, item in state.items())
    if type(state) is list:
        return [change(item) for item in state]
    if isinstance(state, tuple) and (type(state) is tuple or hasattr(state, "_fields")):
        make: Callable[[Iterable[object]], object] = getattr(type(state), "_make", tuple)
        return make(change(item) for item in state)
    return state
