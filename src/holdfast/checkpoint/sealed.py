"""A sealed checkpoint: its seal, its folder in a store, and where else its files can be had."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.checkpoint.catalogue import Catalogue, FileCopy
from holdfast.format.records import Commit, Seal
from holdfast.store.base import Store


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
        return Catalogue(self.nearer, self.storage, self.prefix)

    def key(self, name: str) -> str:
        """The key of file `name` of the checkpoint in `storage`."""
        return self.prefix + name
