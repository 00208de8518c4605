"""The containers that torchtitan's trainer hands to a checkpoint manager, under names in which no layout has a part.

The parts of a model (virtual pipeline stages) have the names of the whole model, and so do the optimizers of the parts:
those of one class are one optimizer, at the path of the container, or one for each class below it where there are
several. The state of a data loader belongs to one data-parallel rank, and not to a rank of the job: it is stored below
``dp_rank_<i>``, beside ``world_size``, as torchtitan names them, but without the pickle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Final, cast

from torch import nn
from torch.optim import Optimizer

from holdfast.errors import StateError
from holdfast.format.names import join
from holdfast.format.values import Open
from holdfast.frameworks import BindingSource, Finish, Sink
from holdfast.frameworks.module import ModuleState, bind_module, describe_module, read_module
from holdfast.frameworks.optimizer import bind_as_optimizer, describe_optimizer
from holdfast.frameworks.optimizer_saving import hyper_parameters
from holdfast.frameworks.stateful import reading, writing
from holdfast.wording import count

_MODEL: Final = ("torchtitan.components.checkpointer.base", "ModelWrapper")
_OPTIMIZERS: Final = ("torchtitan.components.optimizer.optimizer", "OptimizersContainer")
_LOADER: Final = ("torchtitan.components.dataloader", "ParallelAwareDataloader")
_WORLD_SIZE: Final = "world_size"


@dataclass(frozen=True)
class TitanParts:
    """The parts of a model on one rank. Torchtitan's own `ModelWrapper` of them gathers and keeps fused weights."""

    model: list[nn.Module]


class TitanModelAdapter:
    """The adapter for the parts of a model, in `TitanParts` or in torchtitan's `ModelWrapper`."""

    needs_names = False
    is_divisible = True
    spans_ranks = True

    def accepts(self, kind: type) -> bool:
        """As `Adapter.accepts`."""
        return kind is TitanParts or _is(kind, _MODEL)

    def describe(self, path: str, item: Any, sink: Sink) -> bool:
        """As `Adapter.describe`."""
        parts = [read_module(path, part, sink.wants) for part in _parts(item)]
        joined = ModuleState(
            sink.wants,
            list(chain.from_iterable(part.tensors for part in parts)),
            list(chain.from_iterable(part.extras for part in parts)),
            list(chain.from_iterable(part.modules for part in parts)),
            list(chain.from_iterable(part.units for part in parts)),
            set().union(*(part.managed for part in parts)),
            list(chain.from_iterable(part.held for part in parts)),
            {key: first for part in parts for key, first in part.first_experts.items()},
        )
        return describe_module(path, joined, sink)

    def bind(self, path: str, item: Any, source: BindingSource) -> Finish:
        """As `Adapter.bind`."""
        finishes = [bind_module(path, part, source) for part in _parts(item)]
        return partial(_finish, finishes, item)


class TitanOptimizersAdapter:
    """The adapter for torchtitan's `OptimizersContainer`."""

    needs_names = True
    is_divisible = False
    spans_ranks = True

    def accepts(self, kind: type) -> bool:
        """As `Adapter.accepts`."""
        return _is(kind, _OPTIMIZERS)

    def describe(self, path: str, item: Any, sink: Sink) -> bool:
        """As `Adapter.describe`."""
        by_class = _by_class(item)
        if len(by_class) > 1:
            sink.node(path, Open("dict"))
        for name, optimizers in by_class.items():
            here = path if len(by_class) == 1 else join(path, name)
            describe_optimizer(here, _joined(here, optimizers), sink, steppers=optimizers)
        return True

    def bind(self, path: str, item: Any, source: BindingSource) -> Finish:
        """As `Adapter.bind`."""
        by_class = _by_class(item)
        if len(by_class) == 1:
            finishes = [_bind_joined(path, optimizers, source) for optimizers in by_class.values()]
        else:
            finishes = [_bind_joined(join(path, name), each, source) for name, each in by_class.items()]

        def finish() -> object:
            for each in finishes:
                each()
            item.init_cache_state_dict()  # which torchtitan's container for torchft keeps
            return item

        return finish


class TitanLoaderAdapter:
    """The adapter for torchtitan's `ParallelAwareDataloader`, whose state is that of a data-parallel rank."""

    needs_names = False
    is_divisible = False
    spans_ranks = False

    def accepts(self, kind: type) -> bool:
        """As `Adapter.accepts`. A loader with a ``state_dict`` of its own is none: it says what its state is."""
        if not _is(kind, _LOADER):
            return False
        owner = next(base for base in kind.__mro__ if "state_dict" in vars(base))
        return (owner.__module__, owner.__qualname__) == _LOADER

    def describe(self, path: str, item: Any, sink: Sink) -> bool:
        """As `Adapter.describe`."""
        name = _rank_name(item)
        with reading(path, f"{type(item).__qualname__}.state_dict()"):
            state = _loaded_by(item).state_dict(item)
        sink.node(path, Open("dict"))
        sink.tree(join(path, _WORLD_SIZE), item.dp_world_size)
        sink.tree(join(path, name), state, "first")  # ranks that train on the same batches have equal loaders
        return True

    def bind(self, path: str, item: Any, source: BindingSource) -> Finish:
        """As `Adapter.bind`. Refuses another number of data-parallel ranks."""
        name, size = join(path, _rank_name(item)), join(path, _WORLD_SIZE)
        stored = {below[len(path) + 1 :].split("/", 1)[0] for below in source.stored_below(path)} - {_WORLD_SIZE}
        if not stored:
            source.missing(path)
        elif len(stored) != item.dp_world_size or name not in source.nodes:
            ranks = (count(number, "data-parallel rank") for number in (len(stored), item.dp_world_size))
            text = "a data loader of {}, to be loaded by {}: its position belongs to one of them".format(*ranks)
            source.refuse("incompatible.per_rank", path, text)
        else:
            for other in source.stored_below(path):
                if other == size or not (other + "/").startswith(name + "/"):
                    source.mark(other)
            write = partial(_write_loader, path, item)
            source.restore(write, source.opaque(name, replicas="first"), is_random=False)
        return lambda: item


def _is(kind: type, name: tuple[str, str]) -> bool:
    return any((base.__module__, base.__qualname__) == name for base in kind.__mro__)


def _finish(finishes: Sequence[Callable[[], object]], item: object) -> object:
    for each in finishes:
        each()
    return item


def _parts(wrapper: Any) -> list[nn.Module]:
    return cast("list[nn.Module]", wrapper.model)


def _by_class(container: Any) -> dict[str, list[Optimizer]]:
    """The optimizers of a container, by the name of their class, in the order of the parts of the model."""
    found: dict[str, list[Optimizer]] = {}
    for optimizer in container.optimizers:
        found.setdefault(type(optimizer).__name__, []).append(optimizer)
    return found


def _joined(path: str, optimizers: Sequence[Optimizer]) -> Optimizer:
    """One optimizer of the same class, with the parameters and slots of several. Each of its groups has the parameters
    of the groups with that index; all else is that of the first one.

    Raises `StateError`, code ``state.optimizer``, where their groups are not alike.
    """
    first, *others = optimizers
    if not others:
        return first
    for other in others:
        if [hyper_parameters(group) for group in other.param_groups] != list(map(hyper_parameters, first.param_groups)):
            raise StateError(
                f"Optimizer {path!r} consists of {count(len(optimizers), 'optimizer')}, one for each part of the model "
                "on this rank, and their groups have different hyper-parameters.",
                code="state.optimizer",
                action="Give the groups of all parts the same hyper-parameters.",
                path=path,
            )
    joined = object.__new__(type(first))
    vars(joined).update(vars(first))
    joined.param_groups = [
        {**groups[0], "params": [parameter for group in groups for parameter in group["params"]]}
        for groups in zip(*(optimizer.param_groups for optimizer in optimizers), strict=True)
    ]
    joined.state = type(first.state)(dict)
    for optimizer in optimizers:
        joined.state.update(optimizer.state)
    return joined


def _bind_joined(path: str, optimizers: Sequence[Optimizer], source: BindingSource) -> Finish:
    joined = _joined(path, optimizers)
    load = bind_as_optimizer(path, joined, source)

    def finish() -> object:
        load()
        for optimizer in optimizers if len(optimizers) > 1 else ():
            for group, loaded in zip(optimizer.param_groups, joined.param_groups, strict=True):
                group.update(hyper_parameters(loaded))
                for parameter in group["params"]:
                    if parameter in joined.state:
                        optimizer.state[parameter] = joined.state[parameter]
                    else:
                        optimizer.state.pop(parameter, None)
        return joined

    return finish


def _rank_name(loader: Any) -> str:
    return f"dp_rank_{loader.dp_rank}"


def _loaded_by(loader: object) -> Any:
    """The base of torchtitan's class, whose state that class pickles."""
    kinds = type(loader).__mro__
    (place,) = (number for number, kind in enumerate(kinds) if (kind.__module__, kind.__qualname__) == _LOADER)
    return kinds[place + 1]


def _write_loader(path: str, loader: Any, state: Mapping[str, object]) -> None:
    with writing(path, f"{type(loader).__qualname__}.load_state_dict()"):
        _loaded_by(loader).load_state_dict(loader, state)
