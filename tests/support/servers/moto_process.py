"""The program of a `MotoServer`: moto's S3 on a free port of the loopback, which it writes to standard output.

With the argument ``gcs`` it speaks the dialect of Google Cloud Storage.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.support.servers.gcs_dialect import GcsDialect


class _QuietHandler(WSGIRequestHandler):
    """Keeps connections open, as S3 does, and logs no requests."""

    protocol_version = "HTTP/1.1"

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        pass


class _AtomicCreation:
    """`application`, in which requests that create without replacing take turns: moto looks for the key and writes it
    without a lock, so of two such requests at once both could succeed."""

    def __init__(self, application: WSGIApplication) -> None:
        self._application = application
        self._lock = Lock()

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if "HTTP_IF_NONE_MATCH" not in environ:
            return self._application(environ, start_response)
        with self._lock:
            return list(self._application(environ, start_response))


def main() -> None:
    application: WSGIApplication = _AtomicCreation(DomainDispatcherApplication(create_backend_app))
    if "gcs" in sys.argv:
        application = GcsDialect(application)
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=_QuietHandler)
    print(f"port {server.port}", flush=True)  # noqa: T201 - it is told to the process that started this one
    server.serve_forever()


if __name__ == "__main__":
    main()
