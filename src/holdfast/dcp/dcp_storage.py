"""DCP's classes for folders, and the run that stands for a folder: what ``checkpoint_id`` names.

A folder of DCP is one checkpoint, which a save replaces. Here it is a run with one checkpoint. A save commits the new
checkpoint beside the old one, and then deletes that: so a save that fails leaves the old one whole.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import PurePosixPath
from typing import Final, NamedTuple

import msgspec

from holdfast.dcp.dcp_arguments import cannot_honour
from holdfast.errors import ConfigurationError
from holdfast.run.history import Run
from holdfast.run.paths import Selection, parse
from holdfast.saving import run_location
from holdfast.store.base import Location
from holdfast.store.timed import TimedStore
from holdfast.store.urls import open_store
from holdfast.wording import kind_of

_log = logging.getLogger(__name__)

#: The number at the end of a folder's name, of at most 18 digits, so that it is a step.
_NUMBER: Final = re.compile(r"(?:.*[^0-9])?0*([0-9]{1,18})")


class FileSystemWriter:
    """The folder of a save: `path`, as ``torch.distributed.checkpoint.FileSystemWriter`` names it.

    With ``overwrite=False``, a save into a folder that has a checkpoint is an error. Files are always synced, threads
    and copies ahead are chosen by holdfast: the log says once where one of these arguments has no effect.

    Raises `ConfigurationError`, code ``config.dcp_option``, for extensions, and for a format of DCP's own.
    """

    def __init__(  # noqa: PLR0917 - the order is DCP's
        self,
        path: str | os.PathLike[str],
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: object = None,
        serialization_format: object = None,
    ) -> None:
        self.path = path
        self.overwrite = overwrite
        if _extensions:
            action = "Leave them out, or save with torch.distributed.checkpoint."
            raise cannot_honour("_extensions", "its files are plain safetensors files", action)
        if serialization_format is not None and getattr(serialization_format, "name", "") != "TORCH_SAVE":
            action = "Leave it out. For Hugging Face, export the checkpoint: holdfast.export(checkpoint_id, folder)."
            raise cannot_honour(f"serialization_format={serialization_format}", "it has one format", action)
        without_effect = {
            "single_file_per_rank": single_file_per_rank is not True,
            "sync_files": sync_files is not True,
            "thread_count": thread_count != 1,
            "per_thread_copy_ahead": per_thread_copy_ahead != 10_000_000,
            "cache_staged_state_dict": cache_staged_state_dict,
        }
        if ignored := [name for name, is_given in without_effect.items() if is_given]:
            _log.info("FileSystemWriter(%s) of holdfast.dcp does nothing: holdfast chooses that", ", ".join(ignored))


class FileSystemReader:
    """The folder of a load: `path`, of holdfast or of DCP."""

    def __init__(self, path: str | os.PathLike[str], _extension_registry: object = None) -> None:
        self.path = path
        if _extension_registry is not None:
            action = "Load this folder with torch.distributed.checkpoint."
            raise cannot_honour("_extension_registry", "it cannot undo extensions", action)


class Destination(NamedTuple):
    """The folder of a save, and whether that may replace a checkpoint."""

    location: Location
    overwrite: bool


def destination(checkpoint_id: str | os.PathLike[str] | None, storage_writer: object) -> Destination:
    """The folder that these arguments of a save name; as in DCP, `checkpoint_id` counts before the writer's path."""
    if storage_writer is None:
        return Destination(run_location(_given(checkpoint_id, "storage_writer")), overwrite=True)
    if not isinstance(storage_writer, FileSystemWriter):
        raise _foreign_storage("storage_writer", storage_writer, "FileSystemWriter")
    path = storage_writer.path if checkpoint_id is None else checkpoint_id
    return Destination(run_location(path), storage_writer.overwrite)


def source(checkpoint_id: str | os.PathLike[str] | None, storage_reader: object) -> Selection:
    """The folder that these arguments of a load name."""
    if storage_reader is None:
        return parse(_given(checkpoint_id, "storage_reader"))
    if not isinstance(storage_reader, FileSystemReader):
        raise _foreign_storage("storage_reader", storage_reader, "FileSystemReader")
    return parse(storage_reader.path if checkpoint_id is None else checkpoint_id)


class Beginning(msgspec.Struct, frozen=True):
    """Rank 0's answer to the begin of a save: the step of the checkpoint."""

    step: int


def begin(into: Destination, timeout_s: float) -> Beginning:
    """Look at the folder of a save, on rank 0. The step is the number at the end of the folder's name; without one, the
    step after the last save, or 0.

    Raises `ConfigurationError`, code ``config.dcp_exists``, where the save may not replace what is there, and as
    `Run.checked_names`.
    """
    with TimedStore(open_store(into.location), timeout_s=timeout_s) as storage:
        head = Run.open(storage).head() if Run.checked_names(storage) else None
    if head is not None and not into.overwrite:
        raise ConfigurationError(
            f"'{into.location}' has a checkpoint already, and overwrite is False.",
            code="config.dcp_exists",
            action="Save into another folder, or pass FileSystemWriter(..., overwrite=True).",
            path=into.location.url,
        )
    number = _NUMBER.fullmatch(PurePosixPath(into.location.url).name)
    if number is not None:
        return Beginning(int(number[1]))
    return Beginning(0 if head is None else head.step + 1)


def _given(checkpoint_id: str | os.PathLike[str] | None, other: str) -> str | os.PathLike[str]:
    if checkpoint_id is None:
        raise ConfigurationError(
            f"neither checkpoint_id nor {other} says where the checkpoint is.",
            code="config.dcp_option",
            action="Pass checkpoint_id, the path of a folder.",
        )
    return checkpoint_id


def _foreign_storage(option: str, given: object, ours: str) -> ConfigurationError:
    return cannot_honour(
        f"{option}={type(given).__qualname__}(...)",
        f"{kind_of(given)} has the protocol of torch's planner, which does not run here",
        f"Import {ours} from holdfast.dcp, or pass checkpoint_id, a path or a URL, alone.",
    )
