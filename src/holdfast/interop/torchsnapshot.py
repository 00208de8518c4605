"""Folders of torchsnapshot: a manifest of all ranks' entries, and files of tensors' bytes and of pickled objects."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Final

import xxhash

from holdfast.errors import HoldfastError
from holdfast.format.names import shown
from holdfast.interop.foreign_format import ForeignFolder, ForeignState, damaged, unreadable
from holdfast.interop.item_places import item_places
from holdfast.interop.pickle_machine import PickleError
from holdfast.interop.pickled_tree import CheckedNodes, pickled_tree
from holdfast.interop.snapshot_manifest import (
    ManifestError,
    SnapshotEntry,
    SnapshotManifest,
    decode_snapshot,
    locations,
    nested_state,
)
from holdfast.interop.torch_archive import ArchiveError, ArchivePlace, TorchArchive, Windows
from holdfast.wording import count

_METADATA: Final = ".snapshot_metadata"
_MAX_METADATA_NBYTES: Final = 1 << 30
_SHOWN: Final = 5


class TorchSnapshotFormat:
    """Folders that ``torchsnapshot.Snapshot.take`` wrote. torchsnapshot writes the metadata last."""

    kind: Final = "a folder of torchsnapshot"

    def recognises(self, names: Collection[str]) -> bool:
        """As `ForeignFormat.recognises`."""
        return _METADATA in names

    def open(self, folder: ForeignFolder) -> ForeignState:
        """As `ForeignFormat.open`. Reads the metadata, the sizes of all files, and the objects that are no tensors."""
        path = folder.path(_METADATA)
        data = folder.storage.read(_METADATA, limit=_MAX_METADATA_NBYTES)
        if not data.lstrip().startswith(b"{"):
            what = "is no JSON, so a version of torchsnapshot before 0.1 wrote it"
            raise unreadable(path, what, action="Restore it with torchsnapshot 0.1, and take the snapshot again.")
        try:
            manifest = decode_snapshot(data)
            nbytes = _sizes(folder, manifest)
            state = nested_state(manifest, nbytes, partial(_object, folder, Windows(folder.storage), nbytes))
            tree = pickled_tree("", state)
        except (ManifestError, PickleError) as error:
            raise damaged(path, f"is malformed: {error}") from error
        held = {item.file for tensor in tree.items.values() for _, item in tensor.parts}
        sizes = {file: size for file, size in nbytes.items() if file in held}
        return ForeignState(
            folder,
            item_places(folder, path, list(tree.items.items()), sizes),
            list(sizes),
            kind=TorchSnapshotFormat.kind,
            identity=xxhash.xxh3_128_hexdigest(data),
            nodes=CheckedNodes(partial(tree.open_nodes, partial(_refused, path))),
            described_by=(_METADATA,),
        )


def _sizes(folder: ForeignFolder, manifest: SnapshotManifest) -> dict[str, int]:
    """The sizes of all files that the manifest names. Refuses a folder without some of them."""
    found: dict[str, int] = {}
    missing: list[str] = []
    for file in locations(manifest):
        if any(part in ("", ".", "..") for part in file.split("/")):
            raise ManifestError(f"{file!r:.200} is no file in the folder")
        try:
            nbytes = folder.storage.nbytes(file)
        except ValueError as error:
            raise ManifestError(f"{file!r:.200} is no file in the folder") from error
        if nbytes is None:
            missing.append(file)
        else:
            found[file] = nbytes
    if missing:
        what = f"lacks {count(len(missing), 'file')} of {len(missing) + len(found)}"
        details = [f"{shown(file):.200} is missing" for file in missing[:_SHOWN]]
        raise damaged(folder.location.url, what, action="Copy the missing files again.", details=details)
    return found


def _object(folder: ForeignFolder, windows: Windows, nbytes: Mapping[str, int], entry: SnapshotEntry) -> object:
    """The object in a file of its own; an error where it is no plain value."""
    if entry.serializer != "torch_save":
        return PickleError(f"it was written by {entry.serializer!r:.40}, which holdfast does not read")
    try:
        return TorchArchive(ArchivePlace(windows, entry.location, 0, nbytes[entry.location])).value()
    except PickleError as error:
        return error
    except ArchiveError as error:
        raise damaged(folder.path(entry.location), f"is malformed: {error}") from error


def _refused(path: str, name: str, error: PickleError) -> HoldfastError:
    action = "Leave it out with select=, or restore it with torchsnapshot and take it again as plain values."
    return unreadable(path, f"has {shown(name):.200}, which cannot be read: {error}", action=action)
