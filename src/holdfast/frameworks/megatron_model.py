"""The weights of Megatron's model chunks, as one entry of a state."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final, NamedTuple, Protocol, cast

import torch
from torch import nn

from holdfast.errors import StateError
from holdfast.format.names import component, join
from holdfast.format.values import Open
from holdfast.frameworks import BindingSource, Finish, Sink
from holdfast.frameworks.megatron_padding import fitted
from holdfast.frameworks.megatron_shards import HeldObject, HeldPiece, HeldShard, joined, read_tree
from holdfast.frameworks.megatron_trained import TrainedRange
from holdfast.frameworks.piecewise import Piecewise
from holdfast.wording import kind_of

#: Modules around a chunk, whose `module` has the sharded state dict with the keys of the model.
_WRAPPERS: Final = frozenset(
    (
        ("megatron.core.distributed.data_parallel_base", "_BaseDataParallel"),
        ("megatron.core.transformer.module", "Float16Module"),
        ("torch.nn.parallel.distributed", "DistributedDataParallel"),
    )
)
_EXTRA: Final = "_extra_state"


class HeldChunk(NamedTuple):
    """A model chunk, with the shards and the objects that it holds. `gathers_late` says that a step of the optimizer
    changes only the elements that this rank trains, and that the next forward gathers all others."""

    chunk: nn.Module
    shards: Sequence[HeldShard]
    objects: Sequence[HeldObject]
    gathers_late: bool


class ChunkTrainer(Protocol):
    """The optimizer of the model chunks of a rank."""

    def trained(self, path: str) -> Iterator[TrainedRange]:
        """The ranges of parameters that it trains on this rank; `path` is for messages."""

    def renew_masters(self, path: str) -> None:
        """Copy the parameters into their master weights."""


class MegatronChunks:
    """The model chunks of a rank: one, or one for each virtual pipeline stage. `metadata` goes to their
    ``sharded_state_dict``."""

    def __init__(self, chunks: Sequence[nn.Module], metadata: Mapping[str, Any]) -> None:
        self._chunks = [(unwrapped_chunk(chunk), _gathers_late(chunk)) for chunk in chunks]
        for chunk, _ in self._chunks:
            if not callable(getattr(chunk, "sharded_state_dict", None)):
                raise TypeError(f"a model chunk of Megatron has a sharded_state_dict, but {kind_of(chunk)} has none")
        self._metadata = dict(metadata)
        #: The path of the last save or load in the state; the slots of the optimizer are named after it.
        self.path = ""
        self.trainer: ChunkTrainer | None = None
        #: Whether the current load fills the optimizer too.
        self.fills_masters = False

    def read(self) -> list[HeldChunk]:
        """The parts that the chunks hold now. Copies no weights, and no rank communicates."""
        return [HeldChunk(chunk, *self._tree(chunk), gathers_late) for chunk, gathers_late in self._chunks]

    def _tree(self, chunk: nn.Module) -> tuple[Sequence[HeldShard], Sequence[HeldObject]]:
        # Megatron puts process groups into the metadata that it gets.
        return read_tree(cast("Any", chunk).sharded_state_dict(metadata=dict(self._metadata)))


class MegatronModelAdapter:
    """The adapter for `MegatronChunks`: tensors under Megatron's keys, which are global, and extra states of
    modules."""

    needs_names = False
    is_divisible = True
    spans_ranks = True

    def accepts(self, kind: type) -> bool:
        """As `Adapter.accepts`."""
        return kind is MegatronChunks

    def describe(self, path: str, item: MegatronChunks, sink: Sink) -> bool:
        """As `Adapter.describe`."""
        item.path = path
        held = item.read()
        tensors = {key: each for key, each in _current(path, item, held).items() if sink.wants(name_below(path, key))}
        if not tensors and not sink.wants(path):
            return False
        sink.node(path, Open("dict"))
        for key, tensor in tensors.items():
            sink.tree(name_below(path, key), tensor)
        for found in chain.from_iterable(chunk.objects for chunk in held):
            if found.is_main and (value := _stored(found.value)) is not None:
                sink.tree(name_below(path, found.name), value, "first")
        return True

    def bind(self, path: str, item: MegatronChunks, source: BindingSource) -> Finish:
        """As `Adapter.bind`. The last step gives the extra states back to their modules, and renews the optimizer's
        master weights where the load leaves the optimizer out."""
        node = source.nodes.get(path)
        if node is not None and not isinstance(node, Open):
            source.differs(path, "a model of Megatron")
            return lambda: item
        item.path, item.fills_masters = path, False
        held = item.read()
        tensors = {key: each for key, each in _tensors(path, held).items() if source.wants(name_below(path, key))}
        resizable = {shard.key for chunk in held for shard in chunk.shards if shard.may_resize}
        steps = [
            step
            for key, tensor in tensors.items()
            for step in bind_pieces(name_below(path, key), tensor, source, may_resize=key in resizable)
        ]
        steps += [step for chunk in held for step in _bind_objects(path, chunk, source)]

        def finish() -> object:
            for step in steps:
                step()
            if tensors and item.trainer is not None and not item.fills_masters:
                item.trainer.renew_masters(path)
            return item

        return finish


def bind_pieces(name: str, tensor: Piecewise, source: BindingSource, *, may_resize: bool) -> Iterator[Finish]:
    """Bind a logical tensor to the stored one of that name, and yield the last step that this needs, if any.

    With `may_resize`, the stored tensor may have another number of elements along its axes, as a vocabulary with other
    padding has: the load fills what both have, and makes all other elements zero, as Megatron does.
    """
    stored = source.stored(name) if may_resize else None
    fit = None if stored is None else fitted(tensor, stored.shape)
    if fit is None:
        source.live(name, tensor)
        return
    source.live(name, fit.tensor)

    def clear() -> None:
        for memory in fit.rest:
            memory.zero_()

    yield clear


def name_below(path: str, key: str) -> str:
    """The name of what Megatron knows by `key`, in the object at `path`."""
    return join(path, component(key))


def unwrapped_chunk(chunk: nn.Module) -> nn.Module:
    """The model chunk inside its wrappers for data parallelism and low precision."""
    while any((base.__module__, base.__qualname__) in _WRAPPERS for base in type(chunk).__mro__):
        chunk = cast("nn.Module", chunk.module)
    return chunk


def _gathers_late(chunk: nn.Module) -> bool:
    config = getattr(chunk, "ddp_config", None)
    return bool(getattr(config, "use_distributed_optimizer", False) and getattr(config, "overlap_param_gather", False))


def _tensors(path: str, held: Sequence[HeldChunk]) -> dict[str, Piecewise]:
    return joined(((shard, shard.pieces()) for chunk in held for shard in chunk.shards), path)


def _current(path: str, item: MegatronChunks, held: Sequence[HeldChunk]) -> dict[str, Piecewise]:
    """The weights of the last step. Where the next forward gathers them, each rank has the elements that it trains, and
    older values of all others."""
    late = [chunk for chunk in held if chunk.gathers_late]
    if not late:
        return _tensors(path, held)
    if item.trainer is None:
        raise StateError(
            f"The Megatron model {path!r} gathers its weights in the next forward (overlap_param_gather), so each rank "
            "has current values only of those that its optimizer trains.",
            code="state.megatron",
            action="Give the optimizer to megatron_state, too.",
            path=path,
        )
    trained: dict[int, list[TrainedRange]] = {}
    for each in item.trainer.trained(path):
        trained.setdefault(id(each.parameter), []).append(each)
    return joined(((shard, _current_pieces(shard, chunk, trained)) for chunk in held for shard in chunk.shards), path)


def _current_pieces(
    shard: HeldShard, chunk: HeldChunk, trained: Mapping[int, Sequence[TrainedRange]]
) -> Iterator[HeldPiece]:
    if not (chunk.gathers_late and shard.owner.requires_grad):
        yield from shard.pieces()
        return
    for each in trained.get(id(shard.owner), ()):
        elements = shard.owner.detach().view(-1)[each.start : each.stop]
        yield from shard.pieces_of(elements, each.start)


def _stored(value: object) -> object:
    """The extra state of a module as a value; None if it has none."""
    if isinstance(value, io.BytesIO):
        return value.getvalue() or None
    return None if isinstance(value, torch.Tensor) and not value.numel() else value


def _bind_objects(path: str, held: HeldChunk, source: BindingSource) -> Iterator[Finish]:
    for found in held.objects:
        name = name_below(path, found.name)
        if not source.wants(name):
            continue
        if name in source.nodes:
            yield _setter(held.chunk, found, source.opaque(name))
        elif _stored(found.value) is not None:
            source.missing(name)


def _setter(chunk: nn.Module, found: HeldObject, load: Finish) -> Finish:
    """The step that gives a loaded value back to its module."""
    above, _, last = found.path.rpartition(".")

    def give_back() -> object:
        value = load()
        if last == _EXTRA and _stored(found.value) is not None:
            owner: Any = chunk.get_submodule(above)
            owner.set_extra_state(io.BytesIO(value) if isinstance(value, bytes) else value)
        return value

    return give_back
