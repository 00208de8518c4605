"""A proxy between a client and a server of HTTP, which injects the faults of a network where a test wants them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Event, Thread
from types import TracebackType
from typing import Self, TypeAlias, TypeVar
from urllib.parse import urlsplit

from tests.support.servers.faults import Fault, Request

N = TypeVar("N", int, float)

_Streams: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]

_PIECE = 1 << 16
_WITHOUT_BODY = (b"204", b"304")


class _BrokenConnectionError(Exception):
    """A fault breaks this connection."""


class FaultProxy:
    """A proxy of the server at `upstream`, in a thread of its own; use it in a ``with`` block. It carries everything as
    it is until `add` or `faults` say otherwise. All faults that match a request happen to it.
    """

    def __init__(self, upstream: str) -> None:
        address = urlsplit(upstream)
        assert address.hostname is not None
        self._upstream = (address.hostname, address.port or 80)
        #: All requests so far, in the order in which they came.
        self.requests: list[Request] = []
        self._faults: list[tuple[Fault, Iterator[int]]] = []
        self._loop = asyncio.new_event_loop()
        self._is_ready = Event()
        self._thread = Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._is_ready.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()
        self._loop.close()

    def add(self, *faults: Fault) -> None:
        """Have these faults from now on, until `clear`."""
        self._faults += [(fault, itertools.count()) for fault in faults]

    def clear(self) -> None:
        """Have no faults from now on."""
        self._faults = []

    @contextmanager
    def faults(self, *faults: Fault) -> Iterator[None]:
        """Have these faults, beside those that are there, within a ``with`` block."""
        before = self._faults
        self._faults = list(before)
        self.add(*faults)
        try:
            yield
        finally:
            self._faults = before

    def count(self, method: str = "*", target: str = "*") -> int:
        """The number of requests so far whose method and target match the patterns."""
        return sum(request.matches(method, target) for request in self.requests)

    async def _serve(self) -> None:
        self._end = asyncio.Event()
        tasks = set[asyncio.Task[None]]()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = self._loop.create_task(self._converse(reader, writer))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            task.add_done_callback(lambda _: writer.close())  # a task that is cancelled before it begins does not

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        self.endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._is_ready.set()
        await self._end.wait()
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # for what the ends of tasks have called

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry the requests of one connection, one after the other."""
        upstream: _Streams | None = None
        writer.transport.set_write_buffer_limits(0)  # bytes sent before a fault have left this process
        try:
            while (head := await _Head.read(reader)) is not None:
                if upstream is None:
                    upstream = await asyncio.open_connection(*self._upstream)
                    upstream[1].transport.set_write_buffer_limits(0)
                await self._carry(head, (reader, writer), upstream)
        except (_BrokenConnectionError, OSError, asyncio.IncompleteReadError):
            writer.transport.abort()  # at once, and without the bytes that are still to be sent
        finally:
            ends = (writer, *((upstream[1],) if upstream else ()))
            for end in ends:  # all of them first: this task may be cancelled while it waits for one
                end.close()
            for end in ends:
                with suppress(OSError):
                    await end.wait_closed()

    async def _carry(self, head: _Head, client: _Streams, upstream: _Streams) -> None:
        """Carry one request and its answer, with the faults that hit it."""
        method, target, _ = head.first.decode().split(" ", 2)
        faults = self._faults_of(Request(method, target))
        rate = _least(fault.bytes_per_s for fault in faults)
        if head.wants_continue:
            client[1].write(b"HTTP/1.1 100 Continue\r\n\r\n")
        await _wait(faults)
        if any(fault.is_refused for fault in faults):
            raise _BrokenConnectionError
        body = head.body(client[0])
        if scripted := next((fault.answer for fault in faults if fault.answer is not None), None):
            await _drop(body)
            client[1].write(scripted.head if method == "HEAD" else scripted.head + scripted.body)
            return
        request_end = min(
            (fault.request_ends_at for fault in faults if fault.request_ends_at is not None), default=None
        )
        await _send(upstream[1], head.raw, _cut(body, request_end), rate)
        answer = await _Head.read(upstream[0])
        if answer is None:
            raise _BrokenConnectionError
        body = answer.answer_body(upstream[0], method)
        if any(fault.is_answer_lost for fault in faults):
            await _drop(body)
            raise _BrokenConnectionError
        end = _least(fault.answer_ends_at for fault in faults)
        if (lack := _least(fault.answer_lacks for fault in faults)) is not None:
            length = int(answer.headers[b"content-length"])
            answer.headers[b"content-length"] = str(length - lack).encode()
            end = min(length, length - lack)
        await _send(client[1], answer.raw, _cut(body, end), rate)

    def _faults_of(self, request: Request) -> list[Fault]:
        self.requests.append(request)
        matching = [each for each in self._faults if request.matches(each[0].method, each[0].target)]
        return [fault for fault, numbers in matching if fault.hits(next(numbers))]


@dataclass(frozen=True, slots=True)
class _Head:
    """The first lines of a request or an answer: the first one, and the headers with small names."""

    first: bytes
    headers: dict[bytes, bytes]

    @staticmethod
    async def read(reader: asyncio.StreamReader) -> _Head | None:
        """Read one; None where the connection ends before it."""
        first = await reader.readline()
        if not first:
            return None
        headers = dict[bytes, bytes]()
        while (line := (await reader.readline()).strip()) != b"":
            name, _, value = line.partition(b":")
            headers[name.strip().lower()] = value.strip()
        return _Head(first.strip(), headers)

    @property
    def raw(self) -> bytes:
        lines = (name + b": " + value for name, value in self.headers.items() if name != b"expect")
        return b"\r\n".join((self.first, *lines)) + b"\r\n\r\n"

    @property
    def wants_continue(self) -> bool:
        return self.headers.get(b"expect", b"").lower() == b"100-continue"

    def answer_body(self, reader: asyncio.StreamReader, method: str) -> AsyncIterator[bytes]:
        """The pieces of an answer's body, to a request with this method."""
        is_empty = method == "HEAD" or self.first.split(b" ")[1] in _WITHOUT_BODY
        return self.body(reader, nbytes=0 if is_empty else None)

    async def body(self, reader: asyncio.StreamReader, *, nbytes: int | None = None) -> AsyncIterator[bytes]:
        """The pieces of the body as they come, with the frames of its chunks where it has chunks."""
        if nbytes is None and self.headers.get(b"transfer-encoding", b"").lower() == b"chunked":
            while size := int((line := await reader.readline()).split(b";")[0], 16):
                yield line + await reader.readexactly(size + 2)
            while line != b"\r\n":
                yield line
                line = await reader.readline()
            yield line
            return
        left = int(self.headers.get(b"content-length", b"0")) if nbytes is None else nbytes
        while left:
            piece = await reader.read(min(left, _PIECE))
            if not piece:
                raise asyncio.IncompleteReadError(piece, left)
            left -= len(piece)
            yield piece


def _least(numbers: Iterable[N | None]) -> N | None:
    return min((number for number in numbers if number is not None), default=None)


async def _wait(faults: Sequence[Fault]) -> None:
    for fault in faults:
        await asyncio.sleep(fault.delay_s)
        while fault.gate is not None and not fault.gate.is_set():  # noqa: ASYNC110 - threads of tests set it
            await asyncio.sleep(0.002)


async def _send(writer: asyncio.StreamWriter, head: bytes, body: AsyncIterator[bytes], rate: float | None) -> None:
    """Send a head and a body, no faster than `rate` in bytes per second."""
    writer.write(head)
    async for piece in body:
        if rate is not None:
            await asyncio.sleep(len(piece) / rate)  # first, for the receiver goes on with the last piece
        writer.write(piece)
        await writer.drain()
    await writer.drain()


async def _cut(body: AsyncIterator[bytes], end: int | None) -> AsyncIterator[bytes]:
    """The body; with `end`, as many of its bytes, after which the connection breaks."""
    left = end
    async for piece in body:
        yield piece if left is None else piece[:left]
        if left is not None and (left := left - len(piece)) <= 0:
            break
    if end is not None:
        raise _BrokenConnectionError


async def _drop(body: AsyncIterator[bytes]) -> None:
    async for _ in body:
        pass
