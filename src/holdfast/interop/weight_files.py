"""Which files of a folder hold one model, as transformers divides it: one file, or several with an index of tensors."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Final, NamedTuple

import msgspec

from holdfast.decoding import decode_json
from holdfast.errors import CorruptError
from holdfast.format.names import shown
from holdfast.interop.foreign_format import ForeignFolder, damaged
from holdfast.wording import count

#: The name of an index is that of the single file that it replaces, and this.
INDEX_SUFFIX: Final = ".index.json"
_MAX_INDEX_NBYTES: Final = 256 << 20
_SHARD: Final = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<total>[0-9]{5})(?P<suffix>\.[a-z]+)")
_SHOWN: Final = 5


class _IndexFile(msgspec.Struct):
    """The part of an index that is read: the file of each tensor."""

    weight_map: dict[str, str]


class WeightFiles(NamedTuple):
    """The names of the files of one model, and the file of each tensor where the folder has an index."""

    files: Sequence[str]
    file_of: Mapping[str, str] | None


def find_weight_files(folder: ForeignFolder, names: Sequence[str], *, first: str) -> WeightFiles:
    """The files of the model in `folder`. `names` are its files of weights, and `first` is the name of a model in one
    file, which takes precedence.

    Raises `CorruptError`, code ``corrupt.foreign``, for an index that is malformed, for missing files, and for several
    models.
    """
    if first in folder.names:  # as transformers decides; the index of an earlier save into the folder may be left over
        return WeightFiles([first], None)
    index = _index_of(folder, first=first)
    files = sorted(set(index.values())) if index is not None else _unindexed(folder, names)
    _check_present(folder, files, index)
    return WeightFiles(files, index)


def check_index(folder: ForeignFolder, index: Mapping[str, str], held: Collection[tuple[str, str]]) -> None:
    """Refuse files that do not hold what the index says: they come from different saves. `held` are the pairs of a
    tensor and its file."""
    wrong = sorted(set(held).symmetric_difference(index.items()))
    if not wrong:
        return
    details = [
        f"{shown(name)}: {'in' if (name, file) in held else 'not in'} {file}, against the index"
        for name, file in wrong[:_SHOWN]
    ]
    what = f"has an index that disagrees with its files about {count(len({name for name, _ in wrong}), 'tensor')}"
    raise damaged(folder.location.url, what, tensor=wrong[0][0], details=details)


def _index_of(folder: ForeignFolder, *, first: str) -> Mapping[str, str] | None:
    """The file of each tensor by the folder's index; None for a folder without one."""
    suffix = first[first.rindex(".") :]
    names = [name for name in folder.names if name.endswith(suffix + INDEX_SUFFIX)]
    if not names:
        return None
    name = first + INDEX_SUFFIX if first + INDEX_SUFFIX in names else names[0]
    if len(names) > 1 and name != first + INDEX_SUFFIX:
        raise _ambiguous(folder, names)
    try:
        index = decode_json(folder.storage.read(name, limit=_MAX_INDEX_NBYTES), _IndexFile).weight_map
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise damaged(folder.path(name), f"is a malformed index ({error!s:.200})") from error
    if not index:
        raise damaged(folder.path(name), "is a malformed index: it has no tensors")
    for tensor, file in index.items():
        if not file.endswith(suffix) or "/" in file:
            what = f"is a malformed index: it places {shown(tensor):.200} in {file!r:.200}"
            raise damaged(folder.path(name), what, tensor=tensor)
    return index


def _unindexed(folder: ForeignFolder, names: Sequence[str]) -> Sequence[str]:
    """The files of a folder without an index: its only one, or those that count as shards of one model."""
    is_named = PurePosixPath(folder.location.url).name in names
    if len(names) < 2 and (is_named or not names or _SHARD.fullmatch(names[0]) is None):
        return names
    shards = [found for found in map(_SHARD.fullmatch, names) if found is not None]
    if len(shards) != len(names) or len({(found["stem"], found["total"]) for found in shards}) > 1:
        raise _ambiguous(folder, names)
    stem, total, suffix = shards[0]["stem"], shards[0]["total"], shards[0]["suffix"]
    if not all(0 < int(found["number"]) <= int(total) for found in shards):
        raise _ambiguous(folder, names)
    return [f"{stem}-{number:05d}-of-{total}{suffix}" for number in range(1, int(total) + 1)]


def _ambiguous(folder: ForeignFolder, names: Sequence[str]) -> CorruptError:
    what = f"holds several sets of tensors ({', '.join(names[:_SHOWN])})"
    return damaged(folder.location.url, what, action="Name one of these files instead of the folder.")


def _check_present(folder: ForeignFolder, files: Sequence[str], index: Mapping[str, str] | None) -> None:
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
