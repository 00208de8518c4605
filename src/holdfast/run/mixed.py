"""Refuses a run into whose folder PyTorch's DCP saved, too."""

from __future__ import annotations

from typing import Final

from holdfast.errors import ConfigurationError
from holdfast.store.base import Store

#: The file by which a folder is a checkpoint of DCP.
_METADATA: Final = ".metadata"


def check_unmixed(storage: Store) -> None:
    """Raise `ConfigurationError`, code ``config.dcp_mixed``, for a run whose folder has a checkpoint that
    ``torch.distributed.checkpoint.save`` wrote into it: nothing says which one is newer. One request."""
    if storage.nbytes(_METADATA) is not None:
        raise ConfigurationError(
            f"'{storage.location}' has a checkpoint of holdfast, and another one "
            f"that torch.distributed.checkpoint.save wrote ({_METADATA} and *.distcp).",
            code="config.dcp_mixed",
            action=f"To load that of torch, move {_METADATA} and the *.distcp files into a folder of their own. "
            "To load that of holdfast, delete these files. Save with one of the two libraries only.",
            path=storage.location.url,
        )
