"""Which parameter is which in an optimizer that knows its parameters by their order alone. Pure.

A model lists its parameters in one order. Each group of an optimizer has some of them, in the same order, as groups
have that were made by a walk over the named parameters; frozen parameters are in none. The shapes of the optimizer's
slots say which. Only an answer without an alternative is one: else slots would move to other parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from holdfast.geometry import Shape

#: Most states of a search at one parameter: so many numbers of parameters that groups may have taken.
_MAX_STATES: Final = 1 << 12

#: The number of parameters that each group has taken.
_Taken = tuple[int, ...]


class OrderError(ValueError):
    """No order of the parameters fits, or several do."""


class _OrderStep(NamedTuple):
    """The ways to a state, at most 2 of them, and the group that took the last parameter on one; None if none did."""

    ways: int
    group: int | None


def only_order(parameters: Sequence[Shape], groups: Sequence[Sequence[Shape | None]]) -> list[list[int]]:
    """The numbers of the parameters of each group. `groups` are the shapes of their slots; None where a parameter has
    no slots yet. Raises `OrderError`, with what is wrong as its text, unless exactly one answer fits."""
    steps: list[Mapping[_Taken, _OrderStep]] = [{(0,) * len(groups): _OrderStep(1, None)}]
    left = sum(map(len, groups))
    for number, shape in enumerate(parameters):
        found: dict[_Taken, _OrderStep] = {}
        for taken, step in steps[-1].items():
            for group, then in _choices(taken, shape, groups):
                if left - sum(then) < len(parameters) - number:
                    before = found.get(then)
                    found[then] = _OrderStep(min(2, step.ways + (before.ways if before else 0)), group)
        if len(found) > _MAX_STATES:
            raise OrderError("too many orders of the parameters fit the shapes of its slots")
        steps.append(found)
    whole = tuple(map(len, groups))
    if whole not in steps[-1]:
        raise OrderError("its groups do not have the shapes of the model's parameters")
    if steps[-1][whole].ways > 1:
        raise OrderError("several orders of the parameters fit the shapes of its slots")
    backwards: list[list[int]] = [[] for _ in groups]
    for number in reversed(range(len(parameters))):
        group = steps[number + 1][whole].group
        if group is not None:
            backwards[group].append(number)
            whole = _changed(whole, group, -1)
    return [numbers[::-1] for numbers in backwards]


def _choices(
    taken: _Taken, shape: Shape, groups: Sequence[Sequence[Shape | None]]
) -> Iterator[tuple[int | None, _Taken]]:
    """The groups that may take a parameter of this shape, and the state after it; None for a frozen one."""
    yield None, taken
    for group, shapes in enumerate(groups):
        if taken[group] < len(shapes) and shapes[taken[group]] in (None, shape):
            yield group, _changed(taken, group, 1)


def _changed(taken: _Taken, group: int, by: int) -> _Taken:
    return (*taken[:group], taken[group] + by, *taken[group + 1 :])
