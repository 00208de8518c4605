"""The environments apart that the Makefile has for frameworks: each can load the tests that run in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: The packages that `tests/conftest.py` and the settings of pytest in `pyproject.toml` need, in every environment.
NEEDED = {"hypothesis", "pytest", "pytest-timeout"}
#: The environments that the Makefile runs pytest of.
APART = re.findall(r"^\t\.venv-(\w+)/bin/pytest ", (ROOT / "Makefile").read_text(), re.MULTILINE)


def installed(layer: str) -> set[str]:
    """The words of the commands that install a layer, and the packages of the file that they name."""
    found = re.search(
        rf"^    {layer}\)(.*?)^    \S+\)", (ROOT / "tools" / "install").read_text(), re.MULTILINE | re.DOTALL
    )
    assert found is not None
    words = set(found[1].split())
    if "--requirement" in words:
        words |= set(re.findall(r"^([\w-]+)==", (ROOT / "constraints" / f"{layer}.txt").read_text(), re.MULTILINE))
    return words


@pytest.mark.parametrize("layer", APART)
def test_an_environment_apart_has_what_loading_the_tests_takes(layer: str) -> None:
    """The conftest imports hypothesis: an environment without it ends with an ImportError before the first test."""
    assert installed(layer) >= NEEDED
