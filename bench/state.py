"""The states that contenders save and load: a Llama-like model with two Adam moments, or many small tensors.

What a tensor holds follows from its path alone, so any layout of a state can be compared with any other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol, TypeAlias, Union

import msgspec
import torch
import xxhash
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from bench.errors import SetupError
from bench.placing import Layout, mesh_shape, place
from bench.schema import StateSize

Leaf: TypeAlias = torch.Tensor | int | float
Tree: TypeAlias = dict[str, Union["Tree", Leaf]]

NUM_LAYERS = 8
VOCABULARY = 8192
WIDTH_STEP = 64
MOMENTS = ("exp_avg", "exp_avg_sq")
#: What each rank holds of a small tensor.
SMALL_LOCAL_SHAPE = (2, 16)


class Memory(Protocol):
    """Memory that a contender saves from and loads into."""

    def clear(self) -> None:
        """Destroy the content, so that a load that does nothing is seen."""

    def digests(self) -> dict[str, str]:
        """A digest of each part of the content of this rank."""


class State:
    """One rank's part of a state. ``tree`` is what a training loop would hand to a checkpoint library."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree

    def tensors(self) -> dict[str, torch.Tensor]:
        """The local memory of each tensor by its path."""
        return {path: local(leaf) for _, _, path, leaf in walk(self.tree) if isinstance(leaf, torch.Tensor)}

    def values(self) -> dict[str, int | float]:
        """Each value that is not a tensor, by its path."""
        return {path: leaf for _, _, path, leaf in walk(self.tree) if not isinstance(leaf, torch.Tensor)}

    def is_sharded(self) -> bool:
        """Whether ranks hold different parts."""
        return any(isinstance(leaf, DTensor) for *_, leaf in walk(self.tree))

    def share(self, rank: int, world: int) -> list[memoryview]:
        """The bytes of the state that are this rank's: of a tensor that every rank holds whole, an even part."""
        leaves = ((as_bytes(local(leaf)), leaf) for *_, leaf in walk(self.tree) if isinstance(leaf, torch.Tensor))
        return [
            data if isinstance(leaf, DTensor) else data[len(data) * rank // world : len(data) * (rank + 1) // world]
            for data, leaf in leaves
        ]

    def size(self) -> StateSize:
        """Size over all ranks; replicated tensors count once."""
        leaves = [leaf for *_, leaf in walk(self.tree)]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        return StateSize(
            nbytes=sum(math.prod(tensor.shape) * tensor.element_size() for tensor in tensors),
            num_tensors=len(tensors),
            num_values=len(leaves) - len(tensors),
        )

    def clear(self) -> None:
        """Zero every tensor and value."""
        for parent, key, _, leaf in list(walk(self.tree)):
            if isinstance(leaf, torch.Tensor):
                local(leaf).zero_()
            else:
                parent[key] = type(leaf)(0)

    def digests(self) -> dict[str, str]:
        """The digest of each local tensor and the text of each value."""
        tensors = {path: digest(as_bytes(tensor)) for path, tensor in self.tensors().items()}
        return tensors | {path: repr(value) for path, value in self.values().items()}


class LlamaLike(msgspec.Struct, frozen=True):
    """A recipe for a Llama-like training state of at least `min_nbytes` over all ranks, in `layout`."""

    min_nbytes: int
    layout: Layout = "rows"
    num_layers: int = NUM_LAYERS

    def nbytes(self, world: int) -> int:
        """Bytes over `world` ranks, at least."""
        return self.min_nbytes

    def mesh_shape(self, world: int) -> tuple[int, ...]:
        """The device mesh over `world` ranks that `build` wants."""
        return mesh_shape(self.layout, world)

    def build(self, mesh: DeviceMesh) -> State:
        """The state of this rank of `mesh`."""
        shapes = parameter_shapes(width_for(self.min_nbytes, self.num_layers), self.num_layers)

        def placed(prefix: str) -> Tree:
            return {
                name: place(content(f"{prefix}/{name}", shape), name, self.layout, mesh)
                for name, shape in shapes.items()
            }

        optimizer: Tree = {moment: placed(moment) for moment in MOMENTS}
        optimizer["step"] = {name: torch.tensor(1000.0) for name in shapes}
        values: Tree = {"step": 1000, "tokens": 4_194_304_000, "lr": 3e-4}
        return State({"model": placed("model"), "optimizer": optimizer, "progress": values})


class ManySmall(msgspec.Struct, frozen=True):
    """A recipe for `num_tensors` float32 tensors, of which each rank holds `SMALL_LOCAL_SHAPE`."""

    num_tensors: int

    def nbytes(self, world: int) -> int:
        """Bytes over `world` ranks."""
        return 4 * self.num_tensors * world * math.prod(SMALL_LOCAL_SHAPE)

    def mesh_shape(self, world: int) -> tuple[int, ...]:
        """The device mesh over `world` ranks that `build` wants."""
        return (world,)

    def build(self, mesh: DeviceMesh) -> State:
        """The state of this rank of `mesh`. SetupError when there is no tensor in it."""
        if self.num_tensors < 1:
            raise SetupError(f"A state of {self.num_tensors} tensors cannot be built. Ask for at least one.")
        rows, width = SMALL_LOCAL_SHAPE
        shape = (rows * mesh.size(), width)
        names = [f"tensor-{index:06d}" for index in range(self.num_tensors)]
        return State({name: place(content(name, shape), name, "rows", mesh) for name in names})


Recipe: TypeAlias = LlamaLike | ManySmall


def walk(tree: Tree, prefix: str = "") -> Iterator[tuple[Tree, str, str, Leaf]]:
    """(parent, key, path, leaf) of every leaf, in order."""
    for key, child in tree.items():
        path = f"{prefix}{key}"
        if isinstance(child, dict):
            yield from walk(child, f"{path}/")
        else:
            yield tree, key, path, child


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of `tensor` on this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    flat: memoryview = tensor.detach().view(-1).view(torch.uint8).numpy().data
    return flat


def digest(data: memoryview) -> str:
    """xxh3-128 of `data`."""
    return xxhash.xxh3_128_hexdigest(data)


def content(path: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The content of the whole tensor at `path`: random, and the same on every rank of every run."""
    generator = torch.Generator().manual_seed(xxhash.xxh32_intdigest(path.encode()))
    return torch.empty(shape).uniform_(-1, 1, generator=generator)


def parameter_shapes(width: int, num_layers: int = NUM_LAYERS) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the model's parameters."""
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
        raise SetupError(f"A state of {nbytes} bytes cannot be built. Ask for more than 0 GiB.")
    width = WIDTH_STEP
    while _state_nbytes(width, num_layers) < nbytes:
        width += WIDTH_STEP
    return width


def _state_nbytes(width: int, num_layers: int) -> int:
    return 4 * (1 + len(MOMENTS)) * sum(math.prod(shape) for shape in parameter_shapes(width, num_layers).values())
