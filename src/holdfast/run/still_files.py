"""A data file of a save on its way to storage: either its bytes are written, or a mark says that an earlier checkpoint
has them."""

from __future__ import annotations

import logging
from typing import NamedTuple

from holdfast.errors import StorageError
from holdfast.format import manifest as fmt
from holdfast.format import records
from holdfast.format.container import FileLayout
from holdfast.format.manifest import Candidate, DecodedManifest
from holdfast.format.records import FileSeal, Record
from holdfast.store.timed import TimedStore

_log = logging.getLogger(__name__)


class Same(Record, frozen=True, kw_only=True, tag="same"):
    """The mark of a still file that was not written, because it equals the file of its name in the folder
    `checkpoint`."""

    checkpoint: str


class StoredFile(NamedTuple):
    """The data file of this `layout`, to be stored in the checkpoint folder `folder`."""

    storage: TimedStore
    manifest: DecodedManifest
    folder: str
    layout: FileLayout

    @property
    def key(self) -> str:
        """The key of the file."""
        return records.checkpoint_key(self.folder, self.manifest.file_name(self.layout.index))

    @property
    def path(self) -> str:
        """The full path of the file."""
        return self.storage.path(self.key)

    @property
    def candidate(self) -> Candidate | None:
        """The file of an earlier checkpoint that it may equal, if there is one."""
        return self.manifest.candidates.get(self.layout.index)

    @property
    def is_marked(self) -> bool:
        """Whether its mark exists. One request."""
        return self.storage.nbytes(self._mark_key) is not None

    def marked(self, seal: FileSeal) -> bool:
        """Create the mark of the file, durably, if it equals its candidate, as its entry of the seal says. False if it
        does not, or if the candidate is gone, has lost bytes or cannot be looked at: then the file must be written."""
        if not isinstance(seal.checkpoint, str):
            return False
        try:
            found = self.storage.nbytes(records.checkpoint_key(seal.checkpoint, seal.name))
        except StorageError as error:
            _log.warning("'%s' is written whole: %s", self.path, error.message)
            return False
        if found != seal.nbytes:
            return False
        self.storage.create(self._mark_key, records.encode(Same(checkpoint=seal.checkpoint)))
        return True

    @property
    def _mark_key(self) -> str:
        return records.checkpoint_key(self.folder, fmt.mark_name(self.layout.index))
