"""Objects that describe themselves: anything with ``state_dict()`` and ``load_state_dict(state)``.

Learning-rate schedulers, gradient scalers, data loaders, samplers. What they give is opaque: it is saved as it is
and handed back whole.
"""

from __future__ import annotations

from typing import Protocol, TypeGuard


class SelfDescribing(Protocol):
    """The protocol that torch's schedulers, scalers and loaders share."""

    def state_dict(self) -> object:
        """The object's state."""

    def load_state_dict(self, state: object, /) -> object:
        """Take over a state that `state_dict` gave."""


def is_stateful(item: object) -> TypeGuard[SelfDescribing]:
    """Whether `item` is an instance whose class has both methods; classes themselves are not."""
    kind = type(item)
    return callable(getattr(kind, "state_dict", None)) and callable(getattr(kind, "load_state_dict", None))
