"""The museum is as large, and as well labelled, as it says."""

from __future__ import annotations

from tests.known_defects.catalogue import README, exhibits, table


def test_the_table_in_the_readme_is_that_of_the_exhibits() -> None:
    assert README.read_text().endswith(table()), "run: python -m tests.known_defects.catalogue"


def test_there_are_many_exhibits_and_each_says_what_was_seen_and_where() -> None:
    found = exhibits()  # an error where one does not say it
    assert len(found) >= 60
    assert len({exhibit.symptom for exhibit in found}) == len(found)
