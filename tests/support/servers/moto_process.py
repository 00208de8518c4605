"""The program of a `MotoServer`: moto's S3 on a free port of the loopback, which it writes to standard output."""

from __future__ import annotations

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server


class _QuietHandler(WSGIRequestHandler):
    """Keeps connections open, as S3 does, and logs no requests."""

    protocol_version = "HTTP/1.1"

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        pass


def main() -> None:
    application = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=_QuietHandler)
    print(f"port {server.port}", flush=True)  # noqa: T201 - it is told to the process that started this one
    server.serve_forever()


if __name__ == "__main__":
    main()
