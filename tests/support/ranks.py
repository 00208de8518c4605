"""Runs test functions on several processes at once, as ranks of a job or on their own.

The processes are kept warm between calls: a fork server imports torch once, and forks a worker the first time its
index is needed and again after it died. Each call starts on every worker with a fresh process group (or none), a seeded
random generator, the test's own warning filters, and the environment and directory that the worker had at its start.
Module globals keep their values between calls, as they do between tests in one process.

A worker never outlives the tests: it is killed at exit, and by the kernel when the fork server is gone.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import signal
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait
from typing import TypeVar, TypeVarTuple, cast

import torch.distributed as dist

from tests.support.rank_worker import HOST, Outcome, Task, serve

MAX_WORKERS = 8
START_TIMEOUT_S = 60.0
# Grace period for the other ranks once one has failed: most of them are then blocked on it for ever.
GRACE_S = 10.0
# Time for a rank that has finished to leave its process group: a moment, but not on a machine that others use too.
LEAVE_TIMEOUT_S = 60.0

R = TypeVar("R")
Ts = TypeVarTuple("Ts")

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch.distributed.fsdp", "torch.distributed.tensor", "pytest", "tests.support.preloaded"]
)


class RankDiedError(Exception):
    """The process of a rank ended during the call; the error says how."""


class RankHungError(Exception):
    """A rank was still running after its time, and was killed; the error says where each of its threads was."""


class RanksFailedError(ExceptionGroup[Exception]):
    """Some ranks failed. Holds their exceptions, first failure first, each with a note of its rank and traceback.

    ``by_rank`` has the same exceptions, ``results`` what the ranks returned that did not fail.
    """

    by_rank: dict[int, Exception]
    results: dict[int, object]

    @staticmethod
    def of(by_rank: dict[int, Exception], results: dict[int, object]) -> RanksFailedError:
        """Return the group for the failures and results of one call."""
        causes = "; ".join(f"rank {rank}: {type(error).__name__}: {error}" for rank, error in by_rank.items())
        count = f"{len(by_rank)} of {len(by_rank) + len(results)} ranks failed"
        group = RanksFailedError(f"{count}: {causes}", [*by_rank.values()])
        group.by_rank = by_rank
        group.results = results
        return group


def run_ranks(world_size: int, function: Callable[[*Ts], R], *args: *Ts, timeout_s: float = 60.0) -> list[R]:
    """Call a top-level function on every rank of a fresh gloo process group; return the results by rank.

    Raises `RanksFailedError` when a rank raises, dies, or still runs after ``timeout_s`` seconds (it is killed then).
    """
    # The store lives in this process and not on rank 0, so that it survives the death of any rank.
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    calls = [pickle.dumps((function, args))] * world_size
    return cast("list[R]", _run(calls, store.port, timeout_s))


def run_processes(
    num_processes: int, function: Callable[[int, *Ts], R], *args: *Ts, timeout_s: float = 60.0
) -> list[R]:
    """Call a top-level function with its process's index and ``args``, on processes without a process group.

    Raises what `run_ranks` raises.
    """
    calls = [pickle.dumps((function, (index, *args))) for index in range(num_processes)]
    return cast("list[R]", _run(calls, None, timeout_s))


class _Worker:
    """One warm process. For each task it reports that it is idle, gets the task, sends the outcome and is released."""

    def __init__(self, index: int) -> None:
        self.connection, theirs = _context.Pipe()
        self._stacks, their_stacks = _context.Pipe(duplex=False)
        self._process = _context.Process(target=serve, args=(theirs, their_stacks), name=f"rank-{index}", daemon=True)
        self._process.start()
        theirs.close()  # else the worker's death would not end the stream
        their_stacks.close()

    def is_idle(self) -> bool:
        """Tell a live worker, silent before its next task, from a dead one, whose stream has ended."""
        return not self.connection.poll()

    def send(self, message: bytes) -> None:
        # If the worker is gone, `receive` finds that, with its exit status.
        with suppress(BrokenPipeError):
            self.connection.send_bytes(message)

    def receive(self, timeout_s: float) -> bytes:
        """Return the next message. Raises `RankHungError` if none comes in time, and `RankDiedError` if the worker
        ended."""
        try:
            if self.connection.poll(timeout_s):
                return self.connection.recv_bytes()
        except (EOFError, ConnectionError):
            raise RankDiedError(f"{self._ending()}\n{self._read_stacks()}".rstrip()) from None
        os.kill(cast("int", self._process.pid), signal.SIGUSR1)
        raise RankHungError(f"did not answer in time and was killed. It was at\n{self._read_stacks()}")

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()
        self.connection.close()
        self._stacks.close()

    def _ending(self) -> str:
        self._process.join(GRACE_S)
        status = self._process.exitcode
        if status is not None and status < 0:
            return f"killed by {signal.Signals(-status).name}"
        return f"exited with status {status}"

    def _read_stacks(self) -> str:
        text = b""
        while self._stacks.poll(0.5) and (chunk := os.read(self._stacks.fileno(), 1 << 16)):
            text += chunk
        return text.decode(errors="replace")


_pool: dict[int, _Worker] = {}


@atexit.register
def kill_workers() -> None:
    """Kill the warm processes. The next call starts new ones, without the threads that torch left in these."""
    while _pool:
        _pool.popitem()[1].kill()


def _run(calls: list[bytes], store_port: int | None, timeout_s: float) -> list[object]:
    if not 1 <= len(calls) <= MAX_WORKERS:
        raise ValueError(f"{len(calls)} processes asked for; ask for 1 to {MAX_WORKERS}")
    workers = _warm_workers(len(calls))
    try:
        for rank, call in enumerate(calls):
            task = Task(call, rank, len(calls), store_port, timeout_s, warnings.filters)
            workers[rank].send(pickle.dumps(task))
        results, failures = _collect(workers, timeout_s)
    except BaseException:  # interrupted: the state of the workers is unknown
        for rank, worker in workers.items():
            del _pool[rank]
            worker.kill()
        raise
    for rank, error in failures.items():
        if isinstance(error, RankDiedError | RankHungError):
            _pool.pop(rank).kill()
    if failures:
        raise RanksFailedError.of(failures, results)
    return [results[rank] for rank in range(len(calls))]


def _warm_workers(count: int) -> dict[int, _Worker]:
    fresh = []
    for rank in range(count):
        if rank in _pool and not _pool[rank].is_idle():
            _pool.pop(rank).kill()
        if rank not in _pool:
            _pool[rank] = _Worker(rank)
            fresh.append(rank)
    for rank in fresh:
        try:
            _pool[rank].receive(START_TIMEOUT_S)
        except BaseException:
            kill_workers()
            raise
    return {rank: _pool[rank] for rank in range(count)}


def _collect(workers: dict[int, _Worker], timeout_s: float) -> tuple[dict[int, object], dict[int, Exception]]:
    """Await every rank's outcome; return results and failures by rank, in the order in which they came."""
    results: dict[int, object] = {}
    failures: dict[int, Exception] = {}
    unreleased: list[_Worker] = []
    running = dict(workers)
    deadline = time.monotonic() + timeout_s
    while running:
        ready = wait([worker.connection for worker in running.values()], max(0.0, deadline - time.monotonic()))
        # After the deadline no rank is ready: then ask every remaining rank where it is, before killing any.
        for rank in [rank for rank, worker in running.items() if not ready or worker.connection in ready]:
            worker = running.pop(rank)
            _take(worker, rank, results, failures)
            unreleased.append(worker)
        if failures:
            deadline = min(deadline, time.monotonic() + GRACE_S)
        # A rank keeps its process group as long as other ranks may need it to finish, but not once one has failed:
        # then the end of its connections wakes the ranks that wait for it.
        if failures or not running:
            while unreleased:
                unreleased.pop().send(b"")
    for rank, worker in workers.items():
        if not isinstance(failures.get(rank), RankDiedError | RankHungError):
            try:
                worker.receive(LEAVE_TIMEOUT_S)
            except (RankDiedError, RankHungError) as error:
                error.add_note(f"rank {rank} had finished and was leaving its process group")
                results.pop(rank, None)
                failures[rank] = error
    return results, failures


def _take(worker: _Worker, rank: int, results: dict[int, object], failures: dict[int, Exception]) -> None:
    try:
        outcome: Outcome = pickle.loads(worker.receive(0.0))
    except (RankDiedError, RankHungError) as error:
        error.add_note(f"rank {rank}")
        failures[rank] = error
        return
    value = pickle.loads(outcome.payload)
    if outcome.succeeded:
        results[rank] = value
    else:
        value.add_note(f"rank {rank}:\n{outcome.traceback}")
        failures[rank] = value
