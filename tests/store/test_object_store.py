"""Object stores: the conformance tests on an S3 server, and what only they promise."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import boto3
import pytest

from holdfast.store.base import Store
from holdfast.store.objects import ObjectStore
from holdfast.store.urls import location_of
from holdfast.testing import StoreConformance

_NUMBERS = count()
#: The smallest part that S3 takes.
_PART_NBYTES = 5 << 20


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    endpoint = f"http://127.0.0.1:{port}"
    os.environ.update(AWS_ACCESS_KEY_ID="a", AWS_SECRET_ACCESS_KEY="b", AWS_REGION="us-east-1")
    for _ in range(200):
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            break
        except OSError:
            time.sleep(0.1)
    boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket="bucket")
    yield f"s3://bucket/{{}}?endpoint={endpoint}&allow_http=true&unsigned_payload=true&checksum_algorithm=CRC64NVME"
    server.kill()
    server.wait()


class TestObjectStore(StoreConformance):
    @pytest.fixture(autouse=True)
    def _server(self, s3: str) -> None:
        self.url = s3

    def make_store(self, tmp_path: Path) -> Store:
        return ObjectStore(location_of(self.url.format(f"run-{next(_NUMBERS)}")))


class TestObjectStoreInParts(TestObjectStore):
    def make_store(self, tmp_path: Path) -> Store:
        return ObjectStore(location_of(self.url.format(f"run-{next(_NUMBERS)}")), part_nbytes=_PART_NBYTES)
