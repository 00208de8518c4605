"""Parts of training scripts other than layers and optimizers: saved by two ranks, loaded by others, bit for bit."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, MultiStepLR, SequentialLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import holdfast
from holdfast.format.dtypes import DTYPES
from holdfast.frameworks.torch_dtypes import DTYPE_NAMES
from tests.support.models import Bits, bits, full, start_new_job, write
from tests.support.ranks import run_ranks

State = dict[str, Any]

# --- dtypes, sizes and strides ---------------------------------------------------------------------------------------

#: Every dtype that torch and the format have, and the sizes and strides at which code goes wrong.
DTYPES_HERE = sorted(DTYPE_NAMES.values())
SHAPES: dict[str, tuple[int, ...]] = {"scalar": (), "one": (1,), "empty": (0, 3), "odd": (5, 3), "deep": (2, 1, 7)}


def blank(dtype: str, shape: tuple[int, ...], stride: str) -> torch.Tensor:
    """A tensor of that dtype whose elements are in order, in reverse order of axes, or apart."""
    extents = {"rows": shape, "columns": shape[::-1], "apart": tuple(2 * extent for extent in shape)}[stride]
    whole = torch.empty(extents, dtype=getattr(torch, dtype))
    if stride == "columns":
        return whole.permute(list(range(len(shape)))[::-1])
    return whole[tuple(slice(None, None, 2) for _ in shape)] if stride == "apart" else whole


def zoo(strides: tuple[str, str], axis: int) -> dict[str, torch.Tensor]:
    """A plain tensor of each dtype and shape, and one sharded along an axis (none without ranks), by name."""
    tensors: dict[str, torch.Tensor] = {}
    for dtype in DTYPES_HERE:
        for kind, shape in SHAPES.items():
            tensors[f"{dtype}-{kind}"] = blank(dtype, shape, strides[0])
        shape = (5, 3)
        tensors[f"{dtype}-sharded"] = (
            sharded(dtype, shape, strides[1], axis) if dist.is_initialized() else blank(dtype, shape, strides[1])
        )
    return tensors


def sharded(dtype: str, shape: tuple[int, ...], stride: str, axis: int) -> DTensor:
    size = -(-shape[axis] // dist.get_world_size())
    start = min(size * dist.get_rank(), shape[axis])
    local = list(shape)
    local[axis] = min(size, shape[axis] - start)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placements: list[Placement] = [Shard(axis)]
    return DTensor.from_local(
        blank(dtype, tuple(local), stride), mesh, placements, run_check=False, shape=torch.Size(shape), stride=(3, 1)
    )


def content(seed: int, name: str, tensor: torch.Tensor) -> Bits:
    """Random bytes for a whole tensor; booleans are 0 or 1."""
    return full(seed, name, tensor) & np.uint8(1 if tensor.dtype is torch.bool else 255)


def truth(name: str, tensor: torch.Tensor) -> Bits:
    """The part of a tensor's content that this rank holds."""
    whole = content(5, name, tensor)
    if not isinstance(tensor, DTensor):
        return whole
    axis = cast("Shard", tensor.placements[0]).dim
    size = -(-tensor.shape[axis] // dist.get_world_size())
    start = size * dist.get_rank()
    return whole[start : start + size] if axis == 0 else whole[:, start : start + size]


def save_zoo(run: str, strides: tuple[str, str], axis: int) -> None:
    start_new_job()
    tensors = zoo(strides, axis)
    for name, tensor in tensors.items():
        write_any(tensor, truth(name, tensor))
    holdfast.save(run, {"zoo": tensors}, 1, timeout_s=40)


def load_zoo(run: str, strides: tuple[str, str], axis: int) -> list[str]:
    """Names of what is not, bit for bit, what was saved."""
    tensors = zoo(strides, axis)
    for tensor in tensors.values():
        write_any(tensor, np.zeros((*local_of(tensor).shape, tensor.element_size()), np.uint8))
    holdfast.load(run, into={"zoo": tensors}, timeout_s=40)
    return [name for name, tensor in tensors.items() if read_any(tensor) != truth(name, tensor).tobytes()]


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The local elements as integers or, of 16 bytes, complex numbers: torch copies few dtypes that are strided."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
    carriers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
    return local.view(carriers[local.element_size()])


def write_any(tensor: torch.Tensor, data: Bits) -> None:
    write(local_of(tensor), data)


def read_any(tensor: torch.Tensor) -> bytes:
    return local_of(tensor).numpy().tobytes()


def test_every_dtype_of_this_torch_is_tried() -> None:
    assert {"float4_e2m1fn_x2", "float8_e8m0fnu", "complex32", "uint64"} <= set(DTYPES_HERE) <= set(DTYPES)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_all_dtypes_sizes_and_strides_move_between_worlds(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    run_ranks(2, save_zoo, run, ("columns", "apart"), 0)
    assert run_ranks(3, load_zoo, run, ("apart", "columns"), 1) == [[], [], []]
    assert load_zoo(run, ("rows", "columns"), 0) == []
    view = holdfast.open(run)
    for name, tensor in zoo(("rows", "rows"), 0).items():
        found = view[f"zoo/{name}"][...]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), name
        assert read_any(found) == truth(name, tensor).tobytes(), name


# --- modules ---------------------------------------------------------------------------------------------------------


class Oddities(nn.Module):
    """Parameters and buffers of every kind that a module may have, and attributes named as wrappers name theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(3, 4)
        self._orig_mod = nn.Linear(4, 3)
        self.tied = nn.Linear(3, 4)
        self.tied.weight = self.module.weight
        self.temperature = nn.Parameter(torch.ones(1).squeeze(0))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.frozen = nn.Parameter(torch.ones(3, 3).t(), requires_grad=False)
        self.register_buffer("mask", torch.zeros(5, dtype=torch.bool))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("phases", torch.zeros(2, 3, dtype=torch.complex64))
        self.register_buffer("scales", torch.zeros(4, dtype=torch.float16))
        self.register_buffer("absent", None)
        self.register_buffer("cache", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self._orig_mod(self.module(x) + self.tied(x)) @ self.frozen * self.temperature)


STORED = [
    *("_orig_mod.bias", "_orig_mod.weight", "calls", "frozen", "mask", "module.bias", "module.weight", "nothing"),
    *("phases", "scales", "temperature", "tied.bias"),
]


def oddities(kind: str, seed: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The module, in wrappers unless it is to be plain, and its tensors by name, with content of a seed."""
    inner = Oddities()
    named = dict(inner.named_parameters()) | dict(inner.named_buffers())
    for name, tensor in named.items():
        write_any(tensor, content(seed, name, tensor))
    model: nn.Module = inner
    if kind != "plain":
        inner.module = cast("nn.Linear", checkpoint_wrapper(inner.module))
        model = checkpoint_wrapper(inner)
    if kind == "ddp":
        model = DistributedDataParallel(model)
    if kind == "compiled":
        inner._orig_mod = cast("nn.Linear", torch.compile(inner._orig_mod))
        model = cast("nn.Module", torch.compile(model))
    return model, named


def contents(named: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: read_any(tensor) for name, tensor in named.items()}


def save_oddities(kind: str, run: str) -> dict[str, bytes]:
    start_new_job()
    model, named = oddities(kind, 1)
    holdfast.save(run, {"model": model}, 1, timeout_s=40)
    return contents(named)


def load_oddities(kind: str, run: str) -> tuple[dict[str, bytes], bool]:
    """The content of the module after loading, and whether its tied weight is still one tensor."""
    model, named = oddities(kind, 2)
    holdfast.load(run, into={"model": model}, timeout_s=40)
    inner = next(module for module in model.modules() if isinstance(module, Oddities))
    return contents(named), inner.tied.weight is named["module.weight"] and not inner.frozen.requires_grad


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # an import of torch.compile uses it
def test_odd_modules_keep_everything_in_any_wrapper(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    saved = run_ranks(2, save_oddities, "ddp", run)[0]
    _, blank_tensors = oddities("plain", 2)
    expected = saved | {"cache": contents(blank_tensors)["cache"]}
    assert saved["cache"] != expected["cache"]
    assert run_ranks(3, load_oddities, "checkpointed", run) == [(expected, True)] * 3
    for kind in ("plain", "compiled"):
        assert load_oddities(kind, run) == (expected, True)
    assert save_oddities("compiled", str(tmp_path / "compiled")) == saved
    assert holdfast.open(tmp_path / "compiled").names() == holdfast.open(run).names()
    view = holdfast.open(run)
    assert view.names() == [f"model/{name}" for name in STORED]
    assert view.aliases == {"model/tied.weight": "model/module.weight"}


class Tied(nn.Module):
    """An embedding that is the head as well, frozen layers, and blocks that are checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.blocks = nn.Sequential(*(checkpoint_wrapper(nn.Linear(5, 5)) for _ in range(2)))
        self.module = nn.Linear(5, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.module.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.head(self.module(self.blocks(self.embed(tokens)))))


def tied_job() -> tuple[Tied, AdamW]:
    model = Tied()
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, AdamW(model.parameters(), lr=0.25)


def gathered(model: nn.Module, optimizer: AdamW) -> dict[str, bytes]:
    found = {}
    for name, parameter in model.named_parameters():
        for slot, tensor in {"": parameter.detach(), **optimizer.state.get(parameter, {})}.items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            found[f"{name}/{slot}"] = bits(whole).tobytes()
    return found


def train_tied(run: str) -> dict[str, bytes]:
    start_new_job()
    torch.manual_seed(3)
    model, optimizer = tied_job()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter) * 0.5
    optimizer.step()
    holdfast.save(run, {"model": model, "optimizer": optimizer}, 1, timeout_s=40)
    return gathered(model, optimizer)


def load_tied(run: str) -> dict[str, bytes]:
    model, optimizer = tied_job()
    holdfast.load(run, into={"model": model, "optimizer": optimizer}, timeout_s=40)
    assert model.head.weight is model.embed.weight
    assert not any(parameter.requires_grad for parameter in model.module.parameters())
    return gathered(model, optimizer)


def test_tied_frozen_and_checkpointed_layers_are_resharded(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    saved = run_ranks(2, train_tied, run)[0]
    assert [name for name in saved if name.startswith("module.")] == ["module.weight/", "module.bias/"]
    assert run_ranks(3, load_tied, run) == [saved] * 3
    assert load_tied(run) == saved
    names = holdfast.open(run).names()
    assert "model/module.weight" in names
    assert "model/blocks.0.weight" in names
    assert "optimizer/state/model/embed.weight/exp_avg" in names
    assert not any("head" in name for name in names)


# --- whole scripts ---------------------------------------------------------------------------------------------------


class Script(NamedTuple):
    """Two networks of one class with an optimizer each, averages of both kinds, and a loose parameter."""

    players: dict[str, nn.Module]
    optimizers: dict[str, torch.optim.Optimizer]
    average: AveragedModel
    copies: dict[str, torch.Tensor]
    temperature: nn.Parameter
    scaler: torch.amp.GradScaler
    schedulers: list[LRScheduler]

    @property
    def state(self) -> State:
        """The state that the job saves and loads."""
        return {**self._asdict(), "players": dict(self.players)}


def script(seed: int) -> Script:
    """A script, on a mesh when there are ranks; `seed` decides the values."""
    torch.manual_seed(seed)
    players: dict[str, nn.Module] = {}
    for name in ("generator", "critic"):
        players[name] = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 3))
        if dist.is_initialized():
            fully_shard(players[name], mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    temperature = nn.Parameter(torch.tensor(float(seed)))
    optimizers: dict[str, torch.optim.Optimizer] = {
        "generator": AdamW([*players["generator"].parameters(), temperature], lr=0.5, foreach=False),
        "critic": SGD(players["critic"].parameters(), lr=0.25, momentum=0.5),
    }
    plain = nn.Linear(3, 2)
    return Script(
        players=players,
        optimizers=optimizers,
        average=AveragedModel(plain, multi_avg_fn=cast("Any", get_ema_multi_avg_fn)(0.75)),
        copies={name: item.detach().clone() for name, item in players["generator"].named_parameters()},
        temperature=temperature,
        scaler=torch.amp.GradScaler("cpu", init_scale=1024.0 * seed, growth_interval=2),
        schedulers=[
            MultiStepLR(optimizers["generator"], [1, 1, 4], gamma=0.5),
            SequentialLR(
                optimizers["critic"],
                [MultiStepLR(optimizers["critic"], [2]), CosineAnnealingLR(optimizers["critic"], T_max=9)],
                [5],
            ),
        ],
    )


def play(script: Script, count: int) -> None:
    """Steps that depend on nothing but what the script holds."""
    for _ in range(count):
        for optimizer in script.optimizers.values():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = parameter.detach().cos()
            optimizer.step()
        for scheduler in script.schedulers:
            scheduler.step()
        script.average.update_parameters(nn.Linear(3, 2))
        with torch.no_grad():
            for name, parameter in script.players["generator"].named_parameters():
                script.copies[name].lerp_(parameter, 0.25)
        loss = torch.ones((), requires_grad=True)
        script.scaler.scale(loss * 2)
        script.scaler.update(script.scaler.get_scale() * 2)


def held(script: Script) -> dict[str, object]:
    """Everything that a script holds, gathered by torch; optimizer slots by parameter."""
    found: dict[str, object] = {"temperature": script.temperature.item(), "scaler": script.scaler.state_dict()}
    names = {id(script.temperature): "temperature"}
    for player, model in script.players.items():
        for name, parameter in model.named_parameters():
            names[id(parameter)] = f"{player}/{name}"
            found[f"{player}/{name}"] = whole_bits(parameter)
    for player, optimizer in script.optimizers.items():
        for owner, slots in optimizer.state.items():
            found |= {f"{player}/{names[id(owner)]}/{slot}": whole_bits(item) for slot, item in slots.items()}
        found[f"{player}/groups"] = [
            {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
        ]
    for name, tensor in (*script.average.state_dict().items(), *script.copies.items()):
        found[f"average/{name}"] = whole_bits(tensor)
    found["schedulers"] = [scheduler.state_dict() for scheduler in script.schedulers]
    return found


def whole_bits(tensor: torch.Tensor) -> bytes:
    return bits((tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()).tobytes()


def save_script(run: str) -> tuple[dict[str, object], dict[str, object]]:
    """The state of the script when it is saved, and one step later."""
    start_new_job()
    job = script(1)
    play(job, 3)
    holdfast.save(run, job.state, 3, timeout_s=40)
    saved = held(job)
    torch.manual_seed(9)
    play(job, 2)
    return saved, held(job)


def load_script(run: str) -> tuple[dict[str, object], dict[str, object]]:
    job = script(2)
    holdfast.load(run, into=job.state, timeout_s=40)
    loaded = held(job)
    milestones = cast("MultiStepLR", job.schedulers[0]).milestones
    assert type(milestones) is Counter
    assert milestones == Counter([1, 1, 4])
    torch.manual_seed(9)
    play(job, 2)
    return loaded, held(job)


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")  # SequentialLR calls it so itself
def test_a_script_of_two_players_averages_scaler_and_schedulers_goes_on_alike(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    saved = run_ranks(2, save_script, run)
    assert saved[0] == saved[1]
    assert run_ranks(3, load_script, run) == [saved[0]] * 3
    assert load_script(run) == saved[0]
    names = holdfast.open(run).names()
    assert {"players/generator/0.weight", "players/critic/0.weight", "average/module.weight"} <= set(names)
    assert "optimizers/generator/state/temperature/exp_avg" in names
