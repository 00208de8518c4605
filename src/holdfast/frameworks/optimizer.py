"""torch optimizers: state per named parameter, hyper-parameters per group.

Below an optimizer's path: ``state/<parameter name>/<slot>``, ``param_groups/<i>/<key>``, ``group_of/<parameter name
as one component>`` (the group's index), ``shared/<key>`` for state that belongs to no parameter, and ``class``, the
name of the optimizer's type without its module. Parameters are matched by name, so a load may group them differently.
``order/<parameter name as one component>`` (its position) is there only where a tensor of the state has the elements of
several parameters; see ``optimizer_order``. Checkpoints of the first development versions have no ``class`` or
``order``.

Ranks that hold different parameters (pipeline stages, experts) add up to one optimizer: the nodes of ``state``,
``group_of`` and ``param_groups`` do not list their entries, so those of several ranks merge. The node of one group
lists its keys, so that ranks with the same group must agree on all of its hyper-parameters.

A load builds the state from the stored slots, in their stored dtype. It does not use ``Optimizer.load_state_dict``,
which casts fp32 state of a bf16 parameter to bf16, and cannot load into a fresh optimizer, which has no state. The
``state_dict()`` of an optimizer that was saved as a plain dict is read under these names (`optimizer_state_dicts`).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Optimizer

from holdfast.format.values import Open
from holdfast.frameworks import BindingSource, Finish, Sink
from holdfast.frameworks.optimizer_loading import bind_optimizer
from holdfast.frameworks.optimizer_order import describe_order
from holdfast.frameworks.optimizer_saving import KeptGroups, flatten_optimizer, is_replayed, read_slots, stepped
from holdfast.frameworks.optimizer_state_dicts import as_optimizer


class OptimizerAdapter:
    """The adapter for torch optimizers. Their names contain those of parameters, so they come after all modules."""

    needs_names = True
    is_divisible = False
    spans_ranks = True

    def accepts(self, kind: type) -> bool:
        """As `Adapter.accepts`."""
        return issubclass(kind, Optimizer)

    def describe(self, path: str, item: Optimizer, sink: Sink) -> bool:
        """As `Adapter.describe`. Passes the slots that only steps change to `Sink.later`."""
        describe_optimizer(path, item, sink, steppers=[item])
        return True

    def bind(self, path: str, item: Optimizer, source: BindingSource) -> Finish:
        """As `Adapter.bind`."""
        return bind_as_optimizer(path, item, source)


def describe_optimizer(path: str, item: Optimizer, sink: Sink, *, steppers: Sequence[Optimizer]) -> None:
    """Add an optimizer to `sink`. Its parameters change in the steps of the `steppers`, each of which has some of
    them."""
    flatten_optimizer(path, item, sink)
    kept = read_slots(path, item, sink)
    describe_order(kept, item, sink)
    sink.later(KeptGroups(kept))
    if is_replayed(item):
        sink.unsteady(entry.tensor for group in kept.groups for entry in group)
    trained = [] if is_replayed(item) else stepped(kept)
    for stepper in steppers:
        sink.steps(stepper, trained)
    ids = {id(entry.tensor) for entry in trained}
    if not ids >= kept.kept.keys():
        kept, free = kept.divided(ids)
        free.describe(sink)
    sink.later(kept)


def bind_as_optimizer(path: str, item: Optimizer, source: BindingSource) -> Finish:
    """Bind an optimizer to what the checkpoint has at `path`."""
    node = source.nodes.get(path)
    if node == Open("optimizer"):
        return bind_optimizer(path, item, source)
    if node is None:
        source.missing(path)
    elif (translated := as_optimizer(path, item, source)) is not None:
        return bind_optimizer(path, item, translated)
    else:
        source.differs(path, "an optimizer")
    return lambda: item
