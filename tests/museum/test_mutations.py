"""Each of some defects, brought into a copy of the library, is found by its exhibit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
from tests.museum.catalogue import HERE
from tests.museum.mutations import MUTATIONS, Mutation

SOURCE = Path(holdfast.__file__).parent
ROOT = HERE.parents[1]


def run_exhibits(library: Path, *tests: str) -> subprocess.CompletedProcess[str]:
    """Run tests of the museum against the copy of the library in a folder."""
    environment = {**os.environ, "PYTHONPATH": str(library), "PYTHONDONTWRITEBYTECODE": "1"}
    arguments = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *(f"{HERE}/{test}" for test in tests)]
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the library with which all exhibits that mutations name pass."""
    library = tmp_path_factory.mktemp("library")
    shutil.copytree(SOURCE, library / "holdfast", ignore=shutil.ignore_patterns("__pycache__"))
    done = run_exhibits(library, *dict.fromkeys(mutation.test for mutation in MUTATIONS))
    assert done.returncode == 0, done.stdout
    return library


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_what_a_mutation_replaces_is_there_once(mutation: Mutation) -> None:
    assert (SOURCE / mutation.file).read_text().count(mutation.old) == 1
    assert mutation.new != mutation.old


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_an_exhibit_finds_its_defect(library: Path, mutation: Mutation) -> None:
    path = library / "holdfast" / mutation.file
    sound = path.read_text()
    path.write_text(sound.replace(mutation.old, mutation.new))
    try:
        done = run_exhibits(library, mutation.test)
    finally:
        path.write_text(sound)
    assert done.returncode == 1, done.stdout  # ran and failed
    assert "error" not in done.stdout.splitlines()[-1], done.stdout  # in the test, not in collecting it
