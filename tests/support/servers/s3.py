"""S3 on this machine: moto's server, as a process of its own."""

from __future__ import annotations

import http.client
import itertools
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.servers.processes import ServerProcess

_PROGRAM = Path(__file__).with_name("moto_process.py")
_REGION = "us-east-1"


@dataclass(frozen=True, slots=True)
class Bucket:
    """An empty bucket, and where its server answers."""

    name: str
    endpoint: str

    @property
    def url(self) -> str:
        return f"s3://{self.name}"

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables with which clients of S3 find the server."""
        return {
            "AWS_ACCESS_KEY_ID": "holdfast",
            "AWS_SECRET_ACCESS_KEY": "holdfast-secret",
            "AWS_REGION": _REGION,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ALLOW_HTTP": "true",
        }

    def behind(self, endpoint: str) -> Bucket:
        """The same bucket, reached at another endpoint, such as that of a proxy."""
        return Bucket(self.name, endpoint)


class MotoServer:
    """A server of S3 for any number of tests, each with buckets of its own."""

    def __init__(self, folder: Path) -> None:
        """Start the server, with its log in `folder`, and return when it answers."""
        self._process = ServerProcess([sys.executable, str(_PROGRAM)], log=folder / "moto.log")
        self._process.until(lambda: "port " in self._process.log and self._process.log.endswith("\n"))
        found = re.search(r"port (\d+)", self._process.log)
        assert found is not None
        self._address = f"127.0.0.1:{found[1]}"
        self._numbers = itertools.count(1)

    @property
    def endpoint(self) -> str:
        return f"http://{self._address}"

    def new_bucket(self) -> Bucket:
        """Create a bucket with a name that no other has."""
        bucket = Bucket(f"bucket-{next(self._numbers)}", self.endpoint)
        connection = http.client.HTTPConnection(self._address, timeout=30)
        connection.request("PUT", f"/{bucket.name}")
        assert connection.getresponse().status == 200
        connection.close()
        return bucket

    def kill(self) -> None:
        """Kill the server, and return when it is dead."""
        self._process.kill()
