"""The names of metrics: a policy names one, a training loop gives some, and the two may differ by a slip."""

from __future__ import annotations

import re
from collections.abc import Iterable

from holdfast.format.near import near

_WORDS = re.compile(r"[^\W\d_]+|\d+")


def meant(name: str, given: Iterable[str]) -> str | None:
    """The metric among `given` that a user who wrote `name` meant, as far as a slip explains the difference; else None.

    A slip is a typing error in a word, or another separator: ``los`` and ``loss``, ``val/loss`` and ``val_loss``. Names
    of which one has a word more, or that differ in unlike words, are no slips of each other: many loops give ``loss``
    after each step, and ``val_loss`` only after an evaluation.
    """
    own = _words(name)
    if not own:
        return None
    written = {_words(other): other for other in given}
    alike = [words for words in written if len(words) == len(own)]
    for words in (*(words for words in written if "".join(words) == "".join(own)), *_near(own, alike)):
        if written[words] != name:
            return written[words]
    return None


class MetricWatch:
    """Watches the metrics that a loop gives for the one called `name`. It compares each other name once, since a loop
    may give many metrics after each of its steps. `is_over` once the metric was given, or a slip was found."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._compared = set[str]()
        self.is_over = False

    def slip(self, given: Iterable[str]) -> str | None:
        """The metric among `given` that was meant, once; None where there is none, and once `name` itself was given."""
        if self.is_over:
            return None
        new = [other for other in given if other not in self._compared]
        self._compared.update(new)
        found = None if self._name in self._compared else meant(self._name, new)
        self.is_over = found is not None or self._name in self._compared
        return found


def _near(own: tuple[str, ...], others: Iterable[tuple[str, ...]]) -> Iterable[tuple[str, ...]]:
    """Those of the `others` that are near word by word, the most alike first."""
    by_path = {"/".join(words): words for words in others}
    return [by_path[path] for path in near("/".join(own), by_path)]


def _words(name: object) -> tuple[str, ...]:
    # A name of another type is an error of the next save, and none of a comparison of names.
    return tuple(_WORDS.findall(str(name).lower()))
