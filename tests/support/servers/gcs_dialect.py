"""The XML API of Google Cloud Storage, as far as obstore speaks it, in front of a server that speaks that of S3.

A fake, because no emulator serves obstore: fake-gcs-server refuses its uploads ("invalid uploadType"), and
gcp-storage-emulator has the JSON API alone. The two XML APIs differ in the names of headers, in how a creation without
replacement is asked for, and in the answer to the deletion of an absent object.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

if TYPE_CHECKING:
    from types import TracebackType
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

    _ExceptionInfo = tuple[type[BaseException], BaseException, TracebackType] | tuple[None, None, None]

#: The server checks no signature, but answers only to requests that have one.
SIGNATURE = "AWS4-HMAC-SHA256 Credential=holdfast/20260101/us-east-1/s3/aws4_request"

_GOOGLE, _AMAZON = "HTTP_X_GOOG_", "HTTP_X_AMZ_"


class GcsDialect:
    """A WSGI application that translates requests for `s3`, and its answers."""

    def __init__(self, s3: WSGIApplication) -> None:
        self._s3 = s3

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Answer one request."""
        generation = environ.pop("HTTP_X_GOOG_IF_GENERATION_MATCH", None)
        translated = {name.replace(_GOOGLE, _AMAZON): value for name, value in environ.items()}
        translated["HTTP_AUTHORIZATION"] = SIGNATURE
        # obstore escapes more letters of a key than clients of S3, for which the server does not look.
        uri = quote(translated["PATH_INFO"]) + "?" + translated["QUERY_STRING"]
        translated |= {"RAW_URI": uri, "REQUEST_URI": uri}
        if generation == "0":
            translated["HTTP_IF_NONE_MATCH"] = "*"

        def start(status: str, headers: list[tuple[str, str]], info: _ExceptionInfo | None = None) -> Any:
            return start_response(status, [_translated(*header) for header in headers], info)

        if translated["REQUEST_METHOD"] == "DELETE" and "uploadId" not in translated["QUERY_STRING"]:
            return self._delete(translated, start)
        return self._s3(translated, start)

    def _delete(self, environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        """Delete an object, and answer 404 where there is none; S3 answers 204 then, too."""
        statuses: list[str] = []

        def look(status: str, headers: list[tuple[str, str]], info: _ExceptionInfo | None = None) -> Any:
            statuses.append(status)
            return lambda data: None

        list(self._s3(environ | {"REQUEST_METHOD": "HEAD"}, look))
        if statuses == ["404 NOT FOUND"]:
            body = b"<Error><Code>NoSuchKey</Code></Error>"
            start("404 Not Found", [("Content-Length", str(len(body)))])
            return [body]
        return self._s3(environ, start)


def _translated(name: str, value: str) -> tuple[str, str]:
    return name.lower().replace("x-amz-", "x-goog-"), value
