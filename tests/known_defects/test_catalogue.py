"""The README lists all known defects, each with its symptom and source."""

from __future__ import annotations

from tests.known_defects.catalogue import README, known_defects, table


def test_the_table_in_the_readme_is_that_of_the_tests() -> None:
    assert README.read_text().endswith(table()), "run: python -m tests.known_defects.catalogue"


def test_there_are_many_known_defects_and_each_says_what_was_seen_and_where() -> None:
    found = known_defects()  # an error where one does not say it
    assert len(found) >= 60
    assert len({defect.symptom for defect in found}) == len(found)
