"""Folders of Hugging Face: tensors in safetensors files, one or several, with an index where there are several."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Final

import msgspec
import numpy as np
import xxhash

from holdfast.decoding import decode_json
from holdfast.errors import CorruptError
from holdfast.format.names import component, shown
from holdfast.geometry import Int64s
from holdfast.interop.foreign_format import ForeignFolder, ForeignState, damaged
from holdfast.interop.given_places import ForeignTensor, GivenPlaces
from holdfast.interop.safetensors_header import Header, HeaderTensor, read_header
from holdfast.wording import count

_SUFFIX: Final = ".safetensors"
_INDEX_SUFFIX: Final = ".safetensors.index.json"
#: The names of transformers, which come first where a folder has several.
_INDEX: Final = "model.safetensors.index.json"
_MAX_INDEX_NBYTES: Final = 256 << 20
_SHARD: Final = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<total>[0-9]{5})\.safetensors")
_SHOWN: Final = 5


class _IndexFile(msgspec.Struct):
    """The part of an index that is read: the file of each tensor."""

    weight_map: dict[str, str]


class HuggingFaceFormat:
    """Folders with safetensors files, as `save_pretrained` writes them; also a single such file."""

    kind: Final = "a Hugging Face folder"

    def recognises(self, names: Collection[str]) -> bool:
        """As `ForeignFormat.recognises`."""
        return any(name.endswith((_SUFFIX, _INDEX_SUFFIX)) for name in names)

    def open(self, folder: ForeignFolder) -> ForeignState:
        """As `ForeignFormat.open`. Reads the headers of all files."""
        index = _index_of(folder)
        files = sorted(set(index.values())) if index is not None else _unindexed(folder)
        _check_present(folder, files, index)
        headers = {file: read_header(folder.storage, file) for file in files}
        if index is not None:
            _check_index(folder, headers, index)
        return _state(folder, headers)


def _index_of(folder: ForeignFolder) -> Mapping[str, str] | None:
    """The file of each tensor by the folder's index; None for a folder without one."""
    names = [name for name in folder.names if name.endswith(_INDEX_SUFFIX)]
    if not names:
        return None
    name = _INDEX if _INDEX in names else names[0]
    if name != _INDEX and len(names) > 1:
        raise _ambiguous(folder, names)
    try:
        index = decode_json(folder.storage.read(name, limit=_MAX_INDEX_NBYTES), _IndexFile).weight_map
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise damaged(folder.path(name), f"is a malformed index ({error!s:.200})") from error
    for tensor, file in index.items():
        if not fnmatchcase(file, f"*{_SUFFIX}") or "/" in file:
            what = f"is a malformed index: it places {shown(tensor):.200} in {file!r:.200}"
            raise damaged(folder.path(name), what, tensor=tensor)
    return index


def _unindexed(folder: ForeignFolder) -> list[str]:
    """The files of a folder without an index: its only one, or those that count as shards of one model."""
    files = [name for name in folder.names if name.endswith(_SUFFIX)]
    if len(files) < 2:
        return files
    if f"model{_SUFFIX}" in files:
        return [f"model{_SUFFIX}"]
    shards = [found for found in map(_SHARD.fullmatch, files) if found is not None]
    if len(shards) != len(files) or len({(found["stem"], found["total"]) for found in shards}) > 1:
        raise _ambiguous(folder, files)
    stem, total = shards[0]["stem"], shards[0]["total"]
    return [f"{stem}-{number:05d}-of-{total}{_SUFFIX}" for number in range(1, int(total) + 1)]


def _ambiguous(folder: ForeignFolder, names: list[str]) -> CorruptError:
    what = f"holds several sets of tensors ({', '.join(names[:_SHOWN])})"
    return damaged(folder.location.url, what, action="Name one of these files instead of the folder.")


def _check_present(folder: ForeignFolder, files: list[str], index: Mapping[str, str] | None) -> None:
    """Refuse a folder without some of its files; the error says what else could be loaded."""
    missing = [file for file in files if file not in folder.names]
    if not missing:
        return
    details = [f"{file}: {_held(file, index)}" for file in missing[:_SHOWN]]
    present = [file for file in files if file in folder.names]
    action = "Copy the missing files again."
    if present:
        action += f" The tensors of another file alone can be loaded by its path, such as '{folder.path(present[0])}'."
    what = f"lacks {count(len(missing), 'file')} of {len(files)}"
    if index is not None:
        lost = sum(file in missing for file in index.values())
        what += f", with {count(lost, 'tensor')} of {len(index)}"
    raise damaged(folder.location.url, what, action=action, details=details)


def _held(file: str, index: Mapping[str, str] | None) -> str:
    """The tensors of a missing file, as far as an index tells."""
    names = [] if index is None else sorted(name for name, home in index.items() if home == file)
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (", ".join(map(shown, names[:_SHOWN])) or "its tensors are not known without an index") + rest


def _check_index(folder: ForeignFolder, headers: Mapping[str, Header], index: Mapping[str, str]) -> None:
    """Refuse files that do not hold what the index says: they come from different saves."""
    held = {(tensor.name, file) for file, header in headers.items() for tensor in header.tensors}
    wrong = sorted(held.symmetric_difference(index.items()))
    if not wrong:
        return
    details = [
        f"{shown(name)}: {'in' if (name, file) in held else 'not in'} {file}, against the index"
        for name, file in wrong[:_SHOWN]
    ]
    what = f"has an index that disagrees with its files about {count(len({name for name, _ in wrong}), 'tensor')}"
    raise damaged(folder.location.url, what, tensor=wrong[0][0], details=details)


def _state(folder: ForeignFolder, headers: Mapping[str, Header]) -> ForeignState:
    homes: dict[str, tuple[int, HeaderTensor]] = {}
    for number, (file, header) in enumerate(headers.items()):
        for tensor in header.tensors:
            name = component(tensor.name)
            if name in homes:
                what = f"holds tensor {shown(tensor.name)} a second time"
                raise damaged(folder.path(file), what, tensor=tensor.name)
            homes[name] = number, tensor
    names = sorted(homes)
    tensors = [_whole(name, *homes[name]) for name in names]
    offsets = np.asarray([homes[name][1].offset for name in names], np.int64)

    def offsets_of(_: int, numbers: Int64s) -> Int64s:
        found: Int64s = offsets[numbers]
        return found

    places = GivenPlaces(tensors, [header.nbytes for header in headers.values()], offsets_of)
    digest = xxhash.xxh3_128()
    for file, header in headers.items():
        digest.update(f"{file}\0{header.nbytes}\0".encode())
        digest.update(header.text)
    return ForeignState(folder, places, list(headers), kind=HuggingFaceFormat.kind, identity=digest.hexdigest())


def _whole(name: str, file: int, tensor: HeaderTensor) -> ForeignTensor:
    """A tensor that is one part."""
    sizes = np.asarray([tensor.shape], np.int64)
    return ForeignTensor(name, tensor.dtype, tensor.shape, np.zeros_like(sizes), sizes, np.asarray([file], np.int64))
