"""Ranks that read together: what several ranks of one node need is read from storage by one of them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

import msgspec
import numpy as np

from holdfast.control.channel import Channel, Deadline
from holdfast.errors import DeadlineError, StorageError
from holdfast.geometry import Int64s
from holdfast.phases import attempt
from holdfast.plan.exchange import Chunks, divide_reads
from holdfast.plan.load import Want
from holdfast.run.checkpoint import Checkpoint, Targets
from holdfast.run.sharing import SharedReading
from holdfast.storage.base import Bytes
from holdfast.transfer.buffers import BUFFER_NBYTES, NUM_THREADS, pipeline_pool
from holdfast.transfer.neighbours import Neighbour, NeighbourGone, Neighbours, SharedMemory, node_id
from holdfast.transfer.reader import ReadJob
from holdfast.transfer.timed import TimedStorage

#: Default size of the memory through which a rank reads for others of its node.
MEMORY_NBYTES = 64 << 20


class _Nodes(msgspec.Struct, frozen=True, array_like=True):
    """Who is on one node: runs of ranks, as the number of a node and a count, and a secret of this operation."""

    token: bytes
    runs: tuple[tuple[int, int], ...]

    @staticmethod
    def answer(ids: Sequence[bytes]) -> bytes:
        """The nodes of all ranks, whose ids are in rank order, as a message."""
        numbers = {node: number for number, node in enumerate(dict.fromkeys(ids))}
        runs = tuple((numbers[node], sum(1 for _ in run)) for node, run in groupby(ids))
        return msgspec.msgpack.encode(_Nodes(secrets.token_bytes(16), runs))

    def beside(self, rank: int) -> tuple[list[int], int, int]:
        """The ranks on the node of `rank`, the number of that node, and how many nodes there are."""
        nodes = [node for node, count in self.runs for _ in range(count)]
        return [other for other, node in enumerate(nodes) if node == nodes[rank]], nodes[rank], max(nodes) + 1


class _Read(msgspec.Struct, frozen=True, array_like=True):
    """How one rank's reading ended: the ranks that it waited for in vain, where it did."""

    absent: tuple[int, ...]


class Together:
    """One load's reading on one rank. All ranks of the channel make the same calls."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        storage: TimedStorage,
        channel: Channel,
        deadline: Deadline,
        *,
        memory_nbytes: int = MEMORY_NBYTES,
    ) -> None:
        self._checkpoint = checkpoint
        self._storage = storage
        self._channel = channel
        self._deadline = deadline
        self._num_buffers = max(memory_nbytes // BUFFER_NBYTES, NUM_THREADS)
        self._jobs: dict[int, ReadJob] = {}
        self._needs = np.zeros((0, 3), np.int64)
        self._shared: SharedReading | None = None

    def read(self, plan: Callable[[], tuple[Sequence[Want], Targets]], *, verify: bool) -> int:
        """Deliver what `plan` wants to its targets, and help the others of the node; returns the bytes that this rank
        read from storage when all ranks have all they want.

        What several ranks of a node need is read by one of them, into memory that it shares with the others.

        Raises:
            CorruptError: bytes are missing or altered; names the file and the tensors.
            StorageError: the store failed, or did not answer in time.
            DeadlineError: a rank died, or did not go on.
        """
        prepared = attempt(lambda: self._prepare(*plan(), verify))
        nodes = self._channel.exchange("share", prepared, _Nodes.answer, self._deadline)
        done = attempt(lambda: self._read(msgspec.msgpack.decode(nodes, type=_Nodes)))
        self._channel.exchange("read", done, self._check, self._deadline)
        assert self._shared is not None
        return self._shared.bytes_read

    def _prepare(self, wants: Sequence[Want], targets: Targets, verify: bool) -> bytes:
        open_reader = self._storage.direct_reader
        self._jobs = dict(self._checkpoint.jobs(wants, targets, verify=verify, open_reader=open_reader))
        ranges = [(file, job.ranges()) for file, job in sorted(self._jobs.items())]
        self._needs = np.concatenate([self._needs, *(np.insert(each, 0, file, axis=1) for file, each in ranges)])
        return node_id()

    def _read(self, nodes: _Nodes) -> bytes:
        try:
            self._storage.run("read", self._checkpoint.folder, lambda: self._meet(nodes), stop=self._stop)
        except NeighbourGone as gone:
            return msgspec.msgpack.encode(_Read(gone.ranks))
        except StorageError as error:
            absent = () if self._shared is None else self._shared.awaited()
            if error.code != "storage.timeout" or not absent:
                raise
            return msgspec.msgpack.encode(_Read(absent))
        return msgspec.msgpack.encode(_Read(()))

    def _stop(self) -> None:
        if self._shared is not None:
            self._shared.stop()

    def _meet(self, nodes: _Nodes) -> None:
        """Find the neighbours, learn what they need, and do what falls to this rank."""
        rank = self._channel.rank
        ranks, node, num_nodes = nodes.beside(rank)
        first_file = self._checkpoint.manifest.body.num_files * node // num_nodes
        if len(ranks) == 1:
            with pipeline_pool() as pool, pool.all_buffers() as buffers:
                chunks = divide_reads({rank: self._needs}, chunk_nbytes=BUFFER_NBYTES, first_file=first_file)
                self._serve(chunks, {}, buffers)
            return
        with (
            SharedMemory(self._num_buffers * BUFFER_NBYTES, self._needs.tobytes()) as shared,
            Neighbours(nodes.token, rank) as neighbours,
        ):
            neighbours.connect(ranks, shared, end_s=time.monotonic() + self._deadline.remaining_s() / 2)
            needs = {other: _rows(each.note) for other, each in neighbours.others.items()}
            chunks = divide_reads({rank: self._needs, **needs}, chunk_nbytes=BUFFER_NBYTES, first_file=first_file)
            buffers = [shared.data[at : at + BUFFER_NBYTES] for at in range(0, shared.data_nbytes, BUFFER_NBYTES)]
            self._serve(chunks, neighbours.others, buffers)

    def _serve(self, chunks: Chunks, others: Mapping[int, Neighbour], buffers: Sequence[Bytes]) -> None:
        corrupt_block = self._checkpoint.corrupt_block
        self._shared = SharedReading(self._jobs, chunks, self._channel.rank, others, buffers, corrupt_block)
        self._shared.run()

    def _check(self, payloads: Sequence[bytes]) -> bytes:
        """That no rank was left waiting. Who left it is usually heard of before, as absent or by its own error."""
        for rank, payload in enumerate(payloads):
            absent = msgspec.msgpack.decode(payload, type=_Read).absent
            if absent:
                names = ", ".join(map(str, absent))
                raise DeadlineError(
                    f"rank {rank} waited for what rank {names} reads for it, and it did not come.",
                    code="timeout.ranks",
                    action=f"Look at the log of rank {names}; where it is only slow, raise timeout_s.",
                    rank=absent[0],
                    absent=absent,
                )
        return b""


def _rows(note: bytes) -> Int64s:
    return np.frombuffer(note, np.int64).reshape(-1, 3)
