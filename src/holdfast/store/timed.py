"""A store with a time limit: a hanging file server must not hang a training job.

No system call on a file accepts a deadline. So a helper thread makes every request, and the caller stops waiting when
the time is up. A helper whose request hangs is abandoned, with everything that the request may still touch. The file is
closed only after the request has ended, by a helper, because a descriptor that is closed earlier could already belong
to another file. The buffer is not used again (see `BufferPool.buffer`).
"""

from __future__ import annotations

import builtins
import math
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Protocol, Self, TypeVar, runtime_checkable

from holdfast.errors import StorageError
from holdfast.store.base import Bytes, FileReader, FileWriter, Store, StreamingReader
from holdfast.store.helpers import Helpers
from holdfast.store.retry_budget import RetryBudget, repeated

#: Grace period for closing a file after the deadline, and longest wait for a request that was given up before it.
_GRACE_S = 0.1
_LAST_S = 1.0
#: The share of the time in which a store repeats nothing any more, but for `_LAST_S` at most.
_MARGIN = 0.05
#: For how long a whole file is written again that a store could not take.
_REPEATS = RetryBudget(total_s=180.0, first_s=0.5, longest_s=10.0)

T = TypeVar("T")


@runtime_checkable
class LimitedStore(Protocol):
    """A store that repeats failed requests by itself, within the time of its caller."""

    def within(self, left_s: Callable[[], float]) -> Store:
        """The same store for a caller that has ``left_s`` seconds left: then it repeats nothing, and ends what it has
        begun."""


class TimedStore:
    """The store `storage` with one deadline for all requests: `timeout_s` from the construction of this object.

    A request without an answer by then raises `StorageError`, code ``storage.timeout``, which names the path. The
    request itself may end later and take effect. That does no harm: an object appears whole or not at all, and never
    replaces another. Use it in a ``with`` block, whose end does not wait.

    Passing every request to another thread costs a quarter of the speed where much data moves (measured: each request
    wakes two more sleeping cores). Callers pass such work as a whole to `limit.run`, and it makes direct requests.
    """

    def __init__(self, storage: Store, *, timeout_s: float, limit: TimeLimit | None = None) -> None:
        """With `limit`, the store shares the deadline of another one, which ends it."""
        self.location = storage.location
        # Mapped reads cannot be given a deadline.
        self.capabilities = replace(storage.capabilities, is_mappable=False)
        self.limit = limit or TimeLimit(timeout_s)
        self.untimed = storage.within(self.limit.left_s) if isinstance(storage, LimitedStore) else storage

    def resolved(self) -> str:
        """As `Store.resolved`."""
        return self._ask("look at", str(self.location), self.untimed.resolved)

    def path(self, key: str) -> str:
        """The full path of `key`."""
        return self.untimed.path(key)

    def read(self, key: str, *, start: int = 0, nbytes: int | None = None, limit: int | None = None) -> bytes:
        """As `Store.read`."""
        work = partial(self.untimed.read, key, start=start, nbytes=nbytes, limit=limit)
        return self._ask("read", self.path(key), work)

    def nbytes(self, key: str) -> int | None:
        """As `Store.nbytes`."""
        # A temporary name is a key here, and `path` would refuse it.
        return self._ask("look at", f"{self.location}/{key}", partial(self.untimed.nbytes, key))

    def list(self, folder: str, *, limit: int | None = None) -> builtins.list[str]:
        """As `Store.list`."""
        return self._ask("list", self._folder(folder), partial(self.untimed.list, folder, limit=limit))

    def create(self, key: str, data: bytes) -> bool:
        """As `Store.create`."""
        return self._ask("create", self.path(key), partial(self.untimed.create, key, data))

    def writer(self, key: str, *, nbytes: int) -> FileWriter:
        """As `Store.writer`."""
        begin = partial(self.untimed.writer, key, nbytes=nbytes)
        writer = self._ask("create", self.path(key), begin, too_late=lambda late: late.abort())
        return _TimedWriter(writer, _FileRequests(self.limit, self.path(key)))

    def reader(self, key: str) -> FileReader:
        """As `Store.reader`."""
        begin = partial(self.untimed.reader, key)
        reader = self._ask("open", self.path(key), begin, too_late=lambda late: late.close())
        return _TimedReader(reader, _FileRequests(self.limit, self.path(key)))

    def delete(self, key: str) -> bool:
        """As `Store.delete`."""
        # A temporary name is a key here, and `path` would refuse it.
        return self._ask("delete", f"{self.location}/{key}", partial(self.untimed.delete, key))

    def leftovers(self, folder: str, *, older_than_s: float = 0.0) -> builtins.list[str]:
        """As `Store.leftovers`."""
        call = partial(self.untimed.leftovers, folder, older_than_s=older_than_s)
        return self._ask("list", self._folder(folder), call)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.limit.close()

    def _folder(self, folder: str) -> str:
        return self.path(folder) if folder else str(self.location)

    def _ask(
        self, operation: str, path: str, call: Callable[[], T], *, too_late: Callable[[T], None] = lambda _: None
    ) -> T:
        request = self.limit.begin(call, operation, path)
        try:
            return self.limit.answer(request, operation, path)
        except BaseException:
            request.add_done_callback(lambda late: None if late.exception() else too_late(late.result()))
            raise


class _TimedWriter:
    """A `FileWriter` with a time limit."""

    def __init__(self, writer: FileWriter, file: _FileRequests) -> None:
        self._writer = writer
        self._file = file

    @property
    def alignment(self) -> int:
        return self._writer.alignment

    @property
    def in_order(self) -> bool:
        return self._writer.in_order

    def write_at(self, offset: int, *data: Bytes) -> None:
        self._file.ask("write", partial(self._writer.write_at, offset, *data))

    def publish(self, nbytes: int) -> None:
        self._file.ask("publish", partial(self._writer.publish, nbytes))

    def abort(self) -> None:
        self._file.drop(self._writer.abort)


class _TimedReader:
    """A `FileReader` with a time limit."""

    memory = None  # mapped reads cannot be given a deadline

    def __init__(self, reader: FileReader, file: _FileRequests) -> None:
        self.nbytes = reader.nbytes
        self._reader = reader
        self._file = file

    @property
    def alignment(self) -> int:
        return self._reader.alignment

    def read_at(self, offset: int, out: Bytes) -> None:
        self._file.ask("read", partial(self._reader.read_at, offset, out))

    def close(self) -> None:
        self._file.drop(self._reader.close)


class _DirectWriter:
    """A `FileWriter` that begins no request when the time is up."""

    def __init__(self, writer: FileWriter, check: Callable[[], None]) -> None:
        self._writer = writer
        self._check = check

    @property
    def alignment(self) -> int:
        return self._writer.alignment

    @property
    def in_order(self) -> bool:
        return self._writer.in_order

    def write_at(self, offset: int, *data: Bytes) -> None:
        self._check()
        self._writer.write_at(offset, *data)

    def publish(self, nbytes: int) -> None:
        self._check()
        self._writer.publish(nbytes)

    def abort(self) -> None:
        self._writer.abort()


class _DirectReader:
    """A `FileReader` that begins no request when the time is up."""

    def __init__(self, reader: FileReader, check: Callable[[], None]) -> None:
        self.nbytes = reader.nbytes
        self.memory = reader.memory
        self._reader = reader
        self._check = check

    @property
    def alignment(self) -> int:
        return self._reader.alignment

    def expect(self, start: int, stop: int) -> None:
        self._check()
        if isinstance(self._reader, StreamingReader):
            self._reader.expect(start, stop)

    def read_at(self, offset: int, out: Bytes) -> None:
        self._check()
        self._reader.read_at(offset, out)

    def close(self) -> None:
        self._reader.close()


class _FileRequests:
    """The requests for one open file."""

    def __init__(self, deadline: TimeLimit, path: str) -> None:
        self._deadline = deadline
        self._path = path
        self._abandoned: list[Future[None]] = []

    def ask(self, operation: str, call: Callable[[], None]) -> None:
        request = self._deadline.begin(call, operation, self._path)
        try:
            self._deadline.answer(request, operation, self._path)
        except BaseException:
            self._abandoned.append(request)
            raise

    def drop(self, call: Callable[[], None]) -> None:
        """Make the file's last call once its abandoned requests have ended. Never raises for the time limit."""

        def last() -> None:
            wait(self._abandoned)
            call()

        request = self._deadline.start(last)
        wait([request], timeout=0 if any(not each.done() for each in self._abandoned) else self._deadline.patience_s())


class TimeLimit:
    """The common deadline of requests to any number of stores, and the helpers that make them. Use it in a ``with``
    block, whose end does not wait."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._end_s = time.monotonic() + timeout_s
        self._helpers = Helpers()
        self._given_up = False

    def begin(self, call: Callable[[], T], operation: str, path: str) -> Future[T]:
        """Let a helper make `call`. Raises `StorageError` where the time is up already."""
        self.check(operation, path)
        return self.start(call)

    def check(self, operation: str, path: str) -> None:
        """Raise `StorageError` where the time is up."""
        if self._given_up or time.monotonic() > self._end_s:
            raise self._late(operation, path)

    def run(
        self,
        operation: str,
        path: str,
        call: Callable[[], T],
        *,
        stop: Callable[[], None] = lambda: None,
        meanwhile: Callable[[], None] = lambda: None,
        every_s: float = math.inf,
    ) -> T:
        """Let a helper make `call`, which does all of `operation` on `path`, and wait for it as for one request.

        When the time is up, or the caller is interrupted, no further request begins. So `call` ends, and cleans up, as
        soon as its hanging request has ended. Until then it may read from all memory that it was given. `stop` is
        called first; after it has returned, `call` must not write to any memory that the caller continues to use.
        `meanwhile` is called ``every_s`` while this waits; if it raises, the caller waits no longer.
        """
        request = self.begin(call, operation, path)
        try:
            while every_s < self._end_s - time.monotonic() and not wait([request], timeout=every_s).done:
                meanwhile()
            return self.answer(request, operation, path)
        finally:
            if not request.done():
                self.give_up()
                stop()
                wait([request], timeout=self.patience_s())

    def repeated(self, work: Callable[[], T]) -> T:
        """The result of `work`, for work inside `run`: after a failure that may pass, it is done again from its
        beginning, within `_REPEATS` and the time that is left."""
        return repeated(work, lambda: _REPEATS, is_passing=_may_pass, left_s=self.left_s)

    def direct_writer(self, store: Store, key: str, *, nbytes: int) -> FileWriter:
        """As `Store.writer`, for work inside `run`: the calling thread makes the requests itself."""
        check = partial(self.check, "write", store.path(key))
        check()
        return _DirectWriter(untimed(store).writer(key, nbytes=nbytes), check)

    def direct_reader(self, store: Store, key: str) -> FileReader:
        """As `Store.reader`, for work inside `run`: the calling thread makes the requests itself."""
        check = partial(self.check, "read", store.path(key))
        check()
        return _DirectReader(untimed(store).reader(key), check)

    def start(self, call: Callable[[], T]) -> Future[T]:
        """Let a helper make `call`, also after the deadline."""
        return self._helpers.start(call)

    def answer(self, request: Future[T], operation: str, path: str) -> T:
        """Wait for `request`; return or raise what its call does. Raises `StorageError` when the time is up."""
        try:
            return request.result(max(self._end_s - time.monotonic(), 0))
        except TimeoutError as error:
            if request.done():  # meanwhile, or with an error of this kind
                return request.result()
            raise self._late(operation, path) from error

    def left_s(self) -> float:
        """Seconds in which a store may still repeat a failed request: a little less than are left, because the store's
        own error says more than that the time is up."""
        return self._end_s - min(_MARGIN * self._timeout_s, _LAST_S) - time.monotonic()

    def give_up(self) -> None:
        """Refuse all further requests, and shorten the deadline to `_LAST_S` from now."""
        self._given_up = True
        self._end_s = min(self._end_s, time.monotonic() + _LAST_S)

    def patience_s(self) -> float:
        """Longest time in seconds to wait for a call that must not fail for the time limit, such as a close."""
        return max(self._end_s - time.monotonic(), _GRACE_S)

    def close(self) -> None:
        """End each helper as soon as it has no work."""
        self._helpers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _late(self, operation: str, path: str) -> StorageError:
        return StorageError(
            f"cannot {operation} {path}: the store did not answer within {round(self._timeout_s, 2):g} s.",
            code="storage.timeout",
            action="Check the file server, the mount and the disk; if they are only slow, raise timeout_s.",
            path=path,
            retryable=True,
        )


def _may_pass(error: Exception) -> bool:
    return isinstance(error, StorageError) and error.retryable


def untimed(store: Store) -> Store:
    """The store whose requests the calling thread makes itself."""
    return store.untimed if isinstance(store, TimedStore) else store


def timed_alike(store: Store, other: Store) -> Store:
    """`store` under the time limit of `other`, where that has one."""
    return TimedStore(store, timeout_s=0, limit=other.limit) if isinstance(other, TimedStore) else store
