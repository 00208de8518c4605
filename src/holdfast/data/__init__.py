"""The samples that a job trains on next, on any number of ranks and workers: each one once, in a computed order.

A state holds how far the job has trained, whatever workers have loaded ahead. `GlobalOrder` orders the samples of one
dataset, `MixedOrder` those of several.
"""

from holdfast.data.global_order import GlobalOrder
from holdfast.data.mixed_order import MixedOrder

__all__ = ["GlobalOrder", "MixedOrder"]
