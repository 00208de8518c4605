"""Objects in the buckets of Amazon S3, Google Cloud Storage and Azure Blob Storage, through obstore.

Small objects, such as records, are created by conditional requests, so that one of several writers wins. Large ones are
streamed under names that no other writer uses. An answer that was lost on its way looks like a lost race: `create`
reads the object back, and compares.
"""

from __future__ import annotations

import builtins
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, TypeVar

import numpy as np
import obstore

from holdfast.store.base import Bytes, Capabilities, FileWriter, Location
from holdfast.store.object_client import ObjectClient, client_of
from holdfast.store.object_errors import (
    OBSTORE_ERRORS,
    CutAnswerError,
    changed,
    is_definite,
    is_out_of_range,
    is_without_range,
    not_found,
    reported,
)
from holdfast.store.object_urls import ObjectPlace
from holdfast.store.object_writer import PART_NBYTES, StreamedObjectWriter, WholeObjectWriter
from holdfast.store.posix_errors import long, short
from holdfast.store.rate_limit import RequestPace, pace_of

T = TypeVar("T")

#: The chunks in which the body of an answer arrives: larger ones are put together from smaller ones, by one more copy.
_CHUNK_NBYTES: Final = 256 << 10
#: The reads that a network with long delays needs. More or larger ones gain little, and take processor time.
_REQUEST_NBYTES: Final = 16 << 20
_NUM_REQUESTS: Final = 4
#: Tries to read bytes whose answer is cut off without an error of the connection.
_NUM_TRIES: Final = 3
_RULE: Final = (
    "Uploads that a dead process began take space, and cannot be listed here: let a lifecycle rule of the bucket "
    "delete them after some days (AbortIncompleteMultipartUpload)."
)
#: Azure deletes blocks that were never committed by itself, after a week.
_REMAINS: Final = {"s3": _RULE, "gs": _RULE}


class ObjectStore:
    """The objects below one key of a bucket.

    Objects are created once and never changed. `create` and `FileWriter.publish` return when the object is durable.
    Objects of more than `part_nbytes` are written in order, from the first byte to the last. All calls but those of
    `path` raise `ConfigurationError`, code ``config.forked``, in a process that was forked from the one that opened
    the store.
    """

    def __init__(
        self, location: Location, *, part_nbytes: int = PART_NBYTES, left_s: Callable[[], float] = lambda: math.inf
    ) -> None:
        """``left_s`` is the time that the caller has left: requests that fail are not repeated when it is over, and
        uploads end then."""
        self.location = location
        self._left_s = left_s
        self._place = ObjectPlace.of(location)
        self._client = client_of(location)
        self._pace = pace_of(location.url, self._place.limits)
        self._part_nbytes = part_nbytes
        self.capabilities = Capabilities(
            in_order=True,
            unlisted_remains=_REMAINS.get(self._place.scheme, ""),
            request_nbytes=_REQUEST_NBYTES,
            num_requests=_NUM_REQUESTS,
        )

    def within(self, left_s: Callable[[], float]) -> ObjectStore:
        """As `LimitedStore.within`."""
        return ObjectStore(self.location, part_nbytes=self._part_nbytes, left_s=left_s)

    def resolved(self) -> str:
        """The URL of the root, and the address of its server where that is not the cloud's own."""
        return self.location.url + (f" at {self._client.endpoint}" if self._client.endpoint else "")

    def path(self, key: str) -> str:
        """The URL of `key`, without options."""
        for name in key.split("/"):
            if name in ("", ".", ".."):
                raise ValueError(f"{key!r} is not a key: use a relative name without empty, '.' and '..' parts")
        return f"{self.location.url}/{key}"

    def read(self, key: str, *, start: int = 0, nbytes: int | None = None, limit: int | None = None) -> bytes:
        """As `Store.read`."""
        path = self.path(key)
        if nbytes == 0:
            self._size(key)
            return b""
        full = self._place.key(key)
        with reported("read", path):
            size, data = self._asked(lambda: self._got(full, start, nbytes, limit))
        if limit is not None and size > limit:
            raise long(path, limit=limit, found=size)
        if nbytes is not None and len(data) < nbytes:
            raise short(path, start=start, wanted=nbytes, found=len(data))
        return data

    def nbytes(self, key: str) -> int | None:
        """As `Store.nbytes`."""
        with reported("look at", self.path(key)):
            try:
                return self._asked(lambda: obstore.head(self._client.records, self._place.key(key)))["size"]
            except FileNotFoundError:
                return None

    def list(self, folder: str, *, limit: int | None = None) -> builtins.list[str]:
        """As `Store.list`."""
        path = self.path(folder) if folder else self.location.url
        prefix = self._place.key(folder)
        with reported("list", path):
            if limit is not None and (names := self._asked(lambda: self._first_names(prefix, limit))) is not None:
                return names
            found = self._asked(lambda: obstore.list_with_delimiter(self._client.records, prefix or None))
        keys = (*(each["path"] for each in found["objects"]), *found["common_prefixes"])
        return sorted({key.rstrip("/").rpartition("/")[2] for key in keys} - {""})[:limit]

    def create(self, key: str, data: bytes) -> bool:
        """As `Store.create`. An object with the same bytes counts as created by this call where its own request may
        have been served without an answer."""
        return self._created(key, np.frombuffer(data, np.uint8))

    def writer(self, key: str, *, nbytes: int) -> FileWriter:
        """As `Store.writer`; no space is reserved."""
        path = self.path(key)
        if nbytes <= self._part_nbytes:
            self._client.check()
            return WholeObjectWriter(path, lambda data: self._created(key, data, may_be_ours=True), nbytes=nbytes)
        full = self._place.key(key)
        return StreamedObjectWriter(
            self._client,
            full,
            path,
            nbytes=nbytes,
            part_nbytes=self._part_nbytes,
            left_s=self._left_s,
            pace=self._pace,
        )

    def reader(self, key: str) -> ObjectReader:
        """As `Store.reader`. What it reads is the object that is there now, or an error."""
        return ObjectReader(self._client, self._place.key(key), self.path(key), self._left_s, self._pace)

    def delete(self, key: str) -> bool:
        """As `Store.delete`. Of several calls at once, more than one may return True."""
        if self.nbytes(key) is None:
            return False
        with reported("delete", self.path(key)):
            try:
                self._asked(lambda: obstore.delete(self._client.records, self._place.key(key)))
            except FileNotFoundError:
                return False
        return True

    def leftovers(self, folder: str, *, older_than_s: float = 0.0) -> builtins.list[str]:
        """Always empty: obstore does not list uploads that were begun and never ended. A rule of the bucket deletes
        them (``AbortIncompleteMultipartUpload`` of S3)."""
        return []

    def _first_names(self, prefix: str, limit: int) -> builtins.list[str] | None:
        """The first `limit` names below `prefix`, by one request. None where the server does not sort them, or where
        there are folders among them, which sort by other rules than keys."""
        pages = obstore.list(self._client.records, prefix or None, chunk_size=limit)
        keys = [each["path"] for each in next(iter(pages), ())]
        names = [key.removeprefix(f"{prefix}/" if prefix else "") for key in keys]
        is_flat = not any("/" in name for name in names)
        return names[:limit] if is_flat and names == sorted(names) else None

    def _size(self, key: str) -> int:
        found = self.nbytes(key)
        if found is None:
            raise not_found(self.path(key))
        return found

    def _asked(self, request: Callable[[], T]) -> T:
        return self._client.asked(self._pace.paced(request, self._left_s), self._left_s)

    def _got(self, full: str, start: int, nbytes: int | None, limit: int | None) -> tuple[int, bytes]:
        """The size of an object, and its `nbytes` from `start`, or those that are there; none where the object has more
        than `limit`.

        The range is asked for also where it is the whole object: the answer then has the size of the object beside that
        of its own body. Raises `CutAnswerError` where the body has fewer bytes.
        """
        options: obstore.GetOptions = {"range": {"offset": start} if nbytes is None else (start, start + nbytes)}
        try:
            result = obstore.get(self._client.records, full, options=options)
            size = result.meta["size"]
            if limit is not None and size > limit:
                return size, b""
            data = bytes(result.bytes())
        except OBSTORE_ERRORS as error:
            is_ignored = is_without_range(error)
            if not (is_ignored or is_out_of_range(error)):
                raise
            size, data = obstore.head(self._client.records, full)["size"], b""
            if is_ignored and start < size:
                raise
        self._pace.delay_s(nbytes=len(data), requests=0)  # the next request waits for them
        there = max(size - start, 0)
        if len(data) != (there if nbytes is None else min(nbytes, there)):
            raise CutAnswerError(start, len(data))
        return size, data

    def _created(self, key: str, data: Bytes, *, may_be_ours: bool = False) -> bool:
        """Create an object, as `create`. With `may_be_ours`, one with the same bytes that is there already counts as
        created, whoever made it: a proxy may send a request twice, and only tell the answer to the second one."""
        path, full = self.path(key), self._place.key(key)

        def create() -> bool:
            nonlocal may_be_ours
            self._pace.wait(self._left_s, nbytes=len(data))
            try:
                obstore.put(self._client.records, full, data.data, mode="create", use_multipart=False)
            except obstore.exceptions.AlreadyExistsError as error:
                failure: Exception = error
            except OBSTORE_ERRORS as error:
                if is_definite(error):
                    raise
                failure, may_be_ours = error, True
            else:
                return True
            # A lost answer looks like a lost race, and so does a request that the server refused because of another one
            # at the same moment. What is there now decides.
            found = self._found(full)
            if found is None:
                raise failure
            return may_be_ours and found == data.tobytes()

        with reported("create", path):
            return self._client.asked(create, self._left_s, is_passing=lambda error: not is_definite(error))

    def _found(self, full: str) -> bytes | None:
        """The bytes of an object; None where there is none, or the server does not say."""
        try:
            return self._got(full, 0, None, None)[1]
        except OBSTORE_ERRORS:
            return None


class ObjectReader:
    """An open object, see `FileReader`: the version that was there at the opening."""

    alignment = 1
    memory = None

    def __init__(
        self, client: ObjectClient, key: str, path: str, left_s: Callable[[], float], pace: RequestPace
    ) -> None:
        self._client, self._key, self._path, self._left_s, self._pace = client, key, path, left_s, pace
        with reported("open", path):
            found = client.asked(pace.paced(lambda: obstore.head(client.records, key), left_s), left_s)
        self.nbytes = found["size"]
        self._etag = found["e_tag"]
        self._expected = _Expected()

    def expect(self, start: int, stop: int) -> None:
        """As `StreamingReader.expect`."""
        self._expected.body = self._request(start, min(stop, self.nbytes)) if start < self.nbytes else None

    def read_at(self, offset: int, out: Bytes) -> None:
        """As `FileReader.read_at`. Raises `CorruptError`, code ``corrupt.changed``, where the object was replaced."""
        stop = offset + len(out)
        if stop > self.nbytes:
            raise short(self._path, start=offset, wanted=len(out), found=max(self.nbytes - offset, 0))
        if not len(out):
            return
        with self._reading():
            for _ in range(_NUM_TRIES - 1):
                with suppress(CutAnswerError):
                    self._fill(offset, out)
                    return
            self._fill(offset, out)

    def close(self) -> None:
        """As `FileReader.close`."""
        self._expected = _Expected()

    def _fill(self, offset: int, out: Bytes) -> None:
        """Fill `out` from the body that arrives, or from another one. Raises `CutAnswerError` where it ends early."""
        stop = offset + len(out)
        body = self._expected.body
        if body is None or body.at != offset or stop > body.stop:
            body = self._request(offset, stop)
        try:
            done = body.fill(out)
        except OBSTORE_ERRORS as error:
            if not is_out_of_range(error):  # obstore asks for the rest of a body, and there is none
                raise
            done = 0
        if done < len(out):
            self._expected.body = None
            raise CutAnswerError(offset, done)

    def _request(self, start: int, stop: int) -> _ArrivingBody:
        options: obstore.GetOptions = {"range": (start, stop)}
        if self._etag is not None:
            options["if_match"] = self._etag
        self._pace.wait(self._left_s, nbytes=stop - start)
        with self._reading():
            found = obstore.get(self._client.data(self._left_s()), self._key, options=options)
            return _ArrivingBody(start, stop, found.stream(min_chunk_size=_CHUNK_NBYTES))

    @contextmanager
    def _reading(self) -> Iterator[None]:
        with reported("read", self._path):
            try:
                yield
            except (obstore.exceptions.PreconditionError, FileNotFoundError) as error:
                raise changed(self._path) from error


_NOTHING: Final[Bytes] = np.zeros(0, np.uint8)


class _ArrivingBody:
    """The body of an answer, which arrives in chunks: bytes [at, stop) of an object are still to come."""

    def __init__(self, start: int, stop: int, chunks: obstore.BytesStream) -> None:
        self.at, self.stop = start, stop
        self._chunks = chunks
        self._rest = _NOTHING

    def fill(self, out: Bytes) -> int:
        """Fill `out` with the next bytes. Returns how many there were."""
        done = 0
        while done < len(out):
            if not len(self._rest):
                self._rest = _NOTHING  # the old chunk is dropped before the next one comes, which uses its memory again
                self._rest = np.frombuffer(next(self._chunks, b""), np.uint8)
            count = min(len(self._rest), len(out) - done)
            if not count:
                break
            out[done : done + count] = self._rest[:count]
            self._rest = self._rest[count:]
            done += count
        self.at += done
        return done


class _Expected(threading.local):
    """The body that a thread reads from next."""

    body: _ArrivingBody | None = None
