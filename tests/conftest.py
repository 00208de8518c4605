"""Settings for all tests; a run and the memory of a node for those that save with a checkpointer."""

from __future__ import annotations

import gc
import os
import signal
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from holdfast import Memory
    from tests.support.nodes import Network
    from tests.support.servers.fault_proxy import FaultProxy
    from tests.support.servers.s3 import Bucket, MotoServer

# Read when torch is first imported, here and by the rank processes: several of them share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Each connection of torch asks the name server who 127.0.0.1 is. When an answer is lost, the resolver waits 5 seconds.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:3")

# A shell has programs that it starts in the background ignore Ctrl-C; tests interrupt themselves.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Machines that run tests are shared, so the time of one example says nothing about the code.
settings.register_profile("holdfast", deadline=None, print_blob=True)
settings.load_profile("holdfast")


@pytest.fixture
def run(tmp_path: Path) -> str:
    return str(tmp_path / "run")


@pytest.fixture
def node_dir(tmp_path: Path) -> Iterator[Path]:
    """A folder for the memory of a node; its keepers end with the test."""
    from tests.support.keepers import end_keepers

    path = tmp_path / "node"
    path.mkdir()
    yield path
    end_keepers(path)


@pytest.fixture
def memory(node_dir: Path) -> Memory:
    """Memory of a node of its own; its keepers end with the test."""
    from holdfast import Memory

    return Memory(node_dir=node_dir)


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    """A network without nodes, which starts emulated nodes; they end with the test."""
    from tests.support.nodes import Network, missing

    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with Network(tmp_path / "network") as network:
        yield network


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MotoServer]:
    """A server of S3 for all tests of this process."""
    from tests.support.servers.s3 import MotoServer

    server = MotoServer(tmp_path_factory.mktemp("moto"))
    yield server
    server.kill()


@pytest.fixture
def bucket(moto: MotoServer) -> Bucket:
    """An empty bucket of S3; `Bucket.environment` leads clients to it."""
    return moto.new_bucket()


@pytest.fixture
def proxy(moto: MotoServer) -> Iterator[FaultProxy]:
    """A proxy of the server of S3, for one test; `bucket.behind(proxy.endpoint)` is the bucket behind it."""
    from tests.support.servers.fault_proxy import FaultProxy

    with FaultProxy(moto.endpoint) as proxy:
        yield proxy


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector from what lives as long as the tests: torch, their modules, and thousands of tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave most cases of a test that is marked ``few(n)`` to the slow suite: the default suite runs `n` of them, which
    lie evenly among those that are not slow by themselves."""
    cases = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if item.get_closest_marker("few") is not None and item.get_closest_marker("slow") is None:
            cases[item.nodeid.partition("[")[0]].append(item)
    for alike in cases.values():
        (number,) = alike[0].iter_markers("few")
        quick = {round(at * len(alike) / number.args[0]) for at in range(number.args[0])}
        for at, item in enumerate(alike):
            if at not in quick:
                item.add_marker(pytest.mark.slow)
