"""The samples that a job trains on next, on any number of ranks and workers: each one once, in a computed order.

A state holds how far the job has trained, whatever workers have loaded ahead. `GlobalOrder` orders the samples of one
dataset, `MixedOrder` those of several. `ShardedStream` is for samples that only come one after another.
"""

from holdfast.data.global_order import GlobalOrder
from holdfast.data.loader_workers import outlive_signals
from holdfast.data.mixed_order import MixedOrder
from holdfast.data.packed_tokens import PackedTokens, ShardOfDataset
from holdfast.data.sharded_stream import ShardedStream, ShardSource

__all__ = [
    "GlobalOrder",
    "MixedOrder",
    "PackedTokens",
    "ShardOfDataset",
    "ShardSource",
    "ShardedStream",
    "outlive_signals",
]
