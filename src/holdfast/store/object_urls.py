"""The URLs of object stores: which bucket, which key, and options that are no secrets. Does not import obstore.

===================================================  =============================================
``s3://bucket/run`` (also ``s3a://``)                Amazon S3, and servers that speak its protocol
``gs://bucket/run`` (also ``gcs://``)                Google Cloud Storage
``az://container/run`` (also ``azure://``)           Azure Blob Storage
``abfs://container@account.dfs.core.windows.net/x``  the same, as Hadoop and fsspec write it
===================================================  =============================================

Options follow as a query: ``s3://bucket/run?endpoint=https://minio.local:9000&region=eu-1``. Two of them are limits for
each process: ``max_bytes_per_s`` and ``max_requests_per_s``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Final, NamedTuple
from urllib.parse import parse_qsl, quote, unquote, urlencode

from holdfast.errors import ConfigurationError
from holdfast.store.base import SCHEME, Location
from holdfast.store.rate_limit import RateLimits

#: The other names of a scheme.
_ALIASES: Final = {"s3a": "s3", "gcs": "gs", "azure": "az", "abfs": "az", "abfss": "az", "adl": "az"}
#: By scheme, the names of options in a URL, each with the name that obstore has for it.
OPTIONS: Final[dict[str, dict[str, str]]] = {
    "s3": {
        "allow_http": "allow_http",
        "checksum_algorithm": "checksum_algorithm",
        "endpoint": "endpoint",
        "region": "region",
        "request_payer": "request_payer",
        "server_side_encryption": "server_side_encryption",
        "skip_signature": "skip_signature",
        "sse_bucket_key_enabled": "sse_bucket_key_enabled",
        "sse_kms_key_id": "sse_kms_key_id",
        "unsigned_payload": "unsigned_payload",
        "virtual_hosted_style_request": "virtual_hosted_style_request",
    },
    "gs": {"allow_http": "allow_http", "endpoint": "base_url", "skip_signature": "skip_signature"},
    "az": {
        "account_name": "account_name",
        "allow_http": "allow_http",
        "endpoint": "endpoint",
        "skip_signature": "skip_signature",
        "use_azure_cli": "use_azure_cli",
        "use_emulator": "use_emulator",
    },
}
#: The options that limit a process, which every scheme has.
_LIMITS: Final = ("max_bytes_per_s", "max_requests_per_s")
SCHEMES: Final = (*OPTIONS, *_ALIASES)
#: By scheme, how users give what must stay secret.
_SECRETS: Final = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN",
}
#: The letters of bucket names; ``$`` is in those that Azure reserves.
_BUCKET: Final = re.compile(r"[A-Za-z0-9._$-]+")
_SECRET_NAME: Final = re.compile(r"key|secret|token|sas|password|credential|signature", re.IGNORECASE)
_EXAMPLES: Final = {"s3": "s3://bucket/runs/a", "gs": "gs://bucket/runs/a", "az": "az://container/runs/a"}


class ObjectPlace(NamedTuple):
    """The place that a `Location` of an object store names: keys below `prefix` in `bucket`, reached with `options` of
    obstore, within `limits`."""

    scheme: str
    bucket: str
    prefix: str
    options: dict[str, str]
    limits: RateLimits

    @classmethod
    def of(cls, location: Location) -> ObjectPlace:
        """The place of a location that `object_location` made."""
        scheme, _, rest = location.url.partition("://")
        bucket, _, prefix = rest.partition("/")
        options = dict(location.options)
        limits = RateLimits(*(float(options.pop(name, "inf")) for name in _LIMITS))
        return cls(scheme, bucket, prefix, options, limits)

    def key(self, name: str) -> str:
        """The whole key of the object `name` below the prefix."""
        return "/".join(filter(None, (self.prefix, name)))


def object_location(url: str) -> Location:
    """The location that a user's URL names: without a query, which becomes its options, and with one scheme for each
    kind of store.

    Raises `ConfigurationError`, code ``config.path`` for a URL that names no bucket or no possible key, and
    ``config.store_option`` for an option that is unknown or a secret.
    """
    match = SCHEME.match(url)
    assert match is not None
    written = match[1].lower()
    scheme = _ALIASES.get(written, written)
    path, _, query = url[match.end() :].partition("?")
    options = _options(scheme, query)
    bucket, _, prefix = path.partition("/")
    if scheme == "az" and "@" in bucket:
        bucket, _, host = bucket.partition("@")
        options = {"account_name": host.partition(".")[0]} | options
    elif "@" in bucket:
        raise _secret(scheme, "a user or password before '@'", f"{written}://...@{bucket.rpartition('@')[2]}/{prefix}")
    if ":" in bucket:  # a password with a slash: its '@' lies behind what looks like the bucket
        raise _secret(scheme, "a ':' before its first '/', as between a user and a password")
    names = [name for name in prefix.split("/") if name]
    if _BUCKET.fullmatch(bucket) is None or any(name in (".", "..") or not name.isprintable() for name in names):
        raise ConfigurationError(
            f"'{url.partition('?')[0]}' names no possible place in an object store.",
            code="config.path",
            action=f"Write a bucket and a key without '.', '..' and control characters, as {_EXAMPLES[scheme]}.",
            path=url.partition("?")[0],
        )
    return Location("/".join((f"{scheme}://{bucket}", *names)), tuple(sorted(options.items())))


def query_of(location: Location) -> str:
    """The options of `location` as the query of a URL, with its ``?``; empty where there are none."""
    return f"?{urlencode(location.options, safe=':/', quote_via=quote)}" if location.options else ""


def _options(scheme: str, query: str) -> dict[str, str]:
    options = {unquote(name): value for name, value in parse_qsl(query, keep_blank_values=True)}
    check_options(scheme, options)
    return options


def check_options(scheme: str, options: Mapping[str, str]) -> None:
    """Raise the `ConfigurationError`, code ``config.store_option``, of options that stores of `scheme` do not have, and
    of secrets."""
    known = OPTIONS[scheme]
    for name, value in options.items():
        if name in known:
            if "@" in value:
                raise _secret(scheme, f"a user or password in option '{name}'")
            continue
        if name in _LIMITS:
            _check_limit(name, value)
            continue
        if _SECRET_NAME.search(name):
            raise _secret(scheme, f"option '{name}'")
        raise ConfigurationError(
            f"URLs of {scheme}:// have no option '{name}'.",
            code="config.store_option",
            action=f"Use {', '.join((*known, *_LIMITS))}; everything else comes from the environment.",
        )


def _check_limit(name: str, value: str) -> None:
    with suppress(ValueError):
        if 0 < float(value) < math.inf:
            return
    raise ConfigurationError(
        f"option '{name}' of the URL is '{value}', which is no positive number.",
        code="config.store_option",
        action="Write a number for each second and process, such as max_bytes_per_s=200e6 or max_requests_per_s=50.",
    )


def _secret(scheme: str, what: str, path: str | None = None) -> ConfigurationError:
    return ConfigurationError(
        f"the URL has {what}: a URL is shown in messages and stored in records, so it must hold no secrets.",
        code="config.store_option",
        action=f"Set it in the environment: {_SECRETS[scheme]}.",
        path=path,
    )
