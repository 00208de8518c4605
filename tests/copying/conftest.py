"""Fixtures of the tests of copies."""

from __future__ import annotations

import pytest

from tests.support.servers.s3 import Bucket


@pytest.fixture
def in_bucket(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a run that may be begun in a bucket, which this process can reach."""
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    return f"{bucket.url}/runs/a"
