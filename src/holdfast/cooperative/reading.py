"""Cooperative reading: one rank reads from storage the bytes that several ranks need."""

from __future__ import annotations

import os
import secrets
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import groupby
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from holdfast.checkpoint.data_files import DataFiles
from holdfast.checkpoint.delivery import Targets
from holdfast.control.channel import Channel
from holdfast.control.deadline import Deadline
from holdfast.cooperative.neighbours import Neighbour, NeighbourGone, Neighbours, SharedMemory, node_id
from holdfast.cooperative.network import TcpTransport
from holdfast.cooperative.sharing import SharedReading, sent_and_received
from holdfast.errors import DeadlineError, StorageError
from holdfast.format.manifest import data_nbytes
from holdfast.geometry import Int64s
from holdfast.io.buffers import BUFFER_NBYTES, NUM_THREADS, BufferPool
from holdfast.io.jobs import ReadJob
from holdfast.io.meter import Meter
from holdfast.phases import attempt
from holdfast.plan.exchange import Bandwidths, Chunks, divide_job_reads, divide_reads, united
from holdfast.plan.load import ReadRequest
from holdfast.store.base import Bytes
from holdfast.store.timed import TimeLimit

#: Memory through which a rank reads for others of its node: the default and the minimum.
MEMORY_NBYTES = 16 << 20
MIN_MEMORY_NBYTES = NUM_THREADS * BUFFER_NBYTES
#: From files in memory, each rank reads for itself if all ranks together read at most this times the checkpoint's data:
#: waiting for another rank takes longer than verifying some bytes twice.
_APART = 1.5


class ReadCost(NamedTuple):
    """The work of this rank: bytes that it read from storage, and seconds that its threads spent on their digests; and
    for each file the bytes that it needed, by whichever rank they were read."""

    read_nbytes: int
    verify_s: float
    needed: Mapping[int, int]


class _Here(msgspec.Struct, frozen=True, array_like=True):
    """A rank's message: its node, the bytes that it needs and, where nodes may exchange bytes, its address and its
    needed byte ranges, compressed."""

    node: bytes
    nbytes: int
    address: str = ""
    needs: bytes = b""


class _NodeMap(msgspec.Struct, frozen=True, array_like=True):
    """The nodes of all ranks: `runs` of consecutive ranks, as the number of a node and a count; a secret `token` of
    this operation; and whether ranks read `apart`, each all the bytes that it needs.

    Where nodes exchange bytes, it also has the addresses of all ranks and their needed byte ranges.
    """

    token: bytes
    runs: tuple[tuple[int, int], ...]
    apart: bool
    addresses: tuple[str, ...] = ()
    needs: tuple[bytes, ...] = ()

    def members(self) -> list[list[int]]:
        """The ranks of each node."""
        nodes: list[list[int]] = [[] for _ in range(max(node for node, _ in self.runs) + 1)]
        rank = 0
        for node, count in self.runs:
            nodes[node] += range(rank, rank + count)
            rank += count
        return nodes


class _ReadOutcome(msgspec.Struct, frozen=True, array_like=True):
    """The end of one rank's reading: the ranks that it waited for in vain, if any."""

    absent: tuple[int, ...]


class CooperativeReading:
    """The cooperative reading of one load, on one rank. All ranks of the channel make the same calls."""

    def __init__(
        self,
        files: DataFiles,
        limit: TimeLimit,
        channel: Channel,
        deadline: Deadline,
        *,
        verify: bool,
        memory_nbytes: int = MEMORY_NBYTES,
        bandwidths: Bandwidths | None = None,
    ) -> None:
        """`files` are read within `limit`. Where reads wait for nothing, this rank reads with as many threads as it has
        cores."""
        self._files = files
        self._limit = limit
        self._channel = channel
        self._deadline = deadline
        self._verify = verify
        self._num_buffers = memory_nbytes // BUFFER_NBYTES
        self._bandwidths = bandwidths
        self._holders = files.holders
        self._is_prompt = files.is_prompt
        self._capabilities = files.capabilities
        self._jobs: dict[int, ReadJob] = {}
        self._needs = np.zeros((0, 3), np.int64)
        self._network: TcpTransport | None = None
        self._shared: SharedReading | None = None
        self._meter = Meter()
        #: Whether the targets may have got elements.
        self.has_begun = False

    def read(
        self, plan: Callable[[], tuple[Sequence[ReadRequest], Targets]], *, meter: Meter | None = None
    ) -> ReadCost:
        """Deliver the bytes that `plan` requests to its targets, and read for other ranks. Collective; blocks until all
        ranks have all their bytes.

        One rank of a node reads the bytes that several of its ranks need, into memory that it shares with them. Where
        `bandwidths` favour it, one node reads the bytes that several nodes need, and sends them to the others. If one
        rank alone can read a file, it reads the bytes that others need, and sends them to their nodes. `meter` follows
        how much of its own share this rank has read.

        Raises:
            CorruptError: bytes are missing or altered; the error names the file and the tensors.
            StorageError: the store failed, or did not answer in time.
            DeadlineError: a rank died, or was too late.
        """
        self._meter = meter or self._meter
        try:
            prepared = attempt(lambda: self._prepare(*plan()))
            nodes = self._channel.exchange("share", prepared, self._answer, self._deadline, takes=_Here, gives=_NodeMap)
            read = attempt(lambda: self._read(nodes))
            self._channel.exchange("read", read, self._check, self._deadline, takes=_ReadOutcome, gives=_ReadOutcome)
        finally:
            if self._network is not None:
                self._network.close()
        assert self._shared is not None
        files, sizes = self._needs[:, 0], self._needs[:, 2] - self._needs[:, 1]
        needed = {int(file): int(sizes[files == file].sum()) for file in np.unique(files)}
        return ReadCost(self._shared.bytes_read, self._shared.verify_s, needed)

    def _prepare(self, wants: Sequence[ReadRequest], targets: Targets) -> _Here:
        open_reader = self._limit.direct_reader
        self._jobs = dict(self._files.jobs(wants, targets, verify=self._verify, open_reader=open_reader))
        ranges = [(file, job.ranges()) for file, job in sorted(self._jobs.items())]
        self._needs = np.concatenate([self._needs, *(np.insert(each, 0, file, axis=1) for file, each in ranges)])
        here = _Here(node_id(), int((self._needs[:, 2] - self._needs[:, 1]).sum()))
        if (self._bandwidths is None and self._holders is None) or self._channel.world_size == 1:
            return here
        self._network = TcpTransport(self._channel.rank)
        return replace(here, address=self._network.address, needs=zlib.compress(self._needs.tobytes(), 1))

    def _answer(self, ranks: Sequence[_Here]) -> _NodeMap:
        """Rank 0's answer: the nodes of all ranks, and whether nodes exchange the bytes that they read."""
        numbers = {node: number for number, node in enumerate(dict.fromkeys(rank.node for rank in ranks))}
        runs = tuple((numbers[node], sum(1 for _ in run)) for node, run in groupby(rank.node for rank in ranks))
        nodes = _NodeMap(secrets.token_bytes(16), runs, self._is_apart(ranks))
        if len(numbers) > 1 and all(rank.address for rank in ranks):
            needs = [united([_unpacked(ranks[rank].needs) for rank in members]) for members in nodes.members()]
            if self._holders is not None or (self._bandwidths and self._bandwidths.favour_exchange(needs)):
                addresses, packed = tuple(rank.address for rank in ranks), tuple(rank.needs for rank in ranks)
                nodes = replace(nodes, addresses=addresses, needs=packed)
        return nodes

    def _is_apart(self, ranks: Sequence[_Here]) -> bool:
        if not self._is_prompt or self._holders is not None:
            return False
        return sum(rank.nbytes for rank in ranks) <= _APART * data_nbytes(self._files.manifest.body)

    def _read(self, nodes: _NodeMap) -> _ReadOutcome:
        self.has_begun = True
        try:
            self._limit.run("read", self._files.folder, lambda: self._meet(nodes), stop=self._stop)
        except NeighbourGone as gone:
            return _ReadOutcome(gone.ranks)
        except StorageError as error:
            absent = () if self._shared is None else self._shared.awaited()
            if error.code != "storage.timeout" or not absent:
                raise
            return _ReadOutcome(absent)
        return _ReadOutcome(())

    def _stop(self) -> None:
        if self._shared is not None:
            self._shared.stop()

    def _meet(self, nodes: _NodeMap) -> None:
        """Connect to the neighbours, learn their needs, and do this rank's share of the reading."""
        members = nodes.members()
        node = next(number for number, ranks in enumerate(members) if self._channel.rank in ranks)
        ranks = [self._channel.rank] if nodes.apart else members[node]
        num_cores = len(os.sched_getaffinity(0)) // len(members[node])
        # Ends before the store's time limit does, so that a rank that waits for another rank blames that rank, and only
        # a rank that waits for the store blames the store.
        end_s = time.monotonic() + 0.8 * self._deadline.remaining_s()
        with ExitStack() as stack:
            others, buffers = self._neighbours(stack, nodes.token, ranks, end_s)
            if nodes.addresses:
                needs = [[_unpacked(nodes.needs[rank]) for rank in each] for each in members]
                chunks = divide_job_reads(members, needs, node, chunk_nbytes=BUFFER_NBYTES, holders=self._holders)
                network = self._connected(nodes, chunks, end_s)
            else:
                first_file = self._files.manifest.body.num_files * node // len(members)
                chunks = self._divided(ranks, others, first_file)
                network = None
            self._jobs.update(self._idle_jobs(chunks))
            corrupt = self._files.corrupt_block
            self._shared = SharedReading(
                self._jobs,
                chunks,
                self._channel.rank,
                others,
                buffers,
                corrupt,
                network=network,
                num_readers=min(max(num_cores, 1), self._num_readers) if self._is_prompt else self._num_readers,
                request_nbytes=self._capabilities.request_nbytes,
            )
            shared = self._shared
            self._meter.follow(shared.nbytes, lambda: shared.bytes_read)
            shared.run()

    @property
    def _num_readers(self) -> int:
        return max(self._capabilities.num_requests, NUM_THREADS)

    def _divided(self, ranks: Sequence[int], others: Mapping[int, Neighbour], first_file: int) -> Chunks:
        """The chunks that `ranks` of this node read, beginning with `first_file`, when nodes exchange no bytes."""
        needs = [self._needs if rank == self._channel.rank else _rows(others[rank].note) for rank in ranks]
        if self._holders is not None:
            return divide_job_reads([ranks], [needs], 0, chunk_nbytes=BUFFER_NBYTES, holders=self._holders)
        request_nbytes = self._capabilities.request_nbytes
        return divide_reads(
            ranks, needs, chunk_nbytes=BUFFER_NBYTES, request_nbytes=request_nbytes, first_file=first_file
        )

    def _idle_jobs(self, chunks: Chunks) -> dict[int, ReadJob]:
        """Jobs for the files that this rank reads for others only."""
        led = chunks.files[chunks.leaders == chunks.ranks.index(self._channel.rank)]
        open_reader = self._limit.direct_reader
        return {
            file: self._files.idle_job(file, verify=self._verify, open_reader=open_reader)
            for file in set(led.tolist()) - self._jobs.keys()
        }

    def _neighbours(
        self, stack: ExitStack, token: bytes, ranks: Sequence[int], end_s: float
    ) -> tuple[Mapping[int, Neighbour], Sequence[Bytes]]:
        """The other ranks of the node, and the buffers into which this rank reads."""
        if len(ranks) == 1:
            pool = stack.enter_context(BufferPool(self._num_readers * BUFFER_NBYTES))
            return {}, stack.enter_context(pool.buffers(self._num_readers))
        shared = stack.enter_context(SharedMemory(self._num_buffers * BUFFER_NBYTES, self._needs.tobytes()))
        neighbours = stack.enter_context(Neighbours(token, self._channel.rank))
        neighbours.connect(ranks, shared, end_s=end_s)
        starts = range(0, shared.data_nbytes, BUFFER_NBYTES)
        return neighbours.others, [shared.data[start : start + BUFFER_NBYTES] for start in starts]

    def _connected(self, nodes: _NodeMap, chunks: Chunks, end_s: float) -> TcpTransport:
        """The connections to other nodes that `chunks` need, all of them made."""
        rank = self._channel.rank
        assert self._network is not None
        to_send, to_receive = sent_and_received(chunks, rank)
        addresses = dict(enumerate(nodes.addresses))
        self._network.connect(nodes.token, addresses, to_send=to_send, to_receive=to_receive, end_s=end_s)
        return self._network

    def _check(self, reads: Sequence[_ReadOutcome]) -> _ReadOutcome:
        """Raise if a rank waited in vain. Usually the rank that it waited for is named before, by its own error or as
        absent."""
        for rank, read in enumerate(reads):
            if read.absent:
                absent = tuple(sorted(read.absent))
                who, others = self._channel.members.names([rank]), self._channel.members.names(absent)
                raise DeadlineError(
                    f"{who} timed out waiting for data from {others}.",
                    code="timeout.ranks",
                    action=f"Read the log of {others} for the cause; if it is only slow, raise timeout_s.",
                    rank=absent[0],
                    absent=absent,
                )
        return _ReadOutcome(())


def _rows(note: bytes) -> Int64s:
    return np.frombuffer(note, np.int64).reshape(-1, 3)


def _unpacked(needs: bytes) -> Int64s:
    return _rows(zlib.decompress(needs))
