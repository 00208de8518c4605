"""The samples that a job trains on next, on any number of ranks and workers: each one once, in a computed order.

A state holds how far the job has trained, whatever workers have loaded ahead.
"""

from holdfast.data.global_order import GlobalOrder

__all__ = ["GlobalOrder"]
