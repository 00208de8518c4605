"""The catalogue of the copies of a checkpoint's files: in which store and tier each lies, and who can read it.

Readers ask the catalogue for the nearest copy of a file and never know the tiers. So a checkpoint is not tied to one
store, and a new tier adds copies here and changes no reader.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from holdfast.store.base import Capabilities, Store


class Tier(Enum):
    """A place for copies, by its distance from the reader. Peer memory has copies that a node holds for other nodes:
    its own ranks read them as they read their own memory, and all others need a rank of that node."""

    LIVE_MEMORY = "live memory"
    NODE_MEMORY = "node memory"
    PEER_MEMORY = "peer memory"
    NODE_DISK = "node disk"
    STORAGE = "storage"

    def __init__(self, _: str) -> None:
        #: Its number in the order of distances.
        self.distance = len(type(self).__members__)

    @property
    def is_prompt(self) -> bool:
        """Whether reads of this tier wait for nothing. (Live memory may be that of an accelerator.)"""
        return self in (Tier.NODE_MEMORY, Tier.PEER_MEMORY)


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
    where its key begins with `prefix`; None for a state that was never stored. A file that is not there is the one in
    `elsewhere`, which an earlier checkpoint has.
    """

    nearer: Mapping[str, Sequence[FileCopy]]
    storage: Store | None = None
    prefix: str = ""
    elsewhere: Mapping[str, FileCopy] = field(default_factory=dict)
    #: Where files of `elsewhere` were found: in the checkpoint's own folder, or there.
    _found: dict[str, FileCopy] = field(default_factory=dict, compare=False, repr=False)

    def copies(self, name: str) -> tuple[FileCopy, ...]:
        """The copies of file `name`, the nearest first."""
        nearer = tuple(self.nearer.get(name, ()))
        return nearer if self.storage is None else (*nearer, self.stored(name))

    def nearest(self, name: str) -> FileCopy:
        """The copy of file `name` to read."""
        nearer = self.nearer.get(name)
        return nearer[0] if nearer else self.stored(name)

    def stored(self, name: str) -> FileCopy:
        """The copy of file `name` in storage. One request, the first time, for a file that an earlier checkpoint has:
        its own folder comes first."""
        assert self.storage is not None
        own = FileCopy(self.storage, self.prefix + name, Tier.STORAGE)
        other = self.elsewhere.get(name)
        if other is None:
            return own
        if name not in self._found:
            self._found[name] = other if self.storage.nbytes(own.key) is None else own
        return self._found[name]

    def holders(self, names: Iterable[str]) -> tuple[int, ...] | None:
        """For each of these data files, the only rank that can read it, or `EVERY_RANK`; None if every rank can read
        them all."""
        if not self.nearer:
            return None
        holders = tuple(self.nearest(name).holder for name in names)
        return holders if any(holder != EVERY_RANK for holder in holders) else None

    def is_prompt(self, names: Iterable[str]) -> bool:
        """Whether reads of all these data files wait for nothing."""
        return bool(self.nearer) and all(self.nearest(name).tier.is_prompt for name in names)

    def capabilities(self, names: Iterable[str]) -> Capabilities:
        """The abilities of the store that takes the largest requests, of those that these data files are read from."""
        if not self.nearer:
            return Capabilities() if self.storage is None else self.storage.capabilities
        stores = {id(copy.store): copy.store for copy in map(self.nearest, names)}
        found = (store.capabilities for store in stores.values())
        return max(found, key=lambda each: each.request_nbytes, default=Capabilities())
