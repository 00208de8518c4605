"""The storage contract, and the promises of keepers: if the code breaks any of them, some test fails.

`storage_promises.py`, `keeper_promises.py` and `peer_promises.py` list them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.known_defects.keeper_promises import KEEPER_MUTATIONS
from tests.known_defects.mutants import Mutation, assert_found, sound_library
from tests.known_defects.peer_promises import PEER_MUTATIONS
from tests.known_defects.storage_promises import STORAGE_MUTATIONS

MUTATIONS = [*STORAGE_MUTATIONS, *KEEPER_MUTATIONS, *PEER_MUTATIONS]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sound_library(tmp_path_factory.mktemp("library"), MUTATIONS)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_a_mutation_fits_the_library_and_names_a_test(mutation: Mutation) -> None:
    mutation.assert_fits()


@pytest.mark.slow
@pytest.mark.timeout(900)  # the first one runs all the tests on a sound library
@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_a_promise_that_is_broken_is_missed(library: Path, mutation: Mutation) -> None:
    assert_found(library, mutation)
