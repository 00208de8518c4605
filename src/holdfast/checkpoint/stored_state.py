"""The states that `load` and `open` read: data files with values, and the facts recorded about them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from holdfast.checkpoint.data_files import DataFiles
from holdfast.format.records import Place
from holdfast.format.values import Node
from holdfast.store.base import Location, Store

#: The step of a state that another system wrote: no step of a run was finished, and the next one is 0.
NO_STEP: Final = -1


@dataclass(frozen=True, kw_only=True)
class StateRecord:
    """The facts that are recorded about a stored state besides its content.

    Processes that open one `location` and find one `identity` see the same state. Where another system
    wrote it, `step` is `NO_STEP` and `place` is None. `kind` says in which format it is, for messages.
    """

    location: Location
    identity: str
    kind: str = "a checkpoint"
    step: int = NO_STEP
    place: Place | None = None
    in_history: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    diverged: tuple[str, ...] = ()


class StoredState(DataFiles, ABC):
    """A state in storage, for reading. Reads change nothing. Safe for several threads."""

    @property
    @abstractmethod
    def record(self) -> StateRecord:
        """The facts that are recorded about it."""

    @property
    def fingerprint(self) -> str:
        """A text that differs where the stored bytes differ, as far as that can be known without reading them."""
        return self.record.identity

    @property
    def shared_fingerprint(self) -> str:
        """As `fingerprint`, without what differs between machines that see the same files."""
        return self.fingerprint

    @property
    def seen_content(self) -> str:
        """A text that differs between processes that see other files at one location, as far as a few reads tell."""
        return self.record.identity

    def check_unchanged(self, *, all_files: bool = True) -> None:
        """Look whether the files are those that were opened: only those that were read, unless `all_files`.

        Raises `CorruptError`, code ``corrupt.foreign``, where one is not. Checkpoints of holdfast never change.
        """

    @property
    @abstractmethod
    def storage(self) -> Store:
        """The store of its folder."""

    @property
    @abstractmethod
    def nodes(self) -> Mapping[str, Node]:
        """The table of values by path. Listing paths reads nothing; looking up a value may read."""
