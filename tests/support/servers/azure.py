"""Azure Blob Storage on this machine: Azurite, of the layer ``stores``, as a process of its own."""

from __future__ import annotations

import base64
import hashlib
import hmac
import itertools
import urllib.request
from datetime import UTC, datetime
from pathlib import Path

from tests.support.servers.processes import LAYER, ServerProcess, answers, free_port
from tests.support.servers.s3 import Bucket

#: The account that Azurite has, and its published key.
_ACCOUNT = "devstoreaccount1"
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_VERSION = "2021-12-02"


class AzureServer:
    """A server of Azure Blob Storage for any number of tests, each with containers of its own."""

    def __init__(self, folder: Path) -> None:
        """Start the server, with its log in `folder`, and return when it answers."""
        port = free_port()
        program = str(LAYER / "node/node_modules/.bin/azurite-blob")
        options = ("--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry", "--silent")
        command = [program, *options, "--blobHost", "127.0.0.1", "--blobPort", str(port)]
        self._process = ServerProcess(command, log=folder / "azurite.log").until(lambda: answers(port))
        self.endpoint = f"http://127.0.0.1:{port}"
        self._numbers = itertools.count(1)

    def new_bucket(self) -> Bucket:
        """Create a container with a name that no other has."""
        name = f"container-{next(self._numbers)}"
        url = f"{self.endpoint}/{_ACCOUNT}/{name}?restype=container"
        request = urllib.request.Request(url, method="PUT", headers=_signed(name))
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert answer.status == 201
        environment = {
            "AZURE_STORAGE_ACCOUNT_NAME": _ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": _KEY,
            "AZURE_STORAGE_ENDPOINT": f"{self.endpoint}/{_ACCOUNT}",
            "AZURE_ALLOW_HTTP": "true",
        }
        return Bucket(f"az://{name}", self.endpoint, environment)

    def kill(self) -> None:
        """Kill the server, and return when it is dead."""
        self._process.kill()


def _signed(container: str) -> dict[str, str]:
    """The headers of a request that creates a container, with its signature."""
    headers = {"x-ms-date": datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT"), "x-ms-version": _VERSION}
    named = [f"{name}:{value}" for name, value in headers.items()]
    text = "\n".join(["PUT", *[""] * 11, *named, f"/{_ACCOUNT}/{_ACCOUNT}/{container}", "restype:container"])
    signature = hmac.new(base64.b64decode(_KEY), text.encode(), hashlib.sha256).digest()
    return headers | {
        "Authorization": f"SharedKey {_ACCOUNT}:{base64.b64encode(signature).decode()}",
        "Content-Length": "0",
    }
