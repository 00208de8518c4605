"""Random layouts against the real contents of torch's modules: a few cases, and some hundreds in the slow suite.

`python -m tests.jobs.layout_fuzz 5000` runs as many as one likes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs.layout_fuzz import fuzz


def test_random_layouts_store_and_load_what_the_modules_hold(tmp_path: Path) -> None:
    assert fuzz(16, 7, tmp_path) == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_hundreds_of_random_layouts_store_and_load_what_the_modules_hold(tmp_path: Path) -> None:
    assert fuzz(600, 1000, tmp_path) == []
