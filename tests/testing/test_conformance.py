"""The stores of this package pass the tests that every store must pass."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from holdfast.store.base import Store
from holdfast.store.posix import PosixStore
from holdfast.testing import MemoryStore, StoreConformance


class TestPosixStore(StoreConformance):
    def make_store(self, tmp_path: Path) -> Store:
        return PosixStore(str(tmp_path / "run"))


class TestMemoryStore(StoreConformance):
    def make_store(self, tmp_path: Path) -> Store:
        return MemoryStore()

    def reopened(self, store: Store) -> Store:
        return cast("MemoryStore", store).another()
