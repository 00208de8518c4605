"""The bounds of a pipeline: a fixed amount of buffer memory and a fixed number of threads."""

from __future__ import annotations

import mmap
import queue
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock, Thread
from types import TracebackType
from typing import NamedTuple, Self

from holdfast.format.container import BLOCK_NBYTES
from holdfast.io.pages import anonymous
from holdfast.store.base import Bytes, FileWriter

#: Size of one chunk in a pipeline. Buffers of this size stay in the processor's cache from the device to the digest and
#: the copy; buffers of 8 MiB took a fifth longer.
BUFFER_NBYTES = 2 * BLOCK_NBYTES
#: Size of one write to a writer that writes in order: it divides a write into requests, several at a time.
IN_ORDER_NBYTES = 64 << 20
#: Number of threads of a pipeline: while one copies and hashes, the others wait for the device.
NUM_THREADS = 3


class BufferPool:
    """`nbytes` of memory as page-aligned buffers of `buffer_nbytes` (a multiple of 1 MiB), shared by threads.

    The operating system gives the memory as buffers are first used; `close` returns it.
    """

    def __init__(self, nbytes: int, *, buffer_nbytes: int = BUFFER_NBYTES) -> None:
        if buffer_nbytes <= 0 or buffer_nbytes % BLOCK_NBYTES:
            raise ValueError(f"buffer_nbytes is {buffer_nbytes}: it must be a positive multiple of {BLOCK_NBYTES}")
        if nbytes < buffer_nbytes:
            raise ValueError(f"a pool of {nbytes} bytes has no room for one buffer of {buffer_nbytes}")
        self.buffer_nbytes = buffer_nbytes
        self.num_buffers = nbytes // buffer_nbytes
        self._memory = anonymous(self.num_buffers * buffer_nbytes)
        # Last in, first out: few threads touch few buffers, and those stay in the cache.
        self._free: queue.LifoQueue[Bytes] = queue.LifoQueue()
        for start in reversed(range(0, len(self._memory.data), buffer_nbytes)):
            self._free.put(self._memory.data[start : start + buffer_nbytes])

    @contextmanager
    def buffer(self) -> Iterator[Bytes]:
        """A buffer for the duration of a ``with`` block, with arbitrary content. Waits while all buffers are taken.

        After a block that ends with an error the pool replaces the buffer by new memory: a store that did not answer
        in time may still read from the old buffer, or write to it.
        """
        buffer = self._free.get()
        try:
            yield buffer
        except BaseException:
            buffer = anonymous(self.buffer_nbytes).data
            raise
        finally:
            self._free.put(buffer)

    @contextmanager
    def buffers(self, number: int) -> Iterator[list[Bytes]]:
        """Lend `number` buffers, or all if there are less, for the duration of a ``with`` block, as `buffer` lends one.

        Callers that share a pool and take more than one buffer each may wait for each other for ever.
        """
        with ExitStack() as stack:
            yield [stack.enter_context(self.buffer()) for _ in range(min(number, self.num_buffers))]

    def close(self) -> None:
        """Return the memory to the operating system. The caller must have given back all buffers."""
        assert self._free.qsize() == self.num_buffers, "a buffer is still in use"
        # Tracebacks may hold views of buffers, so the mapping itself cannot be closed here.
        self._memory.mapping.madvise(mmap.MADV_DONTNEED)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def pipeline_pool() -> BufferPool:
    """A pool for one pipeline: one buffer per thread, as many as `write_file` and `read_files` use by default."""
    return BufferPool(NUM_THREADS * BUFFER_NBYTES)


def writing_pool(writer: FileWriter) -> BufferPool:
    """A pool for a `write_file` to `writer`. What is written in order is divided into requests by the writer itself, so
    its chunks are large, and only what is copied takes memory."""
    return BufferPool(2 * IN_ORDER_NBYTES, buffer_nbytes=IN_ORDER_NBYTES) if writer.in_order else pipeline_pool()


class WindowPools(NamedTuple):
    """The memory of a writing that fills windows of new files from reads of other files. Each of its threads takes one
    buffer of `windows`, and one of `reads` for each of the threads that fill its window."""

    windows: BufferPool
    reads: BufferPool


@contextmanager
def window_pools(window_nbytes: int) -> Iterator[WindowPools]:
    """Pools with windows of `window_nbytes`, for the duration of a ``with`` block."""
    with (
        BufferPool(NUM_THREADS * window_nbytes, buffer_nbytes=window_nbytes) as windows,
        BufferPool(NUM_THREADS * NUM_THREADS * BUFFER_NBYTES) as reads,
    ):
        yield WindowPools(windows, reads)


class BufferedChunks:
    """The chunks of `nbytes` bytes, one buffer of `pool` each. Each of some threads takes the next one until none is
    left."""

    def __init__(self, nbytes: int, pool: BufferPool, num_threads: int) -> None:
        self._nbytes = nbytes
        self._pool = pool
        self.number = -(-nbytes // pool.buffer_nbytes)
        self._num_threads = min(num_threads, pool.num_buffers, max(self.number, 1))
        self._next = 0
        self._lock = Lock()
        self._stopped = False

    @property
    def nbytes_begun(self) -> int:
        """The bytes of the chunks before the one that was begun last."""
        return max(self._next - 1, 0) * self._pool.buffer_nbytes

    def run(self, work: Callable[[int, int, int, Bytes], None], *, stop: Callable[[], None] = lambda: None) -> None:
        """Call `work` with the number, the start and the size of each chunk, and with a buffer. Returns, or raises the
        first error, when all calls have ended. `stop` is called on the first error, and must make them end soon."""

        def end() -> None:
            self._stopped = True
            stop()

        run_threads(self._num_threads, lambda: self._take(work), stop=end)

    def _take(self, work: Callable[[int, int, int, Bytes], None]) -> None:
        while not self._stopped:
            # The buffer comes first: a thread that has a chunk must not wait for threads that have later ones.
            with self._pool.buffer() as buffer:
                with self._lock:
                    chunk = self._next
                    if chunk == self.number:
                        return
                    self._next += 1
                start = chunk * len(buffer)
                work(chunk, start, min(len(buffer), self._nbytes - start), buffer)


def run_threads(num_threads: int, work: Callable[[], None], *, stop: Callable[[], None]) -> None:
    """Run `work` in each of `num_threads` threads. Returns, or raises the first error, when all threads have ended.
    A single thread is that of the caller: to start one takes longer than many a chunk.

    `stop` is called once on the first error (or an interrupt of the caller) and must make `work` return soon. There is
    no deadline here: work that waits for a store that may hang uses a `TimedStore`. The threads are daemons, so they
    keep no process alive.
    """
    if num_threads == 1:
        try:
            work()
        except BaseException:
            stop()
            raise
        return
    outcomes: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - it is raised to the caller
            outcomes.put(error)
        else:
            outcomes.put(None)

    threads = [Thread(target=run, name="holdfast-transfer", daemon=True) for _ in range(num_threads)]
    try:
        for thread in threads:
            thread.start()
        for _ in threads:
            if (error := outcomes.get()) is not None:
                raise error
    except BaseException:
        stop()
        raise
    finally:
        for thread in threads:
            if thread.ident is not None:  # it was started
                thread.join()
