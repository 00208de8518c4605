"""What ranks tell each other until they agree on a plan."""

from __future__ import annotations

import msgspec


class Described(msgspec.Struct, frozen=True, array_like=True):
    """A rank's state in brief.

    `layout` digests the layout's body, `columns` its columns (empty: there are none, so no pieces). `compared` digests
    tensors that are held whole and that other ranks may hold too without having declared it: the share `turn` of them,
    or (None) all. `values` digests the shared table of values, `value_paths` its paths; ``own_nbytes`` and `own_paths`
    are for the values of this rank alone. `plan_id` names the last plan that this rank took part in ("": none, or it
    takes part in it no more). `unmatched` are globs of the selection that match nothing on this rank, with
    names that are near.
    """

    layout: bytes
    columns: bytes
    turn: int | None
    compared: bytes
    values: bytes
    value_paths: bytes
    values_nbytes: int
    own_paths: bytes
    own_nbytes: int
    plan_id: str
    unmatched: dict[str, list[str]]


class Questions(msgspec.Struct, frozen=True, tag="questions"):
    """What rank 0 must know before it can plan: the body from each rank in `bodies` (and then columns from all; no body
    where the last plan still fits), and the values of each rank in `values`. The answers are `Details`."""

    bodies: tuple[int, ...]
    values: tuple[int, ...]


class Details(msgspec.Struct, frozen=True, array_like=True):
    """A rank's answer to `Questions`."""

    body: bytes
    columns: bytes
    own_paths: tuple[str, ...]
    values: bytes


class Compare(msgspec.Struct, frozen=True, tag="compare"):
    """Asks for the digests of tensors that several ranks hold undeclared. The answers are `Digests`."""

    names: tuple[str, ...]


#: A rank's answer to `Compare`: for each name, in that order, the digest of each part that the rank holds.
Digests = tuple[dict[str, bytes], ...]
