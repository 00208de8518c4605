"""What a run is to do, as the command states it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from bench.contenders import entrants
from bench.results import MEASURES
from bench.state import Recipe

#: Rounds are counted from 1; this one pays for imports and first calls and is not reported.
WARM_UP = 0


class Order(msgspec.Struct, frozen=True):
    """What to run: `contenders`, on what `recipe` makes over `world` ranks.

    A contender that is named in `at_most` takes part in so many rounds only, the first ones, and has no warm-up.
    """

    world: int
    rounds: int
    recipe: Recipe
    contenders: tuple[str, ...]
    at_most: Mapping[str, int] = {}

    def entrants(self, number: int) -> tuple[str, ...]:
        """Who takes a turn in round `number`."""
        return tuple(
            name
            for name in entrants(self.contenders)
            if name not in self.at_most or WARM_UP < number <= self.at_most[name]
        )

    def num_turns(self) -> int:
        """Timed operations, with those of the warm-up."""
        return len(MEASURES) * sum(len(self.entrants(number)) for number in range(WARM_UP, self.rounds + 1))
