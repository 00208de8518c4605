"""The table of foreign formats, and the look for one of them where no run was found."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Final, NamedTuple

from holdfast.checkpoint.stored_checkpoint import Checkpoint
from holdfast.checkpoint.stored_state import StoredState
from holdfast.errors import NotFoundError
from holdfast.format.manifest import NAME as MANIFEST_NAME
from holdfast.format.manifest import is_file_name
from holdfast.format.records import SEAL_NAME
from holdfast.interop.byte_checkpoint import ByteCheckpointFormat
from holdfast.interop.dcp import DcpFormat
from holdfast.interop.deepspeed import DeepSpeedFormat
from holdfast.interop.deepspeed_universal import UniversalFormat
from holdfast.interop.foreign_format import ForeignFolder, ForeignFormat, ForeignState, unreadable
from holdfast.interop.hugging_face import HuggingFaceFormat
from holdfast.interop.megatron_format import MegatronFormat
from holdfast.interop.peft_adapters import PeftFormat
from holdfast.interop.torch_checkpointing import TorchCheckpointingFormat
from holdfast.interop.torch_files import TorchFileFormat
from holdfast.interop.torchsnapshot import TorchSnapshotFormat
from holdfast.interop.weight_files import INDEX_SUFFIX
from holdfast.run.history import Located, resolve
from holdfast.run.paths import Selection, beside
from holdfast.store.base import Store
from holdfast.store.timed import timed_alike
from holdfast.store.urls import open_store

#: Asked in this order.
FORMATS: Final[tuple[ForeignFormat, ...]] = (
    ByteCheckpointFormat(),
    MegatronFormat(),
    DcpFormat(),
    TorchSnapshotFormat(),
    TorchCheckpointingFormat(),
    PeftFormat(),
    HuggingFaceFormat(),
    UniversalFormat(),
    DeepSpeedFormat(),
    TorchFileFormat(),
)

#: Files that are read together with the rest of their folder only.
_DESCRIPTIONS: Final = (".metadata", ".snapshot_metadata", "metadata.pkl")
_FOLDER_SUFFIXES: Final = (".distcp", INDEX_SUFFIX)


def names_advice(kind: str) -> str:
    """More advice where the names of a state of another system differ from the live ones."""
    if kind != HuggingFaceFormat.kind:
        return ""
    return " holdfast.mapping.family(...).read() has the rules for models of transformers."


class FoundState(NamedTuple):
    """A state that a path names, and where it lies in a run; None for one of another system."""

    state: StoredState
    located: Located | None


def find_state(target: Selection) -> FoundState:
    """Open what `target` names: a checkpoint of a run, a checkpoint's folder, or a checkpoint of another system.

    Raises as `resolve` and `ForeignFormat.open` do.
    """
    storage = open_store(target.location)
    try:
        located = resolve(target, storage)
    except NotFoundError as error:
        return FoundState(foreign_instead(error, target, storage), None)
    return FoundState(Checkpoint(located.sealed), located)


def foreign_instead(error: NotFoundError, target: Selection, storage: Store) -> ForeignState:
    """The foreign checkpoint at a path where no run was found. Raises `error` where there is none either."""
    found = None if error.code != "not_found.run" else foreign_at(target, storage)
    if found is None:
        raise error
    return found


def foreign_at(target: Selection, storage: Store) -> ForeignState | None:
    """The foreign checkpoint in the folder, or the file, at the root of `storage`."""
    if target.step is not None or target.place is not None:
        return None
    folder = ForeignFolder(storage, tuple(storage.list("")), target.location)
    if not folder.names and (parent := beside(storage)) is not None:
        name = PurePosixPath(target.location.url).name
        if parent.nbytes(name) is None:
            return None
        if name in _DESCRIPTIONS or name.endswith(_FOLDER_SUFFIXES):
            what = "is one file of a checkpoint that is a folder"
            raise unreadable(parent.path(name), what, action=f"Name the folder instead: '{parent.location}'.")
        folder = ForeignFolder(timed_alike(parent, storage), (name,), target.location)
    if any(is_file_name(name) or name in (MANIFEST_NAME, SEAL_NAME) for name in folder.names):
        return None  # a part of a checkpoint of ours: its data files are safetensors files, too
    found = next((format_ for format_ in FORMATS if format_.recognises(folder.names)), None)
    if found is None:
        return None
    folder.mark(folder.names)
    return found.open(folder)
