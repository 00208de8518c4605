"""Each of some defects, brought into a copy of the library, is found by its test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.known_defects.mutants import Mutation, assert_found, sound_library
from tests.known_defects.mutations import MUTATIONS


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sound_library(tmp_path_factory.mktemp("library"), MUTATIONS)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_a_mutation_fits_the_library_and_names_a_test(mutation: Mutation) -> None:
    mutation.assert_fits()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_the_test_of_a_defect_finds_it(library: Path, mutation: Mutation) -> None:
    assert_found(library, mutation)
