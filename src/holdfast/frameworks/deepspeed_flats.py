"""The flat tensors of DeepSpeed's optimizers, and where the elements of each parameter lie in those of this rank.

Read from live objects, by the attributes that ``docs/design/002-deepspeed-and-megatron-states.md`` lists. DeepSpeed's
own maps (``_hp_mapping``, ``_param_slice_mappings``) and counts of padding are wrong in some configurations, so only
the lists of parameters and their offsets are used. Nothing is gathered or copied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from holdfast.frameworks.piecewise import Piecewise
from holdfast.geometry import FlatRange, Shape
from holdfast.interop.deepspeed_layout import own_range, own_share


class HeldPart(NamedTuple):
    """The elements `held` of one parameter that this rank has in a flat tensor, there from `first` on."""

    parameter: nn.Parameter
    shape: Shape
    held: FlatRange
    first: int


class FlatTensor(NamedTuple):
    """Master weights that the inner optimizer trains as one tensor, the index of its group, and the parameters in
    it: also those of which this rank has no element."""

    master: torch.Tensor
    group: int
    parts: Sequence[HeldPart]

    def pieces(self, part: HeldPart, memory: torch.Tensor) -> Piecewise:
        """This rank's elements of a parameter in `memory`, a tensor of the form of `master`, as a view of it."""
        flat = memory.detach().view(-1)[part.first : part.first + part.held.numel]
        held = [(part.held, flat)] if part.held.numel else []
        return Piecewise(part.shape, held, dtype=memory.dtype, replicas="split")


class EngineFlats(NamedTuple):
    """The state of a ZeRO or mixed-precision optimizer: the inner optimizer, what it trains, the partitioned
    parameters that it does not train, by id, and a function that makes the parameters of the module from the master
    weights. That function communicates as a step does, so all ranks must call it."""

    inner: Optimizer
    flats: Sequence[FlatTensor]
    untrained: Mapping[int, Piecewise]
    refresh: Callable[[], None]

    @property
    def masters(self) -> dict[int, Piecewise]:
        """The master weights of each trained parameter, by the id of the parameter."""
        return {id(part.parameter): flat.pieces(part, flat.master) for flat in self.flats for part in flat.parts}


def engine_flats(engine: Any) -> EngineFlats | None:
    """The flat tensors of an engine; None for one whose optimizer trains the parameters of the module themselves.

    Raises `KeyError` for an optimizer of an unknown type.
    """
    optimizer = engine.optimizer
    if optimizer is None or isinstance(optimizer, Optimizer):
        return None
    return _READERS[type(optimizer).__name__](engine.module, optimizer)


def is_known(optimizer: object) -> bool:
    """Whether `engine_flats` can read an engine with this optimizer."""
    return optimizer is None or isinstance(optimizer, Optimizer) or type(optimizer).__name__ in _READERS


def _zero_1_and_2(_: nn.Module, optimizer: Any) -> EngineFlats:
    # Under `round_robin_gradients` only these lists have the order of the flat tensors.
    columns = (optimizer.round_robin_bit16_groups, optimizer.round_robin_bit16_offsets)
    masters, groups = optimizer.single_partition_of_fp32_groups, optimizer.real_dp_process_group
    flats = [
        _cut(index, parameters, firsts, master, dist.get_rank(group))
        for index, (parameters, firsts, master, group) in enumerate(zip(*columns, masters, groups, strict=True))
    ]
    return EngineFlats(optimizer.optimizer, flats, {}, optimizer.update_lp_params)


def _bf16(_: nn.Module, optimizer: Any) -> EngineFlats:
    groups = optimizer.real_dp_process_group
    columns = zip(optimizer.bf16_groups, optimizer.fp32_groups_flat_partition, groups, strict=True)
    flats = [
        _cut(index, parameters, _running(parameters), master, dist.get_rank(group))
        for index, (parameters, master, group) in enumerate(columns)
    ]
    return EngineFlats(optimizer.optimizer, flats, {}, optimizer.update_lp_params)


def _cut(
    index: int, parameters: Sequence[nn.Parameter], firsts: Sequence[int], master: torch.Tensor, rank: int
) -> FlatTensor:
    """A group that is cut into one part of equal size for each rank, whatever the parameters in it."""
    low = rank * master.numel()
    parts = []
    for parameter, first in zip(parameters, firsts, strict=True):
        held, at = own_range(int(first), parameter.numel(), low, low + master.numel())
        parts.append(HeldPart(parameter, tuple(parameter.shape), held, at))
    return FlatTensor(master, index, parts)


def _fused(_: nn.Module, optimizer: Any) -> EngineFlats:
    columns = zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True)
    flats = [
        _cut(index, parameters, _running(parameters), master, 0) for index, (parameters, master) in enumerate(columns)
    ]
    return EngineFlats(optimizer.optimizer, flats, {}, lambda: _copy_back(flats))


def _unfused(_: nn.Module, optimizer: Any) -> EngineFlats:
    groups = enumerate(zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True))
    flats = [
        _cut(index, [parameter], [0], master, 0)
        for index, (parameters, masters) in groups
        for parameter, master in zip(parameters, masters, strict=True)
    ]
    return EngineFlats(optimizer.optimizer, flats, {}, lambda: _copy_back(flats))


def _copy_back(flats: Sequence[FlatTensor]) -> None:
    """Cast master weights that this rank has whole into the parameters of the module."""
    with torch.no_grad():
        for flat in flats:
            for part in flat.parts:
                values = flat.master.view(-1)[part.first : part.first + part.held.numel]
                part.parameter.copy_(values.view(part.shape))


def _zero_3(module: nn.Module, optimizer: Any) -> EngineFlats:
    flats = []
    for number, (parameters, master) in enumerate(
        zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True)
    ):
        numels = [int(parameter.partition_numel()) for parameter in parameters]
        parts = [
            HeldPart(parameter, tuple(parameter.ds_shape), _share_of(parameter, optimizer), first)
            for parameter, first in zip(parameters, accumulate(numels, initial=0), strict=False)
        ]
        flats.append(FlatTensor(master, int(optimizer.sub_group_to_group_id[number]), parts))
    trained = {id(part.parameter) for flat in flats for part in flat.parts}
    untrained = {}
    each: Any
    for each in module.parameters():
        if id(each) not in trained and hasattr(each, "ds_tensor"):
            held = _share_of(each, optimizer)
            memory = each.ds_tensor.detach().view(-1)[: held.numel]
            pieces = [(held, memory)] if held.numel else []
            shape = tuple(each.ds_shape)
            untrained[id(each)] = Piecewise(shape, pieces, dtype=memory.dtype, replicas="split")
    return EngineFlats(optimizer.optimizer, flats, untrained, lambda: _refresh_zero_3(optimizer))


def _share_of(parameter: Any, optimizer: Any) -> FlatRange:
    """The elements of a parameter that this rank has of the equal shares of all ranks."""
    group = getattr(parameter, "ds_process_group", None) or optimizer.dp_process_group
    return own_share(tuple(parameter.ds_shape), dist.get_rank(group), dist.get_world_size(group))


def _refresh_zero_3(optimizer: Any) -> None:
    """Put the master weights into the partitions of the parameters; then gather anew, as a step does, the small
    parameters that every rank keeps whole."""
    optimizer._partition_all_parameters()  # noqa: SLF001 - the steps of DeepSpeed's own `step`
    for number in range(len(optimizer.fp16_groups)):
        optimizer._reassign_or_swap_out_partitioned_parameters(number)  # noqa: SLF001
    if optimizer.persistent_parameters:
        optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
    optimizer.invalidate_secondary_tensor()


def _running(parameters: Sequence[nn.Parameter]) -> list[int]:
    """The start of each of some parameters that lie one behind the other."""
    return [*accumulate((parameter.numel() for parameter in parameters), initial=0)][:-1]


_READERS: Mapping[str, Callable[[nn.Module, Any], EngineFlats]] = {
    "DeepSpeedZeroOptimizer": _zero_1_and_2,
    "DeepSpeedZeroOptimizer_Stage3": _zero_3,
    "BF16_Optimizer": _bf16,
    "FP16_Optimizer": _fused,
    "FP16_UnfusedOptimizer": _unfused,
}
