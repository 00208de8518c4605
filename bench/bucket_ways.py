"""The contenders that save to and load from a bucket, on the fast S3 server of `bench.s3_server`."""

from __future__ import annotations

import http.client
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import obstore
import torch.distributed as dist
from obstore.store import S3Store
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import holdfast
from bench.contenders import GENERATIONS, HoldfastBackground, Registry
from bench.raw import RawImage
from bench.schema import OURS, RAW
from bench.ways import Pending, Site, Way
from holdfast.run.history import Run
from holdfast.run.removal import remove_checkpoint
from holdfast.store.urls import location_of, open_store

BUCKET, REGION = "bench", "us-east-1"
#: The variables by which clients find the server. No body is signed: a SHA-256 of it would take longer than all else.
_ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "bench",
    "AWS_SECRET_ACCESS_KEY": "bench-secret",
    "AWS_REGION": REGION,
    "AWS_ALLOW_HTTP": "true",
    "AWS_UNSIGNED_PAYLOAD": "true",
}
_ENDPOINT, _SERVER_PID = "AWS_ENDPOINT_URL", "BENCH_S3_PID"


@contextmanager
def served() -> Iterator[None]:
    """A ``with`` block with a server, which this process and those that it starts find by their environment."""
    command = ["setpriv", "--pdeathsig", "KILL", "--", sys.executable, "-m", "bench.s3_server"]
    before = dict(os.environ)
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        address = f"http://127.0.0.1:{int(server.stdout.readline())}"
        os.environ.update(_ENVIRONMENT, **{_ENDPOINT: address, _SERVER_PID: str(server.pid)})
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)
            server.kill()


def server_pid() -> int:
    return int(os.environ[_SERVER_PID])


def num_requests() -> int:
    """The requests that the server has got so far."""
    connection = http.client.HTTPConnection(os.environ[_ENDPOINT].removeprefix("http://"))
    connection.request("GET", "/-/requests")
    number = int(connection.getresponse().read())
    connection.close()
    return number


def url(key: object) -> str:
    return f"s3://{BUCKET}/{key}"


def client() -> S3Store:
    """A client of obstore, as it is given."""
    return S3Store(BUCKET, client_options={"allow_http": True, "timeout": "120s"})


def delete_below(prefix: str) -> None:
    store = client()
    for page in obstore.list(store, prefix):
        obstore.delete(store, [each["path"] for each in page])


class BucketPlaces(Way):
    """Places in the bucket: keys, in the form of paths."""

    def place(self, what: object) -> Path:
        return Path(self.entrant.replace(" ", "-")) / ("run" if self.one_run else str(what))

    def discard(self, folder: Path) -> None:
        """Delete what is below `folder`, of a run all but its head."""
        if not self.one_run:
            delete_below(str(folder))
            return
        run = Run.open(open_store(location_of(url(folder))))
        for commit in list(run.lineage())[1:]:
            remove_checkpoint(run, commit)


class RawTransfer(NamedTuple):
    """A way of raw transfers: they divide the bytes of a rank into so many `objects`, and send each in parts of 16 MiB,
    of which so many are in flight; and so many `readers` (threads) read ranges of so many bytes."""

    objects: int
    in_flight: int
    readers: int
    range_nbytes: int


PART_NBYTES = 16 << 20
RAW_TRANSFERS = {
    "1 x 8": RawTransfer(1, 8, 4, 16 << 20),
    "2 x 4": RawTransfer(2, 4, 3, 2 << 20),
    "4 x 2": RawTransfer(4, 2, 8, 8 << 20),
}


class BucketRaw(BucketPlaces):
    """obstore alone, in equal parts."""

    name, durable = RAW, "the answers of the server"

    def __init__(self, site: Site, entrant: str) -> None:
        super().__init__(site, entrant)
        self._way = RAW_TRANSFERS[entrant.removeprefix(RAW).strip()]
        self._client = client()
        self._view = self.memory.view[: self.memory.nbytes]

    @property
    def memory(self) -> RawImage:
        return self.site.image

    def save(self, folder: Path) -> None:
        def put(index: int) -> None:
            mine = self._view[self._bounds[index] : self._bounds[index + 1]]
            parts = (mine[start : start + PART_NBYTES] for start in range(0, len(mine), PART_NBYTES))
            key, in_flight = self._key(folder, index), self._way.in_flight
            obstore.put(self._client, key, parts, chunk_size=PART_NBYTES, max_concurrency=in_flight, use_multipart=True)

        with ThreadPoolExecutor(self._way.objects) as pool:
            list(pool.map(put, range(self._way.objects)))

    def load(self, folder: Path) -> None:
        out = np.frombuffer(self._view, np.uint8)

        def get(task: tuple[int, int]) -> None:
            index, start = task
            first = self._bounds[index]
            stop = min(start + self._way.range_nbytes, self._bounds[index + 1] - first)
            found = obstore.get(self._client, self._key(folder, index), options={"range": (start, stop)})
            at = first + start
            for chunk in found.stream(min_chunk_size=256 << 10):
                out[at : at + len(chunk)] = np.frombuffer(chunk, np.uint8)
                at += len(chunk)

        tasks = [
            (index, start)
            for index in range(self._way.objects)
            for start in range(0, self._bounds[index + 1] - self._bounds[index], self._way.range_nbytes)
        ]
        with ThreadPoolExecutor(self._way.readers) as pool:
            list(pool.map(get, tasks))

    @property
    def _bounds(self) -> Sequence[int]:
        """The bounds of the objects."""
        return [len(self._view) * number // self._way.objects for number in range(self._way.objects + 1)]

    def _key(self, folder: Path, index: int) -> str:
        return f"{folder}/{dist.get_rank()}-{index}"


class BucketHoldfast(BucketPlaces):
    """holdfast.save/load, defaults, each save into a new run."""

    name, durable = OURS, "the answers of the server, sealed and committed"

    def __init__(self, site: Site, entrant: str) -> None:
        super().__init__(site, entrant)
        self.steps = itertools.count()

    def save(self, folder: Path) -> None:
        holdfast.save(url(folder), self.state.tree, next(self.steps))

    def load(self, folder: Path) -> None:
        holdfast.load(url(folder), into=self.state.tree)


class BucketKeeper(BucketPlaces, HoldfastBackground):
    """holdfast.Checkpointer of the live objects, defaults, until the keeper has uploaded and committed. All saves go
    into one run."""

    name = "holdfast-keeper"
    durable = BucketHoldfast.durable

    @cached_property
    def checkpointer(self) -> holdfast.Checkpointer:
        memory = holdfast.Memory(generations=GENERATIONS, node_dir=self.site.node_dir)
        return holdfast.Checkpointer(url(self.place("")), self._saved, memory=memory)

    def begin(self, folder: Path) -> Pending:
        return HoldfastBackground.begin(self, folder)

    def load(self, folder: Path) -> None:
        holdfast.load(url(folder), into=self._saved)


class BucketDcpS3fs(BucketPlaces):
    """torch.distributed.checkpoint with its FsspecWriter and FsspecReader, on s3fs, which signs nothing here."""

    name, package = "dcp-s3fs", "s3fs"

    def save(self, folder: Path) -> None:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

        dcp_save(self.state.tree, storage_writer=FsspecWriter(url(folder), sync_files=False, anon=True))

    def load(self, folder: Path) -> None:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

        dcp_load(self.state.tree, storage_reader=FsspecReader(url(folder), anon=True))


class BucketDcpConnector(BucketPlaces):
    """torch.distributed.checkpoint with s3torchconnector's S3StorageWriter and S3StorageReader, defaults."""

    name, package = "dcp-s3torchconnector", "s3torchconnector"

    def save(self, folder: Path) -> None:
        from s3torchconnector.dcp import S3StorageWriter

        writer = S3StorageWriter(REGION, url(folder))
        writer.fs = self._file_system()
        dcp_save(self.state.tree, storage_writer=writer)

    def load(self, folder: Path) -> None:
        from s3torchconnector.dcp import S3StorageReader

        reader = S3StorageReader(REGION, url(folder))
        reader.fs._client = self._client  # noqa: SLF001 - as above
        dcp_load(self.state.tree, storage_reader=reader)

    @cached_property
    def _client(self) -> Any:
        """A client of this server: readers and writers take no endpoint."""
        from s3torchconnector import S3ClientConfig
        from s3torchconnector._s3client import S3Client

        config = S3ClientConfig(force_path_style=True)
        return S3Client(REGION, endpoint=os.environ[_ENDPOINT], s3client_config=config)

    def _file_system(self) -> Any:
        from s3torchconnector.dcp.s3_file_system import S3FileSystem

        return S3FileSystem(REGION, s3_client=self._client)


def _registry(*kinds: type[Way]) -> Registry:
    return {kind.name: kind for kind in kinds}


#: Those that save and load through a bucket.
TRANSFERRING = _registry(BucketRaw, BucketDcpS3fs, BucketDcpConnector, BucketHoldfast, BucketKeeper)
#: Those that load what other ranks have saved.
RESHARDING = _registry(BucketRaw, BucketDcpS3fs, BucketDcpConnector, BucketHoldfast)


def impossible() -> dict[str, str]:
    """The contenders that cannot take part here, and why."""
    reason = "its aiobotocore 3.10 needs an older botocore than moto; it takes part where it is on the path of Python"
    return {} if find_spec("s3fs") else {BucketDcpS3fs.name: reason}


KEEPER = BucketKeeper.name
#: The same saves into a bucket and into a folder.
SAVING_BOTH = _registry(BucketKeeper, HoldfastBackground)
