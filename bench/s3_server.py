"""A small, fast S3 server on the loopback, for measurements: ``python -m bench.s3_server`` writes its port and serves.

It keeps objects in memory, receives bodies straight into that memory, and sends them from there without a copy. So it
takes about as long for a byte as the loopback itself. It checks no signatures and no checksums, and speaks as much of
the protocol as the contenders use. ``GET /-/requests`` returns the number of requests so far.
"""

from __future__ import annotations

import itertools
import mmap
import os
import re
import socket
import threading
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

#: Bodies lie in extents of this size in one memory file; its pages are used again, so that only the first use of each
#: takes time.
_EXTENT_NBYTES: Final = 4 << 20
_MEMORY_NBYTES: Final = 64 << 30
_WINDOW_NBYTES: Final = 64 << 10
_TOKEN: Final = "continuation-token"
_COUNT: Final = "-/requests"


class Memory:
    """A memory file, in extents."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("bench-s3")
        os.ftruncate(self.fd, _MEMORY_NBYTES)
        self._view = memoryview(mmap.mmap(self.fd, _MEMORY_NBYTES))
        self._free: list[int] = []
        self._fresh = itertools.count(0, _EXTENT_NBYTES)

    def take(self) -> int:
        """The offset of a free extent."""
        try:
            return self._free.pop()
        except IndexError:
            return next(self._fresh)

    def give_back(self, extents: Sequence[int]) -> None:
        self._free += extents

    def view(self, extent: int) -> memoryview:
        return self._view[extent : extent + _EXTENT_NBYTES]


@dataclass
class Body:
    """The bytes of an object, or of a part of one."""

    memory: Memory
    extents: list[int] = field(default_factory=list)
    nbytes: int = 0

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Offsets and sizes in the memory file of the bytes [start, stop)."""
        while start < stop:
            extent, inside = divmod(start, _EXTENT_NBYTES)
            nbytes = min(stop - start, _EXTENT_NBYTES - inside)
            yield self.extents[extent] + inside, nbytes
            start += nbytes

    def __del__(self) -> None:
        self.memory.give_back(self.extents)


@dataclass
class Stored:
    """An object, in the parts that were sent."""

    bodies: Sequence[Body]
    etag: str
    metadata: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        return sum(body.nbytes for body in self.bodies)

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        for body in self.bodies:
            if start < min(stop, body.nbytes):
                yield from body.pieces(max(start, 0), min(stop, body.nbytes))
            start, stop = start - body.nbytes, stop - body.nbytes


@dataclass
class Upload:
    """A multipart upload under way."""

    metadata: Mapping[str, str]
    parts: dict[int, Body] = field(default_factory=dict)


@dataclass
class Reply:
    """An answer: a text, or bytes [start, stop) of an object."""

    status: int = 200
    text: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    stored: Stored | None = None
    start: int = 0
    stop: int = 0
    #: The size that the header states where no body follows.
    nbytes: int | None = None


@dataclass
class Asked:
    """A request, without its body."""

    method: str
    key: str
    query: Mapping[str, str]
    headers: Mapping[str, str]


class Connection:
    """The bytes of one connection."""

    def __init__(self, client: socket.socket, memory: Memory) -> None:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._client = client
        self._memory = memory
        self._early = b""

    def request(self) -> Asked | None:
        """The next request; None at the end."""
        while b"\r\n\r\n" not in self._early:
            if not (more := self._client.recv(_WINDOW_NBYTES)):
                return None
            self._early += more
        head, _, self._early = self._early.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        method, target, _ = first.split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if headers.get("expect") == "100-continue":
            self._client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        path = urlsplit(target)
        query = dict(parse_qsl(path.query, keep_blank_values=True))
        return Asked(method, unquote(path.path).lstrip("/"), query, headers)

    def body(self, asked: Asked) -> Body:
        """The body that follows the request."""
        body = Body(self._memory)
        if "aws-chunked" in asked.headers.get("content-encoding", ""):
            while nbytes := int(self._line().partition(b";")[0], 16):
                self._receive(body, nbytes)
                self._line()
            while self._line():
                pass
        else:
            self._receive(body, int(asked.headers.get("content-length", 0)))
        return body

    def text(self, body: Body) -> str:
        parts = (os.pread(self._memory.fd, nbytes, offset) for offset, nbytes in body.pieces(0, body.nbytes))
        return b"".join(parts).decode()

    def reply(self, reply: Reply) -> None:
        text = reply.text.encode()
        nbytes = reply.stop - reply.start if reply.stored else len(text) if reply.nbytes is None else reply.nbytes
        headers = {**reply.headers, "Content-Length": str(nbytes)}
        lines = (f"HTTP/1.1 {reply.status} -", *(f"{name}: {value}" for name, value in headers.items()))
        self._client.sendall("\r\n".join((*lines, "\r\n")).encode() + text)
        for offset, size in reply.stored.pieces(reply.start, reply.stop) if reply.stored else ():
            done = 0
            while done < size:
                done += os.sendfile(self._client.fileno(), self._memory.fd, offset + done, size - done)

    def _line(self) -> bytes:
        while b"\r\n" not in self._early:
            self._early += self._client.recv(_WINDOW_NBYTES)
        line, _, self._early = self._early.partition(b"\r\n")
        return line

    def _receive(self, body: Body, nbytes: int) -> None:
        stop = body.nbytes + nbytes
        while body.nbytes < stop:
            extent, inside = divmod(body.nbytes, _EXTENT_NBYTES)
            if extent == len(body.extents):
                body.extents.append(self._memory.take())
            room = self._memory.view(body.extents[extent])[inside : inside + stop - body.nbytes]
            if self._early:
                count = min(len(room), len(self._early))
                room[:count] = self._early[:count]
                self._early = self._early[count:]
            elif not (count := self._client.recv_into(room, len(room), socket.MSG_WAITALL)):
                raise ConnectionError
            body.nbytes += count


class Bucket:
    """All objects, whatever bucket they are said to be in."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.num_requests = 0
        self._objects: dict[str, Stored] = {}
        self._keys: list[str] = []
        self._uploads: dict[str, Upload] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def serve(self, client: socket.socket) -> None:
        """Answer the requests of one connection, until it ends."""
        connection = Connection(client, self.memory)
        with client:
            try:
                while (asked := connection.request()) is not None:
                    body = connection.body(asked)
                    if asked.key != _COUNT:
                        self.num_requests += 1
                    connection.reply(self._answer(connection, asked, body))
            except ConnectionError:
                pass  # a client that ends does not say so

    def _answer(self, connection: Connection, asked: Asked, body: Body) -> Reply:
        match asked.method:
            case "POST":
                return self._post(asked, connection.text(body))
            case "PUT" if "uploadId" in asked.query:
                self._uploads[asked.query["uploadId"]].parts[int(asked.query["partNumber"])] = body
                return Reply(headers={"ETag": self._etag()})
            case "PUT":
                source = self._objects.get(unquote(asked.headers.get("x-amz-copy-source", "")).lstrip("/"))
                bodies = (body,) if source is None else source.bodies
                stored = Stored(bodies, self._etag(), _metadata(asked))
                reply = self._put(asked.key, stored, is_new="if-none-match" in asked.headers)
                return reply if source is None else _xml("CopyObjectResult", f"<ETag>{stored.etag}</ETag>")
            case "DELETE" if "uploadId" in asked.query:
                self._uploads.pop(asked.query["uploadId"], None)
                return Reply(204)
            case "DELETE":
                self._remove(asked.key)
                return Reply(204)
            case "GET" if asked.key == _COUNT:
                return Reply(text=str(self.num_requests))
            case "GET" if "list-type" in asked.query:
                return self._list(asked)
        return self._get(asked)

    def _post(self, asked: Asked, text: str) -> Reply:
        if "uploads" in asked.query:
            upload = f"upload-{next(self._numbers)}"
            self._uploads[upload] = Upload(_metadata(asked))
            return _xml("InitiateMultipartUploadResult", f"<UploadId>{upload}</UploadId>")
        if "uploadId" in asked.query:
            return self._complete(asked, text)
        keys = re.findall(r"<Key>(.*?)</Key>", text)
        for key in keys:
            self._remove(f"{asked.key.rstrip('/')}/{unescape(key)}")
        return _xml("DeleteResult", "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys))

    def _complete(self, asked: Asked, text: str) -> Reply:
        upload = self._uploads.pop(asked.query["uploadId"])
        numbers = sorted(map(int, re.findall(r"<PartNumber>(\d+)</PartNumber>", text)))
        stored = Stored([upload.parts[number] for number in numbers], self._etag(), upload.metadata)
        reply = self._put(asked.key, stored, is_new="if-none-match" in asked.headers)
        return reply if reply.status != 200 else _xml("CompleteMultipartUploadResult", f"<ETag>{stored.etag}</ETag>")

    def _put(self, key: str, stored: Stored, *, is_new: bool) -> Reply:
        with self._lock:
            if key in self._objects:
                if is_new:
                    return _error(412, "PreconditionFailed")
            else:
                insort(self._keys, key)
            self._objects[key] = stored
        return Reply(headers={"ETag": stored.etag})

    def _remove(self, key: str) -> None:
        with self._lock:
            if self._objects.pop(key, None) is not None:
                del self._keys[bisect_left(self._keys, key)]

    def _get(self, asked: Asked) -> Reply:
        stored = self._objects.get(asked.key)
        if stored is None:
            return _error(404, "NoSuchKey") if asked.method == "GET" else Reply(404)
        if asked.headers.get("if-match", stored.etag) != stored.etag:
            return _error(412, "PreconditionFailed")
        headers = {"ETag": stored.etag, "Last-Modified": "Fri, 27 Nov 2026 00:00:00 GMT", "Accept-Ranges": "bytes"}
        headers |= stored.metadata
        if asked.method == "HEAD":
            return Reply(headers=headers, nbytes=stored.nbytes)
        start, stop, wanted = 0, stored.nbytes, re.match(r"bytes=(\d*)-(\d*)", asked.headers.get("range", ""))
        if wanted is None:
            return Reply(headers=headers, stored=stored, start=start, stop=stop)
        first, last = wanted.groups()
        start = int(first) if first else max(stop - int(last), 0)
        stop = min(int(last) + 1, stop) if first and last else stop
        if start >= stop:
            return _error(416, "InvalidRange")
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{stored.nbytes}"
        return Reply(206, headers=headers, stored=stored, start=start, stop=stop)

    def _list(self, asked: Asked) -> Reply:
        bucket = f"{asked.key.rstrip('/')}/"
        prefix, delimiter = asked.query.get("prefix", ""), asked.query.get("delimiter", "")
        after = asked.query.get(_TOKEN) or asked.query.get("start-after", "")
        most = int(asked.query.get("max-keys", 1000))
        with self._lock:
            at = bisect_left(self._keys, bucket + max(prefix, f"{after}\0" if after else ""))
            found, folders, last = list[str](), list[str](), ""
            while at < len(self._keys) and self._keys[at].startswith(bucket + prefix):
                if len(found) + len(folders) == most:
                    break
                key = self._keys[at].removeprefix(bucket)
                name, has_more, _ = key.removeprefix(prefix).partition(delimiter) if delimiter else (key, "", "")
                if has_more:
                    folders.append(f"{prefix}{name}{delimiter}")
                    last = f"{folders[-1]}\U0010ffff"
                    at = bisect_left(self._keys, bucket + last)
                    continue
                found.append(f"<Contents><Key>{escape(key)}</Key>{self._facts(self._objects[bucket + key])}</Contents>")
                last, at = key, at + 1
            is_cut = at < len(self._keys) and self._keys[at].startswith(bucket + prefix)
        more = f"<NextContinuationToken>{escape(last)}</NextContinuationToken>" if is_cut else ""
        groups = (f"<CommonPrefixes><Prefix>{escape(each)}</Prefix></CommonPrefixes>" for each in folders)
        counted = f"<IsTruncated>{str(is_cut).lower()}</IsTruncated><KeyCount>{len(found) + len(folders)}</KeyCount>"
        return _xml("ListBucketResult", "".join((counted, more, *found, *groups)))

    def _facts(self, stored: Stored) -> str:
        return (
            f"<LastModified>2026-11-27T00:00:00.000Z</LastModified><ETag>{escape(stored.etag)}</ETag>"
            f"<Size>{stored.nbytes}</Size><StorageClass>STANDARD</StorageClass>"
        )

    def _etag(self) -> str:
        return f'"{next(self._numbers):032x}"'


def _metadata(asked: Asked) -> dict[str, str]:
    return {name: value for name, value in asked.headers.items() if name.startswith("x-amz-meta-")}


def _xml(name: str, content: str) -> Reply:
    text = f'<?xml version="1.0"?><{name} xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{content}</{name}>'
    return Reply(text=text, headers={"Content-Type": "application/xml"})


def _error(status: int, code: str) -> Reply:
    return Reply(status, f"<Error><Code>{code}</Code></Error>", {"Content-Type": "application/xml"})


def main() -> None:
    bucket = Bucket()
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
        os.write(1, b"%d\n" % listener.getsockname()[1])
        while True:
            client, _ = listener.accept()
            threading.Thread(target=bucket.serve, args=(client,), daemon=True).start()


if __name__ == "__main__":
    main()
