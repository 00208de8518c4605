"""Megatron's optimizers, as one entry of a state that any layout loads.

Each rank describes the elements that it trains itself, as parts of the logical tensors that the model's keys name. So
nothing is gathered, and what the distributed optimizer of one layout saves, any other layout loads, with or without a
distributed optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch

from holdfast.format.names import component, join
from holdfast.format.values import Open
from holdfast.frameworks import BindingSource, Finish, NamedTensor, Sink
from holdfast.frameworks.megatron_buckets import BucketLoad, has_buckets
from holdfast.frameworks.megatron_model import MegatronChunks, bind_pieces, name_below
from holdfast.frameworks.megatron_numbered import read_numbered
from holdfast.frameworks.megatron_shards import HeldPiece, HeldShard, joined
from holdfast.frameworks.megatron_trained import (
    STEP,
    TrainedRange,
    hyper_parameters,
    num_steps,
    plain_optimizers,
    refused,
    set_hyper_parameters,
    trained_ranges,
)
from holdfast.frameworks.optimizer_saving import is_replayed
from holdfast.frameworks.piecewise import Piecewise
from holdfast.mapping.megatron_optimizers import MASTER

#: A hyper-parameter that only Megatron-core 0.16 has, which groups of older folders lack.
_ADDED = "default_config"


class MegatronSlots:
    """An optimizer of Megatron, and the model chunks whose parameters it trains."""

    def __init__(self, optimizer: Any, chunks: MegatronChunks) -> None:
        plain_optimizers(optimizer, "optimizer")
        self.optimizer = optimizer
        self.chunks = chunks
        chunks.trainer = self

    def plain(self, path: str) -> list[TrainedOptimizer]:
        """The optimizers that it consists of, with all that they train on this rank."""
        return [TrainedOptimizer(each, trained_ranges(each, path)) for each in plain_optimizers(self.optimizer, path)]

    def trained(self, path: str) -> Iterator[TrainedRange]:
        """As `ChunkTrainer.trained`."""
        for plain in self.plain(path):
            yield from plain.ranges

    def renew_masters(self, path: str) -> None:
        """As `ChunkTrainer.renew_masters`."""
        for trained in self.trained(path):
            copy_to_master(trained)


class TrainedOptimizer(NamedTuple):
    """One optimizer of a chain, and the ranges that it trains on this rank."""

    optimizer: Any
    ranges: Sequence[TrainedRange]


class _Held(NamedTuple):
    """The ranges of a chain of optimizers, each with the shards that its parameter consists of."""

    plain: Sequence[TrainedOptimizer]
    shards: Mapping[int, Sequence[HeldShard]]

    @property
    def optimizers(self) -> list[Any]:
        """The plain optimizers."""
        return [plain.optimizer for plain in self.plain]

    def pieces(self, trained: TrainedRange, memory: torch.Tensor) -> Iterator[tuple[HeldShard, list[HeldPiece]]]:
        """The parts of logical tensors whose elements `memory` has: those of a range."""
        for shard in self.shards[id(trained.parameter)]:
            yield shard, shard.pieces_of(memory, trained.start)

    def keys(self, trained: TrainedRange) -> list[str]:
        """The keys of the logical tensors that the parameter is a part of: one, where it is not cut into several."""
        return list(dict.fromkeys(shard.key for shard in self.shards[id(trained.parameter)]))


class MegatronOptimizerAdapter:
    """The adapter for `MegatronSlots`.

    Below the path of the optimizer: ``state/<name of the weight>/<slot>`` for each slot, ``fp32`` among them where the
    weight has another dtype; ``param_groups/<what tells a group apart>/<hyper-parameter>``; ``group_of/<weight>``;
    ``step``, and ``grad_scaler`` with one entry for each optimizer that scales its loss.
    """

    needs_names = True  # of weights: MegatronChunks knows its path once it is described or bound
    is_divisible = False
    spans_ranks = True

    def accepts(self, kind: type) -> bool:
        """As `Adapter.accepts`."""
        return kind is MegatronSlots

    def describe(self, path: str, item: MegatronSlots, sink: Sink) -> bool:
        """As `Adapter.describe`."""
        held = _read(path, item)
        model = item.chunks.path
        sink.node(path, Open("optimizer"))
        for below in ("state", "param_groups", "group_of"):
            sink.node(join(path, below), Open("dict"))
        stepped: list[NamedTensor] = []
        for slot, tensors in _slots(path, held).items():
            for key, tensor in tensors.items():
                weight = name_below(model, key)
                name = _slot_name(path, weight, slot)
                sink.tree(name, tensor)
                _, memory = tensor.pieces[0]
                stepped += [NamedTensor(each, memory, "split") for each in (name, weight)]
        for inner in (plain.optimizer.optimizer for plain in held.plain):
            # Megatron copies masters to weights after the step of the inner optimizer, which the guard delays.
            sink.steps(inner, [] if is_replayed(inner) else stepped)
        for name, group in hyper_parameters(held.optimizers, path).items():
            sink.tree(join(path, "param_groups", component(name)), group)
        for name, group_name in _group_of(model, held).items():
            sink.tree(join(path, "group_of", component(name)), group_name)
        if (steps := _steps(path, held)) is not None:
            sink.tree(join(path, STEP), steps)
        for number, scaler in _scalers(held):
            sink.tree(join(path, "grad_scaler", str(number)), scaler.state_dict(), "first")
        return True

    def bind(self, path: str, item: MegatronSlots, source: BindingSource) -> Finish:
        """As `Adapter.bind`. Slots that the optimizer does not have yet, before its first step, are made as they are
        stored."""
        node = source.nodes.get(path)
        if node != Open("optimizer"):
            if node is None:
                source.missing(path)
            else:
                source.differs(path, "an optimizer of Megatron")
            return lambda: item
        item.chunks.fills_masters = True
        return _bind(path, item, source)


def _bind(path: str, item: MegatronSlots, source: BindingSource) -> Finish:
    held, model = _read(path, item), item.chunks.path
    if has_buckets(path, source):
        return _bind_buckets(path, item, held, source)
    made = _made_slots(path, model, held, source)
    resizable = {shard.key for shards in held.shards.values() for shard in shards if shard.may_resize}
    steps: list[Callable[[], object]] = []
    for slot, tensors in _slots(path, held, made).items():
        for key, tensor in tensors.items():
            name = _slot_name(path, name_below(model, key), slot)
            steps += bind_pieces(name, tensor, source, may_resize=key in resizable)
    for name in (_slot_name(path, name_below(model, key), MASTER) for key in _keys_without_master(held)):
        source.mark(name)
    steps += _bind_values(path, model, held, source)
    stale = [each for each in _masters(held) if not _is_stored(each, held, path, model, source)]

    def finish() -> object:
        for each, slots in made:
            each.inner.state[each.main].update(slots)
        for step in steps:
            step()
        for each in stale:
            copy_to_master(each)
        return item

    return finish


def _bind_buckets(path: str, item: MegatronSlots, held: _Held, source: BindingSource) -> Finish:
    """Bind an optimizer to the buckets of a folder of Megatron, whose layout is that of the job but for data
    parallelism."""
    chain = [plain.ranges for plain in held.plain]
    load = BucketLoad(path, chain, source)
    steps = list(_bind_values(path, item.chunks.path, held, source))

    def finish() -> object:
        load.finish()
        for step in steps:
            step()
        return item

    return finish


def _bind_values(path: str, model: str, held: _Held, source: BindingSource) -> Iterator[Callable[[], object]]:
    groups, group_of = hyper_parameters(held.optimizers, path), _group_of(model, held)
    if (numbered := read_numbered(path, group_of, source)) is not None:
        numbered.check_class(type(each.optimizer).__name__ for each in held.optimizers)
        load = numbered.bind_groups(groups, source)
        yield lambda: set_hyper_parameters(held.optimizers, cast("dict[str, dict[str, Any]]", load()))
        count = numbered.bind_steps(source)
    else:
        for name, group in groups.items():
            above = join(path, "param_groups", component(name))
            if above in source.nodes and join(above, _ADDED) not in source.nodes:
                group.pop(_ADDED, None)
            source.live(above, group)
        yield partial(set_hyper_parameters, held.optimizers, groups)
        for name in group_of:
            source.mark(join(path, "group_of", component(name)))
        count = source.opaque(join(path, STEP)) if join(path, STEP) in source.nodes else None
        yield from _bind_scalers(path, held, source)
    if count is not None:
        yield partial(_load_steps, held, count)
    elif _steps(path, held) is not None:
        source.missing(join(path, STEP))


def _bind_scalers(path: str, held: _Held, source: BindingSource) -> Iterator[Callable[[], object]]:
    """Bind the loss scalers. A layout with other expert parallelism has more of them, or fewer: those that the
    checkpoint lacks go on from the first one, whose scale is that of the loss."""
    scalers = list(_scalers(held))
    if not scalers:
        return
    above = join(path, "grad_scaler")
    stored = {name.removeprefix(f"{above}/").partition("/")[0] for name in source.stored_below(above)}
    loads = {number: source.opaque(join(above, number)) for number in sorted(stored)}
    for number, scaler in scalers:
        load = loads.get(str(number), loads.get("0"))
        if load is None:
            source.missing(join(above, str(number)))
        else:
            yield partial(_load_scaler, scaler, load)


def copy_to_master(trained: TrainedRange) -> None:
    """Copy the elements of the parameter into the master weight."""
    if trained.is_master:
        elements = trained.parameter.detach().reshape(-1)[trained.start : trained.stop]
        trained.main.detach().copy_(elements.view(trained.main.shape))


def _read(path: str, item: MegatronSlots) -> _Held:
    """The parts that the optimizers hold now, and the logical tensors to which their parameters belong."""
    plain = item.plain(path)
    shards: dict[int, list[HeldShard]] = {}
    for shard in (shard for chunk in item.chunks.read() for shard in chunk.shards):
        shards.setdefault(id(shard.owner), []).append(shard)
    for trained in (trained for each in plain for trained in each.ranges):
        if id(trained.parameter) not in shards:
            shape = list(trained.parameter.shape)
            raise refused(path, f"trains a parameter of shape {shape} that is in no sharded state dict of the model")
    return _Held(plain, shards)


def _ranges(held: _Held) -> Iterator[TrainedRange]:
    for plain in held.plain:
        yield from plain.ranges


def _masters(held: _Held) -> Iterator[TrainedRange]:
    return (each for each in _ranges(held) if each.is_master)


def _slots(
    path: str, held: _Held, made: Sequence[tuple[TrainedRange, Mapping[str, torch.Tensor]]] = ()
) -> dict[str, dict[str, Piecewise]]:
    """For each slot, its logical tensors by the key of the weight; with the slots that a load has `made`."""
    found: dict[str, list[tuple[HeldShard, list[HeldPiece]]]] = {}
    live = [(each, {**({MASTER: each.main} if each.is_master else {}), **each.slots()}) for each in _ranges(held)]
    for each, slots in (*live, *made):
        for slot, memory in slots.items():
            found.setdefault(slot, []).extend(held.pieces(each, memory))
    return {slot: joined(pieces, join(path, slot)) for slot, pieces in found.items()}


def _made_slots(
    path: str, model: str, held: _Held, source: BindingSource
) -> list[tuple[TrainedRange, Mapping[str, torch.Tensor]]]:
    """New memory for the stored slots that the optimizer does not have."""
    made: list[tuple[TrainedRange, Mapping[str, torch.Tensor]]] = []
    for each in _ranges(held):
        stored: dict[str, torch.dtype] = {}
        for key in held.keys(each):
            above = join(path, "state", name_below(model, key))
            for name in source.stored_below(above):
                tensor = source.stored(name)
                if tensor is not None:
                    stored[name.rpartition("/")[2]] = getattr(torch, tensor.dtype)
        lacking = {slot: dtype for slot, dtype in stored.items() if slot not in (MASTER, STEP, *each.slots())}
        if lacking:
            like = each.main.detach()
            made.append((each, {slot: torch.zeros_like(like, dtype=dtype) for slot, dtype in lacking.items()}))
    return made


def _is_stored(each: TrainedRange, held: _Held, path: str, model: str, source: BindingSource) -> bool:
    """Whether the checkpoint has the master weight of a range."""
    return all(source.stored(_slot_name(path, name_below(model, key), MASTER)) for key in held.keys(each))


def _keys_without_master(held: _Held) -> Iterator[str]:
    """The keys of the weights that are their own masters, of which Megatron's checkpoints have the master too."""
    for each in _ranges(held):
        if not each.is_master:
            yield from held.keys(each)


def _slot_name(path: str, name: str, slot: str) -> str:
    return join(path, "state", name, component(slot))


def _group_of(model: str, held: _Held) -> dict[str, str]:
    return {name_below(model, key): each.group for each in _ranges(held) for key in held.keys(each)}


def _steps(path: str, held: _Held) -> int | None:
    counts = {num_steps(plain.optimizer, plain.ranges, path) for plain in held.plain} - {None}
    if len(counts) > 1:
        raise refused(path, "chains optimizers that have done different numbers of steps")
    return next(iter(counts), None)


def _load_steps(held: _Held, count: Finish) -> None:
    """Set the number of steps where the inner optimizers have it: those of torch in the state of each parameter, those
    of Apex and Transformer Engine in each group."""
    steps = cast("int", count())
    for plain in held.plain:
        inner = plain.optimizer.optimizer
        if type(inner).__module__.startswith("torch.optim"):
            for each in plain.ranges:
                each.inner.state[each.main][STEP] = torch.tensor(float(steps))
        else:
            for group in inner.param_groups:
                group[STEP] = steps


def _load_scaler(scaler: Any, load: Finish) -> None:
    scaler.load_state_dict(load())


def _scalers(held: _Held) -> Iterator[tuple[int, Any]]:
    for number, plain in enumerate(held.plain):
        scaler = getattr(plain.optimizer, "grad_scaler", None)
        if scaler is not None:
            yield number, scaler
