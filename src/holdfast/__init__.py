"""Holdfast keeps the state of large-model training safe and moves it wherever it is needed next.

    >>> import holdfast
    >>> holdfast.save("runs/gpt", {"model": model, "optimizer": optimizer}, step)
    >>> report = holdfast.load("runs/gpt", into={"model": model, "optimizer": optimizer})
    >>> for step in range(report.next_step, num_steps): ...
    >>> holdfast.open("runs/gpt")["model/tok_emb.weight"][10:20]

Names are imported on first use, so that tools that do not use torch start without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from holdfast.errors import (
    ConfigurationError,
    CorruptError,
    DeadlineError,
    FencedError,
    HoldfastError,
    IncompatibleError,
    NotFoundError,
    StateError,
    StorageError,
)

if TYPE_CHECKING:
    from holdfast import data, dcp, mapping
    from holdfast.checkpointer import Checkpointer
    from holdfast.checkpointer.export_hub import ExportHub
    from holdfast.checkpointer.handle import Handle
    from holdfast.checkpointer.memory_option import Memory
    from holdfast.checkpointer.restore_report import RejectedSource, RestoreReport
    from holdfast.copying import copy_run
    from holdfast.exporting import export
    from holdfast.frameworks.piecewise import Piecewise
    from holdfast.frameworks.registry import register_adapter
    from holdfast.frameworks.still import Still
    from holdfast.geometry import Box, FlatRange
    from holdfast.importing import import_checkpoint
    from holdfast.loading import load
    from holdfast.loading.load_plan import LoadPlan, plan_load
    from holdfast.plan.exchange import Bandwidths
    from holdfast.policy.keep import KeepBest, KeepEvery, KeepFor, KeepLast, KeepPolicy
    from holdfast.policy.stop import StopAfter
    from holdfast.policy.when import Auto, EverySteps, EveryTime, OnMetric, OnPreemption, OnRequest, SavePolicy
    from holdfast.protection.policies import Copies, Parity
    from holdfast.publishing import transfer
    from holdfast.reports import (
        CopyReport,
        ExportReport,
        ImportReport,
        LoadReport,
        ReadSource,
        SaveReport,
        TransferReport,
    )
    from holdfast.run.compaction import compact
    from holdfast.run.listing import ListedCheckpoint
    from holdfast.run.manage import ls, pin, remove, unpin
    from holdfast.run.save_requests import request_save
    from holdfast.saving import save
    from holdfast.state.per_rank import PerRank
    from holdfast.state.random_state import RandomState
    from holdfast.state.registered_types import register_tensor, register_value
    from holdfast.store.base import Location
    from holdfast.view import LazyTensor, View, open

_HOMES = {
    "Checkpointer": "holdfast.checkpointer",
    "ExportHub": "holdfast.checkpointer.export_hub",
    "Memory": "holdfast.checkpointer.memory_option",
    "Copies": "holdfast.protection.policies",
    "Parity": "holdfast.protection.policies",
    "Handle": "holdfast.checkpointer.handle",
    "RejectedSource": "holdfast.checkpointer.restore_report",
    "RestoreReport": "holdfast.checkpointer.restore_report",
    "save": "holdfast.saving",
    "load": "holdfast.loading",
    "copy_run": "holdfast.copying",
    "export": "holdfast.exporting",
    "import_checkpoint": "holdfast.importing",
    "plan_load": "holdfast.loading.load_plan",
    "LoadPlan": "holdfast.loading.load_plan",
    "open": "holdfast.view",
    "View": "holdfast.view",
    "LazyTensor": "holdfast.view",
    "SaveReport": "holdfast.reports",
    "CopyReport": "holdfast.reports",
    "ExportReport": "holdfast.reports",
    "ImportReport": "holdfast.reports",
    "LoadReport": "holdfast.reports",
    "ReadSource": "holdfast.reports",
    "TransferReport": "holdfast.reports",
    "PerRank": "holdfast.state.per_rank",
    "Piecewise": "holdfast.frameworks.piecewise",
    "RandomState": "holdfast.state.random_state",
    "Still": "holdfast.frameworks.still",
    "FlatRange": "holdfast.geometry",
    "Box": "holdfast.geometry",
    "Bandwidths": "holdfast.plan.exchange",
    "KeepBest": "holdfast.policy.keep",
    "KeepEvery": "holdfast.policy.keep",
    "KeepFor": "holdfast.policy.keep",
    "KeepLast": "holdfast.policy.keep",
    "KeepPolicy": "holdfast.policy.keep",
    "Location": "holdfast.store.base",
    "register_adapter": "holdfast.frameworks.registry",
    "register_tensor": "holdfast.state.registered_types",
    "register_value": "holdfast.state.registered_types",
    "transfer": "holdfast.publishing",
    "SavePolicy": "holdfast.policy.when",
    "StopAfter": "holdfast.policy.stop",
    "EverySteps": "holdfast.policy.when",
    "Auto": "holdfast.policy.when",
    "EveryTime": "holdfast.policy.when",
    "OnMetric": "holdfast.policy.when",
    "OnPreemption": "holdfast.policy.when",
    "OnRequest": "holdfast.policy.when",
    "request_save": "holdfast.run.save_requests",
    "ls": "holdfast.run.manage",
    "pin": "holdfast.run.manage",
    "unpin": "holdfast.run.manage",
    "remove": "holdfast.run.manage",
    "compact": "holdfast.run.compaction",
    "ListedCheckpoint": "holdfast.run.listing",
}

__all__ = [
    "Auto",
    "Bandwidths",
    "Box",
    "Checkpointer",
    "ConfigurationError",
    "Copies",
    "CopyReport",
    "CorruptError",
    "DeadlineError",
    "EverySteps",
    "EveryTime",
    "ExportHub",
    "ExportReport",
    "FencedError",
    "FlatRange",
    "Handle",
    "HoldfastError",
    "ImportReport",
    "IncompatibleError",
    "KeepBest",
    "KeepEvery",
    "KeepFor",
    "KeepLast",
    "KeepPolicy",
    "LazyTensor",
    "ListedCheckpoint",
    "LoadPlan",
    "LoadReport",
    "Location",
    "Memory",
    "NotFoundError",
    "OnMetric",
    "OnPreemption",
    "OnRequest",
    "Parity",
    "PerRank",
    "Piecewise",
    "RandomState",
    "ReadSource",
    "RejectedSource",
    "RestoreReport",
    "SavePolicy",
    "SaveReport",
    "StateError",
    "Still",
    "StopAfter",
    "StorageError",
    "TransferReport",
    "View",
    "compact",
    "copy_run",
    "data",
    "dcp",
    "export",
    "import_checkpoint",
    "load",
    "ls",
    "mapping",
    "open",
    "pin",
    "plan_load",
    "register_adapter",
    "register_tensor",
    "register_value",
    "remove",
    "request_save",
    "save",
    "transfer",
    "unpin",
]


def __getattr__(name: str) -> object:
    if name == "__version__":
        # Imported here because it takes 20 ms, and few programs need it.
        from importlib.metadata import version

        return version("holdfast")
    if name in ("data", "dcp", "mapping"):
        return importlib.import_module(f"holdfast.{name}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
