"""Options for the encryption that a server of S3 makes: objects of each size carry it, on a moto server."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.request import Request, urlopen

import numpy as np
import pytest

from holdfast.errors import HoldfastError
from holdfast.store.objects import ObjectStore
from holdfast.store.urls import location_of
from tests.store.test_fault_proxy import SIGNED
from tests.support.servers.s3 import Bucket

PART = 5 << 20
KEY = "arn:aws:kms:us-east-1:123456789012:key/12345678-1234-1234-1234-123456789012"
HEADER = "x-amz-server-side-encryption"


@pytest.fixture(autouse=True)
def _environment(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)


def found(bucket: Bucket, query: str) -> list[dict[str, str]]:
    """The encryption that the server notes of a record, of a small file, and of one in several parts."""
    store = ObjectStore(location_of(f"{bucket.url}/run{query}"), part_nbytes=PART)
    assert store.create("record", b"{}")
    for key, nbytes in (("small", 1000), ("large", 2 * PART + 1)):
        writer = store.writer(key, nbytes=nbytes)
        writer.write_at(0, np.zeros(nbytes, np.uint8))
        writer.publish(nbytes)
        assert store.read(key, limit=nbytes) == bytes(nbytes)
    return [_encryption(bucket, key) for key in ("record", "small", "large")]


def _encryption(bucket: Bucket, key: str) -> dict[str, str]:
    request = Request(f"{bucket.endpoint}/{bucket.name}/run/{key}", method="HEAD", headers=SIGNED)
    with urlopen(request, timeout=30) as answer:
        headers: Mapping[str, str] = answer.headers
        return {name.lower(): value for name, value in headers.items() if name.lower().startswith(HEADER)}


def test_without_options_the_bucket_decides(bucket: Bucket) -> None:
    assert found(bucket, "") == [{}] * 3


def test_keys_of_the_store_itself_are_an_option_of_the_url(bucket: Bucket) -> None:
    assert found(bucket, "?server_side_encryption=AES256") == [{HEADER: "AES256"}] * 3


def test_a_key_of_kms_and_the_bucket_key_come_from_the_url(bucket: Bucket) -> None:
    query = f"?server_side_encryption=aws:kms&sse_kms_key_id={KEY}&sse_bucket_key_enabled=true"
    wanted = {HEADER: "aws:kms", f"{HEADER}-aws-kms-key-id": KEY, f"{HEADER}-bucket-key-enabled": "true"}
    *single, in_parts = found(bucket, query)
    assert single == [wanted] * 2
    assert in_parts.items() <= wanted.items()  # moto does not note the bucket key of an upload in parts
    assert len(in_parts) >= 2


def test_the_environment_has_the_same_options(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SERVER_SIDE_ENCRYPTION", "aws:kms")
    monkeypatch.setenv("AWS_SSE_KMS_KEY_ID", KEY)
    assert found(bucket, "") == [{HEADER: "aws:kms", f"{HEADER}-aws-kms-key-id": KEY}] * 3


def test_a_kind_of_encryption_that_does_not_exist_is_refused(bucket: Bucket) -> None:
    with pytest.raises(HoldfastError) as error:
        found(bucket, "?server_side_encryption=rot13")
    assert error.value.code == "config.store_option"


def test_a_customers_key_in_a_url_is_refused(bucket: Bucket) -> None:
    with pytest.raises(HoldfastError, match="no secrets") as error:
        location_of(f"{bucket.url}/run?sse_customer_key_base64=AAAA")
    assert error.value.code == "config.store_option"
