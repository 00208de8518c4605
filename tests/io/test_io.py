"""The pipelines move every byte exactly once, verified, in bounded memory; the first error ends them."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.errors import CorruptError, NotFoundError, StorageError
from holdfast.format.container import BLOCK_NBYTES
from holdfast.format.digests import SHA256, XXH3, DigestKind
from holdfast.io.buffers import BufferPool
from holdfast.io.digest import bad_blocks, digest_blocks
from holdfast.io.jobs import DataFile, Extent, ReadJob
from holdfast.io.reader import ReadStats, read_files
from holdfast.io.writer import write_file
from holdfast.store import helpers as helpers_module
from holdfast.store.base import Bytes, Store
from holdfast.store.posix import PosixStore
from holdfast.store.timed import TimedStore
from tests.support.faulty_storage import Count, FaultyStore, HangAt

PAGE = 4096
MIB = 1 << 20
SHARED_FOLDER = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


class Array:
    """A source in memory."""

    def __init__(self, content: Bytes) -> None:
        self.content = content
        self.nbytes = len(content)

    def read_into(self, start: int, out: Bytes) -> None:
        out[:] = self.content[start : start + len(out)]


class Broken(Array):
    """A source that fails."""

    def read_into(self, start: int, out: Bytes) -> None:
        raise RuntimeError("the device is gone")


def random_bytes(nbytes: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def header_of(data_start: int) -> bytes:
    return random_bytes(data_start, seed=9).tobytes()


def corrupt(file: DataFile, block: int) -> CorruptError:
    return CorruptError(
        f"block {block} of {file.path}", code="corrupt.block", action="Use another copy.", path=file.path
    )


@pytest.fixture
def storage(tmp_path: Path) -> PosixStore:
    return PosixStore(str(tmp_path))


@pytest.fixture
def pool() -> Iterator[BufferPool]:
    with BufferPool(2 * MIB, buffer_nbytes=MIB) as pool:
        yield pool


@pytest.fixture(autouse=True)
def leaves_no_thread_and_no_open_file() -> Iterator[None]:
    gc.collect()  # of what tests before left
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    yield
    # There may be less: a thread of a test before may have ended meanwhile.
    assert threading.active_count() <= threads
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def write(storage: PosixStore, key: str, content: Bytes, pool: BufferPool, *, data_start: int = PAGE) -> bytes:
    writer = storage.writer(key, nbytes=data_start + len(content))
    return write_file(
        writer, [Array(content)], data_start=data_start, header=lambda _: header_of(data_start), pool=pool
    )


def job(
    storage: PosixStore, key: str, nbytes: int, table: bytes | None, extents: Sequence[Extent]
) -> tuple[ReadJob, list[Bytes], list[Bytes]]:
    """A job that delivers to arrays of its own, with how often each byte was delivered."""
    targets = [np.zeros(stop - start, np.uint8) for start, stop in extents]
    counts = [np.zeros(stop - start, np.uint8) for start, stop in extents]

    def deliver(index: int, offset: int, data: Bytes) -> None:
        while len(data):
            part = data[: len(targets[index]) - offset]
            targets[index][offset : offset + len(part)] = part
            counts[index][offset : offset + len(part)] += 1
            index, offset, data = index + 1, 0, data[len(part) :]

    def open_file() -> DataFile:
        return DataFile(storage.reader(key), storage.path(key), PAGE, nbytes, table)

    return ReadJob(nbytes, open_file, extents, deliver, table is not None), targets, counts


def read(
    storage: PosixStore, key: str, nbytes: int, table: bytes | None, extents: Sequence[Extent], pool: BufferPool
) -> tuple[list[Bytes], ReadStats]:
    """The bytes that are delivered for `extents`, each exactly once."""
    wanted, targets, counts = job(storage, key, nbytes, table, extents)
    stats = read_files([wanted], pool=pool, on_corrupt=corrupt)
    assert all(np.all(count == 1) for count in counts)
    return targets, stats


sizes = st.lists(
    st.integers(0, 40) | st.integers(0, 3 * MIB) | st.sampled_from([PAGE, MIB, 2 * MIB, MIB - 1, MIB + 1]), max_size=8
)


@SHARED_FOLDER
@given(
    source_nbytes=sizes,
    data_start=st.sampled_from([PAGE, 3 * PAGE, MIB + PAGE]),
    num_threads=st.integers(1, 3),
    key=st.uuids().map(str),
)
def test_a_file_is_its_header_and_its_sources_packed(
    storage: PosixStore, pool: BufferPool, source_nbytes: list[int], data_start: int, num_threads: int, key: str
) -> None:
    contents = [random_bytes(nbytes, seed) for seed, nbytes in enumerate(source_nbytes)]
    data = b"".join(content.tobytes() for content in contents)
    seen: list[bytes] = []

    def header(table: bytes) -> bytes:
        seen.append(table)
        return header_of(data_start)

    table = write_file(
        storage.writer(key, nbytes=data_start + len(data)),
        [Array(content) for content in contents],
        data_start=data_start,
        header=header,
        pool=pool,
        num_threads=num_threads,
    )
    assert storage.read(key) == header_of(data_start) + data
    assert table == b"".join(xxhash.xxh3_128_digest(data[at : at + MIB]) for at in range(0, len(data), MIB))
    assert seen == [table]
    os.unlink(storage.path(key))


@st.composite
def extents_of(draw: st.DrawFn, nbytes: int) -> list[Extent]:
    at = st.integers(0, nbytes) | st.sampled_from([at for at in (0, 1, PAGE, MIB, 2 * MIB, nbytes) if at <= nbytes])
    pairs = draw(st.lists(st.tuples(at, at), max_size=8))
    return sorted(Extent(min(pair), max(pair)) for pair in pairs)


@SHARED_FOLDER
@given(data=st.data(), verify=st.booleans(), key=st.uuids().map(str))
def test_every_byte_of_every_extent_is_delivered_once_and_bit_exact(
    storage: PosixStore, pool: BufferPool, data: st.DataObject, verify: bool, key: str
) -> None:
    nbytes = data.draw(st.integers(0, 40) | st.integers(0, 4 * MIB), label="nbytes")
    extents = data.draw(extents_of(nbytes), label="extents")
    content = random_bytes(nbytes)
    table = write(storage, key, content, pool)
    targets, stats = read(storage, key, nbytes, table if verify else None, extents, pool)
    for (start, stop), target in zip(extents, targets, strict=True):
        assert np.array_equal(target, content[start:stop])
    assert stats.bytes_needed == sum(stop - start for start, stop in extents)
    wanted = np.zeros(nbytes, bool)
    for start, stop in extents:
        wanted[start:stop] = True
    assert np.count_nonzero(wanted) <= stats.bytes_read <= nbytes
    os.unlink(storage.path(key))


def test_whole_blocks_are_read_to_verify_and_pages_otherwise(storage: PosixStore, pool: BufferPool) -> None:
    content = random_bytes(4 * MIB)
    table = write(storage, "file", content, pool)
    far_apart = [Extent(10, 20), Extent(3 * MIB + 5, 3 * MIB + 6)]
    assert read(storage, "file", len(content), table, far_apart, pool)[1] == ReadStats(2 * MIB, 11)
    assert read(storage, "file", len(content), None, far_apart, pool)[1] == ReadStats(2 * PAGE, 11)


@pytest.mark.parametrize("block", range(4))
def test_a_flipped_bit_is_found_in_any_block_and_only_there(storage: PosixStore, pool: BufferPool, block: int) -> None:
    content = random_bytes(3 * MIB + 100)
    table = write(storage, "file", content, pool)
    at = PAGE + min(block * MIB + 70, PAGE + len(content) - 1)
    with open(storage.path("file"), "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))
    everything = [Extent(0, len(content))]
    with pytest.raises(CorruptError, match=f"block {block} of {storage.path('file')}"):
        read(storage, "file", len(content), table, everything, pool)
    for other in {0, 1, 2, 3} - {block}:
        extent = Extent(other * MIB, min((other + 1) * MIB, len(content)))
        targets, _ = read(storage, "file", len(content), table, [extent], pool)
        assert np.array_equal(targets[0], content[extent.start : extent.stop])
    targets, _ = read(storage, "file", len(content), None, everything, pool)
    assert np.flatnonzero(targets[0] != content).tolist() == [at - PAGE], "without a table nothing is verified"


@given(nbytes=st.integers(1, 3 * BLOCK_NBYTES), kind=st.sampled_from([XXH3, SHA256]), data=st.data())
@settings(max_examples=30, deadline=None)
def test_the_blocks_that_differ_are_named(nbytes: int, kind: DigestKind, data: st.DataObject) -> None:
    content = random_bytes(nbytes)
    before = bytes(2 * kind.nbytes)
    table = before + digest_blocks(content, kind)
    assert bad_blocks(content, table, first=2, kind=kind) == []
    flipped = data.draw(st.integers(0, nbytes - 1))
    content[flipped] ^= 1
    assert bad_blocks(content, table, first=2, kind=kind) == [2 + flipped // BLOCK_NBYTES]


def test_extents_without_gaps_are_delivered_together(storage: PosixStore, pool: BufferPool) -> None:
    content = random_bytes(3 * MIB)
    table = write(storage, "file", content, pool)
    extents = [Extent(0, 8), Extent(8, 8), Extent(8, 20), Extent(30, 2 * MIB), Extent(40, 50), Extent(2 * MIB, 3 * MIB)]
    calls: list[tuple[int, int, int]] = []

    def deliver(index: int, offset: int, data: Bytes) -> None:
        calls.append((index, offset, len(data)))

    wanted, _, _ = job(storage, "file", len(content), table, extents)
    read_files([wanted._replace(deliver=deliver)], pool=pool, on_corrupt=corrupt)
    whole_runs = [(0, 0, 20), (3, 0, MIB - 30), (4, 0, 10)]
    assert sorted(calls) == [*whole_runs[:2], (3, MIB - 30, MIB), whole_runs[2], (5, 0, MIB)]


def test_ten_thousand_tiny_sources_and_extents_are_cheap(storage: PosixStore, pool: BufferPool) -> None:
    content = random_bytes(40_000)
    pieces = [Extent(start, start + 4) for start in range(0, len(content), 4)]
    sources = [Array(content[start:stop]) for start, stop in pieces]
    began = time.process_time()
    writer = storage.writer("file", nbytes=PAGE + len(content))
    table = write_file(writer, sources, data_start=PAGE, header=lambda _: bytes(PAGE), pool=pool)
    targets, stats = read(storage, "file", len(content), table, pieces, pool)
    took_s = time.process_time() - began
    assert np.array_equal(np.concatenate(targets), content)
    assert stats == ReadStats(len(content), len(content))
    assert took_s < 1.0


def test_a_failing_source_aborts_the_file(storage: PosixStore, pool: BufferPool, tmp_path: Path) -> None:
    sources = [Array(random_bytes(3 * MIB)), Broken(random_bytes(MIB)), Array(random_bytes(9 * MIB))]
    writer = storage.writer("file", nbytes=PAGE + 13 * MIB)
    with pytest.raises(RuntimeError, match="the device is gone"):
        write_file(writer, sources, data_start=PAGE, header=lambda _: bytes(PAGE), pool=pool)
    assert os.listdir(tmp_path) == []


def test_a_header_that_cannot_be_made_aborts_the_file(storage: PosixStore, pool: BufferPool, tmp_path: Path) -> None:
    def header(table: bytes) -> bytes:
        raise RuntimeError("no header")

    writer = storage.writer("file", nbytes=PAGE)
    with pytest.raises(RuntimeError, match="no header"):
        write_file(writer, [], data_start=PAGE, header=header, pool=pool)
    assert os.listdir(tmp_path) == []


def test_a_taken_key_aborts_the_file(storage: PosixStore, pool: BufferPool, tmp_path: Path) -> None:
    storage.create("file", b"first")
    with pytest.raises(StorageError, match=r"storage\.exists"):
        write(storage, "file", random_bytes(100), pool)
    assert os.listdir(tmp_path) == ["file"]
    assert storage.read("file") == b"first"


def test_a_data_section_starts_at_a_page(storage: PosixStore, pool: BufferPool, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="multiple of 4096"):
        write(storage, "file", random_bytes(10), pool, data_start=100)
    assert os.listdir(tmp_path) == []


def test_few_of_many_files_are_open_at_a_time(storage: PosixStore, pool: BufferPool) -> None:
    contents = {f"file-{number}": random_bytes(1000, number) for number in range(100)}
    for key, content in contents.items():
        storage.create(key, header_of(PAGE) + content.tobytes())
    before = len(os.listdir("/proc/self/fd"))
    num_open: list[int] = []
    delivered: dict[str, Bytes] = {}

    def jobs() -> Iterator[ReadJob]:
        for key, content in contents.items():
            wanted, targets, _ = job(storage, key, len(content), digest_blocks(content), [Extent(0, len(content))])
            delivered[key] = targets[0]
            num_open.append(len(os.listdir("/proc/self/fd")) - before)
            yield wanted

    read_files(jobs(), pool=pool, on_corrupt=corrupt, num_threads=3)
    descriptors_per_file = 2
    assert max(num_open) <= 3 * descriptors_per_file + 1
    assert all(np.array_equal(delivered[key], content) for key, content in contents.items())


def test_one_large_file_is_served_by_all_threads(storage: PosixStore, pool: BufferPool) -> None:
    content = random_bytes(4 * MIB)
    table = write(storage, "file", content, pool)
    both = threading.Barrier(2, timeout=30)

    def open_file() -> DataFile:
        time.sleep(0.05)
        return DataFile(storage.reader("file"), "file", PAGE, len(content), table)

    def deliver(index: int, offset: int, data: Bytes) -> None:
        both.wait()

    wanted = ReadJob(len(content), open_file, [Extent(0, len(content))], deliver)
    assert read_files([wanted], pool=pool, on_corrupt=corrupt).bytes_read == len(content)


def test_a_truncated_file_is_corrupt(storage: PosixStore, pool: BufferPool) -> None:
    content = random_bytes(2 * MIB)
    write(storage, "file", content, pool)
    os.truncate(storage.path("file"), PAGE + MIB + 100)
    with pytest.raises(CorruptError) as caught:
        read(storage, "file", len(content), None, [Extent(0, len(content))], pool)
    assert caught.value.code == "corrupt.short"
    assert storage.path("file") in str(caught.value)


def test_the_first_error_ends_reading_promptly(storage: PosixStore, pool: BufferPool) -> None:
    content = random_bytes(1000)
    storage.create("good", header_of(PAGE) + content.tobytes())
    opened: list[int] = []

    def jobs() -> Iterator[ReadJob]:
        for number in range(1000):
            opened.append(number)
            yield job(storage, "good" if number < 5 else "lost", 1000, None, [Extent(0, 1000)])[0]

    with pytest.raises(NotFoundError, match="lost"):
        read_files(jobs(), pool=pool, on_corrupt=corrupt)
    assert len(opened) < 20


@pytest.mark.parametrize("num_threads", [1, 3])
def test_an_error_of_a_target_is_raised_as_it_is(storage: PosixStore, pool: BufferPool, num_threads: int) -> None:
    content = random_bytes(3 * MIB)
    table = write(storage, "file", content, pool)

    def deliver(index: int, offset: int, data: Bytes) -> None:
        raise RuntimeError("the target is gone")

    wanted = job(storage, "file", len(content), table, [Extent(0, len(content))])[0]._replace(deliver=deliver)
    with pytest.raises(RuntimeError, match="the target is gone"):
        read_files([wanted], pool=pool, on_corrupt=corrupt, num_threads=num_threads)


@pytest.mark.parametrize("extents", [[Extent(5, 6), Extent(1, 2)], [Extent(0, 101)], [Extent(-1, 1)], [Extent(3, 2)]])
def test_extents_out_of_order_or_range_are_refused(
    storage: PosixStore, pool: BufferPool, extents: list[Extent]
) -> None:
    write(storage, "file", random_bytes(100), pool)
    wanted = ReadJob(
        100,
        lambda: DataFile(storage.reader("file"), "file", PAGE, 100, None),
        extents,
        lambda index, offset, data: None,
        verify=False,
    )
    with pytest.raises(ValueError, match="out of order"):
        read_files([wanted], pool=pool, on_corrupt=corrupt)


def test_a_table_that_does_not_fit_the_data_is_refused(storage: PosixStore) -> None:
    storage.create("file", bytes(PAGE + 10))
    reader = storage.reader("file")
    with pytest.raises(ValueError, match="does not fit"):
        DataFile(reader, "file", PAGE, 10, bytes(2 * XXH3.nbytes))
    reader.close()


# A store with a time limit.

LIMIT_S = 0.3


def hanging(storage: PosixStore, name: str, *, when: str = "before") -> tuple[FaultyStore, HangAt]:
    """The storage, silent at the first request of that name until it is released."""
    hang = HangAt(lambda _, when_, name_, path: (when_, name_) == (when, name))
    return FaultyStore(storage, hang), hang


def address(buffer: Bytes) -> int:
    return buffer.ctypes.data


def eventually(condition: Callable[[], bool]) -> bool:
    """Whether it comes true within seconds: what was abandoned ends in its own time."""
    end_s = time.monotonic() + 30
    while not condition() and time.monotonic() < end_s:
        time.sleep(0.01)
    return condition()


def helpers() -> int:
    return sum(thread.name in ("holdfast-helper", "holdfast-transfer") for thread in threading.enumerate())


def test_a_timed_store_answers_as_the_store_does(
    storage: PosixStore, pool: BufferPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(helpers_module, "_IDLE_S", 600.0)  # none ends because it has nothing to do
    content = random_bytes(3 * MIB)
    with TimedStore(storage, timeout_s=60) as timed:
        assert timed.location.url == storage.location.url
        assert timed.path("folder/file") == storage.path("folder/file")
        assert timed.create("folder/record", b"0123")
        assert not timed.create("folder/record", b"4567")
        writer = timed.writer("folder/file", nbytes=PAGE + len(content))
        assert writer.alignment in (1, PAGE)
        table = write_file(writer, [Array(content)], data_start=PAGE, header=lambda _: bytes(PAGE), pool=pool)
        assert timed.list("folder") == ["file", "record"]
        assert timed.leftovers("folder") == []
        assert (timed.nbytes("folder/record"), timed.nbytes("folder/none")) == (4, None)
        assert timed.read("folder/record", start=1, nbytes=2) == b"12"
        target = np.zeros(len(content), np.uint8)
        wanted = job(storage, "folder/file", len(content), table, [Extent(0, len(content))])[0]._replace(
            open=lambda: DataFile(timed.reader("folder/file"), "file", PAGE, len(content), table),
            deliver=lambda _, offset, data: target.__setitem__(slice(offset, offset + len(data)), data),
        )
        read_files([wanted], pool=pool, on_corrupt=corrupt)
        assert np.array_equal(target, content)
        assert timed.delete("folder/record")
        with pytest.raises(NotFoundError, match="folder/record"):
            timed.read("folder/record")
    assert eventually(lambda: helpers() == 0)


def write_in_time(storage: Store, *, timeout_s: float) -> None:
    """Write a file of three buffers from two threads, as a save does."""

    def write_all() -> bytes:
        with BufferPool(2 * MIB, buffer_nbytes=MIB) as pool:
            writer = timed.limit.direct_writer(timed, "file", nbytes=PAGE + 3 * MIB)
            source = [Array(random_bytes(3 * MIB))]
            return write_file(writer, source, data_start=PAGE, header=lambda _: bytes(PAGE), pool=pool)

    with TimedStore(storage, timeout_s=timeout_s) as timed:
        timed.limit.run("write", timed.path("file"), write_all)


@pytest.mark.parametrize("name", ["writer", "write_at", "publish"])
def test_a_write_that_hangs_is_given_up_and_cleared_away_when_it_ends(
    storage: PosixStore, tmp_path: Path, name: str
) -> None:
    faulty, hang = hanging(storage, name, when="after" if name == "writer" else "before")
    descriptors = len(os.listdir("/proc/self/fd"))
    start = time.monotonic()
    with pytest.raises(StorageError, match=r"did not answer within 0\.3 s") as raised:
        write_in_time(faulty, timeout_s=LIMIT_S)
    assert LIMIT_S <= time.monotonic() - start < 10
    assert (raised.value.code, raised.value.retryable) == ("storage.timeout", True)
    assert raised.value.path == storage.path("file")
    assert storage.list("") == []
    hang.release()
    assert eventually(lambda: helpers() == 0)
    assert eventually(lambda: len(os.listdir("/proc/self/fd")) == descriptors)
    # A publication that was given up was of a whole file; it may come to be.
    assert os.listdir(tmp_path) == (["file"] if name == "publish" else [])


def test_an_interrupt_gives_up_a_write_that_hangs(storage: PosixStore, tmp_path: Path) -> None:
    faulty, hang = hanging(storage, "write_at")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            write_in_time(faulty, timeout_s=60)
        assert time.monotonic() - start < 10
    finally:
        signal.signal(signal.SIGINT, before)
    hang.release()
    assert eventually(lambda: helpers() == 0)
    assert os.listdir(tmp_path) == []


def test_a_buffer_that_a_hanging_read_may_still_fill_is_never_used_again(storage: PosixStore, pool: BufferPool) -> None:
    content = random_bytes(MIB)
    table = write(storage, "file", content, pool)
    faulty, hang = hanging(storage, "read_at")
    delivered: list[int] = []
    with TimedStore(faulty, timeout_s=LIMIT_S) as timed:
        wanted = ReadJob(
            len(content),
            lambda: DataFile(timed.reader("file"), "file", PAGE, len(content), table),
            [Extent(0, len(content))],
            lambda index, offset, data: delivered.append(len(data)),
        )
        with pytest.raises(StorageError, match=r"storage\.timeout"):
            read_files([wanted], pool=pool, on_corrupt=corrupt)
    with pool.buffer() as first, pool.buffer() as second:
        assert first.ctypes.data % PAGE == second.ctypes.data % PAGE == 0
        first[:] = second[:] = 7
        hang.release()
        assert eventually(lambda: helpers() == 0)
        assert np.all(first == 7)
        assert np.all(second == 7)
    assert delivered == []


def test_a_buffer_that_saw_an_error_is_replaced(pool: BufferPool) -> None:
    seen: list[Bytes] = []

    def use() -> None:
        with pool.buffer() as buffer:
            seen.append(buffer)
            raise RuntimeError("broken")

    for _ in range(5):
        with pytest.raises(RuntimeError, match="broken"):
            use()
    assert len({address(buffer) for buffer in seen}) == 5
    assert {len(buffer) for buffer in seen} == {pool.buffer_nbytes}


def test_when_the_time_is_up_a_store_is_not_asked_any_more(storage: PosixStore) -> None:
    count = Count()
    with TimedStore(FaultyStore(storage, count), timeout_s=0.5) as timed:
        writer = timed.writer("file", nbytes=PAGE)
        time.sleep(0.6)
        for ask in (lambda: timed.create("other", b""), lambda: writer.write_at(0, random_bytes(10))):
            with pytest.raises(StorageError, match=r"storage\.timeout"):
                ask()
        writer.abort()
    assert [name for name, _ in count.seen] == ["writer"]
    assert eventually(lambda: helpers() == 0)
    assert os.listdir(storage.location.url) == []


def test_a_store_that_hangs_keeps_no_process_alive(tmp_path: Path) -> None:
    program = f"""
from holdfast.store.posix import PosixStore
from holdfast.store.timed import TimedStore
from tests.support.faulty_storage import FaultyStore, HangAt
store = FaultyStore(PosixStore({str(tmp_path)!r}), HangAt(lambda *_: True))
with TimedStore(store, timeout_s=0.1) as timed:
    timed.list("")
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=50)
    assert done.returncode == 1
    assert "storage.timeout" in done.stderr
