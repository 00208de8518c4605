"""The catalogue of the copies of a checkpoint's files: in which store and tier each lies, and who can read it.

Readers ask the catalogue for the nearest copy of a file and never know the tiers. So a checkpoint is not tied to one
store, and a new tier adds copies here and changes no reader.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from holdfast.store.base import Capabilities, Store


class Tier(Enum):
    """A place for copies, by its distance from the reader."""

    LIVE_MEMORY = "live memory"
    NODE_MEMORY = "node memory"
    NODE_DISK = "node disk"
    STORAGE = "storage"

    @property
    def is_prompt(self) -> bool:
        """Whether reads of this tier wait for nothing. (Live memory may be that of an accelerator.)"""
        return self is Tier.NODE_MEMORY


#: The holder of a copy that every rank can read.
EVERY_RANK = -1


class FileCopy(NamedTuple):
    """One whole copy of a file, under `key` of `store`. Only the rank `holder` of the readers' group can read it."""

    store: Store
    key: str
    tier: Tier
    holder: int = EVERY_RANK

    @property
    def path(self) -> str:
        """The full path of the copy, for messages and for people."""
        return self.store.path(self.key)


@dataclass(frozen=True)
class Catalogue:
    """The copies of one checkpoint's files, on one rank. All ranks that read together know the same tiers and holders.

    `nearer` has, by the file's name, the copies on nodes, the nearest first. Behind them, every file is in `storage`,
    where its key begins with `prefix`; None for a state that was never stored.
    """

    nearer: Mapping[str, Sequence[FileCopy]]
    storage: Store | None = None
    prefix: str = ""

    def copies(self, name: str) -> tuple[FileCopy, ...]:
        """The copies of file `name`, the nearest first."""
        nearer = tuple(self.nearer.get(name, ()))
        if self.storage is None:
            return nearer
        return (*nearer, FileCopy(self.storage, self.prefix + name, Tier.STORAGE))

    def nearest(self, name: str) -> FileCopy:
        """The copy of file `name` to read."""
        return self.copies(name)[0]

    def holders(self, num_files: int) -> tuple[int, ...] | None:
        """For each data file, the only rank that can read it, or `EVERY_RANK`; None if every rank can read them all."""
        if not self.nearer:
            return None
        holders = tuple(copy.holder for copy in self._data_files(num_files))
        return holders if any(holder != EVERY_RANK for holder in holders) else None

    def is_prompt(self, num_files: int) -> bool:
        """Whether reads of all data files wait for nothing."""
        return bool(self.nearer) and all(copy.tier.is_prompt for copy in self._data_files(num_files))

    def capabilities(self, num_files: int) -> Capabilities:
        """The abilities of the store that takes the largest requests, of those that the data files are read from."""
        if not self.nearer:
            return Capabilities() if self.storage is None else self.storage.capabilities
        stores = {id(copy.store): copy.store for copy in self._data_files(num_files)}
        found = (store.capabilities for store in stores.values())
        return max(found, key=lambda each: each.request_nbytes, default=Capabilities())

    def _data_files(self, num_files: int) -> Iterator[FileCopy]:
        """The nearest copies of all data files."""
        from holdfast.format.manifest import file_name  # needs numpy, which commands that list records do without

        return (self.nearest(file_name(index)) for index in range(num_files))
