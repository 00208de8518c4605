"""Servers of object stores that speak the protocol of S3, or nearly so, as processes of their own."""

from __future__ import annotations

import http.client
import itertools
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from tests.support.servers.gcs_dialect import SIGNATURE
from tests.support.servers.processes import LAYER, ServerProcess, answers, free_port

_PROGRAM = Path(__file__).with_name("moto_process.py")


@dataclass(frozen=True, slots=True)
class Bucket:
    """An empty bucket or container: its URL, where its server answers, and the environment in which clients find it."""

    url: str
    endpoint: str
    environment: Mapping[str, str]

    @property
    def name(self) -> str:
        return urlsplit(self.url).netloc

    def behind(self, endpoint: str) -> Bucket:
        """The same bucket, reached at another endpoint, such as that of a proxy."""
        found = {name: value.replace(self.endpoint, endpoint) for name, value in self.environment.items()}
        return replace(self, endpoint=endpoint, environment=found)


class S3Server:
    """A server of S3 for any number of tests, each with buckets of its own."""

    def __init__(self, process: ServerProcess, port: int) -> None:
        self._process = process
        self._address = f"127.0.0.1:{port}"
        self._numbers = itertools.count(1)

    @property
    def endpoint(self) -> str:
        return f"http://{self._address}"

    def new_bucket(self) -> Bucket:
        """Create a bucket with a name that no other has."""
        name = f"bucket-{next(self._numbers)}"
        connection = http.client.HTTPConnection(self._address, timeout=30)
        connection.request("PUT", f"/{name}", headers={"Authorization": SIGNATURE})
        assert connection.getresponse().status == 200
        connection.close()
        return self._bucket(name)

    def kill(self) -> None:
        """Kill the server, and return when it is dead."""
        self._process.kill()

    def _bucket(self, name: str) -> Bucket:
        environment = {
            "AWS_ACCESS_KEY_ID": "holdfast",
            "AWS_SECRET_ACCESS_KEY": "holdfast-secret",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ALLOW_HTTP": "true",
        }
        return Bucket(f"s3://{name}", self.endpoint, environment)


class MotoServer(S3Server):
    """moto's S3."""

    _dialect: Literal["s3", "gcs"] = "s3"

    def __init__(self, folder: Path) -> None:
        """Start the server, with its log in `folder`, and return when it answers."""
        process = ServerProcess([sys.executable, str(_PROGRAM), self._dialect], log=folder / "moto.log")
        process.until(lambda: process.log.endswith("\n"))
        port = re.search(r"port (\d+)\n", process.log)
        assert port is not None, process.log
        super().__init__(process, int(port[1]))


class FastServer(S3Server):
    """The server of `bench.s3_server`, for tests of many thousands of requests: moto takes ten times as long."""

    def __init__(self, folder: Path) -> None:
        """Start the server, with its log in `folder`, and return when it answers."""
        process = ServerProcess([sys.executable, "-m", "bench.s3_server"], log=folder / "fast.log")
        process.until(lambda: process.log.endswith("\n"))
        super().__init__(process, int(process.log))


class MiniStackServer(S3Server):
    """MiniStack's S3, of the layer ``stores``."""

    def __init__(self, folder: Path) -> None:
        """Start the server, with its log in `folder`, and return when it answers."""
        port = free_port()
        process = ServerProcess(
            [str(LAYER / "bin/ministack")],
            log=folder / "ministack.log",
            extra={"GATEWAY_PORT": str(port), "MINISTACK_HOST": "127.0.0.1", "SERVICES": "s3"},
        )
        process.until(lambda: answers(port))
        super().__init__(process, port)


class GcsServer(MotoServer):
    """moto behind the dialect of Google Cloud Storage."""

    _dialect = "gcs"

    def _bucket(self, name: str) -> Bucket:
        account = {"gcs_base_url": self.endpoint, "disable_oauth": True}
        account |= dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
        environment = {
            "GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(account),
            "GOOGLE_BASE_URL": self.endpoint,
            "GOOGLE_ALLOW_HTTP": "true",
        }
        return Bucket(f"gs://{name}", self.endpoint, environment)
