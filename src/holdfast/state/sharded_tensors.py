"""``ShardedTensor``, torch's divided tensor before DTensor: FSDP1 puts it into sharded state dicts. It is a tensor in
pieces, whose memory is that of its local shards."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeGuard

import torch

from holdfast.frameworks.piecewise import Piecewise
from holdfast.geometry import Box
from holdfast.state.collect import unsupported_tensor

if TYPE_CHECKING:
    from torch.distributed._shard.sharded_tensor import ShardedTensor


def any_sharded(kinds: Iterable[type]) -> bool:
    """Whether one of `kinds` is ``ShardedTensor``."""
    return _sharded_type() in set(kinds)


def is_sharded(tensor: object) -> TypeGuard[ShardedTensor]:
    """Whether `tensor` is a ``ShardedTensor``."""
    return type(tensor) is _sharded_type()


def in_pieces(name: str, tensor: ShardedTensor) -> Piecewise:
    """The tensor `name` in pieces, with the memory of the shards that this rank holds.

    Raises:
        StateError: code ``state.unsupported_tensor``: the shards are no plain tensors, as where FSDP1 divides DTensors.
    """
    whole = tensor.metadata()
    shards = [
        (Box(tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes)), shard.tensor)
        for shard in tensor.local_shards()
    ]
    try:
        return Piecewise(tuple(whole.size), shards, dtype=whole.tensor_properties.dtype)
    except (TypeError, ValueError) as error:
        raise unsupported_tensor(name, tensor, f"shards that cannot be stored: {error}") from error


def _sharded_type() -> type[torch.Tensor] | None:
    """The class, if anything has imported it: only then is there an object of it."""
    module = sys.modules.get("torch.distributed._shard.sharded_tensor")
    return None if module is None else module.ShardedTensor
