"""The conformance tests of stores, as a class that the tests of a store inherit from.

    class TestBucketStore(StoreConformance):
        def make_store(self, tmp_path):
            return BucketStore(...)

Each test checks results through a second handle, as another process would.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest

from holdfast.errors import CorruptError, NotFoundError, StorageError
from holdfast.store.base import Bytes, Store
from holdfast.store.urls import open_store

_NUM_RACERS = 16


class StoreConformance(ABC):
    """The tests that every store must pass. Inherit from it and implement `make_store`; pytest does the rest."""

    @abstractmethod
    def make_store(self, tmp_path: Path) -> Store:
        """Return a new, empty store. `tmp_path` is an empty folder of this test alone."""

    def reopened(self, store: Store) -> Store:
        """Return a second handle of `store`. Opens its location, if not overridden."""
        return open_store(store.location)

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        """The store under test."""
        return self.make_store(tmp_path)

    @pytest.fixture
    def other(self, store: Store) -> Store:
        """The second handle, through which tests check results."""
        return self.reopened(store)

    def test_two_handles_of_one_place_resolve_to_one_text(self, store: Store, other: Store) -> None:
        assert store.resolved() == other.resolved()

    def test_a_created_object_is_read_whole_and_by_range(self, store: Store, other: Store) -> None:
        assert store.create("folder/object", b"0123456789")
        assert other.read("folder/object") == b"0123456789"
        assert other.read("folder/object", start=4) == b"456789"
        assert other.read("folder/object", start=4, nbytes=3) == b"456"
        assert other.read("folder/object", start=10, nbytes=0) == b""
        assert other.nbytes("folder/object") == 10

    def test_an_empty_object_is_an_object(self, store: Store, other: Store) -> None:
        assert store.create("empty", b"")
        assert (other.read("empty"), other.nbytes("empty"), other.list("")) == (b"", 0, ["empty"])

    def test_an_object_is_never_replaced(self, store: Store, other: Store) -> None:
        assert store.create("object", b"first")
        assert not other.create("object", b"second")
        assert store.read("object") == b"first"

    def test_one_of_many_racing_creators_wins(self, store: Store, other: Store) -> None:
        barrier = Barrier(_NUM_RACERS)

        def create(number: int) -> bool:
            barrier.wait()
            return (store, other)[number % 2].create("folder/object", b"%d" % number)

        with ThreadPoolExecutor(_NUM_RACERS) as pool:
            won = list(pool.map(create, range(_NUM_RACERS)))
        assert sum(won) == 1 or (any(won) and not store.capabilities.is_fenced)
        assert won[int(other.read("folder/object"))]

    def test_what_is_missing_is_not_found_and_named(self, store: Store) -> None:
        attempts: tuple[Callable[[], object], ...] = (
            lambda: store.read("folder/missing"),
            lambda: store.reader("folder/missing"),
        )
        for attempt in attempts:
            with pytest.raises(NotFoundError) as caught:
                attempt()
            assert caught.value.code == "not_found.object"
            assert caught.value.path == store.path("folder/missing")
        assert store.nbytes("folder/missing") is None
        assert store.list("folder") == []
        assert not store.delete("folder/missing")

    def test_a_range_beyond_the_end_and_an_object_beyond_the_limit_are_corruption(self, store: Store) -> None:
        store.create("object", b"0123456789")
        attempts: dict[str, Callable[[], bytes]] = {
            "corrupt.short": lambda: store.read("object", start=8, nbytes=3),
            "corrupt.size": lambda: store.read("object", limit=9),
        }
        for code, read in attempts.items():
            with pytest.raises(CorruptError) as caught:
                read()
            assert (caught.value.code, caught.value.path) == (code, store.path("object"))
        assert store.read("object", limit=10) == b"0123456789"

    def test_a_listing_is_sorted_and_of_one_folder_alone(self, store: Store, other: Store) -> None:
        for key in ("b/2", "b/1", "b/deep/3", "a", "c/4"):
            store.create(key, b"x")
        assert other.list("") == ["a", "b", "c"]
        assert other.list("b") == ["1", "2", "deep"]
        assert other.list("a/none") == []
        assert other.list("", limit=2) == ["a", "b"]
        assert other.list("b", limit=1) == ["1"]
        assert other.list("b", limit=9) == ["1", "2", "deep"]

    def test_an_object_is_invisible_until_it_is_published(self, store: Store, other: Store) -> None:
        content = _bytes(3 << 20)
        writer = store.writer("folder/object", nbytes=len(content))
        writer.write_at(0, content)
        assert other.nbytes("folder/object") is None
        assert other.list("folder") == []
        writer.publish(len(content))
        assert other.read("folder/object") == content.tobytes()

    def test_writes_in_any_allowed_order_by_several_threads_make_one_object(self, store: Store, other: Store) -> None:
        content = _bytes((5 << 20) + 123)
        step = 1 << 20
        writer = store.writer("object", nbytes=len(content))
        with ThreadPoolExecutor(4) as pool:
            starts = list(range(0, len(content), step))[:: 1 if store.capabilities.in_order else -1]
            list(pool.map(lambda start: writer.write_at(start, content[start : start + step].copy()), starts))
        writer.publish(len(content))
        assert other.read("object") == content.tobytes()

    def test_a_write_of_several_arrays_is_that_of_all_their_bytes(self, store: Store, other: Store) -> None:
        content = _bytes((40 << 20) + 5)
        writer = store.writer("object", nbytes=len(content))
        cuts = [0, 1000, 1000, 20 << 20, (20 << 20) + 7, len(content)]
        for first, last in ((0, 3), (3, 5)):
            pieces = [content[start:stop] for start, stop in pairwise(cuts[first : last + 1])]
            writer.write_at(cuts[first], *pieces)
        writer.publish(len(content))
        assert other.read("object") == content.tobytes()

    def test_only_objects_of_a_store_that_writes_in_order_are_written_so(self, store: Store) -> None:
        writers = [store.writer(name, nbytes=nbytes) for name, nbytes in (("small", 3), ("large", 64 << 20))]
        assert [writer.in_order for writer in writers][1] == store.capabilities.in_order
        assert not writers[0].in_order or store.capabilities.in_order
        for writer in writers:
            writer.abort()

    def test_publishing_cuts_to_the_size_that_is_given(self, store: Store, other: Store) -> None:
        content = _bytes(10_000)
        writer = store.writer("object", nbytes=len(content))
        writer.write_at(0, content)
        writer.publish(9_999)
        assert other.read("object") == content[:9_999].tobytes()

    def test_publishing_under_a_taken_key_is_refused_and_changes_nothing(self, store: Store, other: Store) -> None:
        writer = store.writer("object", nbytes=3)
        writer.write_at(0, np.frombuffer(b"new", np.uint8))
        other.create("object", b"old")
        with pytest.raises(StorageError) as caught:
            writer.publish(3)
        writer.abort()
        assert caught.value.code == "storage.exists"
        assert other.read("object") == b"old"

    def test_abort_leaves_nothing_and_does_nothing_after_publish(self, store: Store, other: Store) -> None:
        dropped, kept = store.writer("dropped", nbytes=3), store.writer("kept", nbytes=3)
        for writer in (dropped, kept):
            writer.write_at(0, np.frombuffer(b"abc", np.uint8))
        dropped.abort()
        kept.publish(3)
        kept.abort()
        assert other.list("") == ["kept"]
        assert other.read("kept") == b"abc"
        assert other.leftovers("") == []

    def test_any_range_is_read_by_several_threads_at_a_time(self, store: Store, other: Store) -> None:
        content = _bytes((2 << 20) + 77)
        store.create("object", content.tobytes())
        reader = other.reader("object")
        random = np.random.default_rng(1)
        ranges = [sorted(random.integers(0, len(content) + 1, 2).tolist()) for _ in range(64)]

        def read(span: list[int]) -> bool:
            out = np.zeros(span[1] - span[0], np.uint8)
            reader.read_at(span[0], out)
            return bool(np.array_equal(out, content[slice(*span)]))

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(read, ranges))
        assert reader.nbytes == len(content)
        if reader.memory is not None:
            assert np.array_equal(reader.memory, content)
        with pytest.raises(CorruptError) as caught:
            reader.read_at(len(content) - 1, np.zeros(2, np.uint8))
        reader.close()
        assert caught.value.code == "corrupt.short"

    def test_a_deleted_object_is_gone_and_its_key_is_free(self, store: Store, other: Store) -> None:
        store.create("folder/object", b"x")
        assert other.delete("folder/object")
        assert not store.delete("folder/object")
        assert store.nbytes("folder/object") is None
        assert store.list("folder") == []
        assert store.create("folder/object", b"y")
        assert other.read("folder/object") == b"y"

    def test_what_can_be_mapped_is_a_file_with_the_bytes_of_the_object(self, store: Store) -> None:
        store.create("folder/object", b"0123")
        if store.capabilities.is_mappable:
            assert Path(store.path("folder/object")).read_bytes() == b"0123"


def _bytes(nbytes: int) -> Bytes:
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
