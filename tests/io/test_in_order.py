"""Files for stores that take bytes in order: the head comes first, and nobody waits for ever."""

from __future__ import annotations

import itertools
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import StateError
from holdfast.format.digests import SHA256
from holdfast.io.buffers import BufferPool
from holdfast.io.digest import digest_blocks, digest_pieces
from holdfast.io.writer import write_file, write_memory
from holdfast.store.base import Bytes
from tests.store.test_posix_storage import random_bytes

MIB = 1 << 20
PAGE = 4096


class OrderedWriter:
    """A `FileWriter` whose `write_at` waits for all bytes before it."""

    alignment = 1
    in_order = True

    def __init__(self) -> None:
        self.data = b""
        self.published: bytes | None = None
        self._is_aborted = False
        self._changed = threading.Condition()

    def write_at(self, offset: int, *data: Bytes) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._is_aborted or len(self.data) == offset, timeout=20)
            if self._is_aborted:
                raise OSError("aborted")
            self.data += b"".join(each.tobytes() for each in data)
            self._changed.notify_all()

    def publish(self, nbytes: int) -> None:
        self.published = self.data[:nbytes]

    def abort(self) -> None:
        with self._changed:
            self._is_aborted = True
            self._changed.notify_all()


class Changing:
    """A source of bytes that may change, or fail to be read the second time."""

    def __init__(self, content: Bytes) -> None:
        self.content = content
        self.nbytes = len(content)
        self.num_read = 0
        self.fails_at: int | None = None

    def read_into(self, start: int, out: Bytes) -> None:
        self.num_read += len(out)
        if start == self.fails_at and self.num_read > self.nbytes:
            time.sleep(0.2)  # in which the others have read what comes after, and wait to write it
            raise ValueError("cannot be read")
        out[:] = self.content[start : start + len(out)]


def written(writer: OrderedWriter, source: Changing, header: object) -> bytes:
    with BufferPool(3 * MIB, buffer_nbytes=MIB) as pool:
        return write_file(writer, [source], data_start=PAGE, header=header, pool=pool)  # type: ignore[arg-type]


def test_the_head_with_the_digests_of_all_data_is_written_first() -> None:
    content = random_bytes(5 * MIB + 17)
    source, writer, tables = Changing(content), OrderedWriter(), list[bytes]()

    def header(table: bytes) -> bytes:
        tables.append(table)
        return table.ljust(PAGE, b" ")

    table = written(writer, source, header)
    assert writer.published == table.ljust(PAGE, b" ") + content.tobytes()
    assert tables == [table]
    assert source.num_read == 2 * len(content)


def test_data_behind_a_head_that_is_known_is_read_once() -> None:
    content = random_bytes(2 * MIB + 1)
    source, writer = Changing(content), OrderedWriter()
    written(writer, source, b"h" * PAGE)
    assert writer.published == b"h" * PAGE + content.tobytes()
    assert source.num_read == len(content)


def test_data_that_changes_behind_its_digests_is_an_error_and_no_file() -> None:
    source, writer = Changing(random_bytes(3 * MIB)), OrderedWriter()

    def header(_: bytes) -> bytes:
        source.content[2 * MIB] ^= 1
        return bytes(PAGE)

    with pytest.raises(StateError) as caught:
        written(writer, source, header)
    assert caught.value.code == "state.changed"
    assert writer.published is None


def test_a_source_that_fails_wakes_the_threads_that_wait_for_its_bytes() -> None:
    source, writer = Changing(random_bytes(6 * MIB)), OrderedWriter()
    source.fails_at = MIB
    start_s = time.monotonic()
    with pytest.raises(ValueError, match="cannot be read"):
        written(writer, source, lambda _: bytes(PAGE))
    assert writer.published is None
    assert time.monotonic() - start_s < 15


def test_memory_is_written_in_order_after_its_head_is_complete() -> None:
    data = np.concatenate([np.zeros(PAGE, np.uint8), random_bytes(200 * MIB // 64), random_bytes(100)])
    writer = OrderedWriter()

    def complete() -> None:
        assert writer.data == b""
        data[:PAGE] = 7

    nbytes = len(data) - 50
    write_memory(writer, data, nbytes=nbytes, head_nbytes=PAGE, await_head=complete)
    assert writer.published == data[:nbytes].tobytes()
    assert writer.published is not None
    assert writer.published[:PAGE] == b"\7" * PAGE


class Held(Changing):
    """A source that is memory of this process."""

    def held(self) -> Bytes:
        return self.content


def test_what_lies_in_memory_is_neither_copied_for_its_digests_nor_to_be_written() -> None:
    large, small = Held(random_bytes(3 * MIB + 5)), Held(random_bytes(1000))
    packed, writer = Changing(random_bytes(2 * MIB)), OrderedWriter()
    with BufferPool(2 * MIB, buffer_nbytes=MIB) as pool:
        table = write_file(writer, [large, small, packed], data_start=PAGE, header=lambda _: bytes(PAGE), pool=pool)
    content = np.concatenate([large.content, small.content, packed.content])
    assert writer.published == bytes(PAGE) + content.tobytes()
    assert table == digest_blocks(content)
    assert (small.num_read, packed.num_read) == (2 * 1000, 2 * len(packed.content))
    assert large.num_read < MIB, "only its end, which is small in its chunk"


def test_memory_that_changes_while_it_is_written_is_an_error_and_no_file() -> None:
    source = Held(random_bytes(3 * MIB))

    class Late(OrderedWriter):
        def write_at(self, offset: int, *data: Bytes) -> None:
            super().write_at(offset, *data)
            if offset == PAGE + MIB:
                source.content[MIB + 7] ^= 1

    writer = Late()
    with pytest.raises(StateError) as caught:
        written(writer, source, lambda _: bytes(PAGE))
    assert caught.value.code == "state.changed"
    assert writer.published is None


def test_memory_behind_a_head_that_is_known_is_copied_before_it_is_written_and_hashed() -> None:
    source, writer = Held(random_bytes(2 * MIB)), OrderedWriter()
    table = written(writer, source, bytes(PAGE))
    assert source.num_read == source.nbytes
    assert table == digest_blocks(source.content)
    assert writer.published == bytes(PAGE) + source.content.tobytes()


@given(st.lists(st.integers(0, 3 * MIB), max_size=5))
@settings(max_examples=20, deadline=None)
def test_digests_do_not_depend_on_where_arrays_are_cut(cuts: list[int]) -> None:
    content = random_bytes(3 * MIB)
    bounds = [0, *sorted(cuts), len(content)]
    pieces = [content[start:stop] for start, stop in itertools.pairwise(bounds)]
    assert digest_pieces(pieces) == digest_blocks(content)
    assert digest_pieces(pieces, SHA256) == digest_blocks(content, SHA256)
