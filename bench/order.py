"""The order for a run of a benchmark, as the command states it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from bench import contenders
from bench.contenders import entrants
from bench.results import MEASURES, WARM_UP, Measure
from bench.state import Recipe


class Order(msgspec.Struct, frozen=True):
    """What to run: `contenders`, on what `recipe` makes over `world` ranks.

    A contender that is named in `at_most` takes part in so many rounds only, the first ones, and has no warm-up.
    The entrants in `kept` save once, before the rounds and untimed, where a run that does not save finds it: this one
    or a later one in the same folder.
    """

    world: int
    rounds: int
    recipe: Recipe
    contenders: tuple[str, ...]
    at_most: Mapping[str, int] = {}
    measures: tuple[Measure, ...] = MEASURES
    kept: tuple[str, ...] = ()

    def entrants(self, number: int) -> tuple[str, ...]:
        """Who takes a turn in round `number`."""
        return tuple(
            name
            for name in entrants(self.contenders)
            if name not in self.at_most or WARM_UP < number <= self.at_most[name]
        )

    def num_turns(self) -> int:
        """Timed operations, with those of the warm-up."""
        return len(self.measures) * sum(len(self.entrants(number)) for number in range(WARM_UP, self.rounds + 1))

    def folder_of(self, name: str, number: int, root: Path) -> Path:
        """Where entrant `name` saves or loads in round `number` of a run in `root`."""
        if "save" in self.measures:
            return contenders.folder_of(name, number, root)
        return contenders.kept_folder(name, root)
