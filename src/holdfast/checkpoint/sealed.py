"""A sealed checkpoint: its seal, its folder in a store, and where else its files can be had."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.checkpoint.catalogue import Catalogue, FileCopy, Tier
from holdfast.format.records import Commit, Seal
from holdfast.store.base import Location, Store
from holdfast.store.timed import timed_alike
from holdfast.store.urls import open_store


@dataclass(frozen=True, slots=True)
class Sealed:
    """A checkpoint whose seal was read. The keys of its files in `storage` begin with `prefix`. `nearer` has, by the
    file's name, the copies that are nearer than `storage`.

    `run_id` names its run, and `commit` is the record that published it. They are None for a folder outside any
    history, and `commit` is None for a checkpoint that is not published yet.
    """

    storage: Store
    prefix: str
    seal: Seal
    run_id: str | None = None
    commit: Commit | None = None
    nearer: Mapping[str, Sequence[FileCopy]] = field(default_factory=dict)

    @property
    def catalogue(self) -> Catalogue:
        """The catalogue of the copies of the checkpoint's files."""
        return Catalogue(self.nearer, self.storage, self.prefix, self._elsewhere())

    def key(self, name: str) -> str:
        """The key of file `name` in the checkpoint's own folder in `storage`."""
        return self.prefix + name

    def lacking(self) -> list[str]:
        """The names of the files that do not exist in storage with their sealed sizes. One request per file."""
        catalogue, files = self.catalogue, (self.seal.manifest, *self.seal.files)
        copies = [catalogue.stored(file.name) for file in files]
        pairs = zip(files, copies, strict=True)
        return [file.name for file, copy in pairs if copy.store.nbytes(copy.key) != file.nbytes]

    def _elsewhere(self) -> dict[str, FileCopy]:
        """The files that earlier checkpoints have, by name. Their folders lie beside this one."""
        referenced = self.seal.referenced
        if not referenced:
            return {}
        store, above = (self.storage, _above(self.prefix)) if self.prefix else (_store_around(self.storage), "")
        if store is None:
            return {}
        return {
            file.name: FileCopy(store, f"{above}{file.checkpoint}/{file.name}", Tier.STORAGE) for file in referenced
        }


def _above(prefix: str) -> str:
    return prefix.rstrip("/").rpartition("/")[0] + "/"


def _store_around(storage: Store) -> Store | None:
    """The store of the folder that the root of `storage` lies in; None where that is no folder."""
    location = storage.location
    if location.folder is not None:
        location = Location(storage.resolved(), location.options)
    return None if location.parent is None else timed_alike(open_store(location.parent), storage)
