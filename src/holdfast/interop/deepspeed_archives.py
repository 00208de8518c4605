"""The files of a DeepSpeed folder, opened: the content of each, without the bytes of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import xxhash

from holdfast.interop.deepspeed_states import GLOBALS
from holdfast.interop.foreign_format import ForeignFolder, damaged, unreadable
from holdfast.interop.pickle_machine import PickleError
from holdfast.interop.saved_names import check_saved_name
from holdfast.interop.torch_archive import ArchiveError, ArchivePlace, TorchArchive, Windows

_Content = TypeVar("_Content")


class Archives:
    """The archives in a folder. Those that were read stay `opened`, by their keys."""

    def __init__(self, folder: ForeignFolder) -> None:
        self._folder = folder
        self._windows = Windows(folder.storage)
        self.opened: dict[str, TorchArchive] = {}

    def read(self, key: str, parse: Callable[[object], _Content]) -> _Content:
        """Parse the object in a file with `parse`, which may raise `PickleError`.

        Raises `CorruptError` and `IncompatibleError` with the path of the file.
        """
        path, nbytes = self._folder.path(key), self._folder.storage.nbytes(key)
        if nbytes is None:
            raise damaged(path, "is missing")
        try:
            archive = self.opened.get(key)
            if archive is None:
                archive = self.opened[key] = TorchArchive(ArchivePlace(self._windows, key, 0, nbytes))
                check_saved_name(self._folder, key, archive)
            return parse(archive.value(GLOBALS, keep_unknown=True))
        except PickleError as error:  # the file is sound, and holds what is no checkpoint, or one of another kind
            action = "Load it with DeepSpeed, and save that state by holdfast, which is tested with DeepSpeed 0.19.8."
            raise unreadable(path, f"cannot be read: {error}", action=action) from error
        except ArchiveError as error:
            raise damaged(path, f"is no file of torch.save: {error}") from error

    def digest(self, keys: Iterable[str]) -> str:
        """A digest of the names and sizes of the entries of some files, and of their checksums."""
        digest = xxhash.xxh3_128()
        for key in keys:
            digest.update(key.encode("utf-8", "surrogatepass") + b"\0" + self.opened[key].directory)
        return digest.hexdigest()
