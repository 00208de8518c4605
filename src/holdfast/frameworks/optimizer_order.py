"""The order of an optimizer's parameters, where its state depends on it.

LBFGS flattens all parameters into one vector, keeps its history of such vectors under the first parameter, and cuts
them by the order of the parameters. No element of them has a name, so a load can only compare the order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import cast

import torch
from torch.optim import Optimizer

from holdfast.errors import IncompatibleError
from holdfast.format.names import component, join
from holdfast.format.values import Node, Open, Plain
from holdfast.frameworks import BindingSource, NamedTensor, Sink
from holdfast.frameworks.optimizer_groups import SavedOptimizer
from holdfast.frameworks.optimizer_saving import Kept
from holdfast.wording import count


def describe_order(kept: Kept, optimizer: Optimizer, sink: Sink) -> None:
    """Add the position of each parameter to `sink`, where a tensor of the state has the elements of several."""
    if not _is_flat(kept, optimizer):
        return
    order = join(kept.path, "order")
    sink.node(order, Open("dict"))
    for position, entry in enumerate(chain.from_iterable(kept.groups)):
        sink.node(join(order, component(entry.name)), Plain(position))


def check_order(
    path: str, optimizer: Optimizer, found: Sequence[NamedTensor], saved: SavedOptimizer, source: BindingSource
) -> None:
    """Raise `IncompatibleError`, code ``incompatible.optimizer``, where the live parameters `found` of the optimizer at
    `path` stand in another order than the stored one. Older checkpoints, and most optimizers, have none. In a load that
    is not strict, also where it has other parameters; a strict load tells all names that only one side has."""
    if not source.is_strict:
        _check_number(path, optimizer, found, saved, source)
    order = join(path, "order")
    if order not in source.nodes:
        return
    source.mark(order)
    names = [join(order, component(entry.name)) for entry in found]
    positions = [_position(source.nodes.get(name)) for name in names]
    for name in names:
        source.mark(name)
    for index, (entry, position) in enumerate(zip(found, positions, strict=True)):
        if position != index:
            was = "without a position of its own" if position is None else f"parameter {position}"
            raise IncompatibleError(
                f"Parameter {index} of optimizer {path!r} is {entry.name!r}, which was {was} when it was saved. The "
                "state of this optimizer has the elements of all parameters in their order.",
                code="incompatible.optimizer",
                action="Give the optimizer the parameters, in the order, that it had when the checkpoint was written, "
                f'or leave it out, with select="!{path}".',
                path=path,
            )


def _check_number(
    path: str, optimizer: Optimizer, found: Sequence[NamedTensor], saved: SavedOptimizer, source: BindingSource
) -> None:
    """Raise `IncompatibleError`, code ``incompatible.optimizer``, where the optimizer at `path` has other parameters
    than the stored one, and a tensor of the stored state has the elements of all of them. `found` are the live
    parameters that the checkpoint has."""
    is_flat = isinstance(optimizer, torch.optim.LBFGS) or join(path, "order") in source.nodes
    if not is_flat or not (saved.shared or any(saved.slots.values())):
        return
    names = {name for entry in found for name in (entry.name, *source.copies(entry.name))}
    num_live, num_stored = sum(len(group["params"]) for group in optimizer.param_groups), len(saved.group_of)
    if len(found) == num_live and names >= saved.group_of.keys():
        return
    raise IncompatibleError(
        f"Optimizer {path!r} has {count(num_live, 'parameter')} here, {len(found)} of them among the "
        f"{count(num_stored, 'parameter')} that it had when it was saved. Its state has the elements of all of them in "
        "a row.",
        code="incompatible.optimizer",
        action=f'Give it the parameters that it had, or leave it out, with select="!{path}": it then starts afresh.',
        path=path,
    )


def _position(node: Node | None) -> int | None:
    return node.value if isinstance(node, Plain) and type(node.value) is int else None


def _is_flat(kept: Kept, optimizer: Optimizer) -> bool:
    """Whether a tensor of the state has as many elements as several parameters together.

    Such state belongs to a whole group, or to all groups. So it is not searched where more parameters have state.
    """
    if kept.held:
        return False  # such tensors were refused
    holders = [slots for slots in kept.kept.values() if slots]
    state = cast("Mapping[object, object]", optimizer.state)
    shared = [value for key, value in state.items() if not isinstance(key, torch.Tensor)]
    if len(holders) > len(kept.groups) and not shared:
        return False
    parts = [*kept.groups, list(chain.from_iterable(kept.groups))]
    totals = {total for part in parts if len(part) > 1 for total in _totals(part)}
    searched = shared if len(holders) > len(kept.groups) else [*holders, *shared]
    return any(tensor.ndim == 1 and tensor.numel() in totals for tensor in _tensors(searched))


def _totals(parameters: Sequence[NamedTensor]) -> Iterator[int]:
    """The numbers of elements of these parameters, and of the trained ones: complex ones count once, or twice."""
    for chosen in (parameters, [entry for entry in parameters if entry.tensor.requires_grad]):
        tensors = [entry.tensor for entry in chosen]
        yield sum(tensor.numel() for tensor in tensors)
        yield sum(tensor.numel() * (1 + tensor.is_complex()) for tensor in tensors)


def _tensors(items: Iterable[object]) -> Iterator[torch.Tensor]:
    for item in items:
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, Mapping):
            yield from _tensors(item.values())
        elif isinstance(item, (list, tuple)):
            yield from _tensors(item)
