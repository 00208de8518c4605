"""The names in ``references/``: which checkpoints refer to files of which others."""

from __future__ import annotations

from holdfast.format.reference_records import REFERENCES, ReferenceName, parse_reference_name
from holdfast.store.base import Store


def references_of(storage: Store) -> tuple[ReferenceName, ...]:
    """All records of checkpoints that refer to earlier ones, as of now. `compact` deletes those of its checkpoint. One
    request."""
    found = map(parse_reference_name, storage.list(REFERENCES))
    return tuple(name for name in found if name is not None)
