"""A plain optimizer in a checkpoint, from which a job of Megatron goes on.

Plain optimizers and engines of DeepSpeed number their parameter groups and count steps for each parameter
(``holdfast.frameworks.optimizer``); Megatron's name their groups, and have one count for all parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import torch

from holdfast.errors import IncompatibleError
from holdfast.format.names import component, join
from holdfast.format.values import Plain
from holdfast.frameworks import BindingSource, Finish, NamedTensor
from holdfast.frameworks.megatron_trained import STEP
from holdfast.frameworks.optimizer_groups import SavedOptimizer, read_saved
from holdfast.wording import with_article

#: Parts of the names of optimizers' classes, common to all with the same state: those of torch, Apex and DeepSpeed.
_FAMILIES: Final = ("adam", "sgd")
#: The hyper-parameters that go on. Megatron's scheduler sets the others at each step, from the options of the job.
_TAKEN: Final = ("betas", "eps", "momentum")


class NumberedOptimizer(NamedTuple):
    """A plain optimizer at `path`, and for each weight that this rank trains, the name of its group in Megatron."""

    path: str
    saved: SavedOptimizer
    group_of: Mapping[str, str]

    def check_class(self, live: Iterable[str]) -> None:
        """Raise `IncompatibleError`, code ``incompatible.optimizer_class``, where the stored optimizer has other state
        than those of the classes `live`."""
        stored = self.saved.kind
        for kind in live:
            if stored is not None and _family(stored) != _family(kind):
                raise IncompatibleError(
                    f"The optimizer {self.path!r} is {with_article(kind)} of Megatron here, but {with_article(stored)} "
                    "in the checkpoint.",
                    code="incompatible.optimizer_class",
                    action=f'Train with that class, or leave the optimizer out, with select="!{self.path}".',
                    path=self.path,
                )

    def bind_groups(self, groups: Mapping[str, Mapping[str, Any]], source: BindingSource) -> Finish:
        """Bind the live `groups`, by their names, to the stored groups of their weights. The result returns the
        hyper-parameters with which they go on.

        Refuses weights of one live group whose stored groups differ in what goes on.
        """
        taken = {name: dict(self._taken(name, group, source)) for name, group in groups.items()}
        for below in ("class", "param_groups"):
            source.mark(join(self.path, below))
            for name in source.stored_below(join(self.path, below)):
                source.mark(name)

        def values() -> dict[str, dict[str, Any]]:
            return {
                name: {**group, **{key: load() for key, load in taken[name].items()}} for name, group in groups.items()
            }

        return values

    def _taken(self, name: str, group: Mapping[str, Any], source: BindingSource) -> Iterator[tuple[str, Finish]]:
        weights = [weight for weight, group_name in self.group_of.items() if group_name == name]
        for weight in weights:
            if weight in self.saved.group_names:
                source.mark(self.saved.group_names[weight])
            else:
                source.missing(join(self.path, "group_of", component(weight)))
        origins = sorted({self.saved.group_of[weight] for weight in weights if weight in self.saved.group_of})
        for key in (key for key in _TAKEN if key in group):
            paths = [join(self.path, "param_groups", str(origin), key) for origin in origins]
            paths = [path for path in paths if path in source.nodes]
            for other in paths[1:]:
                source.require_equal(paths[0], other)
            if paths:
                yield key, source.opaque(paths[0])

    def bind_steps(self, source: BindingSource) -> Finish | None:
        """Bind the counts of steps of the weights, which must be equal. The result returns the count; None where the
        optimizer has done no step."""
        slots = (join(self.path, "state", weight, STEP) for weight in self.group_of)
        names = [name for name in slots if source.stored(name) is not None or name in source.nodes]
        if not names:
            return None
        first, *others = names
        if source.stored(first) is None:
            for other in others:
                source.require_equal(first, other)
            return source.opaque(first)
        number = source.memory(first, live=None, like=None, device=torch.device("cpu"))
        for name in names:
            source.fill(NamedTensor(name, number, "split"))
        return lambda: int(number.item())


def _family(kind: str) -> str:
    return next((family for family in _FAMILIES if family in kind.lower()), kind)


def read_numbered(path: str, group_of: Mapping[str, str], source: BindingSource) -> NumberedOptimizer | None:
    """The plain optimizer that the checkpoint has at `path`; None where it has one of Megatron. `group_of` has the name
    of the group of each weight that this rank trains."""
    nodes = (source.nodes.get(join(path, "group_of", component(weight))) for weight in group_of)
    if not any(isinstance(node, Plain) for node in nodes):
        return None
    return NumberedOptimizer(path, read_saved(path, source), group_of)
