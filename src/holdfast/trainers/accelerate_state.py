"""`state_of`: all that an `Accelerator` of accelerate prepared, as one state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import accelerate
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from holdfast.errors import ConfigurationError, StateError
from holdfast.frameworks.deepspeed_engine import DeepSpeedAdapter
from holdfast.frameworks.known_types import unwrapped
from holdfast.state.per_rank import PerRank
from holdfast.state.random_state import RandomState
from holdfast.trainers.followed_loader import FollowedLoader
from holdfast.wording import count, kind_of

__all__ = ["state_of"]

#: The lists of an `Accelerator` are no public interface, so each version of it needs a test.
_TESTED: Final = "1.15"
#: Entries that `state_of` makes under these names alone.
_OWN: Final = ("scaler", "registered", "accelerator", "random")
_REFUSED: Final = (DistributedType.MEGATRON_LM, DistributedType.XLA)


def state_of(accelerator: Accelerator, *, names: Mapping[str, object] | None = None) -> dict[str, object]:
    """The state of the job of `accelerator`, for a `Checkpointer`: all that it has prepared when this is called.

    The entries are ``model``, ``optimizer`` and ``scheduler`` (``engine`` for an engine of DeepSpeed, which holds all
    three); ``loader``, the position in the prepared loader; ``scaler``, where there is one; ``registered``, the objects
    of `register_for_checkpointing` by the names of their classes; ``accelerator``, its count of micro-batches; and
    ``random``, a `RandomState`. The names and values below them are those of the plain objects, so DDP, FSDP2 and one
    process load what any of them saved, on any number of ranks. You may add entries, or replace one.

    `names` maps names of your own to objects, as `prepare` returned them. Where several models, optimizers, schedulers
    or registered objects of one kind were prepared, name each of them. Of several loaders, name those that are trained
    on; the others, such as loaders for evaluation, have no part in the state. Name a model with buffers, too: the
    accelerator does not hold the DDP that `prepare` put around it.

    From now on the loaders in the state count the batches that the loop takes from them. After a restore, the next pass
    begins where the save was: on as many ranks bit for bit, on another number with the next sample, if the loader goes
    through its samples in order or has a seedable sampler (`use_seedable_sampler`). Nothing is communicated.

    Raises:
        ConfigurationError: nothing was prepared, or several objects need names; `names` has an object that was not
            prepared; a registered object has no ``state_dict``; or the version of accelerate, or its plugin, is not
            known to holdfast (code ``config.accelerator``).

    A save between the micro-batches of one step raises `StateError`, code ``state.gradients``.
    """
    _check(accelerator)
    naming = _Naming(names or {})
    parts = _prepared(accelerator)
    state: dict[str, object] = {}
    for kind, items in parts.items():
        if kind != "loader":
            state |= naming.named(kind, items)
    _refuse_hidden_wrapper(accelerator, state)
    for name, loader in naming.followed(parts["loader"]).items():
        followed = FollowedLoader.of(loader, world_size=accelerator.num_processes)
        state[name] = {"position": followed, "random": PerRank(followed.random, on_resize="first")}
    if accelerator.scaler is not None and accelerator.scaler.is_enabled():
        state["scaler"] = accelerator.scaler
    known = [unwrapped(item) for items in parts.values() for item in items]
    others = [
        item for item in _held(accelerator, "custom_objects") if all(unwrapped(item) is not each for each in known)
    ]
    state |= naming.registered(others)
    naming.refuse_unused()
    return state | {"accelerator": MicroBatches(accelerator), "random": RandomState()}


class MicroBatches:
    """The number of micro-batches that the accelerator has counted, as an entry of the state."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, int]:
        """The number. Raises `StateError`, code ``state.gradients``, where a step is not finished."""
        if not self._accelerator.sync_gradients:
            raise StateError(
                "The accelerator has accumulated gradients of a step that is not finished, which a checkpoint does not "
                "hold.",
                code="state.gradients",
                action="Save where accelerator.sync_gradients is true.",
            )
        return {"micro_batches": self._accelerator.step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Set the number."""
        self._accelerator.step = state["micro_batches"]


def _prepared(accelerator: Accelerator) -> dict[str, list[Any]]:
    """The prepared objects by kind, each once. The optimizer and the scheduler of an engine belong to the engine."""
    models = _distinct(_held(accelerator, "models"))
    is_engine = DeepSpeedAdapter().accepts
    kind = "engine" if any(is_engine(type(model)) for model in models) else "model"
    held = [held for model in models for held in _of_engine(model)] if kind == "engine" else []
    return {
        kind: models,
        "optimizer": _distinct(_held(accelerator, "optimizers"), without=held),
        "scheduler": _distinct(_held(accelerator, "schedulers"), without=held),
        "loader": _distinct(_held(accelerator, "dataloaders")),
    }


def _held(accelerator: Accelerator, kind: str) -> list[Any]:
    """A list of objects that the accelerator holds; they have no public names."""
    held: list[Any] = vars(accelerator)[f"_{kind}"]
    return held


def _of_engine(engine: Any) -> Iterator[object]:
    yield engine.optimizer
    yield engine.lr_scheduler


def _inside(item: Any) -> object:
    """The object that the accelerator holds for `item`: of a model in DDP, the plain model."""
    return item.module if isinstance(item, DistributedDataParallel) else unwrapped(item)


def _refuse_hidden_wrapper(accelerator: Accelerator, state: Mapping[str, object]) -> None:
    """Refuse a plain model whose buffers differ between ranks: the accelerator does not hold the DDP around it, which
    says that those of rank 0 count."""
    if accelerator.num_processes == 1 or not accelerator.distributed_type.value.startswith("MULTI_"):
        return
    for name, item in state.items():
        if not isinstance(item, nn.Module) or isinstance(item, DistributedDataParallel):
            continue
        if next(item.buffers(), None) is not None:
            raise _refused(
                f"{name!r} has buffers, which differ between ranks, and the accelerator does not hold the "
                "DistributedDataParallel around it, whose rank 0 counts.",
                f"Give the model that prepare returned: names={{{name!r}: model}}.",
            )


def _distinct(items: Iterable[Any], *, without: Iterable[object] = ()) -> list[Any]:
    seen, found = {id(item) for item in without}, []
    for item in items:
        inner = unwrapped(item)
        if id(inner) not in seen:
            seen.add(id(inner))
            found.append(item)
    return found


class _Naming:
    """The names of a state: those that the user gives, and else those of the kinds."""

    def __init__(self, names: Mapping[str, object]) -> None:
        if own := sorted(names.keys() & set(_OWN)):
            raise _refused(f"names has {own[0]!r}, an entry that state_of makes itself.", "Choose another name.")
        self._names = {id(_inside(item)): name for name, item in names.items()}
        self._items = dict(names)
        self._unused = dict(names)

    def _given(self, items: Iterable[Any]) -> dict[str, Any]:
        names = [self._names[id(inner)] for item in items if id(inner := _inside(item)) in self._names]
        for name in names:
            self._unused.pop(name, None)
        return {name: self._items[name] for name in names}

    def named(self, kind: str, items: list[Any]) -> dict[str, Any]:
        """The objects of one kind by name."""
        given = self._given(items)
        if len(items) == 1 and not given:
            return {kind: items[0]}
        if len(given) < len(items):
            raise _unnamed(kind, len(items), f"Name each of them, such as names={{'first_{kind}': ..., ...}}.")
        return given

    def followed(self, loaders: list[Any]) -> dict[str, Any]:
        """The loaders whose positions belong to the state, by name."""
        given = self._given(loaders)
        if len(loaders) > 1 and not given:
            raise _unnamed("loader", len(loaders), "Name the one that is trained on: names={'loader': train_loader}.")
        return given or dict(zip(["loader"], loaders, strict=False))

    def registered(self, items: list[Any]) -> dict[str, object]:
        """The objects of `register_for_checkpointing`."""
        for item in items:
            if not hasattr(item, "state_dict") or not hasattr(item, "load_state_dict"):
                raise _refused(
                    f"{kind_of(item)} is registered for checkpointing, and has no state_dict and load_state_dict.",
                    "Give its class both methods.",
                )
        given = self._given(items)
        found: dict[str, object] = {}
        for item in items:
            if all(item is not each for each in given.values()):
                name = type(item).__name__
                if name in found:
                    raise _unnamed(f"registered {name}", 2, "Name each of them in names=.")
                found[name] = item
        return given | ({"registered": found} if found else {})

    def refuse_unused(self) -> None:
        """Refuse names of objects that do not belong to the accelerator."""
        for name, item in self._unused.items():
            raise _refused(
                f"names has {name!r}, {kind_of(item)} that the accelerator has neither prepared nor registered.",
                "Give the object that accelerator.prepare returned; add other objects to the state itself.",
            )


def _check(accelerator: Accelerator) -> None:
    if accelerate.__version__.split(".")[:2] != _TESTED.split("."):
        raise _refused(
            f"accelerate {accelerate.__version__} is installed, and holdfast knows what an Accelerator of {_TESTED} "
            "holds.",
            f"Install accelerate {_TESTED}, or put what prepare returned into the state yourself.",
        )
    if accelerator.distributed_type in _REFUSED:
        raise _refused(
            f"The accelerator trains with {accelerator.distributed_type.value}, whose models and optimizers holdfast "
            "does not find in it.",
            "Put the parts themselves into the state, or save with accelerator.save_state.",
        )
    if not _held(accelerator, "models") and not _held(accelerator, "optimizers"):
        raise _refused(
            "The accelerator has prepared no model and no optimizer.", "Call state_of after accelerator.prepare."
        )


def _unnamed(kind: str, number: int, action: str) -> ConfigurationError:
    return _refused(
        f"The accelerator has {count(number, kind)}, and nothing says which is which in a checkpoint.", action
    )


def _refused(cause: str, action: str) -> ConfigurationError:
    return ConfigurationError(cause, code="config.accelerator", action=action)
