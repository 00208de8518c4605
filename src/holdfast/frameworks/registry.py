"""Which adapter an object is saved and loaded by.

The registry is one per process, as types are: `save` and `load` are functions, and objects stand deep inside a state.
"""

from __future__ import annotations

from functools import lru_cache

from holdfast.errors import ConfigurationError
from holdfast.frameworks import Adapter
from holdfast.frameworks.known_types import type_of
from holdfast.frameworks.module import ModuleAdapter
from holdfast.frameworks.optimizer import OptimizerAdapter
from holdfast.frameworks.stateful import StatefulAdapter
from holdfast.wording import kind_of

#: In the order in which they are asked. Replaced as a whole, so that other threads see all of it or none.
_adapters: tuple[Adapter, ...] = (ModuleAdapter(), OptimizerAdapter(), StatefulAdapter())


def register_adapter(adapter: Adapter) -> None:
    """Save and load objects of another kind with `adapter`, which says of which types they are.

    It is asked before the adapters that were registered earlier, and before holdfast's own. Tensors, containers,
    values and types of `register_value` and `register_tensor` are no objects: no adapter is asked of those. Register it
    in every process that saves or loads, before the first call. For any thread.

    Raises:
        ConfigurationError: `adapter` lacks a part of `holdfast.frameworks.Adapter` (code ``config.adapter``).
    """
    global _adapters  # noqa: PLW0603 - see above
    parts = ("needs_names", "is_divisible", "spans_ranks", "accepts", "describe", "bind")
    lacking = [part for part in parts if not hasattr(adapter, part)]
    if lacking:
        raise ConfigurationError(
            f"{kind_of(adapter)} is no adapter: it has no {', '.join(lacking)}.",
            code="config.adapter",
            action="Give it all parts of the protocol holdfast.frameworks.Adapter.",
        )
    _adapters = (adapter, *_adapters)
    _adapter_of_type.cache_clear()


def adapter_of(item: object) -> Adapter | None:
    """The adapter of an object; None for what is no object of any kind that is known."""
    return _adapter_of_type(type_of(item))


@lru_cache(maxsize=1024)
def _adapter_of_type(kind: type) -> Adapter | None:
    return next((adapter for adapter in _adapters if adapter.accepts(kind)), None)
