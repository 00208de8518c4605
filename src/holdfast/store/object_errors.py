"""Errors of obstore, turned into errors that say what to do.

obstore tells most outcomes apart only by the text of its message: the status of the answer, and the code that the
server gave in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
    UnknownConfigurationKeyError,
)

from holdfast.errors import ConfigurationError, CorruptError, HoldfastError, NotFoundError, StorageError

#: All that obstore raises. It reports a missing object, and a key that it refuses, by errors of Python.
OBSTORE_ERRORS: Final = (BaseError, FileNotFoundError, ValueError)
#: A request with these errors took no effect, and would not by being repeated.
DEFINITE_ERRORS: Final = (FileNotFoundError, ValueError, PermissionDeniedError, UnauthenticatedError)

_STATUS: Final = re.compile(r"status code: (\d{3})")
_CODE: Final = re.compile(r"<Code>(\w+)</Code>")
_MESSAGE: Final = re.compile(r"<Message>([^<\n]*)")
_EMPTY_RANGE: Final = re.compile(r'CONTENT_RANGE header: "bytes [^/]*/0"')
_RETRIES: Final = re.compile(r", after \d+ retries, max_retries: \d+, retry_timeout: \S+")


class CutAnswerError(BaseError):
    """A server or a proxy ended an answer before all bytes that it had announced, as if it were whole."""

    def __init__(self, start: int, nbytes: int) -> None:
        super().__init__(f"Got invalid short response: it ends {nbytes:,} bytes behind offset {start:,}")


class _Failure(NamedTuple):
    """A kind of failure: the pattern by which its text is recognised, and what to tell the user."""

    pattern: re.Pattern[str]
    error: type[ConfigurationError | StorageError]
    code: str
    action: str
    retryable: bool = False


def _kind(pattern: str, error: type[ConfigurationError | StorageError], code: str, action: str) -> _Failure:
    return _Failure(re.compile(pattern), error, code, action)


def _passing(pattern: str, code: str, action: str) -> _Failure:
    return _Failure(re.compile(pattern), StorageError, code, action, retryable=True)


_KINDS: Final = (
    _kind(
        r"NoSuchBucket|ContainerNotFound|specified bucket does not exist|ContainerBeingDeleted",
        ConfigurationError,
        "config.bucket",
        "Create the bucket (container), or correct its name in the URL; check that the endpoint is the right server.",
    ),
    _kind(
        r"169\.254\.|metadata\.google|MissingCredential|No credentials|missing credential|computeMetadata|"
        r"credential(s)? (not|was not) found|Error (fetching|getting|performing) (token|credential)",
        ConfigurationError,
        "config.credentials",
        'No credentials were found. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (from a profile: eval "$(aws '
        'configure export-credentials --format env)"), GOOGLE_APPLICATION_CREDENTIALS, or AZURE_STORAGE_ACCOUNT_KEY '
        "in the environment of the job.",
    ),
    _kind(
        r"ExpiredToken|TokenRefreshRequired|RequestExpired|token has expired|AuthenticationFailed.*[Ee]xpir",
        StorageError,
        "storage.credentials",
        "The credentials have expired: get new ones, and start the job and its keeper again. For a job that outlives "
        "them, use a role or a token file that is renewed by itself.",
    ),
    _kind(
        r"InvalidAccessKeyId|SignatureDoesNotMatch|InvalidToken|AuthenticationFailed|RequestTimeTooSkewed|"
        r"status code: 401|Unauthenticated",
        ConfigurationError,
        "config.credentials",
        "The server does not know these credentials: check the variables AWS_..., GOOGLE_... or AZURE_... in the "
        "environment of the job, and the clock of this machine.",
    ),
    _kind(
        r"PermanentRedirect|AuthorizationHeaderMalformed|IllegalLocationConstraint|status code: 301|"
        r"redirect without LOCATION",
        ConfigurationError,
        "config.region",
        "Set AWS_REGION, or add ?region=... to the URL, to the region of the bucket.",
    ),
    _kind(
        r"status code: 403|PermissionDenied",
        StorageError,
        "storage.denied",
        "Give these credentials the rights to list the bucket, and to read, create and delete objects below this key.",
    ),
    _passing(
        r"SlowDown|status code: (429|503)|TooManyRequests|ServerBusy|RequestLimitExceeded",
        "storage.throttled",
        "The store limits the rate of requests: try again later, or spread runs over more prefixes or buckets.",
    ),
    _passing(
        r"BadDigest|ContentSHA256Mismatch|Md5Mismatch|Crc64Mismatch|IncompleteBody|InvalidPart\b|InvalidBlockList",
        "storage.mangled",
        "Try again: nothing was written. If it happens often, check the memory and the network card of this machine, "
        "and proxies on the way.",
    ),
    _passing(
        r"kind: Timeout|TimedOut|operation timed out|status code: (408|504)|RequestTimeout",
        "storage.timeout",
        "Check the network and the server; if they are only slow, try again.",
    ),
    _passing(
        r"kind: Connect|dns error|error trying to connect|Connection refused",
        "storage.unreachable",
        "Check the endpoint (AWS_ENDPOINT_URL, or ?endpoint=... in the URL), that the server is up, and the network.",
    ),
    _passing(
        r"status code: 5\d\d|status code: 409|kind: (Request|Decode|Interrupted|Unknown)|connection (closed|reset)|"
        r"error (sending request|decoding response)|IncompleteMessage|Got invalid \w+ response",
        "storage.unavailable",
        "Try again; if the error persists, check the network and the server.",
    ),
)


@contextmanager
def reported(operation: str, path: str) -> Iterator[None]:
    """Turn an error of obstore in the block into one of holdfast's."""
    try:
        yield
    except OBSTORE_ERRORS as error:
        raise error_for(operation, path, error) from error


@contextmanager
def opened(url: str) -> Iterator[None]:
    """Turn obstore's refusal of an option in the block into a `ConfigurationError`, code ``config.store_option``."""
    try:
        yield
    except UnknownConfigurationKeyError as error:
        raise _bad_option(url, error) from error
    except OBSTORE_ERRORS as error:
        raise _bad_option(url, error) from error


def error_for(operation: str, path: str, error: Exception) -> HoldfastError:
    """holdfast's error for one of obstore's."""
    text = str(error)
    if isinstance(error, FileNotFoundError) and _KINDS[0].pattern.search(text) is None:
        return not_found(path)
    reason = reason_of(error)
    for kind in _KINDS:
        if kind.pattern.search(text):
            message = f"cannot {operation} {path}: {reason}."
            if issubclass(kind.error, StorageError):
                return StorageError(message, code=kind.code, action=kind.action, path=path, retryable=kind.retryable)
            return kind.error(message, code=kind.code, action=kind.action, path=path)
    return StorageError(
        f"cannot {operation} {path}: {reason}.",
        code="storage.failed",
        action="Repair the cause that the store reports, then try again.",
        path=path,
    )


def reason_of(error: Exception) -> str:
    """The answer of the store, in one line."""
    text = str(error)
    message, code, status = (pattern.search(text) for pattern in (_MESSAGE, _CODE, _STATUS))
    if code is not None:
        said = f": {message[1].rstrip('.')}" if message is not None and message[1] else ""
        return f"{code[1]}{said}" + (f" (status {status[1]})" if status is not None else "")
    return _RETRIES.sub("", text.partition("\n")[0]).strip().rstrip(".:")


def is_out_of_range(error: Exception) -> bool:
    """Whether a request was refused because its range begins behind the end of the object."""
    return "status code: 416" in str(error) or "InvalidRange" in str(error)


def is_without_range(error: Exception) -> bool:
    """Whether a server answered a request for a range without one, as several do where the object is empty: they send
    the whole object, or the range that ends before it begins."""
    text = str(error)
    return "Received non-partial response" in text or _EMPTY_RANGE.search(text) is not None


def is_definite(error: Exception) -> bool:
    """Whether a request that failed had no effect, and would fail again."""
    found = error_for("", "", error)
    return not (isinstance(found, StorageError) and (found.retryable or found.code == "storage.failed"))


def is_passing(error: Exception) -> bool:
    """Whether a request failed for a cause that may pass: the network, the server, or its limit of requests."""
    if not isinstance(error, OBSTORE_ERRORS) or isinstance(error, AlreadyExistsError | PreconditionError):
        return False
    found = error_for("", "", error)
    return isinstance(found, StorageError) and found.retryable


def is_answer(error: Exception) -> bool:
    """Whether a server has answered the request that failed with `error`."""
    is_told = isinstance(error, FileNotFoundError | AlreadyExistsError | PreconditionError)
    return is_told or _STATUS.search(str(error)) is not None


def no_address() -> ConfigurationError:
    """The error for an endpoint that is no address of a server. It does not show it, because it may hold a password."""
    return ConfigurationError(
        "the endpoint that the URL or the environment gives is no address of a server.",
        code="config.endpoint",
        action="Write a scheme and a host, with a port if it needs one, and without a user: https://minio.local:9000.",
    )


def no_tls(endpoint: str, variable: str) -> ConfigurationError:
    """The error for an endpoint without encryption that was not allowed."""
    return ConfigurationError(
        f"the endpoint '{endpoint}' has no encryption (http), which was not allowed.",
        code="config.endpoint",
        action=f"In a network that you trust, set {variable}=true, or add allow_http=true to the URL; else use https.",
    )


def _bad_option(url: str, error: Exception) -> ConfigurationError:
    return ConfigurationError(
        f"'{url}' cannot be opened: {reason_of(error)}.",
        code="config.store_option",
        action="Correct the options in the URL and the variables AWS_..., GOOGLE_... or AZURE_... in the environment.",
        path=url,
    )


def not_found(path: str) -> NotFoundError:
    """The error for a key without an object."""
    return NotFoundError(
        f"there is no object {path}.",
        code="not_found.object",
        action="Check the path, and whether the run was copied completely.",
        path=path,
    )


def changed(path: str) -> CorruptError:
    """The error for an object that was replaced while it was read. No store of holdfast's replaces one."""
    return CorruptError(
        f"{path} was replaced or deleted while it was read.",
        code="corrupt.changed",
        action="Find out what else writes below this key; then use another copy or an older checkpoint.",
        path=path,
    )
