"""The proxy that injects faults, and the S3 server behind it: each fault does what its name says, and nothing else."""

from __future__ import annotations

import http.client
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.nursery import until
from tests.support.servers.fault_proxy import FaultProxy
from tests.support.servers.faults import Fault, on
from tests.support.servers.gcs_dialect import SIGNATURE
from tests.support.servers.s3 import Bucket

SIGNED = {"Authorization": SIGNATURE}
BROKEN = (http.client.BadStatusLine, http.client.IncompleteRead, ConnectionError)

STARTER = """
import sys
from pathlib import Path
from tests.support.servers.processes import ServerProcess
print(ServerProcess(["sleep", "60"], log=Path(sys.argv[1])).pid, flush=True)
sys.stdin.read()
"""


class Client:
    """A client of one bucket that repeats nothing."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._connection = http.client.HTTPConnection(bucket.endpoint.removeprefix("http://"), timeout=20)

    def ask(self, method: str, key: str, data: bytes | None = None, **headers: str) -> tuple[int, bytes]:
        """Returns the status and the body of the answer. After an error the next request has a new connection."""
        try:
            self._connection.request(method, f"/{self._bucket.name}/{key}", data, SIGNED | headers)
            answer = self._connection.getresponse()
            return answer.status, answer.read()
        except BROKEN:
            self._connection.close()
            raise

    def get(self, key: str) -> bytes:
        status, data = self.ask("GET", key)
        assert status == 200
        return data


@pytest.fixture
def direct(bucket: Bucket) -> Client:
    return Client(bucket)


@pytest.fixture
def client(bucket: Bucket, proxy: FaultProxy) -> Client:
    return Client(bucket.behind(proxy.endpoint))


def test_without_faults_everything_passes_on_one_connection_and_is_counted(client: Client, proxy: FaultProxy) -> None:
    content = bytes(range(256)) * 4096
    assert client.ask("PUT", "folder/object", content)[0] == 200
    assert client.get("folder/object") == content
    assert client.ask("GET", "folder/object", Range="bytes=5-7") == (206, b"\x05\x06\x07")
    assert client.ask("HEAD", "folder/object") == (200, b"")
    assert client.ask("DELETE", "folder/object") == (204, b"")
    assert client.ask("GET", "folder/object")[0] == 404
    assert (proxy.count(), proxy.count("GET"), proxy.count("*", "*/folder/other")) == (6, 3, 0)


def test_chunks_and_requests_that_ask_before_they_send_pass(client: Client, direct: Client) -> None:
    assert client.ask("PUT", "object", b"0123", Expect="100-continue")[0] == 200
    assert direct.get("object") == b"0123"


@pytest.mark.parametrize(
    ("fault", "arrived"),
    [
        (on("PUT").loses_the_answer(), True),
        (on("PUT").breaks_the_connection(), False),
        (on("PUT").cuts_the_request(after=1000), False),
    ],
    ids=["lost answer", "broken connection", "cut request"],
)
def test_a_broken_connection_leaves_what_its_fault_says(
    client: Client, direct: Client, proxy: FaultProxy, fault: Fault, arrived: bool
) -> None:
    with proxy.faults(fault), pytest.raises(BROKEN):
        client.ask("PUT", "object", bytes(100_000))
    assert direct.ask("HEAD", "object")[0] == (200 if arrived else 404)
    assert client.ask("PUT", "object", b"x")[0] == 200


def test_an_answer_is_cut_after_so_many_bytes(client: Client, proxy: FaultProxy) -> None:
    client.ask("PUT", "object", bytes(300_000))
    proxy.add(on("GET").cuts_the_answer(after=100_000))
    with pytest.raises(http.client.IncompleteRead) as caught:
        client.ask("GET", "object")
    assert len(caught.value.partial) == 100_000
    proxy.clear()
    assert len(client.get("object")) == 300_000


def test_a_scripted_answer_is_given_to_the_chosen_requests_and_the_server_sees_none(
    client: Client, direct: Client, proxy: FaultProxy
) -> None:
    proxy.add(on("PUT", "*/history/*").after(1).times(2).answers(503), on("DELETE").answers(403))
    statuses = [client.ask("PUT", f"history/{number}", b"x")[0] for number in range(4)]
    assert statuses == [200, 503, 503, 200]
    assert [direct.ask("HEAD", f"history/{number}")[0] for number in range(4)] == [200, 404, 404, 200]
    status, body = client.ask("DELETE", "history/0")
    assert (status, b"AccessDenied" in body) == (403, True)
    assert client.ask("PUT", "other", b"x")[0] == 200
    assert proxy.count("PUT", "*/history/*") == 4


@pytest.mark.parametrize("fault", [on().waits(0.2), on("GET").throttles(1_000_000)], ids=["latency", "bandwidth"])
def test_a_slow_network_takes_its_time(client: Client, proxy: FaultProxy, fault: Fault) -> None:
    client.ask("PUT", "object", bytes(200_000))
    with proxy.faults(fault):
        begun = time.monotonic()
        assert len(client.get("object")) == 200_000
        assert time.monotonic() - begun >= 0.19


def test_a_request_is_held_until_another_has_passed(client: Client, direct: Client, proxy: FaultProxy) -> None:
    gate = threading.Event()
    proxy.add(on("PUT").waits_for(gate))
    late = threading.Thread(target=client.ask, args=("PUT", "object", b"late"))
    late.start()
    until(lambda: proxy.count("PUT") == 1)
    assert direct.ask("PUT", "object", b"early")[0] == 200
    gate.set()
    late.join()
    assert direct.get("object") == b"late"


@pytest.mark.parametrize("change", [lambda fault: fault.once(), lambda fault: fault.after(2)], ids=["once", "after"])
def test_a_fault_is_a_value_that_its_users_share(change: Callable[[Fault], Fault]) -> None:
    fault = on("PUT").answers(503)
    assert change(fault) != fault
    assert fault == on("PUT").answers(503)


def test_a_server_ends_with_the_process_that_started_it_even_by_a_kill(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STARTER, str(tmp_path / "log")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as starter:
        assert starter.stdout is not None
        server = Path("/proc", starter.stdout.readline().strip())
        until(lambda: (server / "comm").read_text() == "sleep\n")
        starter.kill()
    until(lambda: not server.exists() or "State:\tZ" in (server / "status").read_text())
