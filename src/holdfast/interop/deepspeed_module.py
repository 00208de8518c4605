"""The tensors of DeepSpeed's model files: frozen parameters, buffers, and copies of the trained parameters."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.errors import HoldfastError
from holdfast.format.names import component, join, shown
from holdfast.interop.deepspeed_layout import partition, share
from holdfast.interop.deepspeed_states import ModelStates
from holdfast.interop.deepspeed_table import TensorTable
from holdfast.interop.foreign_format import damaged
from holdfast.interop.torch_globals import PickledTensor


def add_module(
    table: TensorTable,
    root: str,
    keys: Sequence[str],
    models: Sequence[ModelStates],
    trained: frozenset[str],
    *,
    is_partitioned: bool,
) -> None:
    """Add what the module holds, from the model files `keys`, of one rank or, where it `is_partitioned` (ZeRO-3), of
    all. `root` is the path of their folder, for messages."""
    model = models[0]
    for name, tensor in model.module.items():
        if not isinstance(tensor, PickledTensor) or name in model.shared:
            continue
        if is_partitioned and name not in model.buffers:
            continue
        table.whole(join("module" if name in trained else "model", component(name)), keys[0], tensor)
    if not is_partitioned:
        return
    for name, shape in model.frozen.items():
        try:
            parts = [each.frozen_parts[name] for each in models]
        except KeyError as error:
            raise mixed(root, f"a rank has no part of the frozen {shown(name):.200}") from error
        for part in parts:
            if part.shape != (share(shape, len(models)),):
                raise mixed(root, f"a part of the frozen {shown(name):.200} has the shape {list(part.shape)}")
        table.cut(join("model", component(name)), shape, keys, parts, partition(shape, len(models)))


def second_names(table: TensorTable, model: ModelStates) -> dict[str, str]:
    """The second names of shared parameters, and the first name of each."""
    found = {}
    for root in ("model", "module"):
        for name, of in model.shared.items():
            alias, target = join(root, component(name)), join(root, component(of))
            if alias not in table and target in table:
                found[alias] = target
    return found


def mixed(root: str, what: str) -> HoldfastError:
    """The error for files that come from different saves."""
    return damaged(root, f"mixes files of several saves: {what:.400}", action="Use another checkpoint.")
