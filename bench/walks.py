"""Finding the state: the cost of a save's walk of live objects, beside that of usual ways to get the same tensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bench.rank import TORCH_THREADS
from bench.results import MODEL_KINDS, ModelKind, WalkFigure
from bench.statistics import rotated, spread
from holdfast.state.collect import WalkCache
from holdfast.state.flatten import FlatState, flatten

#: Each with a weight and a bias, to which AdamW adds three slots each.
LINEARS_PER_LAYER = 5
TENSORS_PER_LAYER = LINEARS_PER_LAYER * 2 * 4
FIRST, LATER, STATE_DICTS, GET_STATE_DICT = "holdfast-first", "holdfast-later", "state_dict", "get_state_dict"


class WalkOrder(msgspec.Struct, frozen=True):
    """Which walks to time: `rounds` of each contender, on a model of `layers` with AdamW."""

    layers: int
    rounds: int

    @property
    def num_tensors(self) -> int:
        """Tensors of model and optimizer."""
        return self.layers * TENSORS_PER_LAYER


def run_walks(order: WalkOrder, *, on_kind: Callable[[ModelKind], None]) -> tuple[WalkFigure, ...]:
    """Time the walks of every kind of model, each in a process of its own. `on_kind` sees each kind as it ends."""
    figures: list[WalkFigure] = []
    for kind in MODEL_KINDS:
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            figures += pool.submit(measure, kind, order).result()
        on_kind(kind)
    return tuple(figures)


def measure(kind: ModelKind, order: WalkOrder) -> list[WalkFigure]:
    """The figures of one kind of model, in this process, as the only rank of a job.

    The contenders are interleaved, after one call each that is not counted.
    """
    torch.set_num_threads(TORCH_THREADS)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model, optimizer = _trained(kind, order.layers)
    walker = _Walker(model, optimizer)
    found = len(walker.first().tensors)
    assert found == order.num_tensors, f"{found} tensors instead of {order.num_tensors}"
    contenders: dict[str, Callable[[], object]] = {
        FIRST: walker.first,
        LATER: walker.later,
        STATE_DICTS: lambda: (model.state_dict(), optimizer.state_dict()),
        GET_STATE_DICT: lambda: get_state_dict(model, optimizer),
    }
    for call in contenders.values():
        call()
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(order.rounds):
        for name in rotated(tuple(contenders), number):
            samples[name].append(_seconds(contenders[name]))
    dist.destroy_process_group()
    return [WalkFigure(kind, name, spread(series), tuple(series)) for name, series in samples.items()]


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
