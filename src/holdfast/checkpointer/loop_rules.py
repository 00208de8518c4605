"""The rules that all ranks of a loop must have alike, because no message tells one rank that another one saves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import msgspec

from holdfast.errors import ConfigurationError, DeadlineError
from holdfast.format.records import MAX_STEP
from holdfast.policy.when import EverySteps, SavePolicy


class LoopRules(msgspec.Struct, frozen=True, array_like=True):
    """The number of steps of a loop (None: nobody knows it), and the intervals of its `EverySteps`, in order, each with
    its `memory_only`. What another policy decides, one rank tells the others."""

    total: int | None
    every: tuple[tuple[int, bool], ...]

    @classmethod
    def of(cls, policy: SavePolicy, total: int | None = None) -> Self:
        """The rules of a loop of `total` steps that saves by `policy`. Numbers beyond the last step that any loop can
        reach mean "never", and are alike."""
        found = {
            (min(each.num_steps, MAX_STEP + 1), each.memory_only)
            for each in policy.parts()
            if isinstance(each, EverySteps)
        }
        return cls(None if total is None else min(total, MAX_STEP + 1), tuple(sorted(found)))

    def __str__(self) -> str:
        told = [f"EverySteps({steps}{', memory_only=True' if alone else ''})" for steps, alone in self.every]
        return " and ".join([*(told or ["no EverySteps"]), *([] if self.total is None else [f"steps({self.total})"])])


def check_alike(ranks: Sequence[LoopRules]) -> bytes:
    """Raise `ConfigurationError`, code ``config.unlike_loops``, unless all `ranks` have the same rules."""
    for rank, rules in enumerate(ranks):
        if rules != ranks[0]:
            raise ConfigurationError(
                f"the loops of the ranks differ: rank 0 has {ranks[0]}, and rank {rank} has {rules}. They would save "
                "after different steps, and wait for each other.",
                code="config.unlike_loops",
                action="Give all ranks the same policy (save=) and the same total of steps.",
                rank=rank,
            )
    return b""


def suspect(error: DeadlineError) -> None:
    """Add to the `error` of a save that a policy asked for, and to which ranks did not come, that theirs may differ."""
    if error.code == "timeout.ranks":
        error.action += " In a loop, all ranks need the same policy (save=) and the same total of steps."
