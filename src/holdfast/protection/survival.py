"""The probability that the loss of random nodes loses no snapshot. Exact, for placements without failure domains.

All nodes lie in cells, and what one cell survives does not depend on the others. So the number of harmless losses is a
coefficient of a product: that of one polynomial for each cell, whose coefficient of x^j is the number of ways to lose j
nodes of the cell and no snapshot.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

from holdfast.protection.policies import Copies, Parity


def survival(policy: Copies | Parity | None, num_nodes: int, num_lost: int) -> float:
    """The probability that no snapshot is lost when `num_lost` random nodes of `num_nodes` are lost at once, under a
    policy for which the nodes suffice (None: no protection)."""
    if policy is None:
        return float(num_lost == 0)
    if isinstance(policy, Copies):
        ways = _ways_with_copies(num_nodes, policy.n, num_lost)
    else:
        ways = _ways_with_parity(num_nodes, policy, num_lost)
    return ways / comb(num_nodes, num_lost)


def least_survival(num_fatal: int, *, size: int, num_nodes: int, num_lost: int) -> float:
    """A lower limit of the probability, for any placement of copies where the loss of `num_fatal` sets of `size` nodes
    is fatal. Exact where no more than `size` nodes are lost."""
    if num_lost < size:
        return 1.0
    fatal = num_fatal * comb(num_nodes - size, num_lost - size)
    return max(0.0, 1 - fatal / comb(num_nodes, num_lost))


def _ways_with_copies(num_nodes: int, n: int, num_lost: int) -> int:
    """The harmless losses under GEMINI's placement: groups of ``n + 1`` nodes, and a ring if some are left over."""
    num_groups, left = divmod(num_nodes, n + 1)
    if not left:
        return _power(_group(n + 1, n, num_lost), num_groups, num_lost)[num_lost]
    groups = _power(_group(n + 1, n, num_lost), num_groups - 1, num_lost)
    return _product(groups, _ring(n + 1 + left, n, num_lost), num_lost)[num_lost]


def _ways_with_parity(num_nodes: int, policy: Parity, num_lost: int) -> int:
    """The harmless losses of groups whose sizes differ by one at most."""
    num_groups = num_nodes // policy.group_size(num_nodes)
    size, num_larger = divmod(num_nodes, num_groups)
    larger = _power(_group(size + 1, policy.losses, num_lost), num_larger, num_lost)
    others = _power(_group(size, policy.losses, num_lost), num_groups - num_larger, num_lost)
    return _product(larger, others, num_lost)[num_lost]


def _group(size: int, losses: int, degree: int) -> list[int]:
    """A group of `size` nodes that survives any `losses` of them, and no more."""
    return [comb(size, lost) if lost <= losses else 0 for lost in range(degree + 1)]


def _ring(size: int, n: int, degree: int) -> list[int]:
    """A ring of `size` nodes that each send copies to the next `n`: no ``n + 1`` nodes in a row may be lost."""
    return [_in_ring(size, lost, n) if lost < size else 0 for lost in range(degree + 1)]


def _in_ring(size: int, num_lost: int, longest: int) -> int:
    """The ways to lose nodes of a ring, of which some are left, so that at most `longest` in a row are lost.

    Each node that is left is followed by 0 to `longest` lost ones: compositions of `num_lost`, counted by inclusion and
    exclusion. A ring with one of its left nodes marked is one such composition, turned to one of `size` places.
    """
    left = size - num_lost
    compositions = sum(
        (-1 if number % 2 else 1) * comb(left, number) * comb(num_lost - number * (longest + 1) + left - 1, left - 1)
        for number in range(min(left, num_lost // (longest + 1)) + 1)
    )
    return compositions * size // left


def _power(base: Sequence[int], exponent: int, degree: int) -> list[int]:
    """The polynomial `base` to the power `exponent`, up to x^`degree`."""
    result = [1] + [0] * degree
    square = list(base)
    while exponent:
        if exponent % 2:
            result = _product(result, square, degree)
        square = _product(square, square, degree)
        exponent //= 2
    return result


def _product(first: Sequence[int], second: Sequence[int], degree: int) -> list[int]:
    """The product of two polynomials, up to x^`degree`."""
    return [sum(first[place] * second[total - place] for place in range(total + 1)) for total in range(degree + 1)]
