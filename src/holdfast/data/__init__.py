"""This room says which samples a job trains on next, on any number of ranks: an order of samples, and a position in it.

It is pure: it uses no clock, no files and no torch. `GlobalOrder` is what a job holds.
"""

from holdfast.data.global_order import GlobalOrder

__all__ = ["GlobalOrder"]
