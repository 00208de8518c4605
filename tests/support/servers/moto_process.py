"""The program of a `MotoServer`: moto's S3 on a free port of the loopback, which it writes to standard output."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from threading import Lock
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from moto.s3.responses import S3Response
from werkzeug.serving import WSGIRequestHandler, make_server


class _QuietHandler(WSGIRequestHandler):
    """Keeps connections open, as S3 does, and logs no requests."""

    protocol_version = "HTTP/1.1"

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        pass


def _one_at_a_time(method: Callable[..., Any]) -> Callable[..., Any]:
    lock = Lock()

    @wraps(method)
    def called(*arguments: object, **options: object) -> object:
        with lock:
            return method(*arguments, **options)

    return called


def main() -> None:
    # moto looks whether a key exists, and creates it, without a lock: of racing creators several would win.
    S3Response.put_object = _one_at_a_time(S3Response.put_object)  # type: ignore[method-assign]
    application = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=_QuietHandler)
    print(f"port {server.port}", flush=True)  # noqa: T201 - it is told to the process that started this one
    server.serve_forever()


if __name__ == "__main__":
    main()
