"""Folders of ``megatron.core.dist_checkpointing`` in the format ``torch_dist``.

Such a folder is one of DCP under Megatron's keys, with ``common.pt`` for the values, and ``metadata.json``.

The optimizer is as the format ``fully_reshardable`` has it, which loads on any layout. Optimizers that are not
distributed find their state, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Final

import msgspec
import torch

from holdfast.checkpoint.stored_state import StoredState
from holdfast.exporting.chosen_tensors import ChosenContent, ChosenTensor, ExportTensor, unfit
from holdfast.exporting.chosen_values import plain_key
from holdfast.exporting.dcp_folder import METADATA, DcpContent, saved
from holdfast.exporting.element_source import small_contents
from holdfast.exporting.new_folder import NewFolder
from holdfast.exporting.plain_values import plain_value
from holdfast.format.names import component, join, shown, split
from holdfast.format.values import Node, Plain
from holdfast.interop.megatron_iterations import BACKEND, BACKEND_VERSION, COMMON, CONFIG
from holdfast.interop.megatron_names import BUCKETS, MASTERS, is_of_model
from holdfast.mapping.megatron_optimizers import MASTER
from holdfast.phases import LOG
from holdfast.wording import count

_MODEL: Final = "model"
_OPTIMIZER: Final = "optimizer"
_SCHEDULER: Final = "scheduler"
_SCALER: Final = ("optimizer", "grad_scaler")
#: Entries that only a job on as many ranks could take, and what an import has read from another folder of Megatron.
_LEFT_OUT: Final = ("random", "model_parallel_random", "megatron")
_SHARDING: Final = "fully_reshardable"
_EXPERTS: Final = ".experts."
_EXTRA: Final = "_extra_state"
_CONFIG: Final = {
    "sharded_backend": BACKEND,
    "sharded_backend_version": BACKEND_VERSION,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def megatron_folder(choice: ChosenContent, state: StoredState, *, shard_nbytes: int) -> NewFolder:
    """The folder of one iteration for the chosen tensors and values of `state`.

    Raises `IncompatibleError`, code ``incompatible.export``, for tensors that Megatron has no keys for, and for a plain
    optimizer. The log warns of weights whose names no model of Megatron has.
    """
    _check_optimizer(choice)
    content = DcpContent(shard_nbytes, None)
    chosen = [one for one in choice.tensors if split(one.names[0])[0] not in _LEFT_OUT]
    scalers = [one for one in chosen if tuple(split(one.names[0])[:2]) == _SCALER]
    written = [one for one in chosen if one not in scalers]
    keys = _keys(written)
    _tell_of_other_names(written)
    for one in written:
        content.add_tensor([key for name in one.names for key in keys[name]], one.tensor)
    for key, value in dict(_objects(choice, written)).items():
        content.add_value(key, [value])
    common = _common(choice, state, {one.names[0]: _small_tensor(state, one.tensor) for one in scalers})
    first = {COMMON: saved(common)}
    last = {METADATA: content.metadata(), CONFIG: msgspec.json.encode(_CONFIG)}
    return NewFolder(state.record.identity, first, content.files(), last, len(written))


def _keys(written: Sequence[ChosenTensor]) -> dict[str, list[str]]:
    """Megatron's keys for each name. A weight that is its own master has the key of a master, too."""
    names = [name for one in written for name in one.names]
    slots: defaultdict[str, set[str]] = defaultdict(set)
    keys: dict[str, list[str]] = {}
    for name in names:
        parts = [plain_key(part) for part in split(name)]
        if len(parts) == 2 and parts[0] == _MODEL:
            keys[name] = [parts[1]]
        elif len(parts) == 5 and parts[:3] == [_OPTIMIZER, "state", _MODEL]:
            slots[parts[3]].add(parts[4])
            keys[name] = [
                f"optimizer.state.{slot}.{parts[3]}" for slot in (MASTERS if parts[4] == MASTER else parts[4:])
            ]
        elif parts[:2] == [_OPTIMIZER, BUCKETS]:
            text = "is a bucket of the job that saved it, which no other layout loads"
            raise unfit(name, text, "Load it into a job of that layout, and save that; or choose select='model'.")
        else:
            raise unfit(name, "has no key in Megatron", "Leave it out with select (--select).")
    for key, found in slots.items():
        weight = join(_MODEL, component(key))
        if MASTER not in found and weight in keys:
            keys[weight].append(f"optimizer.state.{MASTERS[0]}.{key}")
    return keys


def _check_optimizer(choice: ChosenContent) -> None:
    """Refuse an optimizer that numbers its groups, as plain ones do: Megatron finds groups by what tells them apart."""
    above, nodes = join(_OPTIMIZER, "group_of") + "/", choice.table.nodes
    if any(name.startswith(above) and isinstance(nodes[name], Plain) for name in choice.values):
        raise unfit(
            _OPTIMIZER,
            "is a plain one, whose parameter groups Megatron does not find",
            "Choose the weights alone with select='model' (--select model). Or load the run into a live job of "
            "Megatron with the rule ToMegatron(), save that, and export it.",
        )


def _tell_of_other_names(written: Sequence[ChosenTensor]) -> None:
    """Warn of weights that a stock job would look for under other names."""
    names = [one.names[0] for one in written if split(one.names[0])[0] == _MODEL]
    strange = sorted(name for name in names if not is_of_model(plain_key(split(name)[-1])))
    if strange:
        LOG.warning(
            "%d of %s have names that no model of Megatron-core has, such as %s: Megatron will not find them. Rename "
            "them with a mapping (--mapping), unless your own model has these names",
            len(strange),
            count(len(names), "weight"),
            shown(strange[0]),
        )


def _objects(choice: ChosenContent, written: Sequence[ChosenTensor]) -> Iterator[tuple[str, object]]:
    """The extra states of modules: those that are stored, and nothing for each other module that may ask for one.

    Megatron's linear layers have one, and Transformer Engine's attention.
    """
    weights = {plain_key(split(name)[1]): one.tensor.shape for one in written for name in one.names if _is_weight(name)}
    for key, shape in weights.items():
        module = key.removesuffix("weight")
        modules = [module]
        if module.endswith(".linear_qkv."):
            modules.append(f"{module.removesuffix('linear_qkv.')}core_attention.")
        grid = shape[:-2] or (1,)
        for at, each in product(product(*map(range, grid)), modules):
            place, sizes = (".".join(map(str, numbers)) for numbers in (at, grid))
            yield f"{each}{_EXTRA}/shard_{place}_{sizes}", None
    nodes = choice.table.nodes
    for name in choice.values:
        parts = split(name)
        if parts[0] == _MODEL and len(parts) == 2:
            yield plain_key(parts[1]), plain_value(nodes, name)


def _is_weight(name: str) -> bool:
    parts = split(name)
    return len(parts) == 2 and parts[0] == _MODEL and name.endswith(".weight")


def _common(choice: ChosenContent, state: StoredState, scalers: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The values that Megatron has in ``common.pt``; those of the user stand beside them."""
    nodes, step = choice.table.nodes, state.record.step
    common: dict[str, Any] = {
        "checkpoint_version": 3.0,
        "iteration": max(step, 0),
        "content_metadata": {
            "distrib_optim_sharding_type": _SHARDING,
            "chained_optim_avoid_prefix": True,
            "singleton_local_shards": False,
        },
    }
    entries = dict.fromkeys(split(name)[0] for name in choice.values)
    for entry in entries:
        if entry == _SCHEDULER:
            common["opt_param_scheduler"] = plain_value(nodes, entry)
        elif entry == _OPTIMIZER:
            common[_OPTIMIZER] = _optimizer(choice, scalers)
        elif entry != _MODEL and entry not in _LEFT_OUT:
            common[plain_key(entry)] = plain_value(nodes, entry)
    return common


def _optimizer(choice: ChosenContent, scalers: Mapping[str, torch.Tensor]) -> dict[Any, Any]:
    """The values of the optimizer, where each of Megatron's kinds looks for them. A model with experts has a chain of
    two: of all other weights, and of experts."""
    nodes = choice.table.nodes
    above = join(_OPTIMIZER, "param_groups")
    paths = dict.fromkeys("/".join(split(name)[:3]) for name in choice.values if name.startswith(f"{above}/"))
    step = plain_value(nodes, join(_OPTIMIZER, "step")) if join(_OPTIMIZER, "step") in nodes else None
    groups = [dict(_group(nodes, path), **({} if step is None else {"step": step})) for path in paths]
    has_experts = any(_EXPERTS in name for one in choice.tensors for name in one.names)
    optimizers = [
        _plain_optimizer(
            [{**group, "is_expert_parallel": number == 1} for group in groups], step, _scaler(nodes, scalers, number)
        )
        for number in range(2 if has_experts else 1)
    ]
    return dict(enumerate(optimizers)) if has_experts else optimizers[0]


def _group(nodes: Mapping[str, Node], path: str) -> dict[str, Any]:
    group = plain_value(nodes, path)
    assert isinstance(group, dict)
    return group


def _plain_optimizer(groups: Sequence[dict[str, Any]], step: object, scaler: dict[str, Any]) -> dict[str, Any]:
    state = {"common_step": torch.tensor(float(step))} if isinstance(step, int | float) else {}
    inner = {"param_groups": list(groups), "state": state}
    return {"optimizer": inner, **inner, **scaler, "param_state_sharding_type": _SHARDING}


def _scaler(nodes: Mapping[str, Node], scalers: Mapping[str, torch.Tensor], number: int) -> dict[str, Any]:
    """The state of the loss scaler of an optimizer, or of the first one."""
    above = join(*_SCALER)
    for path in (join(above, str(number)), join(above, "0")):
        tensors = {split(name)[3]: tensor for name, tensor in scalers.items() if name.startswith(f"{path}/")}
        below = [name for name in nodes if name.startswith(f"{path}/") and name not in scalers]
        values = {split(name)[3]: plain_value(nodes, name) for name in below}
        if tensors or values:
            return {"grad_scaler": {plain_key(name): value for name, value in {**values, **tensors}.items()}}
    return {}


def _small_tensor(state: StoredState, tensor: ExportTensor) -> torch.Tensor:
    data = bytearray(small_contents(state, [tensor])[0])
    return torch.frombuffer(data, dtype=getattr(torch, tensor.dtype)).view(tensor.shape)
