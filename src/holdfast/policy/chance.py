"""Looks for policies of which one keeps only what the other one saves by chance."""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm

from holdfast.policy.keep import KeepEvery, KeepPolicy, parts_of
from holdfast.policy.when import EverySteps, SavePolicy


def kept_by_chance(save: SavePolicy, keep: KeepPolicy) -> Iterator[str]:
    """A warning for each `KeepEvery` in `keep` whose steps no `EverySteps` in `save` saves, or not all of them."""
    every = [part.num_steps for part in save.parts() if isinstance(part, EverySteps) and not part.memory_only]
    for part in parts_of(keep):
        if not isinstance(part, KeepEvery) or any(part.steps % steps == 0 for steps in every):
            continue
        fix = f"add EverySteps({part.steps}) to save, or choose another number"
        if every:
            rarely = min(lcm(part.steps, steps) for steps in every)
            yield f"{part.subject} keeps only each {rarely:,}th step: EverySteps saves no other multiple; {fix}"
        else:
            yield f"{part.subject} keeps multiples of {part.steps:,}, which are saved by chance only; {fix}"
