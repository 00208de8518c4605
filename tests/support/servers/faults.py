"""Faults of a network and of a server, as values that read like a specification.

on("PUT", "*/history/*").once().loses_the_answer()
on("GET").after(2).times(3).answers(503)
on().waits(0.05)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from threading import Event

#: The error codes of S3 in the bodies of answers.
_CODES = {403: "AccessDenied", 404: "NoSuchBucket", 409: "ConditionalRequestConflict", 503: "SlowDown"}


@dataclass(frozen=True, slots=True)
class Request:
    """A request as the proxy saw it; `target` is its path and query."""

    method: str
    target: str

    def matches(self, method: str, target: str) -> bool:
        """Whether its method and its target match the two patterns, in which ``*`` stands for any text."""
        return fnmatchcase(self.method, method) and fnmatchcase(self.target, target)


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer that the proxy gives in place of the server."""

    status: int
    body: bytes
    headers: tuple[str, ...] = ()

    @property
    def head(self) -> bytes:
        lines = (
            f"HTTP/1.1 {self.status} Scripted",
            "Content-Type: application/xml",
            f"Content-Length: {len(self.body)}",
            *self.headers,
        )
        return ("\r\n".join(lines) + "\r\n\r\n").encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault that hits the requests that match; `on` begins one."""

    method: str
    target: str
    num_spared: int = 0
    num_hit: int | None = None
    answer: Answer | None = None
    delay_s: float = 0.0
    bytes_per_s: float | None = None
    gate: Event | None = None
    is_refused: bool = False
    request_ends_at: int | None = None
    is_answer_lost: bool = False
    answer_ends_at: int | None = None
    answer_lacks: int | None = None

    def after(self, number: int) -> Fault:
        """Spare the first `number` requests that match."""
        return replace(self, num_spared=number)

    def times(self, number: int) -> Fault:
        """Hit `number` requests, and spare those after them."""
        return replace(self, num_hit=number)

    def once(self) -> Fault:
        """Hit one request, and spare those after it."""
        return self.times(1)

    def hits(self, number: int) -> bool:
        """Whether the fault hits the request that matches as the `number`th, from 0."""
        return number >= self.num_spared and (self.num_hit is None or number < self.num_spared + self.num_hit)

    def answers(self, status: int, *headers: str, code: str = "", body: bytes | None = None) -> Fault:
        """Answer in place of the server, which never sees the request. The body is an error of S3 with `code`, which
        the status implies, or `body`."""
        error = f"<Error><Code>{code or _CODES.get(status, 'InternalError')}</Code><Message>scripted</Message></Error>"
        return replace(self, answer=Answer(status, error.encode() if body is None else body, headers))

    def breaks_the_connection(self) -> Fault:
        """Break the connection before the server sees the request."""
        return replace(self, is_refused=True)

    def loses_the_answer(self) -> Fault:
        """The server does what the request asks, and the connection breaks before the first byte of its answer."""
        return replace(self, is_answer_lost=True)

    def cuts_the_request(self, *, after: int) -> Fault:
        """Break the connection when so many bytes of the body have reached the server."""
        return replace(self, request_ends_at=after)

    def cuts_the_answer(self, *, after: int) -> Fault:
        """Break the connection when so many bytes of the answer's body have reached the client."""
        return replace(self, answer_ends_at=after)

    def shortens_the_answer(self, *, by: int) -> Fault:
        """Give the answer a length that is smaller `by` so many bytes, and no more of its body: as if it were whole.
        If `by` is negative, the length is larger than the body, and the connection breaks behind it."""
        return replace(self, answer_lacks=by)

    def waits(self, seconds: float) -> Fault:
        """Hold the request for so long before the server sees it."""
        return replace(self, delay_s=seconds)

    def waits_for(self, gate: Event) -> Fault:
        """Hold the request until `gate` is set."""
        return replace(self, gate=gate)

    def throttles(self, bytes_per_s: float) -> Fault:
        """Carry the bodies of a request and of its answer no faster."""
        return replace(self, bytes_per_s=bytes_per_s)


def on(method: str = "*", target: str = "*") -> Fault:
    """A fault that does nothing yet, to requests whose method and target (path and query) match the patterns."""
    return Fault(method=method, target=target)
