"""What ranks tell each other during a save."""

from __future__ import annotations

import msgspec

from holdfast.format.records import Place


class Described(msgspec.Struct, frozen=True, array_like=True):
    """A rank's state in brief.

    `layout` digests the layout's body, `columns` its columns. `compared` digests tensors that several ranks may hold
    without having declared it: all of them where the plan is new, a rotating share later. `values` digests the shared
    table of values, `value_paths` its paths; ``own_nbytes`` and `own_paths` are for the values of this rank alone.
    """

    layout: bytes
    columns: bytes
    compared: bytes
    values: bytes
    value_paths: bytes
    values_nbytes: int
    own_paths: bytes
    own_nbytes: int


class Questions(msgspec.Struct, frozen=True, tag="questions"):
    """What rank 0 must know before it can plan: the body from each rank in `bodies` (and then columns from all; no body
    where the last plan still fits), the values of each rank in `values`, and with `compare` the digest of each tensor
    that is to be compared."""

    bodies: tuple[int, ...]
    values: tuple[int, ...]
    compare: bool


class Details(msgspec.Struct, frozen=True, array_like=True):
    """A rank's answer to `Questions`."""

    body: bytes
    columns: bytes
    own_paths: tuple[str, ...]
    compared: dict[str, bytes]
    values: bytes


class Planned(msgspec.Struct, frozen=True, tag="planned"):
    """Which checkpoint is being written: where its manifest is, and its digest.

    `plan_id` names the plan; a rank that has taken part in it before knows its share already.
    """

    folder: str
    checkpoint_id: str
    place: Place
    nbytes: int
    digest: str
    plan_id: str


Answer = Questions | Planned


class Written(msgspec.Struct, frozen=True, array_like=True):
    """A rank's data file: its index (-1: the rank has none), size, and digest of its digest table."""

    index: int
    nbytes: int
    digest: str
