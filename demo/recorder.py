"""The demo's own observations: losses and digests of the whole state, taken without holdfast.

Each training has a folder of these files; its ranks write them, the launcher reads them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from demo.records import LOSSES, SAVES, Loss, Restored, Save, Started, State, restored_file, started_file, state_file


class Recorder:
    """Writes down what one rank of a training sees."""

    def __init__(self, folder: Path, *, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self._write(started_file(rank), Started(pid=os.getpid()))

    def loss(self, step: int, value: float) -> None:
        """Note the loss of the whole batch, which all ranks know; one of them writes."""
        self._append(LOSSES, Loss(step=step, value=value))

    def saved(self, step: int, blocked_s: float) -> None:
        """Note for how long the save of `step` held the training up; one rank writes, since all wait for each other."""
        self._append(SAVES, Save(step=step, blocked_s=blocked_s))

    def restored(self, restored: Restored) -> None:
        """Note what this rank restored."""
        self._write(restored_file(self._rank), restored)

    def state(self, moment: str, step: int, model: nn.Module, optimizer: Optimizer, schedule: LRScheduler) -> None:
        """Note digests of the state at `moment` ("saved" or "loaded") of `step`. Collective."""
        state = State(tensor_digests(model, optimizer), value_digests(optimizer, schedule))
        self._write(state_file(moment, step, self._rank), state)

    def _append(self, name: str, record: object) -> None:
        if self._rank == 0:
            with (self._folder / name).open("ab") as file:
                file.write(msgspec.json.encode(record) + b"\n")

    def _write(self, name: str, record: object) -> None:
        # Under its name a file is complete: the launcher reads while ranks write.
        temporary = self._folder / f"{name}.part"
        temporary.write_bytes(msgspec.json.encode(record))
        temporary.rename(self._folder / name)


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
    values: dict[str, object] = {f"optimizer/group {number}": group for number, group in enumerate(groups)}
    values["schedule"] = schedule.state_dict()
    return {name: hashlib.sha256(json.dumps(v, sort_keys=True).encode()).hexdigest() for name, v in values.items()}


def _digest(tensor: Tensor) -> str:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    memory = whole.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    about = f"{whole.dtype} {tuple(whole.shape)}"
    return hashlib.sha256(about.encode() + memory.tobytes()).hexdigest()
