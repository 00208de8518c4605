"""The conformance tests on the servers of the layer ``stores``: another S3, Azure, and the dialect of Google Cloud."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.store.base import Store
from holdfast.store.objects import ObjectStore
from holdfast.store.urls import location_of
from holdfast.testing import StoreConformance
from tests.support.servers.azure import AzureServer
from tests.support.servers.s3 import GcsServer, MiniStackServer, S3Server

pytestmark = pytest.mark.stores

#: The smallest part that S3 takes.
PART_NBYTES = 5 << 20


@pytest.fixture(scope="module", params=[AzureServer, GcsServer, MiniStackServer])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[AzureServer | S3Server]:
    server = request.param(tmp_path_factory.mktemp("server"))
    yield server
    server.kill()


class TestObjectStoreOnOtherServers(StoreConformance):
    @pytest.fixture(autouse=True)
    def _bucket(self, server: AzureServer | S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
        bucket = server.new_bucket()
        for name, value in bucket.environment.items():
            monkeypatch.setenv(name, value)
        self.url = f"{bucket.url}/runs/a"

    def make_store(self, tmp_path: Path) -> Store:
        return ObjectStore(location_of(self.url), part_nbytes=PART_NBYTES)
