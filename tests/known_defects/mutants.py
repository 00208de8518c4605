"""Mutants: copies of the library with one defect each, which a test must find."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import holdfast

TESTS = Path(__file__).parents[1]
SOURCE = Path(holdfast.__file__).parent


@dataclass(frozen=True)
class Mutation:
    """In `file` of the package `old`, which occurs once, becomes `new`; then `test` fails, named from `tests`."""

    test: str
    file: str
    old: str
    new: str

    def __str__(self) -> str:
        return self.test.partition("::")[2]

    def assert_fits(self) -> None:
        """The library has what it replaces, and its test exists."""
        source = (SOURCE / self.file).read_text()
        assert source.count(self.old) == 1, f"'{self.file}' has changed: mutate what it says now"
        assert self.new != self.old
        file, _, name = self.test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (TESTS / file).read_text(), f"there is no '{self.test}'"


def sound_library(folder: Path, mutations: Iterable[Mutation]) -> Path:
    """A copy of the library in `folder`, with which the tests of all `mutations` pass."""
    shutil.copytree(SOURCE, folder / "holdfast", ignore=shutil.ignore_patterns("__pycache__"))
    done = _run_tests(folder, *dict.fromkeys(mutation.test for mutation in mutations))
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def assert_found(library: Path, mutation: Mutation) -> None:
    """Bring the defect into the copy of the library for a while: its test must fail."""
    path = library / "holdfast" / mutation.file
    sound = path.read_text()
    path.write_text(sound.replace(mutation.old, mutation.new))
    try:
        done = _run_tests(library, mutation.test)
    finally:
        path.write_text(sound)
    assert done.returncode == 1, done.stdout  # ran and failed
    assert " failed" in done.stdout.splitlines()[-1], done.stdout  # in the test, not in collecting it


def _run_tests(library: Path, *tests: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(library), "PYTHONDONTWRITEBYTECODE": "1"}
    arguments = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "", *(f"{TESTS}/{test}" for test in tests)]
    return subprocess.run(
        [sys.executable, *arguments], cwd=TESTS.parent, env=environment, capture_output=True, text=True, check=False
    )
