"""Tools for tests: a store in memory, and the conformance tests that every store must pass. Needs pytest."""

from holdfast.testing.memory_store import MemoryStore
from holdfast.testing.stores import StoreConformance

__all__ = ["MemoryStore", "StoreConformance"]
