"""For those who test with holdfast: a store in memory, and what every store has to keep to. Needs pytest."""

from holdfast.testing.memory_store import MemoryStore
from holdfast.testing.stores import StoreConformance

__all__ = ["MemoryStore", "StoreConformance"]
