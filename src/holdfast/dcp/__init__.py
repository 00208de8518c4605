"""The calls of ``torch.distributed.checkpoint`` (DCP), over checkpoints of holdfast: a script changes one import.

    >>> import holdfast.dcp as dcp
    >>> dcp.save({"app": app}, checkpoint_id="checkpoints/step-700")
    >>> dcp.load({"app": app}, checkpoint_id="checkpoints/step-700")

`load` also reads folders that DCP wrote. The planners, the stagers and ``Stateful`` are those of torch, and so is
``torch.distributed.checkpoint.state_dict``. An argument that holdfast cannot honour is an error that says what to do.
"""

from __future__ import annotations

import importlib
from typing import Final

from torch.distributed import checkpoint
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.stateful import Stateful

from holdfast.dcp.dcp_loading import load
from holdfast.dcp.dcp_saving import async_save, save
from holdfast.dcp.dcp_storage import FileSystemReader, FileSystemWriter
from holdfast.dcp.torch_saving import AsyncCheckpointerType, AsyncSaveResponse
from holdfast.errors import HoldfastError as CheckpointException

__all__ = [
    "AsyncCheckpointerType",
    "AsyncSaveResponse",
    "CheckpointException",
    "DefaultLoadPlanner",
    "DefaultSavePlanner",
    "FileSystemReader",
    "FileSystemWriter",
    "Stateful",
    "async_save",
    "load",
    "save",
]

#: The modules of DCP that scripts reach as attributes, and that only make and copy states.
_MODULES: Final = ("staging", "state_dict", "stateful")


def __getattr__(name: str) -> object:
    """Modules of torch that scripts reach through DCP; an error that says more for other names that DCP has."""
    if name in _MODULES:
        return importlib.import_module(f"torch.distributed.checkpoint.{name}")
    if name in ("load_state_dict", "save_state_dict"):
        verb = name.removesuffix("_state_dict")
        raise AttributeError(f"holdfast.dcp has no {name!r}, which torch has replaced: call holdfast.dcp.{verb}.")
    if hasattr(checkpoint, name):
        raise AttributeError(
            f"holdfast.dcp has no {name!r}: it plans and stores by itself, and has save, async_save and load. To use "
            f"{name!r} with the calls of torch, import it from torch.distributed.checkpoint."
        )
    raise AttributeError(f"module 'holdfast.dcp' has no attribute {name!r}")
