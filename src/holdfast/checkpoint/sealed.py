"""A sealed checkpoint: its seal, and the store and prefix of its files."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.format.records import Commit, Seal
from holdfast.store.base import Store


@dataclass(frozen=True, slots=True)
class Sealed:
    """A checkpoint whose seal was read. The keys of its files in `storage` begin with `prefix`.

    `run_id` names its run, and `commit` is the record that published it. They are None for a folder outside any
    history, and `commit` is None for a checkpoint that is not published yet.
    """

    storage: Store
    prefix: str
    seal: Seal
    run_id: str | None = None
    commit: Commit | None = None

    def key(self, name: str) -> str:
        """The key of file `name` of the checkpoint."""
        return self.prefix + name
