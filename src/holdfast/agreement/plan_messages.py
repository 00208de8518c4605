"""The messages with which ranks agree on a plan."""

from __future__ import annotations

import msgspec


class Described(msgspec.Struct, frozen=True, array_like=True):
    """A summary of a rank's state.

    `layout` is the digest of the layout's body, `columns` that of its columns (empty: it has none, so no pieces).
    `compared` is a digest of the tensors that this rank holds whole and that other ranks may hold too without a
    declaration: of their share `turn`, or (None) of all. `values` is the digest of the shared table of values,
    `value_paths` that of its paths; ``own_nbytes`` and `own_paths` are for the values of this rank alone. `plan_id`
    names the last plan that this rank took part in (empty: it has none, or it has left it). `unmatched` maps each glob
    of the selection that matches nothing on this rank to similar names.
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
    """Rank 0's questions before it can plan: it asks each rank in `bodies` for its body (and then all ranks for their
    columns; `bodies` is empty where the last plan still fits), and each rank in `values` for its values. The ranks
    answer with `Details`."""

    bodies: tuple[int, ...]
    values: tuple[int, ...]


class Details(msgspec.Struct, frozen=True, array_like=True):
    """A rank's answer to `Questions`."""

    body: bytes
    columns: bytes
    own_paths: tuple[str, ...]
    values: bytes


class Compare(msgspec.Struct, frozen=True, tag="compare"):
    """A request for the digests of tensors that several ranks hold without a declaration. The ranks answer with
    `Digests`."""

    names: tuple[str, ...]


#: A rank's answer to `Compare`: for each name, in that order, the digest of each part that the rank holds.
Digests = tuple[dict[str, bytes], ...]
