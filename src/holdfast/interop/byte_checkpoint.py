"""Folders of ByteCheckpoint: a DCP-like folder for the model and one for the optimizer, and a pickle of each rank.

A checkpoint is a folder ``global_step_<N>``, or the folder above it, whose tracker file names the last good step. Their
names begin with ``model``, ``optimizer`` and ``extra_state/rank_<r>``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import replace
from math import prod
from typing import Final

from holdfast.errors import StateError
from holdfast.format.dtypes import DTYPES
from holdfast.format.values import Open
from holdfast.geometry import whole
from holdfast.interop.dcp import MAX_METADATA_NBYTES, METADATA, read_metadata, state_of
from holdfast.interop.dcp_metadata import DcpMetadata, moved
from holdfast.interop.foreign_format import ForeignFolder, ForeignState, damaged
from holdfast.interop.item_places import Item, TensorItems
from holdfast.interop.pickle_machine import PickleError
from holdfast.interop.pickled_tree import PickledTree, nodes_of
from holdfast.interop.saved_names import check_saved_name
from holdfast.interop.torch_archive import ArchiveError, ArchivePlace, TorchArchive, Windows
from holdfast.interop.torch_globals import PickledTensor
from holdfast.wording import count

_STEP: Final = re.compile(r"global_step_([0-9]{1,18})")
_EXTRA: Final = re.compile(r"extra_state/extra_state_rank_([0-9]{1,9})\.pt")
#: The file of a rank's part of the model or the optimizer.
_DATA: Final = re.compile(r"(?:model|optimizer)/__([0-9]{1,9})_[0-9]+\.distcp")
_TRACKER: Final = "latest_checkpointed_iteration.txt"
_PARTS: Final = ("model", "optimizer")
_NAME_A_STEP: Final = "Name the folder of one step, such as global_step_100."
_SHOWN: Final = 5


class ByteCheckpointFormat:
    """Folders that ``bytecheckpoint.save`` wrote, of the model and mostly of an optimizer."""

    kind: Final = "a folder of ByteCheckpoint"

    def recognises(self, names: Collection[str]) -> bool:
        """As `ForeignFormat.recognises`: a folder of one step, or of several."""
        if _TRACKER in names and any(map(_STEP.fullmatch, names)):
            return True
        return "model" in names and ("optimizer" in names or "extra_state" in names)

    def open(self, folder: ForeignFolder) -> ForeignState:
        """As `ForeignFormat.open`. Reads the metadata, and the states of the ranks."""
        root = _root(folder)
        folder = _with_files(folder, root)
        if f"{root}model/{METADATA}" not in folder.names:
            what = f"has no model/{METADATA}, so its save did not finish, or it is no checkpoint"
            raise damaged(folder.location.url, what, action="Use another checkpoint.")
        parts = {part: f"{root}{part}/" for part in _PARTS if f"{root}{part}/{METADATA}" in folder.names}
        read: list[bytes] = []
        merged = DcpMetadata({}, {})
        for part, prefix in parts.items():
            read.append(folder.storage.read(prefix + METADATA, limit=MAX_METADATA_NBYTES))
            merged = _joined(merged, _below(part, prefix, read_metadata(folder.path(prefix + METADATA), read[-1])))
        return state_of(
            folder,
            folder.path(f"{root}model/{METADATA}"),
            merged,
            kind=ByteCheckpointFormat.kind,
            data=b"".join(read),
            more=_extra_states(folder, root),
            described_by=[prefix + METADATA for prefix in parts.values()],
        )


def _root(folder: ForeignFolder) -> str:
    """The prefix of the checkpoint's files: of the step that the tracker file names, where there are several."""
    if "model" in folder.names:
        return ""
    text = folder.storage.read(_TRACKER, limit=64).decode("ascii", "replace").strip()
    step = f"global_step_{text}"
    if not _STEP.fullmatch(step) or step not in folder.names:
        raise damaged(folder.path(_TRACKER), f"says {text!r:.40}, but there is no such step", action=_NAME_A_STEP)
    return f"{step}/"


def _with_files(folder: ForeignFolder, root: str) -> ForeignFolder:
    """The folder with the names of the checkpoint's files, which are in folders below it."""
    below = [f"{root}{part}" for part in (*_PARTS, "extra_state")]
    return replace(folder, names=tuple(f"{each}/{name}" for each in below for name in folder.names_in(each)))


def _below(part: str, prefix: str, metadata: DcpMetadata) -> DcpMetadata:
    """The content of one folder, with paths below `part` and files below `prefix`."""

    tensors = {
        f"{part}/{name}": moved(tensor, (part, *tensor.path), prefix) for name, tensor in metadata.tensors.items()
    }
    values = {
        f"{part}/{name}": ((part, *path), item._replace(file=prefix + item.file))
        for name, (path, item) in metadata.values.items()
    }
    return DcpMetadata(tensors, values)


def _joined(first: DcpMetadata, second: DcpMetadata) -> DcpMetadata:
    return DcpMetadata({**first.tensors, **second.tensors}, {**first.values, **second.values})


def _extra_states(folder: ForeignFolder, root: str) -> PickledTree:
    """The state that each rank pickled. What cannot be read is an error where it is looked up."""
    tree = PickledTree()
    windows = Windows(folder.storage)
    files = list(_of_ranks(folder, root, _EXTRA))
    _require_ranks(folder, root, {rank for _, rank in files})
    for file, rank in files:
        name = f"extra_state/rank_{rank}"
        tree.nodes["extra_state"] = Open("dict")
        nbytes = folder.storage.nbytes(file) or 0
        try:
            archive = TorchArchive(ArchivePlace(windows, file, 0, nbytes))
            check_saved_name(folder, file, archive)
            tensors: dict[str, PickledTensor] = {}
            nodes = nodes_of(name, archive.value(), tensors)
            items = {each: _item(archive, file, tensor) for each, tensor in tensors.items()}
        except ArchiveError as error:
            raise damaged(folder.path(file), f"is malformed: {error}") from error
        except (PickleError, StateError) as error:
            tree.nodes[name] = PickleError(str(error))
            continue
        tree.nodes.update(nodes)
        tree.items.update(items)
    return tree


def _require_ranks(folder: ForeignFolder, root: str, held: Collection[int]) -> None:
    """Refuse a folder that lacks the states of some ranks, where several ranks, or a later one, have theirs."""
    if not held or held == {0}:  # a job may save the state of rank 0 alone
        return
    ranks = range(max(*held, *(rank for _, rank in _of_ranks(folder, root, _DATA)), 0) + 1)
    missing = [f"{root}extra_state/extra_state_rank_{rank}.pt is missing" for rank in ranks if rank not in held]
    if missing:
        what = f"lacks the state of {count(len(missing), 'rank')} of {len(ranks)}"
        action = "Copy the missing files again."
        raise damaged(folder.location.url, what, action=action, details=missing[:_SHOWN])


def _of_ranks(folder: ForeignFolder, root: str, pattern: re.Pattern[str]) -> Iterator[tuple[str, int]]:
    """The files of ranks whose names match `pattern`, each with its rank."""
    for name in folder.names:
        if name.startswith(root) and (found := pattern.fullmatch(name[len(root) :])) is not None:
            yield name, int(found[1])


def _item(archive: TorchArchive, file: str, tensor: PickledTensor) -> TensorItems:
    nbytes = prod(tensor.shape) * DTYPES[tensor.dtype].itemsize
    item = Item(file, archive.elements_offset(tensor), nbytes, is_bare=True)
    return TensorItems(tensor.dtype, tensor.shape, [(whole(tensor.shape), item)])
