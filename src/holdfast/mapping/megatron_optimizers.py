"""Optimizers of Megatron in a table, rewritten as plain ones of the same parameters, and the master weights that a job
of Megatron takes from a plain one. Pure.

Megatron's optimizers keep master weights as the slot ``fp32``, count their steps once for all parameters, and name
parameter groups after what tells them apart (``holdfast.frameworks.megatron_optimizer``). Plain optimizers train the
weights themselves, count for each parameter, and number their groups (``holdfast.frameworks.optimizer``).
"""

from __future__ import annotations

from typing import Final

from holdfast.format.names import component, join
from holdfast.format.values import Open, Plain, TableNode, Text
from holdfast.mapping.draft import MappingState

#: The slot of the master weights.
MASTER: Final = "fp32"
_STEP: Final = "step"
#: The entries of a group of torch's AdamW, with their default values. The optimizers of Apex and Transformer Engine
#: keep only the first four.
_ADAM: Final[dict[str, bool | None]] = {
    "amsgrad": False,
    "foreach": None,
    "maximize": False,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}
_KEPT: Final = frozenset(
    ("lr", "initial_lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov", *_ADAM)
)


def is_of_megatron(draft: MappingState, path: str) -> bool:
    """Whether the optimizer at `path` names its groups, as Megatron's do."""
    groups = [draft.value(draft.group_name(path, parameter)) for parameter in draft.optimizers[path]]
    return bool(groups) and all(isinstance(group, Text) for group in groups)


def make_plain(draft: MappingState, path: str) -> None:
    """Rewrite the optimizer at `path`: the master weights become the weights, each parameter gets the count of steps,
    the groups get numbers, in the order of their names, and loss scalers are left out."""
    names: dict[str, str] = {}
    for parameter in draft.optimizers[path]:
        group = draft.value(draft.group_name(path, parameter))
        assert isinstance(group, Text)
        names[parameter] = group.data.decode("utf-8", "surrogatepass")
    numbers = {name: number for number, name in enumerate(sorted(set(names.values())))}
    for name, number in numbers.items():
        _number_group(draft, join(path, "param_groups"), component(name), str(number))
    for parameter, name in names.items():
        draft.put_value(draft.group_name(path, parameter), Plain(numbers[name]))
    draft.put_value(join(path, "param_groups"), Open("dict"))
    draft.remove(draft.values_at(join(path, "grad_scaler")))
    draft.take_masters(path, MASTER)
    if draft.value(join(path, _STEP)) is None:
        draft.drop_state(path, "exp_avg")  # before the first step, moments are 0, and Adam makes them with its count
    draft.spread_value(join(path, _STEP), path, _STEP)


def add_masters(draft: MappingState, path: str) -> None:
    """Give each parameter of the optimizer at `path` a master weight: the weight itself, which must be in fp32."""
    draft.give_masters(path, MASTER)


def _number_group(draft: MappingState, groups: str, name: str, number: str) -> None:
    """Give a group a number for its name, and leave out what only Megatron keeps in it."""
    old, new = join(groups, name), join(groups, number)
    node = draft.value(old)
    keys = node.keys if isinstance(node, TableNode) else ()
    kept = tuple(key for key in keys if key in _KEPT)
    draft.remove([below for key in keys if key not in _KEPT for below in draft.values_at(join(old, key))])
    draft.move({below: new + below.removeprefix(old) for below in draft.values_at(old)})
    lacking = [key for key in _ADAM if "betas" in kept and key not in kept]
    for key in lacking:
        draft.put_value(join(new, key), Plain(_ADAM[key]))
    draft.put_value(new, TableNode("dict", (*kept, *lacking)))
