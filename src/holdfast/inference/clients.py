"""The control plane of an inference engine, as a trainer calls it: the four phases of vLLM's weight transfer."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Protocol

from holdfast.errors import StorageError


class EngineClient(Protocol):
    """The four calls of an engine. vLLM's own `HTTPVLLMWeightSyncClient` and `RayVLLMWeightSyncClient` fit."""

    def init_weight_transfer_engine(self, init_info: dict[str, object]) -> None:
        """Have all workers of the engine meet the trainer."""

    def start_weight_update(self) -> None:
        """Begin a version."""

    def update_weights(self, update_info: dict[str, object]) -> None:
        """Have all workers receive a version; returns when they have it."""

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Have all workers show the version."""


class HTTPEngineClient:
    """An `EngineClient` of a vLLM server: its routes of the same four names, at `base_url`.

    The server has `timeout_s` to answer. Let the `Publisher` have less: its errors tell more."""

    def __init__(self, base_url: str, *, timeout_s: float = 600.0) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url is the address of an engine, such as http://host:8000, not {base_url!r}")
        self._base_url = base_url.rstrip("/")
        self._timeout_s = timeout_s

    def init_weight_transfer_engine(self, init_info: dict[str, object]) -> None:
        """As `EngineClient.init_weight_transfer_engine`."""
        self._post("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """As `EngineClient.start_weight_update`."""
        self._post("start_weight_update", None)

    def update_weights(self, update_info: dict[str, object]) -> None:
        """As `EngineClient.update_weights`."""
        self._post("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """As `EngineClient.finish_weight_update`."""
        self._post("finish_weight_update", None if weight_version is None else {"weight_version": weight_version})

    def _post(self, route: str, body: Mapping[str, object] | None) -> None:
        data = b"" if body is None else json.dumps(body).encode()
        url = f"{self._base_url}/{route}"
        request = urllib.request.Request(  # noqa: S310 - the scheme was checked
            url, data=data, headers={"Content-Type": "application/json"} if data else {}, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as response:  # noqa: S310
                response.read()
        except urllib.error.HTTPError as error:
            said = error.read(2000).decode(errors="replace")
            raise StorageError(
                f"the engine at {url} failed: {error}. {said}".rstrip(),
                code="storage.engine",
                action="Read the log of the engine, and publish again.",
            ) from error
        except (OSError, http.client.HTTPException) as error:
            cause = error.reason if isinstance(error, urllib.error.URLError) else error
            raise StorageError(
                f"the engine at {url} does not answer: {cause}.",
                code="storage.engine",
                action="Check the address and whether the engine runs, and publish again.",
            ) from error
