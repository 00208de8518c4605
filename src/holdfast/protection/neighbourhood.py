"""The closeness of nodes: the failure domains and the parallel groups that they share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from holdfast.errors import ConfigurationError
from holdfast.protection.cards import NodeCard

Numbers: TypeAlias = npt.NDArray[np.intp]
Relation: TypeAlias = npt.NDArray[np.bool_]


class LargestDomain(NamedTuple):
    """The domain that has most nodes, and how many it has."""

    name: str
    size: int


class DomainLevel(NamedTuple):
    """The domains of one size: for each node the number of its domain, and the names of the domains."""

    numbers: Numbers
    names: tuple[str, ...]

    @property
    def largest(self) -> LargestDomain:
        """The domain that has most nodes."""
        sizes = np.bincount(self.numbers)
        return LargestDomain(self.names[int(sizes.argmax())], int(sizes.max()))

    @property
    def is_divided(self) -> bool:
        """Whether there is more than one domain."""
        return len(self.names) > 1


def in_order(cards: Sequence[NodeCard]) -> list[int]:
    """The indices of `cards` in an order that does not depend on how they were given."""
    return sorted(range(len(cards)), key=lambda index: (cards[index].ranks, cards[index].identity))


def levels_of(cards: Sequence[NodeCard]) -> list[DomainLevel]:
    """The levels of domains, largest domains first: those that users give, and at last the host.

    Raises `ConfigurationError` if nodes give unlike numbers of domains.
    """
    depth = len(cards[0].domains)
    for card in cards:
        if len(card.domains) != depth:
            raise ConfigurationError(
                f"{cards[0].host} gives {_given(cards[0])} as its failure domains, and {card.host} gives "
                f"{_given(card)}.",
                code="config.protection",
                action="Give all nodes as many domains, by domain= or HOLDFAST_DOMAIN, such as block-2/rack-7.",
            )
    given = [_level([card.domains[first:] for card in cards]) for first in reversed(range(depth))]
    return [*given, _level([(card.host,) for card in cards])]


def single_nodes(cards: Sequence[NodeCard]) -> DomainLevel:
    """Each node in a domain of its own."""
    return _level([(card.identity,) for card in cards])


def _given(card: NodeCard) -> str:
    """The domains of a node as a user gives them."""
    return f"'{'/'.join(reversed(card.domains))}'" if card.domains else "none"


def _level(keys: Sequence[tuple[str, ...]]) -> DomainLevel:
    number = {key: index for index, key in enumerate(dict.fromkeys(keys))}
    numbers = np.array([number[key] for key in keys], dtype=np.intp)
    return DomainLevel(numbers, tuple("/".join(reversed(key)) for key in number))


def sharing_groups(cards: Sequence[NodeCard]) -> Relation:
    """Which nodes have ranks in one parallel group. A group with ranks on all nodes says nothing, so it does not
    count."""
    members: dict[str, list[int]] = {}
    for index, card in enumerate(cards):
        for label in set(card.groups):
            members.setdefault(label, []).append(index)
    related = np.zeros((len(cards), len(cards)), dtype=np.bool_)
    for nodes in {tuple(nodes) for nodes in members.values() if 1 < len(nodes) < len(cards)}:
        related[np.ix_(nodes, nodes)] = True
    np.fill_diagonal(related, val=False)
    return related
