"""Finding the state: the cost of a save's walk of live objects, beside that of usual ways to get the same tensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bench.runner import TORCH_THREADS
from bench.schema import Part, Sample, Scenario, StateSize, measured
from bench.statistics import rotated
from holdfast.state.collect import WalkCache
from holdfast.state.flatten import FlatState, flatten

#: Each with a weight and a bias, to which AdamW adds three slots each.
LINEARS_PER_LAYER = 5
TENSORS_PER_LAYER = LINEARS_PER_LAYER * 2 * 4
FIRST, LATER, STATE_DICTS, GET_STATE_DICT = "holdfast-first", "holdfast-later", "state_dict", "get_state_dict"


ModelKind = Literal["plain", "fsdp2"]
MODEL_KINDS: tuple[ModelKind, ...] = ("plain", "fsdp2")


def measure_walks(layers: int, rounds: int, folder: Path, advance: Callable[[str], None]) -> list[Part]:
    """Time the walks of every kind of model of so many layers with AdamW, each kind in a process of its own."""
    parts: list[Part] = []
    size = StateSize(num_tensors=layers * TENSORS_PER_LAYER)
    for kind in MODEL_KINDS:
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            samples = pool.submit(measure, kind, layers, rounds).result()
        scenario = Scenario(name=kind, rounds=rounds, state=size)
        parts.append(measured(scenario, samples, folder))
        advance(f"walks of a {kind} model")
    return parts


def measure(kind: ModelKind, layers: int, rounds: int) -> tuple[Sample, ...]:
    """The samples of one kind of model, in this process, as the only rank of a job.

    The contenders are interleaved, after one call each that is not counted.
    """
    torch.set_num_threads(TORCH_THREADS)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model, optimizer = _trained(kind, layers)
    walker = _Walker(model, optimizer)
    found, expected = len(walker.first().tensors), layers * TENSORS_PER_LAYER
    assert found == expected, f"{found} tensors instead of {expected}"
    contenders: dict[str, Callable[[], object]] = {
        FIRST: walker.first,
        LATER: walker.later,
        STATE_DICTS: lambda: (model.state_dict(), optimizer.state_dict()),
        GET_STATE_DICT: lambda: get_state_dict(model, optimizer),
    }
    for call in contenders.values():
        call()
    samples = [
        Sample(name, number + 1, {"seconds": (_seconds(contenders[name]),)}, turn=turn)
        for number in range(rounds)
        for turn, name in enumerate(rotated(tuple(contenders), number))
    ]
    dist.destroy_process_group()
    return tuple(samples)


class _Walker:
    """The walks of the saves of one training state."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._state = {"model": model, "optimizer": optimizer, "progress": {"step": 1}}
        self._remembered: Sequence[WalkCache] = ()

    def first(self) -> FlatState:
        """Walk as the first save of a run does."""
        return flatten(self._state)

    def later(self) -> FlatState:
        """Walk as every save after it does (the first call remembers nothing yet)."""
        flat = flatten(self._state, last=self._remembered)
        self._remembered = flat.remembered
        return flat


def _trained(kind: ModelKind, layers: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its AdamW after one step."""
    model = nn.Sequential(*(nn.Sequential(*(nn.Linear(4, 4) for _ in range(LINEARS_PER_LAYER))) for _ in range(layers)))
    if kind == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return model, optimizer


def _seconds(call: Callable[[], object]) -> float:
    """Seconds of `call`."""
    start_s = time.perf_counter()
    found = call()
    seconds = time.perf_counter() - start_s
    del found  # freed only now, when the clock has stopped
    return seconds
