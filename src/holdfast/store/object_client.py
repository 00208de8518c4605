"""The connection to one bucket: obstore's clients, their time limits, and the guard against forks.

obstore runs threads of its own, which a forked child does not have: a call in such a child would hang for ever (tokio
does not support forks). So each use checks that it is in the process that opened the connection. What a child inherits
is never destroyed there, because that could hang, too.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, TypeAlias, TypeVar
from urllib.parse import urlsplit

import msgspec
from obstore.store import AzureStore, GCSStore, S3Store

from holdfast.errors import ConfigurationError
from holdfast.store.base import Location
from holdfast.store.object_errors import OBSTORE_ERRORS, is_answer, is_passing, no_address, no_tls, opened
from holdfast.store.object_urls import OPTIONS, ObjectPlace
from holdfast.store.retry_budget import RetryBudget, repeated

T = TypeVar("T")

Bucket: TypeAlias = "S3Store | GCSStore | AzureStore"

#: Limits for one request of a few kilobytes, and for one of up to some hundred megabytes, body included.
_RECORD_TIMEOUT_S: Final = 20.0
_DATA_TIMEOUT_S: Final = 120.0
#: The budget of requests to a server that has answered once, and to one that never has: a wrong address is reported
#: after seconds. The first one ends before the default time limit of a save.
_BUDGET: Final = RetryBudget(total_s=180.0)
_FIRST_CONTACT: Final = RetryBudget(total_s=10.0)
#: The times for which requests of many megabytes are repeated. A client of obstore has one of them for good, so there
#: is a client for each.
_DATA_BUDGETS_S: Final = (_BUDGET.total_s, 60.0, 20.0, 6.0, 2.0)
#: Idle connections are closed before usual servers and balancers close them.
_IDLE_S: Final = 15.0

#: The environment variables of each scheme begin with one of these; those with the endpoint; the one that allows HTTP.
_PREFIXES: Final = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}
_ENDPOINTS: Final = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
#: obstore panics at some of the others, at the first request.
_ADDRESS: Final = re.compile(r"https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:\d{1,5})?(/[!-~]*)?")
_TRUE: Final = frozenset({"1", "true", "on", "yes", "y"})

_clients: dict[tuple[object, ...], ObjectClient] = {}
#: The process that used obstore first, by whose threads it works.
_owner: list[int] = []


class ObjectClient:
    """obstore's clients of one bucket. All stores of a process that name the bucket alike share one, and so its
    connections."""

    def __init__(self, place: ObjectPlace) -> None:
        self.endpoint = _endpoint(place)
        self.pid = os.getpid()
        self._place = place
        self._records = _bucket(place, self.endpoint, _RECORD_TIMEOUT_S, RetryBudget(total_s=0.0))
        #: Clients for many megabytes, by the time for which they repeat a request.
        self._data: dict[float, Bucket] = {}
        #: Whether the server has ever answered, so that its address is right.
        self.has_answered = False

    @property
    def records(self) -> Bucket:
        """The client for requests of a few kilobytes. It makes each request once: its caller repeats it (`asked`)."""
        return self._checked(self._records)

    def data(self, left_s: float) -> Bucket:
        """The client for requests of many megabytes, for a caller that has ``left_s``. It repeats them by itself, for
        less than that, so that its error comes in time."""
        total_s = next((each for each in _DATA_BUDGETS_S if each < left_s), _DATA_BUDGETS_S[-1])
        if total_s not in self._data:
            budget = msgspec.structs.replace(_BUDGET, total_s=total_s)
            self._data.setdefault(total_s, _bucket(self._place, self.endpoint, _DATA_TIMEOUT_S, budget))
        return self._checked(self._data[total_s])

    @property
    def budget(self) -> RetryBudget:
        """The budget of repeats for failed requests."""
        return _BUDGET if self.has_answered else _FIRST_CONTACT

    def asked(
        self,
        request: Callable[[], T],
        left_s: Callable[[], float],
        *,
        is_passing: Callable[[Exception], bool] = is_passing,
    ) -> T:
        """The answer to a `request` of a few kilobytes, which is repeated after an error that `is_passing`, within
        `budget` and ``left_s``."""

        def ask() -> T:
            try:
                answer = request()
            except OBSTORE_ERRORS as error:
                self.has_answered |= is_answer(error)
                raise
            self.has_answered = True
            return answer

        return repeated(ask, lambda: self.budget, is_passing=is_passing, left_s=left_s)

    def keep_in_child(self) -> None:
        """In a forked child: keep obstore's objects for ever. Their destructors could wait for threads that the child
        does not have."""
        for bucket in (self._records, *self._data.values()):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(bucket))

    def check(self) -> None:
        """Raise `ConfigurationError`, code ``config.forked``, in a process that was forked from the one that opened
        this."""
        if os.getpid() != self.pid:
            raise _forked()

    def _checked(self, bucket: Bucket) -> Bucket:
        self.check()
        return bucket


def client_of(location: Location) -> ObjectClient:
    """The client of the bucket that `location` names, with the options there and those of the environment as of now.

    Raises `ConfigurationError`: code ``config.forked`` in a child of a process that uses obstore, ``config.endpoint``
    for an address without TLS that was not allowed, and ``config.store_option`` for an option that obstore refuses.
    """
    if _owner and _owner[0] != os.getpid():
        raise _forked()
    place = ObjectPlace.of(location)
    environment = tuple(sorted(each for each in os.environ.items() if each[0].startswith(_PREFIXES[place.scheme])))
    key = (place.scheme, place.bucket, location.options, environment)
    if key not in _clients:
        with opened(location.url):
            client = ObjectClient(place)
        _owner[:] = [os.getpid()]
        _clients.setdefault(key, client)
    return _clients[key]


def _bucket(place: ObjectPlace, endpoint: str | None, timeout_s: float, budget: RetryBudget) -> Bucket:
    names = OPTIONS[place.scheme]
    # obstore checks the values: whoever writes them gets its error.
    config: Any = {names[name]: value for name, value in place.options.items() if name != "allow_http"}
    client_options: Any = {
        "timeout": timedelta(seconds=timeout_s),
        "connect_timeout": timedelta(seconds=5),
        "pool_idle_timeout": timedelta(seconds=_IDLE_S),
        "user_agent": "holdfast",
    }
    if endpoint is not None and urlsplit(endpoint).scheme == "http":
        client_options["allow_http"] = True  # `_endpoint` has checked that the user allows it
    retry: Any = {
        "max_retries": 1 << 20 if budget.total_s else 0,  # the time alone limits them
        "retry_timeout": timedelta(seconds=budget.total_s),
        "backoff": {
            "init_backoff": timedelta(seconds=budget.first_s),
            "max_backoff": timedelta(seconds=budget.longest_s),
            "base": 2,
        },
    }
    common: Any = {"client_options": client_options, "retry_config": retry}
    if place.scheme == "s3":
        if endpoint is not None:
            # Both names: obstore prefers the second, which the environment may hold.
            config |= {"endpoint": endpoint, "aws_endpoint_url_s3": endpoint}
        config = {"disable_bulk_delete": True} | _signing(endpoint) | config
        return S3Store(place.bucket, config=config, **common)
    if place.scheme == "gs":
        return GCSStore(place.bucket, config=config, **common)
    return AzureStore(place.bucket, config=config, **common)


def _signing(endpoint: str | None) -> dict[str, object]:
    """The options that protect bodies of S3. With TLS the signature leaves them out, since a SHA-256 of them costs most
    of an upload's processor time; and Amazon's own servers verify a checksum."""
    config: dict[str, object] = {}
    is_amazon = endpoint is None or (urlsplit(endpoint).hostname or "").endswith(".amazonaws.com")
    if endpoint is None or urlsplit(endpoint).scheme == "https":
        config["unsigned_payload"] = True
    if is_amazon:
        config["checksum_algorithm"] = "CRC64NVME"
    # Variables that the user sets in the environment take precedence.
    return {name: value for name, value in config.items() if f"AWS_{name.upper()}" not in os.environ}


def _endpoint(place: ObjectPlace) -> str | None:
    """The address that the user gives, in the URL or the environment; None for that of the cloud itself.

    Raises `ConfigurationError`, code ``config.endpoint``, where it is no address of a server, or has no TLS and the
    user has not allowed that.
    """
    from_environment = next(filter(None, map(os.environ.get, _ENDPOINTS[place.scheme])), None)
    endpoint = place.options.get("endpoint", from_environment)
    if endpoint is None:
        return None
    if _ADDRESS.fullmatch(endpoint) is None:
        raise no_address()
    if urlsplit(endpoint).scheme != "http":
        return endpoint
    variable = f"{_PREFIXES[place.scheme]}ALLOW_HTTP"
    allowed = place.options.get("allow_http", os.environ.get(variable, ""))
    if allowed.lower() not in _TRUE:
        raise no_tls(endpoint, variable)
    return endpoint


def _forked() -> ConfigurationError:
    return ConfigurationError(
        "an object store was used in a process that was forked from one that uses it already: its connections do not "
        "work there, and would hang.",
        code="config.forked",
        action="Start such processes with the method 'spawn' or 'forkserver' (DataLoader(..., "
        "multiprocessing_context='spawn')), and open the run or the view in the worker itself.",
    )


def _keep_in_child() -> None:
    for client in _clients.values():
        client.keep_in_child()


os.register_at_fork(after_in_child=_keep_in_child)
