"""The demo's own observations of a training, taken without holdfast: one line of JSON each, in a file of each rank."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


class Witness:
    """Notes what one rank sees, first of all that it has begun."""

    def __init__(self, folder: Path, *, rank: int) -> None:
        self._file = _file(folder, rank)
        self.note("started", pid=os.getpid())

    def note(self, kind: str, **seen: object) -> None:
        """Note what was seen."""
        with self._file.open("a") as file:
            file.write(json.dumps({"kind": kind} | seen) + "\n")

    def state(self, moment: str, step: int, model: nn.Module, optimizer: Optimizer, schedule: LRScheduler) -> None:
        """Note digests of the state at `moment` ("saved" or "loaded") of `step`. Collective."""
        self.note(moment, step=step, digests=tensor_digests(model, optimizer) | value_digests(optimizer, schedule))


def notes(folder: Path, kind: str, *, rank: int = 0, **seen: object) -> list[dict[str, Any]]:
    """The notes of this kind, and with these values, that a rank of the training in `folder` has made so far."""
    file = _file(folder, rank)
    text = file.read_text() if file.exists() else ""
    # The rank is still writing the line that follows the last newline.
    every = map(json.loads, text[: text.rfind("\n") + 1].splitlines())
    return [note for note in every if {"kind": kind, **seen}.items() <= note.items()]


def tensor_digests(model: nn.Module, optimizer: Optimizer) -> dict[str, str]:
    """SHA-256 of every tensor of model and optimizer, gathered in full, by name. Collective."""
    tensors: dict[str, Tensor] = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        slots: Mapping[str, Tensor] = optimizer.state.get(parameter, {})
        tensors |= {f"optimizer/{name}/{slot}": tensor for slot, tensor in slots.items()}
    return {name: _digest(tensor) for name, tensor in tensors.items()}


def value_digests(optimizer: Optimizer, schedule: LRScheduler) -> dict[str, str]:
    """SHA-256 of the hyper-parameters of each group of the optimizer and of the schedule, by name."""
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    values: dict[str, object] = {f"values of optimizer group {number}": group for number, group in enumerate(groups)}
    values["values of schedule"] = schedule.state_dict()
    return {name: hashlib.sha256(json.dumps(v, sort_keys=True).encode()).hexdigest() for name, v in values.items()}


def _digest(tensor: Tensor) -> str:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    memory = whole.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    about = f"{whole.dtype} {tuple(whole.shape)}"
    return hashlib.sha256(about.encode() + memory.tobytes()).hexdigest()


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.jsonl"
