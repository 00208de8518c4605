"""The types and the stager that `async_save` takes from DCP, where this version of torch has them."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import torch
from torch.distributed.checkpoint import staging, state_dict_saver
from torch.distributed.checkpoint.staging import AsyncStager, BlockingAsyncStager

from holdfast.dcp.dcp_arguments import cannot_honour

__all__ = ["AsyncCheckpointerType", "AsyncSaveResponse", "check_stagers", "new_stager"]


class _ThreadOrProcess(Enum):
    """Stands for ``AsyncCheckpointerType`` in older versions, which lack it."""

    THREAD = "thread"
    PROCESS = "process"


@dataclass
class _CopyAndSave:
    """Stands for ``AsyncSaveResponse`` in older versions, which lack it."""

    staging_completion: Future[None]
    upload_completion: Future[None]


if TYPE_CHECKING:
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
else:
    AsyncCheckpointerType = getattr(state_dict_saver, "AsyncCheckpointerType", _ThreadOrProcess)
    AsyncSaveResponse = getattr(state_dict_saver, "AsyncSaveResponse", _CopyAndSave)


def check_stagers() -> None:
    """Raise `ConfigurationError` where the stagers of torch do not copy tensors of host memory, as in torch 2.6: the
    save would have what training writes meanwhile."""
    if not hasattr(staging, "DefaultStager"):
        raise cannot_honour(
            "async_save",
            f"the stagers of torch {torch.__version__} do not copy the state",
            "Call holdfast.dcp.save, use holdfast.Checkpointer, or install a newer torch (tested: 2.13).",
        )


def new_stager(*, with_sharded: bool) -> AsyncStager:
    """The stager that DCP makes; but that one cannot copy a ``ShardedTensor``, which an older one can."""
    return BlockingAsyncStager() if with_sharded else staging.DefaultStager(staging.StagingOptions(*[False] * 4))
