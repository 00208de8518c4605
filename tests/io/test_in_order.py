"""Files for stores that take bytes in order: the head comes first, and nobody waits for ever."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from holdfast.errors import StateError
from holdfast.io.buffers import BufferPool
from holdfast.io.writer import write_file, write_memory
from holdfast.store.base import Bytes
from tests.store.test_posix_storage import random_bytes

MIB = 1 << 20
PAGE = 4096


class OrderedWriter:
    """A `FileWriter` whose `write_at` waits for all bytes before it."""

    alignment = 1

    def __init__(self) -> None:
        self.data = b""
        self.published: bytes | None = None
        self._is_aborted = False
        self._changed = threading.Condition()

    def write_at(self, offset: int, data: Bytes) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._is_aborted or len(self.data) == offset, timeout=20)
            if self._is_aborted:
                raise OSError("aborted")
            self.data += data.tobytes()
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
        return write_file(writer, [source], data_start=PAGE, header=header, pool=pool, in_order=True)  # type: ignore[arg-type]


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
    write_memory(writer, data, nbytes=nbytes, head_nbytes=PAGE, await_head=complete, in_order=True)
    assert writer.published == data[:nbytes].tobytes()
    assert writer.published is not None
    assert writer.published[:PAGE] == b"\7" * PAGE
