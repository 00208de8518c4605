"""Which nodes keep the copies of a node, and which nodes share parity.

Copies lie as GEMINI places them (SOSP'23). Where the number of nodes is a multiple of ``n + 1``, nodes form groups of
``n + 1``, and each node of a group keeps the copies of the others. Else there are groups too, and the last ``n + 1 +
r`` nodes form a ring, where each node sends its copies to the next `n` ones. No other placement survives the loss of
random nodes more often in the first case, and hardly any in the second.

Failure domains come first: copies lie outside the largest domain of their owner for which a placement exists. If there
is none even for the smallest domain, the placement fails. Then parallel groups: as few copies as can be found lie
inside those of their owner, because a job may lose such a group as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from holdfast.errors import ConfigurationError
from holdfast.protection.cards import NodeCard
from holdfast.protection.cells import Cell, most_of_a_domain, part_groups, stripe, take_apart
from holdfast.protection.flow import spread
from holdfast.protection.neighbourhood import (
    DomainLevel,
    Numbers,
    Relation,
    in_order,
    levels_of,
    sharing_groups,
    single_nodes,
)
from holdfast.protection.policies import Copies, Parity
from holdfast.wording import count

_Found = TypeVar("_Found")


class CopyPlacement(NamedTuple):
    """For each node the nodes that keep its copies, as indices of the cards; and `notes` on wishes that no placement
    fulfils."""

    holders: tuple[tuple[int, ...], ...]
    notes: tuple[str, ...]


class ParityPlacement(NamedTuple):
    """The groups of nodes that share parity, as indices of the cards; and `notes` on wishes that no placement
    fulfils."""

    groups: tuple[tuple[int, ...], ...]
    notes: tuple[str, ...]


def place_copies(cards: Sequence[NodeCard], n: int) -> CopyPlacement:
    """Choose `n` holders for each node; each node holds for `n` others. The choice does not depend on the order of the
    cards.

    Raises `ConfigurationError` if there are too few nodes, or if their failure domains allow no such choice.
    """
    Copies(n).check_nodes(len(cards))
    order = in_order(cards)
    nodes = [cards[index] for index in order]
    related = sharing_groups(nodes)
    holders, notes = _placed(nodes, "copies", lambda level: _holders(level.numbers, related, n))
    inside = {owner for owner, held in enumerate(holders) if related[owner, held].any()}
    if inside:
        notes.append(f"{count(len(inside), 'node')} of {len(nodes)} have copies inside their own parallel groups")
    own = {order[owner]: tuple(order[holder] for holder in held) for owner, held in enumerate(holders)}
    return CopyPlacement(tuple(own[index] for index in range(len(cards))), tuple(notes))


def place_parity(cards: Sequence[NodeCard], policy: Parity) -> ParityPlacement:
    """Part the nodes into groups that share parity, so that the loss of a failure domain takes at most
    ``policy.losses`` nodes of each. The choice does not depend on the order of the cards.

    Raises `ConfigurationError` if there are too few nodes, or if their failure domains allow no such groups.
    """
    policy.check_nodes(len(cards))
    order = in_order(cards)
    nodes = [cards[index] for index in order]
    related = sharing_groups(nodes)
    num_groups = len(cards) // policy.group_size(len(cards))

    def groups(level: DomainLevel) -> list[Cell] | None:
        cells = stripe(range(len(nodes)), level.numbers, num_groups)
        most = most_of_a_domain(cells, level.numbers)
        return None if most > policy.losses else part_groups(cells, level.numbers, related, limit=most)

    found, notes = _placed(nodes, "parity", groups)
    inside = sum(int(related[np.ix_(group, group)].any(axis=1).sum()) for group in found)
    if inside:
        notes.append(f"{count(inside, 'node')} of {len(nodes)} share parity with nodes of their own parallel groups")
    return ParityPlacement(tuple(tuple(sorted(order[node] for node in group)) for group in found), tuple(notes))


def _placed(
    nodes: Sequence[NodeCard], what: str, place: Callable[[DomainLevel], _Found | None]
) -> tuple[_Found, list[str]]:
    """The result of `place` for the largest domains for which it finds one, and notes on larger ones."""
    *given, hosts = levels_of(nodes)
    divided = [level for level in given if level.is_divided]
    notes = []
    if given and not divided:
        notes.append(f"all nodes are in the domain '{given[-1].largest.name}', so {what} do not survive its loss")
    for level in divided or [hosts, single_nodes(nodes)]:
        found = place(level)
        if found is not None:
            return found, notes
        name, size = level.largest
        notes.append(f"{what} cannot survive the loss of '{name}', which has {size} of {count(len(nodes), 'node')}")
    raise ConfigurationError(
        f"the failure domains allow no placement: {notes[-1]}.",
        code="config.protection",
        action="Spread the job over more domains, protect with fewer copies or smaller groups, or name no domains.",
    )


def _holders(numbers: Numbers, related: Relation, n: int) -> list[list[int]] | None:
    """For each node its holders, outside its domain; None if no choice keeps to the domains."""
    order: Sequence[int] = range(len(numbers))
    num_cells = len(numbers) // (n + 1)
    rest: Cell = []
    if len(numbers) % (n + 1):
        rest, order = take_apart(order, numbers, len(numbers) - (num_cells - 1) * (n + 1))
        num_cells -= 1
    cells = stripe(order, numbers, num_cells)
    holders: dict[int, list[int]] = {}
    if rest and most_of_a_domain([rest], numbers) == 1:
        cells.append(rest)
    elif rest:
        inside = np.ix_(rest, rest)
        found = _spread(numbers[rest], related[inside], n) or []
        holders = {rest[owner]: [rest[holder] for holder in held] for owner, held in enumerate(found)}
    if not cells or most_of_a_domain(cells, numbers) > 1 or len(holders) + sum(map(len, cells)) < len(numbers):
        return _spread(numbers, related, n)
    for cell in part_groups(cells, numbers, related, limit=1):
        for place, owner in enumerate(cell):
            holders[owner] = [cell[(place + step) % len(cell)] for step in range(1, n + 1)]
    return [holders[owner] for owner in range(len(numbers))]


def _spread(numbers: Numbers, related: Relation, n: int) -> list[list[int]] | None:
    """Holders without groups of nodes: outside the parallel groups of the owner if possible."""
    apart = numbers[:, None] != numbers
    return spread(apart & ~related, n) or spread(apart, n)
