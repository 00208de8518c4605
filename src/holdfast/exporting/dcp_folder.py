"""Folders of ``torch.distributed.checkpoint``: archives of tensors and values in ``.distcp`` files, and ``.metadata``.

It imports torch, whose own classes the metadata consists of; so do `tensor_archives` and `plain_values`.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from holdfast.exporting.chosen_tensors import ChosenContent, ExportTensor, unfit
from holdfast.exporting.chosen_values import KeyPath, key_path
from holdfast.exporting.dcp_optimizers import dcp_optimizers
from holdfast.exporting.element_source import GivenSegment, Segment
from holdfast.exporting.new_folder import NewFile, NewFolder, Trailer
from holdfast.exporting.plain_values import plain_value
from holdfast.exporting.tensor_archives import ArchivedTensor, TensorArchive
from holdfast.geometry import Box, whole

METADATA: Final = ".metadata"
#: Most bytes of a tensor in one archive: readers hold all of an archive in memory.
MAX_NBYTES: Final = 512 << 20


def dcp_folder(choice: ChosenContent, *, identity: str, shard_nbytes: int) -> NewFolder:
    """The folder for the chosen tensors and values, in files of at most `shard_nbytes` bytes, or of one archive.

    A key is the path of a name's keys, joined by dots, as DCP makes them of nested dicts. The names of optimizers are
    those of ``get_state_dict``. A tied tensor is stored once, and found under all its names, and so is its state in an
    optimizer. Raises `IncompatibleError`, code ``incompatible.export``, for keys that meet.
    """
    nodes = choice.table.nodes
    optimizers = dcp_optimizers(choice)
    values = [name for name in choice.values if name not in optimizers.dropped]
    names = [*values, *(name for one in choice.tensors for name in one.names)]
    paths = {name: optimizers.paths.get(name) or key_path(name, nodes) for name in names}
    keys = _keys({name: [path, *optimizers.copies.get(name, ())] for name, path in paths.items()})
    added = {".".join(map(str, path)): path for path in optimizers.added}
    found = {key: path for name in names for key, path in keys[name].items()}
    content = DcpContent(shard_nbytes, found | added)
    for name in values:
        for key in keys[name]:
            content.add_value(key, plain_value(nodes, name))
    for key, path in added.items():
        content.add_value(key, optimizers.added[path])
    for aliases, tensor in choice.tensors:
        content.add_tensor([key for name in aliases for key in keys[name]], tensor)
    return NewFolder(identity, {}, content.files(), {METADATA: content.metadata()}, len(choice.tensors))


class DcpContent:
    """The tensors and values of a folder under construction, in files of at most `shard_nbytes` bytes, or of one
    archive. `paths` are those of nested dicts, by key."""

    def __init__(self, shard_nbytes: int, paths: Mapping[str, KeyPath] | None) -> None:
        self._files = _DistcpFiles(shard_nbytes)
        self._metadata = Metadata({}, None if paths is None else dict(paths), {}, StorageMeta(), "1.0.0")
        self._stored: dict[MetadataIndex, _StorageInfo] = {}

    def add_value(self, key: str, value: object) -> None:
        """Add a value in plain types."""
        self._metadata.state_dict_metadata[key] = BytesStorageMetadata()
        self._stored[MetadataIndex(key)] = self._files.add_bytes(saved(value))

    def add_tensor(self, keys: Sequence[str], tensor: ExportTensor) -> None:
        """Add a tensor, which is stored once, under all its keys."""
        chunks, stored = [], []
        for box in _boxes(whole(tensor.shape), MAX_NBYTES // tensor.itemsize):
            chunks.append(ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.size)))
            stored.append(self._files.add_tensor(tensor, box))
        properties = TensorProperties(dtype=getattr(torch, tensor.dtype))
        described = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
        for key in keys:
            self._metadata.state_dict_metadata[key] = described
            for index, (chunk, info) in enumerate(zip(chunks, stored, strict=True)):
                self._stored[MetadataIndex(key, chunk.offsets, index)] = info

    def files(self) -> list[NewFile]:
        """The files with the tensors and values."""
        return self._files.finished()

    def metadata(self) -> bytes:
        """The file that describes the others."""
        self._metadata.storage_data = self._stored
        return pickle.dumps(self._metadata)


def _keys(paths: Mapping[str, Sequence[KeyPath]]) -> dict[str, dict[str, KeyPath]]:
    """The keys of each name, with their paths."""
    keys = {name: {".".join(map(str, path)): path for path in found} for name, found in paths.items()}
    owners: dict[str, str] = {}
    for name, key in ((name, key) for name, found in keys.items() for key in found):
        if owners.setdefault(key, name) != name:
            text = f"and {owners[key]} would both get the key {key!r}"
            raise unfit(name, text, "Rename one with a mapping (--mapping).")
    return keys


def _boxes(box: Box, most: int) -> Iterator[Box]:
    """Boxes of at most `most` elements that make up `box`: slabs along the outermost axis that has several elements."""
    if box.numel <= most:
        yield box
        return
    axis = next(axis for axis, extent in enumerate(box.size) if extent > 1)
    rows = max(most // (box.numel // box.size[axis]), 1)
    for first in range(0, box.size[axis], rows):
        start = (*box.start[:axis], box.start[axis] + first, *box.start[axis + 1 :])
        size = (*box.size[:axis], min(rows, box.size[axis] - first), *box.size[axis + 1 :])
        yield from _boxes(Box(start, size), most)


def saved(value: object) -> bytes:
    """An archive of ``torch.save``."""
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


class _DistcpFile(NamedTuple):
    """A file under construction."""

    name: str
    segments: list[Segment]
    trailers: list[Trailer]

    @property
    def nbytes(self) -> int:
        return self.segments[-1].start + self.segments[-1].nbytes if self.segments else 0


class _DistcpFiles:
    """The ``.distcp`` files under construction: archives one after another."""

    def __init__(self, most_nbytes: int) -> None:
        self._most_nbytes = most_nbytes
        self._files: list[_DistcpFile] = []

    def add_bytes(self, data: bytes) -> _StorageInfo:
        """Add an archive that is known."""
        file = self._file(len(data))
        start = file.nbytes
        file.segments.append(GivenSegment(start, data))
        return _StorageInfo(file.name, start, len(data))

    def add_tensor(self, tensor: ExportTensor, box: Box) -> _StorageInfo:
        """Add the archive of a part of a tensor."""
        nbytes = box.numel * tensor.itemsize
        file = self._file(nbytes)
        start = file.nbytes
        archive = TensorArchive(ArchivedTensor(tensor, box), start=start)
        file.segments.extend(archive.segments)
        file.trailers.extend(archive.trailers)
        return _StorageInfo(file.name, start, archive.length)

    def finished(self) -> list[NewFile]:
        """All files."""
        return [NewFile(file.name, b"", file.segments, file.trailers) for file in self._files]

    def _file(self, nbytes: int) -> _DistcpFile:
        """The file that takes an archive of about `nbytes`."""
        if not self._files or (self._files[-1].nbytes + nbytes > self._most_nbytes and self._files[-1].segments):
            self._files.append(_DistcpFile(f"__0_{len(self._files)}.distcp", [], []))
        return self._files[-1]
