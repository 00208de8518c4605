"""FSDP1 (``torch.distributed.fsdp.FullyShardedDataParallel``): flat parameters as portions of the original ones.

Each unit flattens the parameters of a module, one after another, into one tensor with padding between and behind them,
and each rank keeps a range of it, the local shard. Every element of the shard belongs to an element of an original
parameter, which the metadata of the flat parameter tells. So a rank describes what it holds without any communication,
and the names are those of the module before it was wrapped.

With ``use_orig_params=True`` the optimizer trains one view of the shard for each parameter; without it, the flat
parameter. The local shard is the truth at any time: forward and backward compute with copies that they gather.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from holdfast.errors import StateError
from holdfast.format.names import component
from holdfast.frameworks import NamedTensor
from holdfast.frameworks.flat_memory import FlatMemory, Portion, memory_order

#: The attribute of an FSDP1 module that holds the module it wraps.
WRAPPED = "_fsdp_wrapped_module"
#: Name and module of the type.
KIND = ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel")

#: An original parameter's place: the id of the module that owns it, and its name there.
_Place = tuple[int, str]


class FlatUnit(NamedTuple):
    """An FSDP1 module that has flattened parameters, and their handle, which is torch's."""

    module: Any
    handle: Any

    def places(self) -> Iterator[_Place]:
        """The places of the parameters that the unit manages, where the modules hold views of them or of copies, and of
        the flat parameter, which has no name of its own."""
        flat = self.handle.flat_param
        for info in (*flat._param_infos, *flat._shared_param_infos):  # noqa: SLF001
            yield id(info.module), info.param_name
        inner = self.module.module  # inside a wrapper of activation checkpointing too
        yield from ((id(inner), name) for name, tensor in inner._parameters.items() if tensor is flat)  # noqa: SLF001


def flat_unit(module: nn.Module) -> FlatUnit | None:
    """The unit of an FSDP1 module; None where all its parameters belong to units inside it, or it has none."""
    handle = getattr(module, "_handle", None)
    return None if handle is None else FlatUnit(module, handle)


def reshard(unit: FlatUnit) -> None:
    """Make the unit forget the full parameters that it may have kept after a forward, so that the next forward gathers
    those of a changed shard. Communicates nothing."""
    handle = unit.handle
    if getattr(handle.flat_param, "_local_shard", None) is not None:
        runtime = sys.modules["torch.distributed.fsdp._runtime_utils"]
        runtime._reshard(unit.module, handle, handle.uses_sharded_strategy)  # noqa: SLF001


def held_by(unit: FlatUnit, path: str, bases: Mapping[int, Sequence[str]]) -> Iterator[FlatMemory | NamedTensor]:
    """Describe the memory that a unit of the module at `path` holds. For the id of each module, `bases` has the
    prefixes of the names of its tensors.

    Yields plain tensors where each rank has all elements and trains the original parameters, and flat memory elsewhere.
    The save compares the copies that several ranks have, because FSDP1 makes them equal only with
    ``sync_module_states``.

    Raises:
        StateError: code ``state.flat_parameters``: the unit has parameters of tensor parallelism, is inside
            ``summon_full_params``, or a parameter got memory outside of the shard.
    """
    handle, flat = unit.handle, unit.handle.flat_param
    _refuse_unusual(unit, path)
    names = _names(flat, path, bases)
    if flat._params is not None and not handle.uses_sharded_strategy:  # noqa: SLF001
        for mine, parameter in zip(names, flat._params, strict=True):  # noqa: SLF001
            yield from (NamedTensor(name, parameter, "compare") for name in mine)
        return
    shard = getattr(flat, "_local_shard", None)
    shard = (flat if shard is None else shard).detach()
    portions = list(_portions(flat, names))
    if flat._params is None:  # noqa: SLF001
        yield FlatMemory(flat, shard, tuple(portions))
        return
    for parameter, portion in zip(flat._params, portions, strict=True):  # noqa: SLF001
        memory = shard[portion.first : portion.first + portion.stop - portion.start]
        if memory.numel() == parameter.numel() and memory.data_ptr() != parameter.data_ptr():
            raise _unusual(
                path,
                f"parameter {portion.names[0]!r} has memory outside of its local shard, which the next forward will "
                "take over",
                "Write into the memory of the parameter (parameter.copy_) instead of replacing it, or run a forward "
                "first.",
            )
        yield FlatMemory(parameter, memory, (portion._replace(first=0),))


def refuse_loose(
    path: str,
    tensors: Iterable[NamedTensor],
    modules: Iterable[tuple[str, nn.Module]],
    managed: Container[_Place],
) -> None:
    """Refuse parameters that FSDP1 manages, but whose unit is not in the state: among the `tensors` that were found,
    and in the `modules`, with the prefixes of their names. `managed` has the places whose unit is there.

    Raises:
        StateError: code ``state.flat_parameters``.
    """
    if "torch.distributed.fsdp._flat_param" not in sys.modules:
        return
    loose = [entry.name for entry in tensors if getattr(entry.tensor, "_fsdp_flattened", False)]
    # With use_orig_params=False, a module has views of the flat parameter in place of its parameters. FSDP1 marks it.
    for base, module in modules:
        if module.__dict__.get("_fsdp_use_orig_params") is False:
            loose += [base + name for name in _views_of_flat(module) if (id(module), name) not in managed]
    if loose:
        raise _unusual(
            path,
            f"{loose[0]!r} is managed by an FSDP1 module that is not in the state",
            "Put the FSDP1 module itself into the state: the names do not change.",
        )


def _views_of_flat(module: nn.Module) -> Iterator[str]:
    """The names of the attributes that are views of a flat parameter."""
    for name, item in vars(module).items():
        if isinstance(item, torch.Tensor) and getattr(item._base, "_is_flat_param", False):  # noqa: SLF001
            yield name


def _names(flat: Any, path: str, bases: Mapping[int, Sequence[str]]) -> list[tuple[str, ...]]:
    """The sorted names of each original parameter of a flat parameter: a tied one has several."""
    found: dict[_Place, list[str]] = {}
    for info in flat._param_infos:  # noqa: SLF001
        text = component(info.param_name, path=path)
        found[id(info.module), info.param_name] = [base + text for base in bases[id(info.module)]]
    for info in flat._shared_param_infos:  # noqa: SLF001
        text = component(info.param_name, path=path)
        found[id(info.prim_module), info.prim_param_name] += [base + text for base in bases[id(info.module)]]
    return [tuple(sorted(set(names))) for names in found.values()]


def _portions(flat: Any, names: Sequence[tuple[str, ...]]) -> Iterator[Portion]:
    columns = (names, flat._shapes, flat._strides, flat._shard_param_infos)  # noqa: SLF001
    for mine, shape, strides, info in zip(*columns, strict=True):
        order = memory_order(shape, strides)
        if info.in_shard:
            start = info.intra_param_start_idx
            yield Portion(mine, tuple(shape), order, start, start + info.numel_in_shard, info.offset_in_shard)
        else:
            yield Portion(mine, tuple(shape), order, 0, 0, 0)


def _refuse_unusual(unit: FlatUnit, path: str) -> None:
    flat = unit.handle.flat_param
    if any(extension is not None for extension in flat._param_extensions):  # noqa: SLF001
        raise _unusual(
            path,
            "FSDP1 has flattened the local parts of tensor parallelism, and does not tell where they lie in the whole",
            "Shard the model with torch.distributed.fsdp.fully_shard (FSDP2) over tensor parallelism.",
        )
    if unit.handle._training_state.name == "SUMMON_FULL_PARAMS":  # noqa: SLF001
        raise _unusual(
            path,
            "it is inside summon_full_params, which writes changes back to the shards when it ends",
            "Save and load outside of that block: holdfast needs no full parameters.",
        )


def _unusual(path: str, problem: str, action: str) -> StateError:
    return StateError(
        f"The FSDP1 parameters of module {path!r} cannot be described: {problem}.",
        code="state.flat_parameters",
        action=action,
        path=path,
    )
