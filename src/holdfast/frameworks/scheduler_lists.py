"""Lists in the state of a learning-rate scheduler that have an entry for each group of its optimizer.

Groups follow their parameters, which have names. The entries of these lists follow the index of a group and nothing
else, so they fit the live groups only if those are as many as the stored ones, and in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from holdfast.errors import IncompatibleError
from holdfast.format.names import join, parse_component, split
from holdfast.format.values import Items, Node, TensorRef, bare
from holdfast.frameworks import BindingSource
from holdfast.frameworks.known_types import unwrapped
from holdfast.wording import count

#: Lists in the states of torch's schedulers whose entries belong to something else, or are only shown.
_OTHERS: Final = frozenset({"_milestones", "_schedulers", "_schedule_phases", "_last_lr"})


def driven_by(item: object) -> Optimizer | None:
    """The optimizer whose rates `item` sets, if it is a scheduler."""
    optimizer = unwrapped(getattr(item, "optimizer", None)) if isinstance(item, LRScheduler) else None
    return optimizer if isinstance(optimizer, Optimizer) else None


def check_lists(path: str, optimizer: Optimizer, served: Mapping[int, int], source: BindingSource) -> None:
    """Refuse live groups that are in another order than the stored ones, or as many as those were not, where a
    scheduler in the state has a list by group. `served` has the live index for each stored one.

    Raises:
        IncompatibleError: code ``incompatible.groups``.
    """
    groups = join(path, "param_groups")
    depth = len(split(groups))
    num_stored = len({split(name)[depth] for name in source.stored_below(groups)})
    num_live = len(optimizer.param_groups)
    for scheduler in source.schedulers(optimizer):
        for name in _lists(scheduler, num_stored, source):
            if num_stored != num_live:
                here = f"{count(num_live, 'group')} here, {num_stored} when it was saved"
                raise _misfit(path, f"has {here}, and scheduler {scheduler!r} has a list by group, {name!r}")
            for origin, index in served.items():
                if origin != index and _entry(name, origin, source) != _entry(name, index, source):
                    what = f"has as group {index} what was group {origin} when it was saved"
                    raise _misfit(path, f"{what}, and scheduler {scheduler!r} has a list by group, {name!r}")


def _lists(scheduler: str, size: int, source: BindingSource) -> Iterator[str]:
    """The names of the stored lists by group of a scheduler and of those that it holds."""
    for name in source.stored_below(scheduler):
        node = source.nodes.get(name)
        shell = None if node is None else bare(node)
        if isinstance(shell, Items) and shell.size == size and str(parse_component(split(name)[-1])) not in _OTHERS:
            yield name


def _entry(name: str, index: int, source: BindingSource) -> list[tuple[str, Node | None]]:
    """The nodes of one entry of a list, by their names in it. Tensors are not compared, and so count as different."""
    item = join(name, str(index))
    names = [item, *source.stored_below(item)]
    nodes = [(each, source.nodes.get(each)) for each in names]
    return [(each if isinstance(node, TensorRef | None) else each[len(item) :], node) for each, node in nodes]


def _misfit(path: str, text: str) -> IncompatibleError:
    return IncompatibleError(
        f"Optimizer {path!r} {text}.",
        code="incompatible.groups",
        action="Build the groups as they were when the checkpoint was written, or pass strict=False and set the rates "
        "and their limits yourself.",
        path=path,
    )
