"""Ranks of one node that read for each other: which rank reads which bytes, and how they reach the other ranks."""

from __future__ import annotations

import gc
import itertools
import os
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.cooperative.neighbours import NeighbourGone, Neighbours, SharedMemory, node_id
from holdfast.cooperative.sharing import SharedReading, sent_and_received
from holdfast.errors import CorruptError
from holdfast.geometry import Int64s
from holdfast.io.jobs import DataFile, Extent, ReadJob
from holdfast.plan.exchange import Bandwidths, Chunks, divide_job_reads, divide_reads
from holdfast.store.base import Bytes, FileReader
from holdfast.store.posix import PosixStore

CHUNK = 16
MIB = 1 << 20

Runs = list[tuple[int, int, int]]


@pytest.fixture(autouse=True)
def collects_what_errors_keep() -> Iterator[None]:
    """Tracebacks hold memory that ranks share, and so its descriptors, until garbage is collected."""
    yield
    gc.collect()


@st.composite
def needs(draw: st.DrawFn, max_ranks: int = 4) -> dict[int, Int64s]:
    """The needs of ranks with any numbers from a few files: sorted runs that do not touch each other."""
    found = {}
    for rank in draw(st.sets(st.integers(0, 9), min_size=1, max_size=max_ranks)):
        rows: Runs = []
        for file in sorted(draw(st.sets(st.integers(0, 3), max_size=3))):
            cuts = sorted(draw(st.sets(st.integers(0, 100), max_size=8)))
            rows += [(file, a, b) for a, b in zip(cuts[::2], cuts[1::2], strict=False)]
        found[rank] = np.asarray(rows, np.int64).reshape(-1, 3)
    return found


def bytes_of(runs: Int64s) -> set[tuple[int, int]]:
    return {(file, byte) for file, start, stop in runs.tolist() for byte in range(start, stop)}


def divided(needs: dict[int, Int64s], first_file: int = 0, num_chunks: int = 0) -> Chunks:
    """The reads of ranks, by requests of up to `num_chunks` chunks."""
    ranks = sorted(needs)
    return divide_reads(
        ranks,
        [needs[rank] for rank in ranks],
        chunk_nbytes=CHUNK,
        request_nbytes=num_chunks * CHUNK,
        first_file=first_file,
    )


def rows(chunks: Chunks) -> Int64s:
    return np.stack([chunks.files, chunks.starts, chunks.stops], axis=1)


@given(needs(), st.integers(0, 4), st.integers(0, 3))
def test_each_needed_byte_is_read_once_by_a_rank_that_wants_some_of_the_chunk(
    needs: dict[int, Int64s], first_file: int, num_chunks: int
) -> None:
    chunks = divided(needs, first_file, num_chunks)
    read = [(file, byte) for file, start, stop in rows(chunks).tolist() for byte in range(start, stop)]
    assert len(read) == len(set(read))
    assert set(read) == set().union(*map(bytes_of, needs.values()))
    for number, row in enumerate(rows(chunks)):
        held = bytes_of(row[None])
        assert 0 < len(held) <= CHUNK
        wanting = [rank for rank in chunks.ranks if held & bytes_of(needs[rank])]
        reader = chunks.ranks[chunks.leaders[number]]
        assert reader in wanting
        assert chunks.consumers(number) == [rank for rank in wanting if rank != reader]


@given(needs(), st.integers(0, 4))
def test_all_ranks_read_in_one_order_that_begins_with_the_first_file(needs: dict[int, Int64s], first_file: int) -> None:
    chunks = divided(needs, first_file)
    order = [((file < first_file), file, start) for file, start, _ in rows(chunks).tolist()]
    assert order == sorted(order)
    swapped = dict(reversed(needs.items()))
    assert np.array_equal(rows(divided(swapped, first_file)), rows(chunks))


def test_what_all_want_is_divided_evenly() -> None:
    everything = np.asarray([(0, 0, 40 * CHUNK), (1, 0, 24 * CHUNK)], np.int64)
    chunks = divided(dict.fromkeys(range(4), everything))
    assert np.bincount(chunks.leaders).tolist() == [16, 16, 16, 16]
    assert chunks.consumers(5) == [rank for rank in range(4) if rank != chunks.leaders[5]]


def test_a_rank_reads_all_chunks_of_a_request_that_all_want() -> None:
    everything = np.asarray([(0, 0, 40 * CHUNK), (1, 0, 24 * CHUNK)], np.int64)
    chunks = divided(dict.fromkeys(range(2), everything), num_chunks=8)
    assert [set(part) for part in np.split(chunks.leaders, 8)] == [{0}, {1}] * 4


def test_a_request_ends_where_other_ranks_want_what_follows_and_where_the_file_ends() -> None:
    first = np.asarray([(0, 0, 12 * CHUNK), (1, 0, 30 * CHUNK)], np.int64)
    second = np.asarray([(0, 2 * CHUNK, 12 * CHUNK), (1, 0, 30 * CHUNK)], np.int64)
    chunks = divided({0: first, 1: second}, num_chunks=4)
    leaders = chunks.leaders.tolist()
    assert leaders[:12] == [0, 0, *[1] * 4, *[0] * 4, *[1] * 2]
    assert leaders[12:] == [0] * 4 + [1] * 4 + [0] * 4 + [1] * 4 + [0] * 4 + [1] * 4 + [0] * 4 + [1] * 2


def test_few_chunks_are_divided_evenly_rather_than_read_by_large_requests() -> None:
    everything = np.asarray([(0, 0, 16 * CHUNK)], np.int64)
    chunks = divided(dict.fromkeys(range(4), everything), num_chunks=8)
    assert np.bincount(chunks.leaders).tolist() == [4, 4, 4, 4]


def test_what_one_wants_alone_counts_in_who_reads_the_rest() -> None:
    needs = {0: np.asarray([(0, 0, 64)], np.int64), 1: np.asarray([(0, 0, 32)], np.int64)}
    chunks = divided(needs)
    assert chunks.leaders.tolist() == [1, 1, 0, 0]


def test_scalars_that_all_want_between_large_tensors_of_one_do_not_have_others_read_these() -> None:
    # As the step counters of AdamW: one rank read three times what the other did, and passed on most of it.
    mine = np.asarray([(0, 0, 8 * CHUNK)], np.int64)
    counters = [(0, chunk * CHUNK + 3, chunk * CHUNK + 4) for chunk in range(8)]
    other = np.asarray([*counters, (1, 0, 8 * CHUNK)], np.int64)
    chunks = divided({0: mine, 1: other})
    assert chunks.leaders.tolist() == [0] * 8 + [1] * 8


def test_the_node_of_a_process_is_the_same_for_its_children() -> None:
    assert node_id() == node_id()
    assert len(node_id()) == 16


def node_needs(needs: dict[int, Int64s], sizes: list[int]) -> tuple[list[list[int]], list[list[Int64s]]]:
    """Ranks from 0 on, `sizes` of them on each node, and what each needs; nothing where `needs` does not say."""
    ranks = iter(range(sum(sizes)))
    nodes = [[next(ranks) for _ in range(size)] for size in sizes]
    nothing = np.zeros((0, 3), np.int64)
    return nodes, [[needs.get(rank, nothing) for rank in node] for node in nodes]


@given(needs(max_ranks=6), st.lists(st.integers(1, 3), min_size=1, max_size=4), st.randoms() | st.none())
def test_a_job_reads_each_byte_once_and_every_node_gets_what_it_needs(
    needs: dict[int, Int64s], sizes: list[int], owned_by: random.Random | None
) -> None:
    nodes, by_node = node_needs(needs, sizes)
    owners = None if owned_by is None else [owned_by.randrange(sum(sizes)) for _ in range(4)]
    plans = [divide_job_reads(nodes, by_node, node, chunk_nbytes=CHUNK, holders=owners) for node in range(len(nodes))]
    read: list[tuple[int, int]] = []
    sent: dict[tuple[int, int], list[int]] = {}
    received: dict[tuple[int, int], list[int]] = {}
    for node, plan in enumerate(plans):
        assert bytes_of(rows(plan)) >= set().union(*map(bytes_of, by_node[node]))
        assert (plan.wanted.any(axis=1) | np.asarray([len(to) > 0 for to in plan.receivers], bool)).all()
        assert list(plan.numbers) == sorted(plan.numbers)
        for index, row in enumerate(rows(plan)):
            leader, number = plan.ranks[plan.leaders[index]], int(plan.numbers[index])
            if plan.senders[index] < 0:
                read += bytes_of(row[None])
                assert owners is None or leader == owners[plan.files[index]]
            else:
                assert plan.receivers[index] == ()
                received.setdefault((int(plan.senders[index]), leader), []).append(number)
            for receiver in plan.receivers[index]:
                sent.setdefault((leader, receiver), []).append(number)
    assert len(read) == len(set(read))
    assert sent == received
    for plan in plans:
        for rank in plan.ranks:
            to_send, to_receive = sent_and_received(plan, rank)
            assert all(sent[rank, other] == numbers for other, numbers in to_send.items())
            assert all(received[other, rank] == numbers for other, numbers in to_receive.items())


def test_nodes_and_ranks_take_turns_in_reading_what_all_need() -> None:
    everything = np.asarray([(0, 0, 64 * CHUNK)], np.int64)
    nodes, by_node = node_needs(dict.fromkeys(range(8), everything), [2, 2, 2, 2])
    plans = [divide_job_reads(nodes, by_node, node, chunk_nbytes=CHUNK) for node in range(4)]
    assert [int((plan.senders < 0).sum()) for plan in plans] == [16] * 4
    for plan in plans:
        assert np.bincount(plan.leaders[plan.senders < 0]).tolist() == [8, 8]


def test_bytes_are_exchanged_where_storage_is_slower_than_the_network() -> None:
    everything = np.asarray([(0, 0, 1000)], np.int64)
    replicas = [everything] * 4
    slow_store = Bandwidths(node_storage=1.0, all_storage=2.0, node_network=10.0)
    assert slow_store.favour_exchange(replicas)
    fast_store = Bandwidths(node_storage=10.0, all_storage=40.0, node_network=1.0)
    assert not fast_store.favour_exchange(replicas)
    parts = [np.asarray([(0, 250 * node, 250 * node + 250)], np.int64) for node in range(4)]
    assert not slow_store.favour_exchange(parts)
    with pytest.raises(ValueError, match="positive"):
        Bandwidths(1.0, 0.0, 1.0)


# Ranks as threads of this process: sockets and shared memory do not mind.


@contextmanager
def meeting(num_ranks: int, *, num_buffers: int = 3, notes: list[bytes] | None = None) -> Iterator[list[Met]]:
    """Neighbours that have met."""
    token = secrets.token_bytes(16)
    made = [
        (SharedMemory(num_buffers * MIB, notes[rank] if notes else b""), Neighbours(token, rank))
        for rank in range(num_ranks)
    ]
    try:
        end_s = time.monotonic() + 20
        with ThreadPoolExecutor(num_ranks) as pool:
            calls = [pool.submit(each.connect, range(num_ranks), shared, end_s=end_s) for shared, each in made]
            for call in calls:
                call.result()
        yield made
    finally:
        for shared, neighbours in made:
            neighbours.close()
            shared.__exit__(None, None, None)


Met = tuple[SharedMemory, Neighbours]


def test_neighbours_see_what_each_other_writes_and_notes() -> None:
    notes = [b"", b"one", b"two" * 10_000]
    with meeting(3, notes=notes) as met:
        for rank, (shared, _) in enumerate(met):
            shared.data[:4] = rank + 7
        for rank, (_, neighbours) in enumerate(met):
            assert sorted(neighbours.others) == [other for other in range(3) if other != rank]
            for other, neighbour in neighbours.others.items():
                assert neighbour.note == notes[other]
                assert neighbour.data[:4].tolist() == [other + 7] * 4


def test_a_neighbour_that_does_not_come_is_named_when_the_time_is_up() -> None:
    token = secrets.token_bytes(16)
    for present, absent in ((0, 1), (1, 0)):
        with SharedMemory(MIB, b"") as shared, Neighbours(token, present) as neighbours:
            with pytest.raises(NeighbourGone) as raised:
                neighbours.connect([0, 1], shared, end_s=time.monotonic() + 0.2)
            assert raised.value.ranks == (absent,)


def test_nothing_of_a_meeting_is_left() -> None:
    before = os.listdir("/proc/self/fd")
    for _ in range(5):
        with meeting(3):
            pass
    assert len(os.listdir("/proc/self/fd")) == len(before)


class Streaming:
    """A `StreamingReader` of a file: it notes its requests, and refuses reads that are not the ones to expect."""

    alignment, memory = 1, None

    def __init__(self, reader: FileReader, requests: list[tuple[int, int]]) -> None:
        self.nbytes = reader.nbytes
        self._reader = reader
        self._requests = requests
        self._left = threading.local()

    def expect(self, start: int, stop: int) -> None:
        self._requests.append((start, stop))
        self._left.span = start, stop

    def read_at(self, offset: int, out: Bytes) -> None:
        at, stop = getattr(self._left, "span", (0, 0))
        if at == stop:
            self._requests.append((offset, offset + len(out)))
        else:
            assert at == offset
            assert offset + len(out) <= stop
            self._left.span = offset + len(out), stop
        self._reader.read_at(offset, out)

    def close(self) -> None:
        self._reader.close()


class Job:
    """Some ranks that want some extents of some files, each with memory of its own to fill. `requests` has the bytes
    that each request asked for; `request_nbytes` is their largest size."""

    def __init__(
        self,
        folder: Path,
        contents: list[Bytes],
        wanted: dict[int, dict[int, list[Extent]]],
        *,
        request_nbytes: int = 0,
    ) -> None:
        self.storage = PosixStore(str(folder))
        self.request_nbytes = request_nbytes
        self.requests: list[tuple[int, int]] = []
        self.contents = contents
        self.wanted = wanted
        self.filled = {
            rank: {file: [np.zeros(e.stop - e.start, np.uint8) for e in extents] for file, extents in files.items()}
            for rank, files in wanted.items()
        }
        self.bytes_read = dict.fromkeys(wanted, 0)
        self.on_deliver: Callable[[int], None] = lambda rank: None
        for number, content in enumerate(contents):
            self.storage.create(f"file-{number}", content.tobytes())

    def jobs(self, rank: int) -> dict[int, ReadJob]:
        return {file: self._job(rank, file, extents) for file, extents in self.wanted[rank].items()}

    def _job(self, rank: int, file: int, extents: list[Extent]) -> ReadJob:
        def deliver(index: int, offset: int, data: Bytes) -> None:
            self.on_deliver(rank)
            arrays = self.filled[rank][file]
            while len(data):
                part = data[: len(arrays[index]) - offset]
                arrays[index][offset : offset + len(part)] += part
                index, offset, data = index + 1, 0, data[len(part) :]

        def open_file() -> DataFile:
            reader = Streaming(self.storage.reader(f"file-{file}"), self.requests)
            return DataFile(reader, f"file-{file}", 0, len(self.contents[file]), None)

        return ReadJob(len(self.contents[file]), open_file, extents, deliver, verify=False)

    def read(self, rank: int, met: Met, needs: dict[int, Int64s]) -> None:
        """The work of one rank."""
        shared, neighbours = met
        of_ranks, size = [needs[each] for each in sorted(needs)], self.request_nbytes
        chunks = divide_reads(sorted(needs), of_ranks, chunk_nbytes=MIB, request_nbytes=size)
        buffers = [shared.data[at : at + MIB] for at in range(0, shared.data_nbytes, MIB)]
        jobs = self.jobs(rank)
        reading = SharedReading(jobs, chunks, rank, neighbours.others, buffers, corrupt, request_nbytes=size)
        try:
            reading.run()
        finally:
            neighbours.close()
        self.bytes_read[rank] = reading.bytes_read

    def run(self, num_buffers: int = 3) -> dict[int, BaseException | None]:
        """Do it on all ranks; what each raised."""
        needs = {
            rank: np.asarray(
                [(file, *span) for file, job in sorted(self.jobs(rank).items()) for span in job.ranges().tolist()],
                np.int64,
            ).reshape(-1, 3)
            for rank in self.wanted
        }
        with meeting(len(self.wanted), num_buffers=num_buffers) as met, ThreadPoolExecutor(len(self.wanted)) as pool:
            calls = {rank: pool.submit(self.read, rank, met[rank], needs) for rank in self.wanted}
            return {rank: call.exception(timeout=60) for rank, call in calls.items()}


def corrupt(file: DataFile, block: int) -> CorruptError:
    return CorruptError(file.path, code="corrupt.file", action="None.")


def random_bytes(nbytes: int, seed: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


@settings(max_examples=12)
@given(data=st.data())
def test_every_rank_gets_every_byte_that_it_wants_once(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    num_ranks = data.draw(st.integers(1, 4))
    sizes = data.draw(st.lists(st.integers(1, 5 * MIB), min_size=1, max_size=3))
    contents = [random_bytes(size, seed) for seed, size in enumerate(sizes)]
    wanted: dict[int, dict[int, list[Extent]]] = {}
    for rank in range(num_ranks):
        files = data.draw(st.sets(st.integers(0, len(sizes) - 1)))
        wanted[rank] = {}
        for file in files:
            bounds = st.tuples(st.integers(0, sizes[file]), st.integers(0, sizes[file])).map(sorted)
            wanted[rank][file] = sorted(Extent(*pair) for pair in data.draw(st.lists(bounds, max_size=5)))
    request_nbytes = data.draw(st.integers(0, 4)) * MIB
    job = Job(tmp_path_factory.mktemp("files"), contents, wanted, request_nbytes=request_nbytes)
    assert set(job.run(num_buffers=data.draw(st.integers(1, 4))).values()) == {None}
    assert all(stop - start <= max(request_nbytes, MIB) for start, stop in job.requests)
    for rank, filled in job.filled.items():
        for file, arrays in filled.items():
            for extent, array in zip(wanted[rank][file], arrays, strict=True):
                assert np.array_equal(array, contents[file][extent.start : extent.stop])
    needed = set()
    for rank in wanted:
        for file, one in job.jobs(rank).items():
            needed |= {(file, page) for a, b in one.ranges().tolist() for page in range(a, b)}
    assert sum(job.bytes_read.values()) == len(needed)


def test_one_buffer_each_is_enough(tmp_path: Path) -> None:
    content = random_bytes(9 * MIB, 1)
    job = Job(tmp_path, [content], {rank: {0: [Extent(0, len(content))]} for rank in range(3)})
    assert set(job.run(num_buffers=1).values()) == {None}
    assert all(np.array_equal(job.filled[rank][0][0], content) for rank in range(3))
    assert sum(job.bytes_read.values()) == len(content)


@pytest.mark.parametrize("num_buffers", [1, 3, 8])
def test_ranks_that_read_for_each_other_ask_for_several_buffers_at_once(tmp_path: Path, num_buffers: int) -> None:
    content = random_bytes(64 * MIB - 5, 1)
    wanted = {rank: {0: [Extent(0, len(content))]} for rank in range(2)}
    job = Job(tmp_path, [content], wanted, request_nbytes=8 * MIB)
    assert set(job.run(num_buffers=num_buffers).values()) == {None}
    assert all(np.array_equal(job.filled[rank][0][0], content) for rank in range(2))
    bounds = [*range(0, len(content), 8 * MIB), len(content)]
    assert sorted(job.requests) == list(itertools.pairwise(bounds))
    assert job.bytes_read[0] in (32 * MIB, 32 * MIB - 5)


@pytest.mark.parametrize("failing", [0, 2])
def test_a_rank_that_fails_ends_those_that_wait_for_it(tmp_path: Path, failing: int) -> None:
    content = random_bytes(12 * MIB, 1)
    job = Job(tmp_path, [content], {rank: {0: [Extent(0, len(content))]} for rank in range(3)})
    seen = threading.Event()

    def fail(rank: int) -> None:
        if rank == failing and not seen.is_set():
            seen.set()
            raise RuntimeError("the target is gone")

    job.on_deliver = fail
    outcomes = job.run()
    assert isinstance(outcomes[failing], RuntimeError)
    for rank in set(outcomes) - {failing}:
        assert isinstance(outcomes[rank], NeighbourGone)


def test_ranks_that_need_nothing_of_one_that_fails_are_done(tmp_path: Path) -> None:
    contents = [random_bytes(3 * MIB, 1), random_bytes(3 * MIB, 2)]
    whole = [Extent(0, 3 * MIB)]
    job = Job(tmp_path, contents, {0: {0: whole}, 1: {1: whole}, 2: {1: whole}})

    def fail(rank: int) -> None:
        if rank == 0:
            raise RuntimeError("the target is gone")

    job.on_deliver = fail
    outcomes = job.run()
    assert isinstance(outcomes[0], RuntimeError)
    assert outcomes[1] is outcomes[2] is None
    assert np.array_equal(job.filled[2][1][0], contents[1])


def test_a_reading_that_is_done_keeps_no_memory_until_garbage_is_collected(tmp_path: Path) -> None:
    content = random_bytes(4 * MIB, 1)
    before = os.listdir("/proc/self/fd")
    gc.disable()
    try:
        job = Job(tmp_path, [content], {rank: {0: [Extent(0, len(content))]} for rank in range(3)})
        assert set(job.run().values()) == {None}
        assert len(os.listdir("/proc/self/fd")) == len(before)
    finally:
        gc.enable()
