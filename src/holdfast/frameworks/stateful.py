"""Objects that describe themselves: anything with ``state_dict()`` and ``load_state_dict(state)``, and known types.

They are learning-rate schedulers, gradient scalers, data loaders, samplers, generators of numpy and Python, metrics.
Their state is opaque: it is saved unchanged, and handed back as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import Parameter, signature
from typing import Final, NamedTuple, Protocol, cast

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from holdfast.errors import HoldfastError, IncompatibleError, StateError
from holdfast.format.names import join, parse_component
from holdfast.format.values import Items, Node, Open, PerRankNode, Stateful, TableNode
from holdfast.frameworks import BindingSource, Finish, Sink
from holdfast.frameworks.known_types import WholeObject, known_type, refusal_of, type_of
from holdfast.frameworks.scheduler_lists import driven_by
from holdfast.wording import count, kind_of

#: Attributes that tell no class: nearly all schedulers have one, or had it in earlier versions of torch.
_COMMON: Final = frozenset({"last_epoch", "verbose"})
#: Attributes of schedulers that hold others.
_INNER: Final = frozenset({"_schedulers", "_milestones"})
#: The node that is stored for an object whose ``state_dict()`` was empty.
_NO_STATE: Final = Stateful(TableNode("dict", ()))


class SelfDescribing(Protocol):
    """The protocol that torch's schedulers, scalers and loaders share."""

    def state_dict(self) -> object:
        """The object's state."""

    def load_state_dict(self, state: object, /) -> object:
        """Take over a state that `state_dict` returned."""


class Description(NamedTuple):
    """The functions that read and write the state of one object. With `is_random`, it is written after everything
    else."""

    read: Callable[[], object]
    write: Callable[[object], object]
    is_random: bool


class StatefulAdapter:
    """The adapter for objects that describe themselves and are not modules or optimizers."""

    needs_names = False
    is_divisible = False
    spans_ranks = False

    def accepts(self, kind: type) -> bool:
        """As `Adapter.accepts`."""
        return is_described(kind) or (_describes_itself(kind) and not issubclass(kind, (nn.Module, Optimizer)))

    def describe(self, path: str, item: object, sink: Sink) -> bool:
        """As `Adapter.describe`."""
        if refusal_of(item) is not None:
            return False
        sink.whole(path, description_of(path, item).read())
        return True

    def bind(self, path: str, item: object, source: BindingSource) -> Finish:
        """As `Adapter.bind`."""
        description = description_of(path, item)
        node = source.nodes.get(path)
        if node is None:
            source.missing(path)
        elif isinstance(node, (Open, PerRankNode)):
            source.differs(path, kind_of(item))
        elif node == _NO_STATE and description.read() != {}:
            text = f"{kind_of(item)} with a state here, but one without state in the checkpoint, such as a disabled one"
            source.refuse("incompatible.no_state", path, text)
        elif node != _NO_STATE and _is_off(item):
            text = f"{kind_of(item)} that is off here, one with a state in the checkpoint, which would be lost"
            source.refuse("incompatible.no_state", path, text)
        elif (of_another := _another_class(item, path, source.nodes, description.read)) is not None:
            source.refuse("incompatible.scheduler_class", path, of_another)
        else:
            if (optimizer := driven_by(item)) is not None:
                source.schedules(optimizer, path)
            source.restore(description.write, source.opaque(path), is_random=description.is_random)
        return lambda: item


def _is_off(item: object) -> bool:
    """Whether an object is disabled, as a `GradScaler` may be: it then ignores the state that it is given."""
    is_enabled = getattr(item, "is_enabled", None)
    return callable(is_enabled) and is_enabled() is False


def _another_class(item: object, path: str, nodes: Mapping[str, Node], read: Callable[[], object]) -> str | None:
    """The difference, where the state at `path` is that of a learning-rate scheduler of another class; else None.

    A scheduler's state is its attributes, and torch's `load_state_dict` takes over any: a StepLR that gets the state of
    a CosineAnnealingLR goes on with its own step size and with a learning rate of the other. Private attributes differ
    between versions of torch. A class with a `load_state_dict` of its own may know older states.
    """
    if not isinstance(item, LRScheduler) or not type(item).load_state_dict.__module__.startswith("torch."):
        return None
    node = nodes.get(path)
    table = node.state if isinstance(node, Stateful) else node
    live = read()
    if not isinstance(table, TableNode) or not isinstance(live, dict):
        return None
    there = {str(parse_component(key)) for key in table.keys}
    foreign = {key for key in there - live.keys() if _is_telling(key)}
    lacking = {key for key in live.keys() - there if key in _INNER or key in _required(type(item))}
    if foreign or lacking:
        names = ", ".join([*(f"with {key}" for key in sorted(foreign)), *(f"without {key}" for key in sorted(lacking))])
        return f"{kind_of(item)} here, in the checkpoint a scheduler of another class or with other options, {names}"
    return _another_inside(getattr(item, "_schedulers", ()), join(path, "_schedulers"), nodes)


def _another_inside(items: Sequence[object], path: str, nodes: Mapping[str, Node]) -> str | None:
    """As `_another_class`, of the schedulers that another one holds."""
    stored = nodes.get(path)
    if isinstance(stored, Items) and stored.size != len(items):
        return f"{count(len(items), 'scheduler')} inside here, {stored.size} in the checkpoint"
    for number, item in enumerate(items):
        read = cast("SelfDescribing", item).state_dict
        if (found := _another_class(item, join(path, str(number)), nodes, read)) is not None:
            return f"inside {found}"
    return None


def _is_telling(attribute: str) -> bool:
    """Whether an attribute of a scheduler says of which class it is."""
    return attribute in _INNER or not (attribute.startswith("_") or attribute in _COMMON)


def _required(kind: type) -> set[str]:
    """The parameters that a call of `kind` must give. A later version of a class cannot add one."""
    parameters = signature(kind).parameters.values()
    return {each.name for each in parameters if each.default is Parameter.empty}


def is_described(kind: type) -> bool:
    """Whether `kind` is a known type with functions of its own to read and write its state, even if it is a module."""
    return isinstance(known_type(kind), WholeObject)


def description_of(path: str, item: object) -> Description:
    """The description of the object at `path`, of a type that `StatefulAdapter` accepts.

    Both of its functions turn any error of the object's own code into a `HoldfastError`.
    """
    known = known_type(type_of(item))
    if isinstance(known, WholeObject):
        return describe(path, item, known)
    itself = cast("SelfDescribing", item)
    return _named(path, item, itself.state_dict, itself.load_state_dict, is_random=False)


def describe(path: str, item: object, known: WholeObject) -> Description:
    """The description of the object at `path` by the entry `known` of its type; see `description_of`."""
    return _named(
        path, item, lambda: known.read(item), lambda state: known.write(item, state), is_random=known.is_random
    )


def _describes_itself(kind: type) -> bool:
    return callable(getattr(kind, "state_dict", None)) and callable(getattr(kind, "load_state_dict", None))


@contextmanager
def reading(path: str, what: str) -> Iterator[None]:
    """A ``with`` block that reads the object at `path`. Turns an error of the object's code, which `what` names, into a
    `StateError`, code ``state.object``.
    """
    try:
        yield
    except HoldfastError:
        raise
    except Exception as error:
        raise StateError(
            f"{_failed(path, what, error)}.",
            code="state.object",
            action="Correct that code, or take the object out of the state.",
            path=path,
        ) from error


@contextmanager
def writing(
    path: str,
    what: str,
    *,
    action: str = "Build the object as it was when the checkpoint was written, or take it out of the state.",
) -> Iterator[None]:
    """A ``with`` block that loads the object at `path`. Turns an error of the object's code, which `what` names, into
    an `IncompatibleError`, code ``incompatible.object``."""
    try:
        yield
    except HoldfastError:
        raise
    except Exception as error:
        raise IncompatibleError(
            f"{_failed(path, what, error)}: it did not take the stored state.",
            code="incompatible.object",
            action=action,
            path=path,
        ) from error


def _failed(path: str, what: str, error: Exception) -> str:
    text = f": {error}" if str(error) else ""
    return f"{path!r}: {what} raised {type(error).__name__}{text:.300}"


def _named(
    path: str, item: object, read: Callable[[], object], write: Callable[[object], object], *, is_random: bool
) -> Description:
    def reads() -> object:
        with reading(path, f"{type(item).__qualname__}.state_dict()"):
            return read()

    def writes(state: object) -> object:
        with writing(path, f"{type(item).__qualname__}.load_state_dict()"):
            return write(state)

    return Description(reads, writes, is_random)
