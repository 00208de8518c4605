"""The part of each parameter that Megatron's optimizers hold: a range of its elements, and the state of these."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from holdfast.errors import StateError
from holdfast.interop.megatron_names import buffer_name, group_name
from holdfast.wording import count, kind_of

_CHAINED: Final = "ChainedOptimizer"
_DISTRIBUTED: Final = "DistributedOptimizer"
_FLOAT16: Final = "Float16OptimizerWithFloat16Params"
_FLOAT32: Final = "FP32Optimizer"
#: The optimizers inside them that have been tried, and those of Apex and Transformer Engine, which have the same state.
_INNER: Final = frozenset(("Adam", "AdamW", "FusedAdam", "SGD", "FusedSGD"))
#: The entries of a parameter's optimizer state that count its steps.
STEP: Final = "step"
#: Megatron aligns weights in buckets to so many elements.
_ALIGNMENT: Final = 64
#: Whether a group has experts depends on the layout: with one expert-parallel rank, they are in the other groups.
_OF_LAYOUT: Final = "is_expert_parallel"


class BucketPlace(NamedTuple):
    """The place of a range in a bucket of a distributed optimizer, or in all buckets of a buffer one after another: the
    name that Megatron's folders have for it, the number of its elements without padding at the ends of buckets, and the
    first element of the range."""

    key: str
    numel: int
    start: int


class TrainedRange(NamedTuple):
    """Elements ``[start, stop)`` of a local parameter, in its row-major order, that an optimizer trains on this rank.

    `main` is the tensor that the `inner` optimizer knows. `is_master` says that it is a copy in another dtype; else it
    shares its memory with the parameter. `places` are those in a bucket and in a buffer, for a distributed optimizer.
    """

    parameter: torch.Tensor
    start: int
    stop: int
    main: torch.Tensor
    inner: torch.optim.Optimizer
    is_master: bool
    group: str
    places: Sequence[BucketPlace] = ()

    @property
    def state(self) -> dict[str, Any]:
        """The state of the elements, as the inner optimizer has it."""
        found: dict[str, Any] = self.inner.state.get(self.main, {})
        return found

    def slots(self) -> dict[str, torch.Tensor]:
        """The tensors of the state that have an element for each element of the range."""
        return {
            slot: value
            for slot, value in self.state.items()
            if slot != STEP and isinstance(value, torch.Tensor) and value.numel() == self.main.numel()
        }


def plain_optimizers(optimizer: Any, path: str) -> list[Any]:
    """The optimizers that `optimizer` chains, or itself. Refuses kinds that are not known, by `path`."""
    kind = _kind(optimizer)
    if kind == _CHAINED:
        return [each for chained in optimizer.chained_optimizers for each in plain_optimizers(chained, path)]
    if kind not in (_DISTRIBUTED, _FLOAT16, _FLOAT32):
        raise refused(path, f"is {kind_of(optimizer)}, which holdfast does not know")
    if type(optimizer.optimizer).__name__ not in _INNER:
        raise refused(path, f"works with {kind_of(optimizer.optimizer)}, whose state holdfast does not know")
    config = getattr(optimizer, "config", None)
    if getattr(config, "use_precision_aware_optimizer", False):
        raise refused(path, "is precision-aware: it keeps scaled state, of which Megatron gives copies only")
    if getattr(config, "overlap_param_gather_with_optimizer_step", False):
        raise refused(path, "gathers weights while it steps, and so would change what a load has filled")
    if getattr(getattr(optimizer, "ddp_config", None), "use_megatron_fsdp", False):
        raise refused(path, "trains a model of Megatron-FSDP")
    return [optimizer]


def trained_ranges(optimizer: Any, path: str) -> list[TrainedRange]:
    """All ranges that the plain optimizer `optimizer` trains on this rank."""
    kind = _kind(optimizer)
    if kind == _DISTRIBUTED:
        found = list(_distributed(optimizer))
    elif kind == _FLOAT16:
        found = list(_whole(optimizer))
    else:
        found = list(_float32(optimizer.optimizer))
    for each in found:
        if not each.parameter.is_contiguous() or each.main.numel() != each.stop - each.start:
            raise refused(path, f"trains a parameter of shape {list(each.parameter.shape)} that does not lie in a row")
        strange = [slot for slot, value in each.state.items() if slot != STEP and slot not in each.slots()]
        if [slot for slot in strange if each.state[slot] is not None]:
            raise refused(path, f"has the state {strange[0]!r}, which is not one number for each element")
    return found


def hyper_parameters(optimizers: Sequence[Any], path: str) -> dict[str, dict[str, Any]]:
    """The hyper-parameters of plain optimizers, by what tells a group apart in any layout.

    Refuses optimizers with two groups that are told apart by nothing, and yet differ.
    """
    found: dict[str, dict[str, Any]] = {}
    for group in (group for optimizer in optimizers for group in optimizer.optimizer.param_groups):
        values = {key: value for key, value in group.items() if key not in ("params", STEP, _OF_LAYOUT)}
        name = group_name(group)
        if found.setdefault(name, values) != values:
            raise refused(path, f"has two parameter groups with {name} whose hyper-parameters differ")
    return found


def set_hyper_parameters(optimizers: Sequence[Any], values: Mapping[str, Mapping[str, Any]]) -> None:
    """Put `values`, by what tells a group apart, into the groups."""
    for group in (group for optimizer in optimizers for group in optimizer.optimizer.param_groups):
        group.update(values[group_name(group)])


def num_steps(optimizer: Any, ranges: Sequence[TrainedRange], path: str) -> int | None:
    """The number of steps that a plain optimizer has done; None before the first one. Megatron has one number for all
    parameters, too."""
    counts = {int(each.state[STEP]) for each in ranges if STEP in each.state}
    counts |= {int(group[STEP]) for group in optimizer.optimizer.param_groups if group.get(STEP) is not None}
    if len(counts) > 1:
        raise refused(path, f"has done {count(min(counts), 'step')} for some parameters, {max(counts)} for others")
    return next(iter(counts), None)


def refused(path: str, what: str) -> StateError:
    """The error for an optimizer that cannot be saved."""
    return StateError(
        f"The Megatron optimizer {path!r} {what}.",
        code="state.megatron",
        action="Leave it out of megatron_state, or save it with megatron.core.dist_checkpointing.",
        path=path,
    )


def _kind(optimizer: object) -> str | None:
    """The name of the class in Megatron; None for a class of anything else, also one that is derived from these."""
    kind = type(optimizer)
    return kind.__qualname__ if kind.__module__.startswith("megatron.core.optimizer.") else None


def _distributed(optimizer: Any) -> Iterator[TrainedRange]:
    # Not from the places in buffers: those count the padding between buckets (design note 002, trap 6).
    above = f"optimizer.distributed.dp_group_idx_{optimizer.data_parallel_group_idx}"
    for buffer, of_dtypes in enumerate(optimizer.gbuf_ranges):
        for dtypes, number, bucket in ((key, *each) for key, held in of_dtypes.items() for each in enumerate(held)):
            places = _places(optimizer.buffers[buffer], buffer_name(above, buffer, dtypes), number)
            for parameter, ranges in bucket["param_map"].items():
                at_group, at = optimizer.model_param_group_index_map[parameter]
                group = optimizer.optimizer.param_groups[at_group]
                held, start = ranges["param"], ranges["gbuf_world_in_bucket"].start
                found = _range(parameter, held.start, held.end, group["params"][at], optimizer.optimizer, group)
                yield found._replace(places=[place._replace(start=place.start + start) for place in places])


def _places(buffer: Any, name: str, number: int) -> list[BucketPlace]:
    """The place of a bucket itself, and its place in its buffer, unless buffers of other buckets could be as long.

    Weights begin at multiples of `_ALIGNMENT` in a bucket. So where each bucket but the last is a multiple, the buckets
    lie one after another as one bucket of all weights would. Any other buckets of the same weights make a shorter
    buffer, for a weight begins earlier in them.
    """
    numels = [bucket.numel_unpadded for bucket in buffer.buckets]
    places = [BucketPlace(f"{name}.bucket_idx_{number}", numels[number], 0)]
    if not any(numel % _ALIGNMENT for numel in numels[:-1]):
        places.append(BucketPlace(name, sum(numels), sum(numels[:number])))
    return places


def _whole(optimizer: Any) -> Iterator[TrainedRange]:
    inner = optimizer.optimizer
    owners = {
        id(main): parameter
        for parameters, mains in zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True)
        for parameter, main in zip(parameters, mains, strict=True)
    }
    for group in inner.param_groups:
        for main in group["params"]:
            parameter = owners.get(id(main), main)
            yield _range(parameter, 0, parameter.numel(), main, inner, group)


def _float32(inner: torch.optim.Optimizer) -> Iterator[TrainedRange]:
    for group in inner.param_groups:
        for parameter in group["params"]:
            yield _range(parameter, 0, parameter.numel(), parameter, inner, group)


def _range(
    parameter: torch.Tensor,
    start: int,
    stop: int,
    main: torch.Tensor,
    inner: torch.optim.Optimizer,
    group: Mapping[str, Any],
) -> TrainedRange:
    is_master = main.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr()
    return TrainedRange(parameter, start, stop, main, inner, is_master, group_name(group))
