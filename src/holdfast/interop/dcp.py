"""Folders of ``torch.distributed.checkpoint`` (DCP), also where FSDP, Accelerate or torchtitan wrote them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Sequence
from itertools import chain
from typing import Final

import xxhash

from holdfast.checkpoint.stored_state import NO_STEP
from holdfast.errors import HoldfastError, StateError
from holdfast.format.names import shown
from holdfast.interop.dcp_metadata import DcpMetadata, decode_metadata, name_of
from holdfast.interop.dcp_values import ContentOf, dcp_nodes, whole_content
from holdfast.interop.foreign_format import ForeignFolder, ForeignState, damaged, unreadable
from holdfast.interop.item_places import Item, item_places
from holdfast.interop.pickle_machine import ForbiddenGlobalError, PickleError, UnreadTensorError
from holdfast.interop.pickled_tree import PickledTree
from holdfast.wording import count

METADATA: Final = ".metadata"
_DATA_SUFFIX: Final = ".distcp"
_RANK_METADATA: Final = re.compile(r"__[0-9]+\.metadata")
MAX_METADATA_NBYTES: Final = 4 << 30
_SHOWN: Final = 5


class DcpFormat:
    """Folders of DCP: a pickle ``.metadata``, and files in which each item is an archive of ``torch.save``."""

    kind: Final = "a folder of torch.distributed.checkpoint"

    def recognises(self, names: Collection[str]) -> bool:
        """As `ForeignFormat.recognises`; also a folder whose save did not finish."""
        return METADATA in names or any(name.endswith(_DATA_SUFFIX) for name in names)

    def open(self, folder: ForeignFolder) -> ForeignState:
        """As `ForeignFormat.open`. Reads the metadata alone."""
        path = folder.path(METADATA)
        if METADATA not in folder.names:
            raise _unfinished(folder)
        data = folder.storage.read(METADATA, limit=MAX_METADATA_NBYTES)
        metadata = read_metadata(path, data)
        return state_of(folder, path, metadata, kind=DcpFormat.kind, data=data, described_by=(METADATA,))


def read_metadata(path: str, data: bytes) -> DcpMetadata:
    """The content of the metadata file at `path`. Raises as `ForeignFormat.open` does."""
    try:
        return decode_metadata(data)
    except ForbiddenGlobalError as error:
        raise unreadable(path, f"is refused: {error}, so the file may be an attack") from error
    except UnreadTensorError as error:
        raise unreadable(path, f"cannot be read: {error}") from error
    except PickleError as error:
        raise damaged(path, f"is malformed: {error}") from error


def state_of(
    folder: ForeignFolder,
    path: str,
    metadata: DcpMetadata,
    *,
    kind: str,
    data: bytes,
    more: PickledTree | None = None,
    value_of: ContentOf = whole_content,
    step: int | None = None,
    described_by: Sequence[str] = (),
) -> ForeignState:
    """The state that `metadata` describes, which was read from `data` at `path`, and with it the items and nodes of
    `more`. `value_of` gives the value that an archive stands for, or none; `step` is that of the state, if it says
    one; `described_by` as that of `ForeignState`. Raises as `ForeignFormat.open` does."""
    more = PickledTree() if more is None else more
    beside = (item for tensor in more.items.values() for _, item in tensor.parts)
    files = sorted({item.file for item in chain(_items(metadata), beside)})
    nbytes = _sizes(folder, metadata, files)
    try:
        named = [(name_of(tensor.path), tensor.items) for tensor in metadata.tensors.values()]
    except StateError as error:
        raise unreadable(path, f"has a name that holdfast cannot have: {error}") from error
    places = item_places(folder, path, [*named, *more.items.items()], dict(zip(files, nbytes, strict=True)))
    return ForeignState(
        folder,
        places,
        files,
        kind=kind,
        identity=xxhash.xxh3_128_hexdigest(data),
        nodes=dcp_nodes(folder, metadata, more.nodes, value_of),
        step=NO_STEP if step is None else step,
        described_by=described_by,
    )


def _unfinished(folder: ForeignFolder) -> HoldfastError:
    path = folder.location.url
    if any(map(_RANK_METADATA.fullmatch, folder.names)):
        what = "was saved with use_collectives=False: each rank described its own part, and nothing describes the whole"
        return unreadable(path, what, action="Load it with dcp.load on the layout that saved it, and save that again.")
    return damaged(path, f"has no {METADATA}: its save did not finish", action="Use another checkpoint.")


def _items(metadata: DcpMetadata) -> chain[Item]:
    parts = (item for tensor in metadata.tensors.values() for _, item in tensor.items.parts)
    return chain(parts, (item for _, item in metadata.values.values()))


def _sizes(folder: ForeignFolder, metadata: DcpMetadata, files: Sequence[str]) -> list[int]:
    """The sizes of the data files. Refuses items that are outside their files, or cannot be read."""
    require_files(folder, metadata, files)
    needed: defaultdict[str, int] = defaultdict(int)
    for item in _items(metadata):
        needed[item.file] = max(needed[item.file], item.start + item.nbytes)
        if item.transforms:
            what = f"was written through {', '.join(item.transforms):.100}, which holdfast cannot undo"
            raise unreadable(folder.path(item.file), what)
    sizes = []
    for file in files:
        found = folder.storage.nbytes(file)
        if found is None or found < needed[file]:
            raise damaged(folder.path(file), f"is cut off: it has {found} bytes, and needs {needed[file]}")
        sizes.append(found)
    return sizes


def require_files(folder: ForeignFolder, metadata: DcpMetadata, files: Collection[str]) -> None:
    """Refuse a folder that lacks some of `files`, and say what is not whole without them."""
    missing = {file for file in files if file not in folder.names}
    if not missing:
        return
    lost = [
        name for name, tensor in metadata.tensors.items() if any(item.file in missing for _, item in tensor.items.parts)
    ]
    lost += [name for name, (_, item) in metadata.values.items() if item.file in missing]
    total = len(metadata.tensors) + len(metadata.values)
    held = f"with all or a part of {len(lost)} of {total} entries"
    what = f"lacks {count(len(missing), 'file')} of {len(files)}, {held}"
    details = [f"{shown(file):.200} is missing" for file in sorted(missing)[:_SHOWN]]
    details += [f"{shown(name):.200} is not whole without it" for name in lost[:_SHOWN]]
    raise damaged(folder.location.url, what, action="Copy the missing files again.", details=details)
