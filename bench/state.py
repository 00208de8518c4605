"""The states that contenders save and load: a Llama-like model with two Adam moments, or many small tensors.

The content of a tensor follows from its path alone, so any layout of a state can be compared with any other.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple, Protocol, TypeAlias, Union, cast

import torch
import xxhash
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from bench.schema import BenchError, StateSize

Tree: TypeAlias = dict[str, Union["Tree", torch.Tensor, int, float]]
#: Shards of rows (FSDP) or of columns; FSDP over tensor parallelism; or plain tensors that every rank holds (DDP).
Layout = Literal["rows", "columns", "fsdp-tp", "replicas"]

NUM_LAYERS = 8
VOCABULARY = 8192
WIDTH_STEP = 64
MOMENTS = ("exp_avg", "exp_avg_sq")
#: The shape of the rows of a small tensor that each rank holds.
SMALL_LOCAL_SHAPE = (2, 16)
#: Tensor-parallel ranks under "fsdp-tp", and the weights of which they hold columns rather than rows.
TP = 2
_BY_COLUMNS = ("attention.wo", "mlp.down")
#: The tensors that a step changes: so few that its time hardly counts, and enough that a torn copy is seen.
STEPPED = ("norm", "layers.0.attention_norm", "layers.0.attention.wq")
#: The part of a tree that has no tensors.
VALUES = "progress"


class State:
    """One rank's part of a state. ``tree`` is what a training loop would hand to a checkpoint library."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree

    def leaves(self) -> dict[str, torch.Tensor]:
        """Each tensor by its path: a DTensor, or a plain one that every rank holds whole."""
        return dict(_leaves(self.tree))

    def tensors(self) -> dict[str, torch.Tensor]:
        """The local memory of each tensor by its path."""
        return {path: local(leaf) for path, leaf in self.leaves().items()}

    @property
    def values(self) -> dict[str, int | float]:
        """The plain values of the state, which a loop can change."""
        return cast("dict[str, int | float]", self.tree.get(VALUES, {}))

    def is_sharded(self) -> bool:
        return any(isinstance(leaf, DTensor) for leaf in self.leaves().values())

    def share(self, rank: int, world: int) -> list[memoryview]:
        """The bytes of the state that are this rank's: of a tensor that every rank holds whole, an even part."""
        parts = []
        for leaf in self.leaves().values():
            data = as_bytes(local(leaf))
            even = slice(len(data) * rank // world, len(data) * (rank + 1) // world)
            parts.append(data if isinstance(leaf, DTensor) else data[even])
        return parts

    def size(self) -> StateSize:
        """Size over all ranks; replicated tensors count once."""
        leaves = self.leaves().values()
        return StateSize(sum(leaf.numel() * leaf.element_size() for leaf in leaves), len(leaves))

    def clear(self) -> None:
        """Zero every tensor and value, so that a load that does nothing is seen."""
        for tensor in self.tensors().values():
            tensor.zero_()
        self.values.update({name: type(value)(0) for name, value in self.values.items()})

    def digests(self) -> dict[str, str]:
        """The digest of each local tensor and the text of each value."""
        tensors = {path: digest(as_bytes(tensor)) for path, tensor in self.tensors().items()}
        return tensors | {name: repr(value) for name, value in self.values.items()}


class LlamaLike(NamedTuple):
    """A recipe for a Llama-like training state of at least `min_nbytes` over all ranks, in `layout`."""

    min_nbytes: int
    layout: Layout = "rows"
    num_layers: int = NUM_LAYERS

    def build(self, world: int) -> State:
        mesh = init_device_mesh("cpu", (world // TP, TP) if self.layout == "fsdp-tp" else (world,))
        shapes = parameter_shapes(width_for(self.min_nbytes, self.num_layers), self.num_layers)

        def placed(slot: str) -> Tree:
            wholes = ((name, content(f"{slot}/{name}", shape)) for name, shape in shapes.items())
            return {name: place(whole, name, self.layout, mesh) for name, whole in wholes}

        optimizer: Tree = {moment: placed(moment) for moment in MOMENTS}
        optimizer["step"] = {name: torch.tensor(1000.0) for name in shapes}
        values: Tree = {"step": 1000, "tokens": 4_194_304_000, "lr": 3e-4}
        return State({"model": placed("model"), "optimizer": optimizer, VALUES: values})


class ManySmall(NamedTuple):
    """A recipe for `num_tensors` tensors of float32, of each of which a rank holds `SMALL_LOCAL_SHAPE`."""

    num_tensors: int

    def build(self, world: int) -> State:
        rows, width = SMALL_LOCAL_SHAPE
        shape, mesh = (rows * world, width), init_device_mesh("cpu", (world,))
        names = [f"tensor-{index:06d}" for index in range(self.num_tensors)]
        return State({name: place(content(name, shape), name, "rows", mesh) for name in names})


class Recipe(Protocol):
    """A recipe that makes a state."""

    def build(self, world: int) -> State:
        """This rank's part of it."""


class Live:
    """A module and AdamW on the memory of `state`, one of `LlamaLike`. holdfast saves ``objects``, and peers that want
    tensors ``state.tree``."""

    def __init__(self, state: State) -> None:
        model, optimizer = cast("dict[str, torch.Tensor]", state.tree["model"]), cast("Tree", state.tree["optimizer"])
        self.module = module_of(model)
        self.optimizer = torch.optim.AdamW(self.module.parameters())
        for name, parameter in self.module.named_parameters():
            slots = {slot: cast("Tree", optimizer[slot])[name] for slot in ("step", *MOMENTS)}
            self.optimizer.state[parameter] = slots
            if name in STEPPED:
                parameter.grad = torch.ones_like(parameter)
        self.objects = {"model": self.module, "optimizer": self.optimizer, VALUES: state.values}

    def step(self) -> float:
        """Step the optimizer; returns the seconds, with all waits."""
        start_s = time.perf_counter()
        self.optimizer.step()
        return time.perf_counter() - start_s


def module_of(parameters: Mapping[str, torch.Tensor]) -> nn.Module:
    """A module with these parameters, on the same memory."""
    root = nn.Module()
    for name, tensor in parameters.items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = getattr(module, part)
        module.register_parameter(last, nn.Parameter(tensor))
    return root


class Work:
    """Keeps a core busy as a forward and a backward do, mostly outside of the interpreter."""

    #: A product of matrices of this width takes part of a millisecond, and stays in a core's cache.
    WIDTH = 256
    #: Floating-point operations of one product.
    OPERATIONS = 2 * WIDTH**3

    def __init__(self) -> None:
        self._factor = content("work", (self.WIDTH, self.WIDTH))
        self._product = torch.empty_like(self._factor)

    def for_seconds(self, seconds: float) -> None:
        end_s = time.perf_counter() + seconds
        while time.perf_counter() < end_s:
            self.products(1)

    def products(self, count: int) -> None:
        for _ in range(count):
            torch.mm(self._factor, self._factor, out=self._product)


def _leaves(tree: Tree, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    for name, child in tree.items():
        if isinstance(child, dict):
            yield from _leaves(child, f"{prefix}{name}/")
        elif isinstance(child, torch.Tensor):
            yield f"{prefix}{name}", child


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def as_bytes(tensor: torch.Tensor) -> memoryview:
    flat: memoryview = tensor.detach().view(-1).view(torch.uint8).numpy().data
    return flat


def digest(data: memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def place(whole: torch.Tensor, name: str, layout: Layout, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's part of the parameter `name`, or of a moment of it, when every rank has it `whole`."""
    if layout == "replicas":
        return whole
    cuts: tuple[Placement, ...] = (Shard(whole.ndim - 1 if layout == "columns" else 0),)
    if layout == "fsdp-tp":
        # As FSDP2 has it: it cuts the rows of what tensor parallelism left to this rank.
        by_columns = name.endswith(_BY_COLUMNS)
        cuts = (Shard(0), Shard(1)) if by_columns else (_StridedShard(0, split_factor=TP), Shard(0))
    return distribute_tensor(whole, mesh, cuts, src_data_rank=None)


def box(tensor: torch.Tensor) -> tuple[slice, ...]:
    """This rank's part of `tensor`, which is one block in every layout."""
    if not isinstance(tensor, DTensor):
        return (slice(None),) * tensor.ndim
    sizes, starts = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


def content(path: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The whole tensor at `path`: random, and the same on every rank of every run."""
    generator = torch.Generator().manual_seed(xxhash.xxh32_intdigest(path.encode()))
    return torch.empty(shape).uniform_(-1, 1, generator=generator)


def parameter_shapes(width: int, num_layers: int = NUM_LAYERS) -> dict[str, tuple[int, ...]]:
    layer: dict[str, tuple[int, ...]] = {
        **{f"attention.w{part}": (width, width) for part in "qkvo"},
        "mlp.gate": (4 * width, width),
        "mlp.up": (4 * width, width),
        "mlp.down": (width, 4 * width),
        "attention_norm": (width,),
        "mlp_norm": (width,),
    }
    shapes: dict[str, tuple[int, ...]] = {"embedding": (VOCABULARY, width)}
    for index in range(num_layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes | {"norm": (width,), "output": (VOCABULARY, width)}


def width_for(nbytes: int, num_layers: int = NUM_LAYERS) -> int:
    """The smallest width whose fp32 state (weights and moments) has at least `nbytes`."""
    if nbytes <= 0:
        raise BenchError(f"A state of {nbytes} bytes cannot be built. Ask for more than 0 GiB.")
    width = WIDTH_STEP
    while 4 * (1 + len(MOMENTS)) * sum(map(math.prod, parameter_shapes(width, num_layers).values())) < nbytes:
        width += WIDTH_STEP
    return width
