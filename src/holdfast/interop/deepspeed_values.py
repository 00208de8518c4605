"""The values of a DeepSpeed checkpoint as a table, with the tensors inside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from holdfast.errors import HoldfastError
from holdfast.format.names import component, join, shown
from holdfast.format.values import Node, Open, Plain, Stateful, TableNode, Text
from holdfast.interop.deepspeed_states import ModelStates, OptimStates
from holdfast.interop.foreign_format import unreadable
from holdfast.interop.pickle_machine import PickleError
from holdfast.interop.pickled_tree import nodes_of
from holdfast.interop.torch_globals import PickledTensor

#: The hyper-parameter by which groups of torch's Adam and AdamW differ.
_DECOUPLED: Final = "decoupled_weight_decay"
#: The hyper-parameters of torch's Adam that DeepSpeed's own (`FusedAdam`, `DeepSpeedCPUAdam`) do not have.
_OF_TORCH: Final[Mapping[str, object]] = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
}
#: A hyper-parameter of DeepSpeed's own Adam and Lamb, and one of Lamb alone.
_CORRECTED, _OF_LAMB = "bias_correction", "max_coeff"


class FoundValues:
    """The values and the tensors of the files, by the names that they get. `path` is that of the file for messages."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.table: dict[str, Node | HoldfastError] = {"": Open("dict")}
        self.tensors: dict[str, PickledTensor] = {}

    def add(self, name: str, value: object) -> None:
        """Add a value; its error where it is of a class that is no value."""
        tensors: dict[str, PickledTensor] = {}
        try:
            self.table.update(nodes_of(name, value, tensors))
        except PickleError as error:
            action = "Leave it out with select=, or load it with DeepSpeed and save it again as plain values."
            what = f"holds {shown(name):.200}, which cannot be read: {error}"
            self.table[name] = unreadable(self._path, what, action=action)
        else:
            self.tensors |= tensors

    def add_model(self, model: ModelStates) -> None:
        """Add the values of a model file."""
        self.table["model"] = Open("dict")
        for name, value in model.module.items():
            if not isinstance(value, PickledTensor):
                self.add(join("model", component(name)), value)
        self.table["client_state"] = TableNode("dict", tuple(map(component, model.client)))
        for key, value in model.client.items():
            self.add(join("client_state", component(key)), value)
        engine = {key: value for key, value in model.engine.items() if key not in ("lr_scheduler", "optimizer")}
        self.table["engine"] = TableNode("dict", tuple(map(component, engine)))
        for key, value in engine.items():
            self.add(join("engine", component(key)), value)
        if "lr_scheduler" in model.engine:
            self.add("lr_scheduler", model.engine["lr_scheduler"])
            if isinstance(node := self.table["lr_scheduler"], TableNode):
                self.table["lr_scheduler"] = Stateful(node)

    def add_optimizer(self, optim: OptimStates, groups: Sequence[Sequence[str]], *, kind: str) -> None:
        """Add the optimizer's groups and what scaled its losses; `groups` are the trained parameters of each flat
        group, and `kind` is the optimizer that the engine's configuration named."""
        self.table["optimizer"] = Open("optimizer")
        for name in ("group_of", "param_groups"):
            self.table[join("optimizer", name)] = Open("dict")
        for flat, names in enumerate(groups):
            for name in names:
                path = join("optimizer", "group_of", component(join("model", component(name))))
                self.table[path] = Plain(optim.groups_of.get(flat, flat))
        hyper = [_as_torch_has(_shared(group), kind) for group in optim.param_groups]
        decoupled = {group.get(_DECOUPLED) for group in hyper}
        if len(decoupled) == 1 and isinstance(is_decoupled := decoupled.pop(), bool):
            self.table["optimizer/class"] = Text(b"AdamW" if is_decoupled else b"Adam")
        for index, group in enumerate(hyper):
            path = join("optimizer", "param_groups", str(index))
            values = {component(key): value for key, value in group.items()}
            self.table[path] = TableNode("ordered", tuple(sorted(values)))
            for key, value in values.items():
                self.add(join(path, key), value)
        scaling = {**optim.scaling, **({} if optim.loss_scaler is None else {"loss_scaler": optim.loss_scaler})}
        self.add("scaling", dict(scaling))


def _shared(group: Mapping[str, object]) -> Mapping[str, object]:
    """The hyper-parameters of a group that do not depend on the ranks: a group of experts is named by the ranks that
    hold them, as `holdfast.frameworks.optimizer_saving` says too."""
    if group.get("moe") is not True:
        return group
    return {key: value for key, value in group.items() if key not in ("name", "moe")}


def _as_torch_has(group: Mapping[str, object], kind: str) -> Mapping[str, object]:
    """A group of DeepSpeed's own Adam with the hyper-parameters of torch's; any other group as it is.

    No file says whether weight decay was decoupled, unless the configuration asked for ``AdamW``.
    """
    if not group.get(_CORRECTED) or "foreach" in group or _OF_LAMB in group:
        return group
    decoupled = {_DECOUPLED: True} if kind.lower() == "adamw" else {}
    kept = {key: value for key, value in group.items() if key not in (_CORRECTED, "step")}
    return {**_OF_TORCH, **decoupled, **kept}
