"""The registry of adapters, which finds the adapter for an object.

There is one registry per process, as there is one of each type: `save` and `load` are functions, and objects lie deep
inside a state.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache

from holdfast.errors import ConfigurationError
from holdfast.frameworks import Adapter, BindingSource, Finish
from holdfast.frameworks.deepspeed_engine import DeepSpeedAdapter
from holdfast.frameworks.known_types import type_of
from holdfast.frameworks.megatron_model import MegatronModelAdapter
from holdfast.frameworks.megatron_optimizer import MegatronOptimizerAdapter
from holdfast.frameworks.module import ModuleAdapter
from holdfast.frameworks.optimizer import OptimizerAdapter
from holdfast.frameworks.stateful import StatefulAdapter, reading, writing
from holdfast.frameworks.titan_containers import TitanLoaderAdapter, TitanModelAdapter, TitanOptimizersAdapter
from holdfast.wording import kind_of

#: In the order in which they are asked: DeepSpeed's engines are modules too, and torchtitan's container an optimizer.
#: Always replaced as a whole, so that other threads see a complete tuple.
_adapters: tuple[Adapter, ...] = (
    DeepSpeedAdapter(),
    MegatronModelAdapter(),
    MegatronOptimizerAdapter(),
    TitanModelAdapter(),
    TitanOptimizersAdapter(),
    TitanLoaderAdapter(),
    ModuleAdapter(),
    OptimizerAdapter(),
    StatefulAdapter(),
)


def register_adapter(adapter: Adapter) -> None:
    """Save and load objects of another kind with `adapter`, whose `accepts` says which types it handles.

    It is asked before the adapters that were registered earlier, and before holdfast's own. Adapters are not asked
    about tensors, containers, values, and types of `register_value` and `register_tensor`. Register it in every process
    that saves or loads, before the first call. Any thread may call this.

    Raises:
        ConfigurationError: `adapter` lacks a part of `holdfast.frameworks.Adapter` (code ``config.adapter``).
    """
    global _adapters  # noqa: PLW0603 - see above
    parts = ("needs_names", "is_divisible", "spans_ranks", "accepts", "describe", "bind")
    lacking = [part for part in parts if not hasattr(adapter, part)]
    if lacking:
        raise ConfigurationError(
            f"{kind_of(adapter)} is not an adapter: it lacks {', '.join(lacking)}.",
            code="config.adapter",
            action="Implement the whole protocol holdfast.frameworks.Adapter.",
        )
    _adapters = (adapter, *_adapters)
    _adapter_of_type.cache_clear()


def adapter_of(item: object) -> Adapter | None:
    """The adapter for an object; None if no adapter accepts its type."""
    return _adapter_of_type(type_of(item))


@contextmanager
def describing(path: str, adapter: Adapter) -> Iterator[None]:
    """A ``with`` block in which `adapter` describes the object at `path`. Turns any error of an adapter that is not
    holdfast's own into a `StateError`, code ``state.object``, which names the object."""
    with nullcontext() if _is_ours(adapter) else reading(path, _name(adapter)):
        yield


def bound(path: str, adapter: Adapter, item: object, source: BindingSource) -> Finish:
    """The result of `adapter.bind` for `item` at `path`. Turns any error of an adapter that is not holdfast's own, in
    `bind` or in its result, into an `IncompatibleError`, code ``incompatible.object``, which names the object."""
    if _is_ours(adapter):
        return adapter.bind(path, item, source)
    with writing(path, _name(adapter)):
        finish = adapter.bind(path, item, source)

    def named() -> object:
        with writing(path, _name(adapter)):
            return finish()

    return named


def _is_ours(adapter: Adapter) -> bool:
    return type(adapter).__module__.startswith("holdfast.")


def _name(adapter: Adapter) -> str:
    return f"the adapter {type(adapter).__qualname__}"


@lru_cache(maxsize=1024)
def _adapter_of_type(kind: type) -> Adapter | None:
    return next((adapter for adapter in _adapters if _accepts(adapter, kind)), None)


def _accepts(adapter: Adapter, kind: type) -> bool:
    try:
        return adapter.accepts(kind)
    except Exception as error:
        raise ConfigurationError(
            f"{_name(adapter)} raised {type(error).__name__} when asked about {kind.__qualname__}: {error}",
            code="config.adapter",
            action="Correct the method `accepts` of the adapter.",
        ) from error
