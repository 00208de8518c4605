"""Writers of objects: small ones in one conditional request, large ones streamed in parts.

A streamed object is one multipart upload by `obstore.put_async`, which takes its bytes in order from an iterator and
runs in a thread of the writer. The parts are views of the caller's own memory where a write is large, so nothing is
copied; `write_at` returns when obstore has released them. Smaller writes are collected in a buffer for each part.

obstore repeats the requests of an upload by itself. When the time of the caller is up, the upload is given up: first in
order, so that the server forgets its parts; and where the server does not answer, by cancelling all of its requests.
"""

from __future__ import annotations

import asyncio
import atexit
import math
import os
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from contextvars import Context
from itertools import count
from typing import Final, Self, TypeVarTuple

import numpy as np
import obstore

from holdfast.store.base import Bytes
from holdfast.store.object_client import Bucket, ObjectClient
from holdfast.store.object_errors import OBSTORE_ERRORS, error_for, reported
from holdfast.store.posix_errors import exists
from holdfast.store.rate_limit import RequestPace

Ts = TypeVarTuple("Ts")

#: S3 allows 10,000 parts; fewer leave room for objects that grow a little.
_MAX_PARTS: Final = 9_000
PART_NBYTES: Final = 16 << 20
#: Bound for the parts of one object that are under way at a time.
_IN_FLIGHT_NBYTES: Final = 128 << 20
#: Time for an upload to end in order after it was given up; then it is cancelled.
_GRACE_S: Final = 3.0
#: Longest wait for an upload that was given up.
_ABORT_S: Final = 10.0
#: Longest wait for obstore's threads to leave Python, and the pause at the end of a process for their last steps there.
_LEAVING_S: Final = 1.0
_LEFT_S: Final = 0.03
#: Interval of looks at whether an upload is to be given up.
_LOOK_S: Final = 0.2
#: The name of an attribute by which a writer recognises its object. Azure allows only letters and digits.
_ATTRIBUTE: Final = "holdfastupload"


class UploadAbortedError(Exception):
    """The upload was aborted while a thread was in `write_at`; whoever aborted it knows why."""


class WholeObjectWriter:
    """A `FileWriter` of an object of a few megabytes, which appears by one conditional request: `create` makes it, or
    returns False where its key is taken."""

    alignment = 1
    in_order = False

    def __init__(self, path: str, create: Callable[[Bytes], bool], *, nbytes: int) -> None:
        self._path = path
        self._create = create
        self._data = np.zeros(nbytes, np.uint8)

    def write_at(self, offset: int, *data: Bytes) -> None:
        """As `FileWriter.write_at`."""
        for each in data:
            self._data[offset : offset + len(each)] = each
            offset += len(each)

    def publish(self, nbytes: int) -> None:
        """As `FileWriter.publish`."""
        if not self._create(self._data[:nbytes]):
            raise exists(self._path)

    def abort(self) -> None:
        """As `FileWriter.abort`."""
        self._data = np.zeros(0, np.uint8)


class _Arrays:
    """Arrays of bytes, taken from the first byte to the last."""

    def __init__(self, arrays: Iterable[Bytes]) -> None:
        self._left = deque(each for each in arrays if len(each))

    def take(self, nbytes: int) -> Iterator[Bytes]:
        """The next `nbytes` bytes, in as many pieces as they lie in."""
        while nbytes:
            first = self._left.popleft()
            if len(first) > nbytes:
                self._left.appendleft(first[nbytes:])
            yield first[:nbytes]
            nbytes -= min(nbytes, len(first))


class StreamedObjectWriter:
    """A `FileWriter` of a large object, which must be written in order: a `write_at` waits until all bytes before it
    were written. So of concurrent writes, the first must be under way. `abort` makes those that wait raise.

    Extra memory is one part for each part under way, and only where writes are smaller than half a part.
    """

    alignment = 1
    in_order = True

    def __init__(
        self,
        client: ObjectClient,
        key: str,
        path: str,
        *,
        nbytes: int,
        part_nbytes: int = PART_NBYTES,
        left_s: Callable[[], float] = lambda: math.inf,
        pace: RequestPace,
    ) -> None:
        """``left_s`` is the time that the caller has left: the upload is given up when it is over. Parts are sent at
        this `pace`."""
        self._client, self._key, self._path = client, key, path
        self._left_s = left_s
        self._pace = pace
        self._part_nbytes = max(part_nbytes, -(-nbytes // _MAX_PARTS))
        self._num_parts = min(max(_IN_FLIGHT_NBYTES // self._part_nbytes, 2), 8)
        self._token = secrets.token_hex(16)
        self._changed = threading.Condition()
        self._next = 0
        #: Pieces that obstore has not taken yet; the pieces of each part add up to exactly one part.
        self._pieces: deque[memoryview] = deque()
        #: The buffer that holds the first `_num_kept` bytes of the next part.
        self._kept: Bytes | None = None
        self._num_kept = 0
        self._spare: list[Bytes] = []
        self._num_buffers = 0
        #: Weak references to pieces that obstore may still read, by number.
        self._held: dict[int, weakref.ref[memoryview]] = {}
        self._numbers = count()
        self._is_complete = False
        self._is_aborted = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        #: The event loop of the thread while it runs, and the event that wakes it.
        self._loop: _UploadLoop | None = None
        self._news = asyncio.Event()

    def write_at(self, offset: int, *data: Bytes) -> None:
        """As `FileWriter.write_at`."""
        mine: list[int] = []
        nbytes = sum(map(len, data))
        arrays = _Arrays(data)
        with self._changed:
            self._wait(lambda: self._next == offset)
            self._start()
            taken = 0
            while taken < nbytes:
                taken += self._take(arrays, nbytes - taken, mine)
            self._next = offset + nbytes
            self._tell()
            self._wait(lambda: self._held.keys().isdisjoint(mine))

    def publish(self, nbytes: int) -> None:
        """As `FileWriter.publish`. Only the bytes that fill no whole part can be cut off."""
        surplus = self._next - nbytes
        if not 0 <= surplus <= self._num_kept:
            raise ValueError(f"{self._next} bytes were written: an object of {nbytes} cannot be made of them")
        with reported("publish", self._path):
            if self._found() is not None:
                raise exists(self._path)
        with self._changed:
            self._start()
            self._num_kept -= surplus
            self._push_kept()
            self._is_complete = True
            self._tell()
        assert self._thread is not None
        self._thread.join()
        if self._error is not None and not self._was_published():
            raise self._failure()

    def abort(self) -> None:
        """As `FileWriter.abort`. Waits some seconds at most until obstore has given up the upload."""
        with self._changed:
            self._is_aborted = True
            self._pieces.clear()
            self._tell()
        if self._thread is not None and os.getpid() == self._client.pid:
            self._thread.join(_ABORT_S)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> memoryview:
        """The next piece, when the pace allows it; obstore asks for it."""
        nbytes = await self._next_nbytes()
        begins_s = time.monotonic() + self._pace.delay_s(nbytes=nbytes, requests=nbytes / self._part_nbytes)
        while (rest_s := begins_s - time.monotonic()) > 0 and not self._is_aborted:  # noqa: ASYNC110
            await asyncio.sleep(min(rest_s, _LOOK_S))  # an abort does not wake this thread
        with self._changed:
            if self._is_aborted:
                raise UploadAbortedError
            return self._pieces.popleft()

    async def _next_nbytes(self) -> int:
        """The size of the next piece, once it is there."""
        while True:
            with self._changed:
                if self._is_aborted:
                    raise UploadAbortedError
                if self._pieces:
                    return len(self._pieces[0])
                if self._is_complete:
                    raise StopAsyncIteration
                self._news.clear()
            await self._news.wait()

    def _take(self, arrays: _Arrays, nbytes: int, mine: list[int]) -> int:
        """Take the first of `nbytes` bytes: whole parts and large ends of parts as views, the rest as a copy. Returns
        how many."""
        room = self._part_nbytes - self._num_kept
        if nbytes >= room and 2 * room >= self._part_nbytes:
            self._push_kept()
            mine += (self._push(piece.data, None) for piece in arrays.take(room))
            return room
        taken = min(room, nbytes)
        if self._kept is None:
            self._wait(lambda: self._spare or self._num_buffers <= self._num_parts)
            self._kept = self._spare.pop() if self._spare else self._new_buffer()
        for piece in arrays.take(taken):
            self._kept[self._num_kept : self._num_kept + len(piece)] = piece
            self._num_kept += len(piece)
        if self._num_kept == self._part_nbytes:
            self._push_kept()
        return taken

    def _new_buffer(self) -> Bytes:
        self._num_buffers += 1
        return np.empty(self._part_nbytes, np.uint8)

    def _push_kept(self) -> None:
        if self._kept is not None:
            if self._num_kept:
                self._push(self._kept[: self._num_kept].data, self._kept)
            else:
                self._spare.append(self._kept)
        self._kept, self._num_kept = None, 0

    def _push(self, piece: memoryview, buffer: Bytes | None) -> int:
        """Give `piece` to obstore, and return its number. When obstore has released it, its `buffer` is used again."""
        number = next(self._numbers)

        def released(_: weakref.ref[memoryview]) -> None:
            with self._changed:
                del self._held[number]
                if buffer is not None:
                    self._spare.append(buffer)
                self._changed.notify_all()

        self._held[number] = weakref.ref(piece, released)
        self._pieces.append(piece)
        self._tell()
        return number

    def _tell(self) -> None:
        """With the lock: wake all threads that wait for a change, and the upload."""
        self._changed.notify_all()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._news.set)

    def _wait(self, is_so: Callable[[], object]) -> None:
        """Wait, with the lock, until `is_so`. Raises if the upload has failed or was aborted."""
        self._changed.wait_for(lambda: is_so() or self._is_aborted or self._error is not None)
        if self._error is not None and not self._is_aborted:
            raise self._failure()
        if self._is_aborted:
            raise UploadAbortedError

    def _start(self) -> None:
        if self._thread is None:
            bucket = self._client.data(self._left_s())  # first, because it raises in a forked process
            self._pace.delay_s(requests=2)  # to begin the upload, and to complete it

            def upload() -> None:
                try:
                    loop = _UploadLoop()
                    with asyncio.Runner(loop_factory=lambda: loop) as runner:
                        self._loop = loop
                        runner.run(self._upload(bucket, loop))
                except BaseException as error:  # noqa: BLE001 - raised to whoever writes
                    self._fail(error)

            self._thread = threading.Thread(target=upload, name="holdfast-upload", daemon=True)
            _uploads.add(self)
            self._thread.start()

    async def _upload(self, bucket: Bucket, loop: _UploadLoop) -> None:
        """Upload the object, until it is there, or given up, and obstore's threads have left Python."""
        try:
            upload = obstore.put_async(
                bucket,
                self._key,
                self,
                chunk_size=self._part_nbytes,
                max_concurrency=self._num_parts,
                attributes={_ATTRIBUTE: self._token},
            )
            await self._guarded(asyncio.ensure_future(upload))
        finally:
            ends_s = time.monotonic() + _LEAVING_S
            while (loop.callers or (self._is_aborted and self._held)) and time.monotonic() < ends_s:  # noqa: ASYNC110
                await asyncio.sleep(_LEAVING_S / 1000)  # they tell nobody that they have left
            with self._changed:
                self._loop = None

    async def _guarded(self, upload: asyncio.Future[obstore.PutResult]) -> None:
        """Wait for `upload`. Give it up when the time is over or somebody has aborted it, and cancel it where it does
        not end then."""
        ends_s = math.inf
        while not (await asyncio.wait({upload}, timeout=_LOOK_S))[0]:
            if math.isinf(ends_s) and (self._is_aborted or self._left_s() <= 0):
                ends_s = time.monotonic() + _GRACE_S
                with self._changed:
                    self._is_aborted = True
                    self._pieces.clear()
                    self._tell()
            if time.monotonic() > ends_s:
                upload.cancel()
        if upload.cancelled():
            raise UploadAbortedError
        upload.result()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = error
            self._pieces.clear()
            self._tell()

    def _failure(self) -> BaseException:
        assert self._error is not None
        if isinstance(self._error, OBSTORE_ERRORS):
            return error_for("write", self._path, self._error)
        return self._error

    def _found(self) -> str | None:
        """The token of the writer that published the object; None where there is no object."""
        try:
            options: obstore.GetOptions = {"head": True}
            get = self._pace.paced(lambda: obstore.get(self._client.records, self._key, options=options), self._left_s)
            found = self._client.asked(get, self._left_s)
        except FileNotFoundError:
            return None
        return str(found.attributes.get(_ATTRIBUTE, ""))

    def _was_published(self) -> bool:
        """Whether the object is there in spite of an error: the answer to its last request may have been lost."""
        with suppress(*OBSTORE_ERRORS):
            return self._found() == self._token
        return False


class _UploadLoop(asyncio.SelectorEventLoop):
    """The event loop of one upload. `callers` has an entry for each thread that is waking it: one of obstore's that
    comes back from there into a Python that is gone ends the process with SIGABRT."""

    def __init__(self) -> None:
        self.callers: deque[None] = deque()
        super().__init__()

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """As for any loop."""
        self.callers.append(None)
        try:
            return super().call_soon_threadsafe(callback, *args, context=context)
        finally:
            self.callers.pop()


_uploads: weakref.WeakSet[StreamedObjectWriter] = weakref.WeakSet()


def _end_uploads() -> None:
    """Abort what is under way when the process ends: threads of obstore must not wait for a Python that is gone."""
    if writers := list(_uploads):
        for writer in writers:
            writer.abort()
        time.sleep(_LEFT_S)


atexit.register(_end_uploads)
