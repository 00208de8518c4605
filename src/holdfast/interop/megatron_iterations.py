"""The files of a Megatron checkpoint: the folder of an iteration, or the folder above it with the tracker file."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import msgspec

from holdfast.checkpoint.stored_state import NO_STEP
from holdfast.decoding import decode_json
from holdfast.errors import ConfigurationError, HoldfastError
from holdfast.format.names import shown
from holdfast.interop.dcp import METADATA
from holdfast.interop.foreign_format import ForeignFolder, damaged, unreadable
from holdfast.store.base import Store
from holdfast.store.posix import PosixStore

_log = logging.getLogger(__name__)

TRACKER: Final = "latest_checkpointed_iteration.txt"
COMMON: Final = "common.pt"
CONFIG: Final = "metadata.json"
#: The only kind of folder that Megatron-core 0.16 has, and its version.
BACKEND: Final = "torch_dist"
BACKEND_VERSION: Final = 1
#: The folder of a checkpoint without an iteration, and what the tracker file then says.
RELEASE: Final = "release"
_ITERATION: Final = re.compile(r"iter_([0-9]{7,18})")
_LEGACY: Final = re.compile(r"mp_rank_[0-9]{2,}(?:_[0-9]{3,}){0,2}")
_DATA_SUFFIX: Final = ".distcp"
_MAX_CONFIG_NBYTES: Final = 64 << 10
_SHOWN: Final = 5
_MAX_TRACKER_NBYTES: Final = 64
#: A temporary file whose writer is not known to be dead is left alone for so long.
_LEFTOVER_S: Final = 60.0
_CONVERT: Final = "Load it with the Megatron that wrote it, and save it with --ckpt-format torch_dist."


class IterationFolder(NamedTuple):
    """The folder of one iteration: its names, what stands before them in the keys of the store, its path for messages,
    and the iteration; None for a release, or where the folder has another name."""

    folder: ForeignFolder
    prefix: str
    path: str
    iteration: int | None


class _FolderConfig(msgspec.Struct, frozen=True):
    """The content of ``metadata.json``: the format of the folder."""

    sharded_backend: str
    sharded_backend_version: int = 1


def folder_name(iteration: int) -> str:
    """The name of an iteration's folder."""
    return f"iter_{iteration:07d}"


def iteration_name(step: int) -> str:
    """The name of the folder for the state of a step; that of a release where it has no step."""
    return RELEASE if step == NO_STEP else folder_name(step)


def write_tracker(above: Store, name: str) -> None:
    """Have the tracker file name the folder `name`, as Megatron does after a save. It stays where it names a later
    iteration, from which Megatron would go on, and the log says so. In a folder of this machine it is never missing
    meanwhile: without it, Megatron begins anew. Raises as `check_tracker`."""
    iteration = _iteration(name)
    there = check_tracker(above)
    if iteration is not None and there.isdigit() and int(there) > iteration:
        _log.warning(
            "'%s' keeps naming iteration %d, which is later than %d", above.path(TRACKER), int(there), iteration
        )
        return
    for leftover in above.leftovers("", older_than_s=_LEFTOVER_S):  # of a call that was killed here
        above.delete(leftover)
    text = (RELEASE if iteration is None else str(iteration)).encode()
    folder = above.location.folder
    if folder is not None:
        PosixStore(str(folder)).replace(TRACKER, text)
        return
    above.delete(TRACKER)
    above.create(TRACKER, text)


def check_tracker(above: Store) -> bytes:
    """The text of the tracker file; empty where there is none, or where a killed Megatron has left it so.

    Raises `ConfigurationError`, code ``config.destination``, where something else has its name: nothing replaces it.
    """
    nbytes = above.nbytes(TRACKER)
    if nbytes is None and TRACKER not in above.list(""):
        return b""
    text = above.read(TRACKER).strip() if nbytes is not None and nbytes <= _MAX_TRACKER_NBYTES else None
    if text is None or not (text in (b"", RELEASE.encode()) or text.isdigit()):
        raise ConfigurationError(
            f"'{above.path(TRACKER)}' is no tracker file of Megatron, which names one iteration.",
            code="config.destination",
            action="Move it elsewhere, or name another folder.",
            path=above.path(TRACKER),
        )
    return text


def is_megatron(names: Collection[str]) -> bool:
    """Whether a folder with these names is that of an iteration, or one with the tracker file; also a folder that is
    not whole, or of the format before ``torch_dist``."""
    if TRACKER in names or COMMON in names or any(map(_ITERATION.fullmatch, names)):
        return True
    is_dcp = METADATA in names or any(name.endswith(_DATA_SUFFIX) for name in names)
    return (CONFIG in names and is_dcp) or any(map(_LEGACY.fullmatch, names))


def find_iteration(folder: ForeignFolder) -> IterationFolder:
    """The folder of the iteration that `folder` is, or that its tracker file names, after its format was checked."""
    name = folder.location.url.rstrip("/").rpartition("/")[2]
    found = IterationFolder(folder, "", folder.location.url, _iteration(name))
    if not _is_iteration(folder.names):
        tracked = _tracked(folder)
        names = folder.names_in(tracked)
        path = folder.path(tracked)
        found = IterationFolder(replace(folder, names=names), f"{tracked}/", path, _iteration(tracked))
        if not names:
            what = f"names {tracked}, which is not there"
            raise damaged(folder.path(TRACKER), what, action=_others(folder.names))
    _check(found, folder)
    return found


def _is_iteration(names: Sequence[str]) -> bool:
    below = (name for name in names if name != TRACKER and not _ITERATION.fullmatch(name))
    return is_megatron(tuple(below))


def _iteration(name: str) -> int | None:
    found = _ITERATION.fullmatch(name)
    return None if found is None else int(found[1])


def _tracked(folder: ForeignFolder) -> str:
    """The folder that the tracker file names."""
    if TRACKER not in folder.names:
        what = f"has no {TRACKER}, which names the iteration to load"
        raise damaged(folder.location.url, what, action=_others(folder.names))
    text = folder.storage.read(TRACKER, limit=_MAX_CONFIG_NBYTES).decode("utf-8", "replace").strip()
    if text == RELEASE:
        return RELEASE
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        what = "is empty, so a save was cut off" if not text else f"names no iteration, but {text!r:.100}"
        raise damaged(folder.path(TRACKER), what, action=_others(folder.names))
    return folder_name(int(text))


def _others(names: Sequence[str]) -> str:
    found = [name for name in names if _ITERATION.fullmatch(name) or name == RELEASE]
    return f"Name the folder of one iteration: {', '.join(found[-_SHOWN:])}." if found else ""


def _check(found: IterationFolder, above: ForeignFolder) -> None:
    """Refuse folders of other formats, and those whose save did not finish."""
    names = found.folder.names
    if any(map(_LEGACY.fullmatch, names)):
        legacy = next(name for name in names if _LEGACY.fullmatch(name))
        what = f"is in Megatron's legacy format (--ckpt-format torch): {legacy} is the part of one rank"
        raise unreadable(found.path, what, action=_CONVERT)
    if METADATA in names and not {CONFIG, COMMON} & set(names):
        what = (
            "is a plain folder of DCP, as Megatron writes with --ckpt-format fsdp_dtensor (Megatron-FSDP) or torch_dcp"
        )
        action = "Name that folder itself: its tensors are read as those of any folder of DCP, under Megatron's names."
        raise unreadable(found.path, what, action=action)
    if CONFIG not in names:
        what = f"has no {CONFIG}, which Megatron writes last: its save did not finish, or the file was not copied"
        others = tuple(name for name in above.names if f"{name}/" != found.prefix)
        raise damaged(found.path, what, action=_others(others) or "Use another checkpoint.")
    config = _config(found)
    if config.sharded_backend != BACKEND:
        what = f"is in Megatron's format {shown(config.sharded_backend):.40}; holdfast reads {BACKEND}"
        raise unreadable(found.path, what, action=_CONVERT)
    if config.sharded_backend_version != BACKEND_VERSION:
        what = f"is in version {config.sharded_backend_version} of {BACKEND}; holdfast reads version {BACKEND_VERSION}"
        raise unreadable(found.path, what)
    missing = [name for name in (METADATA, COMMON) if name not in names]
    if missing:
        raise _missing(found, missing)


def _missing(found: IterationFolder, missing: Sequence[str]) -> HoldfastError:
    lost = {METADATA: "says where each tensor is", COMMON: "has the values of the optimizer and of the job"}
    details = [f"{name} is missing, which {lost[name]}" for name in missing]
    return damaged(found.path, "is not whole", action="Copy the missing files again.", details=details)


def _config(found: IterationFolder) -> _FolderConfig:
    key = found.prefix + CONFIG
    try:
        return decode_json(found.folder.storage.read(key, limit=_MAX_CONFIG_NBYTES), _FolderConfig)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        what = f"says nothing about the format ({error!s:.100}): its save did not finish"
        raise damaged(found.folder.path(key), what, action="Use another checkpoint.") from error
