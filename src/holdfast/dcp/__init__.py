"""The calls of ``torch.distributed.checkpoint`` (DCP), over checkpoints of holdfast: a script changes one import.

    >>> import holdfast.dcp as dcp
    >>> dcp.save({"app": app}, checkpoint_id="checkpoints/step-700")
    >>> dcp.load({"app": app}, checkpoint_id="checkpoints/step-700")

`load` also reads folders that DCP wrote. The planners, the stagers and ``Stateful`` are those of torch, and so is
``torch.distributed.checkpoint.state_dict``. An argument that holdfast cannot honour is an error that says what to do.
"""

from __future__ import annotations

from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.checkpoint.stateful import Stateful

from holdfast.dcp.dcp_loading import load
from holdfast.dcp.dcp_saving import async_save, save
from holdfast.dcp.dcp_storage import FileSystemReader, FileSystemWriter
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
