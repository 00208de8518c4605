"""Objects that describe themselves: anything with ``state_dict()`` and ``load_state_dict(state)``, and adapted types.

Learning-rate schedulers, gradient scalers, data loaders, samplers, generators of numpy and Python, metrics. What they
give is opaque: it is saved as it is and handed back whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol, TypeGuard

from torch import nn
from torch.optim import Optimizer

from holdfast.errors import HoldfastError, IncompatibleError, StateError
from holdfast.frameworks.adapters import WholeObject, adapter_of


class SelfDescribing(Protocol):
    """The protocol that torch's schedulers, scalers and loaders share."""

    def state_dict(self) -> object:
        """The object's state."""

    def load_state_dict(self, state: object, /) -> object:
        """Take over a state that `state_dict` gave."""


class Description(NamedTuple):
    """How to read and write the state of one object. `is_random`: it is written after everything else."""

    read: Callable[[], object]
    write: Callable[[object], object]
    is_random: bool


def describes_itself(item: object) -> TypeGuard[SelfDescribing]:
    """Whether `item` is an instance whose class has both methods; classes themselves are not."""
    kind = type(item)
    return callable(getattr(kind, "state_dict", None)) and callable(getattr(kind, "load_state_dict", None))


def is_described(item: object) -> bool:
    """Whether an adapter says how the state of `item` is read and written, whatever else `item` is."""
    return isinstance(adapter_of(item), WholeObject)


def is_stateful(item: object) -> bool:
    """Whether `item` is saved as what it says of itself."""
    if is_described(item):
        return True
    return describes_itself(item) and not isinstance(item, (nn.Module, Optimizer))


def description_of(path: str, item: object) -> Description | None:
    """How the object at `path` says its state, where `is_stateful` says that it does.

    Both functions raise `HoldfastError` for whatever the object's own code raises.
    """
    if not is_stateful(item):
        return None
    adapter = adapter_of(item)
    if isinstance(adapter, WholeObject):
        return describe(path, item, adapter)
    assert describes_itself(item)
    return _named(path, item, item.state_dict, item.load_state_dict, is_random=False)


def describe(path: str, item: object, adapter: WholeObject) -> Description:
    """How the object at `path` says its state, in the words of `adapter`; see `description_of`."""
    read, write = adapter.read, adapter.write
    return _named(path, item, lambda: read(item), lambda state: write(item, state), is_random=adapter.is_random)


@contextmanager
def reading(path: str, what: str) -> Iterator[None]:
    """Say where code of an object in the state failed while it was read; `what` names the code.

    Raises `StateError`, code ``state.object``.
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
def writing(path: str, what: str) -> Iterator[None]:
    """The same of what is loaded. Raises `IncompatibleError`, code ``incompatible.object``."""
    try:
        yield
    except HoldfastError:
        raise
    except Exception as error:
        raise IncompatibleError(
            f"{_failed(path, what, error)}: it did not take the stored state.",
            code="incompatible.object",
            action="Build the object as it was when the checkpoint was written, or take it out of the state.",
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
