"""torch.nn modules: parameters, persistent buffers and extra state under canonical names.

This walks the tree of modules directly, because ``state_dict()`` is slow and runs user hooks. It refuses modules that
rewrite their own state dict, whose state a direct walk could miss. Wrappers are stripped by their type, so a user's
attribute that happens to be called ``module`` keeps its name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple, cast

import torch
from torch import nn

from holdfast.errors import StateError
from holdfast.format.names import component, join
from holdfast.format.values import Open
from holdfast.frameworks import BindingSource, Finish, NamedTensor, Sink, deepspeed_experts, fsdp1
from holdfast.frameworks.flat_memory import FlatMemory
from holdfast.frameworks.known_types import (
    KnownType,
    Refused,
    Transparent,
    WholeObject,
    Wrapper,
    known_type,
    refusal_of,
    type_of,
    unwrapped,
)
from holdfast.frameworks.piecewise import Piecewise
from holdfast.frameworks.stateful import Description, describe, is_described, reading, writing
from holdfast.plan.layout import Replicas

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

# Wrapper types, by name: importing some of these modules takes seconds. The values are the attributes that hold the
# wrapped module.
_WRAPPERS = {
    ("torch.nn.parallel.distributed", "DistributedDataParallel"): "module",
    ("torch.nn.parallel.data_parallel", "DataParallel"): "module",
    ("torch._dynamo.eval_frame", "OptimizedModule"): "_orig_mod",
    ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper"): "_checkpoint_wrapped_module",
    fsdp1.KIND: fsdp1.WRAPPED,
}

# Modules of torch that define harmless state-dict hooks, after which the state is still what a direct walk finds: FSDP2
# re-shards (as this walk does), FSDP1 gathers the shards that this walk describes, activation checkpointing strips its
# prefix, spectral norm adds a version number.
_HARMLESS_HOOKS = frozenset(
    {
        "torch.distributed.fsdp._fully_shard._fsdp_param_group",
        "torch.distributed.fsdp._state_dict_utils",
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "torch.nn.utils.spectral_norm",
    }
)

#: The type of the parameters of a module whose elements DeepSpeed's ZeRO-3 took out of it.
_ZERO_3: Final = "ZeROOrderedDict"
#: No parameters whose elements are outside of their module.
_NONE: Final[Mapping[int, Piecewise]] = {}


class ModuleAdapter:
    """The adapter for modules. A selection may take a part of a module."""

    needs_names = False
    is_divisible = True
    spans_ranks = True

    def accepts(self, kind: type) -> bool:
        """As `Adapter.accepts`."""
        return issubclass(kind, nn.Module) and not is_described(kind)

    def describe(self, path: str, item: nn.Module, sink: Sink) -> bool:
        """As `Adapter.describe`."""
        return flatten_module(path, item, sink)

    def bind(self, path: str, item: nn.Module, source: BindingSource) -> Finish:
        """As `Adapter.bind`."""
        return bind_module(path, item, source)


class ModuleState(NamedTuple):
    """The state of one module tree under full names. `wants` says which names are saved or loaded."""

    wants: Callable[[str], bool]
    tensors: list[NamedTensor]
    extras: list[tuple[str, Description]]
    #: Every module, with the prefix of its tensors' names.
    modules: list[tuple[str, nn.Module]]
    #: The units of FSDP1, and the places of all parameters that they manage.
    units: list[fsdp1.FlatUnit]
    managed: set[tuple[int, str]]
    #: The flat memory of these units.
    held: list[FlatMemory]
    #: For each list of experts, by its id, the number that its first expert has among those of all ranks.
    first_experts: dict[int, int]


class _Traits(NamedTuple):
    """The traits of a type of modules: what is known about it, the attribute that holds the module it wraps, the method
    by which it changes its state dict, whether it has extra state, whether it is DDP, FSDP2, FSDP1, or a layer of
    experts of DeepSpeed."""

    known: KnownType | None
    wrapped: str | None
    overrides: str | None
    has_extra_state: bool
    synchronizes: bool
    shards: bool
    flattens: bool
    routes: bool


def flatten_module(path: str, module: nn.Module, sink: Sink) -> bool:
    """Add a module's parameters, persistent buffers and extra states to `sink`. Returns False if it wants none of them.

    FSDP2 modules are resharded first, as their ``state_dict()`` does. Raises `StateError`, code
    ``state.module_hooks``, for modules whose state a walk of parameters and buffers would miss.
    """
    return describe_module(path, read_module(path, module, sink.wants), sink)


def describe_module(path: str, state: ModuleState, sink: Sink, *, apart: Mapping[int, Piecewise] = _NONE) -> bool:
    """Add the `state` of a module to `sink`, as `flatten_module` does. The elements of the parameters in `apart`, by
    id, are outside of the module, in pieces."""
    tensors = sink.chosen(state.tensors)
    extras = [(name, extra) for name, extra in state.extras if sink.wants(name)]
    has_portions = any(sink.wants(name) for held in state.held for part in held.portions for name in part.names)
    if not (tensors or extras or has_portions or sink.wants(path)):
        return False
    sink.node(path, Open("module"))
    sink.tensors([entry for entry in tensors if id(entry.tensor) not in apart] if apart else tensors)
    for entry in tensors if apart else ():
        if id(entry.tensor) in apart:
            sink.pieces(entry.name, apart[id(entry.tensor)])
    idle = (entry for entry in tensors if not entry.tensor.requires_grad)
    sink.frozen(entry.name for entry in idle if isinstance(entry.tensor, nn.Parameter))
    for held in state.held:
        sink.hold(held)
    for name, extra in extras:
        sink.tree(name, extra.read())
    embeddings = (owner for _, owner in state.modules if isinstance(owner, (nn.Embedding, nn.EmbeddingBag)))
    # (A forward under FSDP1 changes a copy of the weight, which is dropped.)
    own = (each for each in embeddings if each.max_norm is not None and (id(each), "weight") not in state.managed)
    weights = (owner._parameters.get("weight") for owner in own)  # noqa: SLF001
    # With weight_norm and the like a weight is None.
    sink.unsteady([weight for weight in weights if weight is not None and id(weight) not in apart])
    return True


def bind_module(path: str, module: nn.Module, source: BindingSource) -> Finish:
    """Bind a module's tensors, which are filled in place; the result sets extra states and runs post-load hooks.

    Where FSDP2 keeps shards padded, its own post-load hook takes over the shards that got memory.
    """
    return bind_module_state(path, read_module(path, module, source.wants), source)


def bind_module_state(
    path: str, state: ModuleState, source: BindingSource, *, apart: Mapping[int, Piecewise] = _NONE
) -> Finish:
    """Bind the `state` of a module, as `bind_module` does; `apart` as for `describe_module`."""
    _, module = state.modules[0]
    _fill(state, source, apart)
    stored = {id(entry.tensor) for entry in state.tensors}
    for base, owner in state.modules:
        for name in _unstored_on_meta(owner, stored):
            source.unfillable(base + component(name, path=path))
    extras: list[tuple[Description, Finish]] = []
    for name, extra in state.extras:
        if name in source.nodes:
            extras.append((extra, source.opaque(name)))
        else:
            source.missing(name)

    def finish() -> nn.Module:
        for extra, stored in extras:
            extra.write(stored())
        for unit in state.units:
            fsdp1.reshard(unit)
        for owner in module.modules():
            if _traits(type_of(owner)).flattens:
                continue  # its hook ends a load of state dicts, which this is not
            for hook in owner._load_state_dict_post_hooks.values():  # noqa: SLF001
                with writing(path, f"a load_state_dict hook of {type(owner).__qualname__}"):
                    hook(owner, nn.modules.module._IncompatibleKeys([], []))  # noqa: SLF001
        return module

    return finish


def _fill(state: ModuleState, source: BindingSource, apart: Mapping[int, Piecewise]) -> None:
    source.fill_all([entry for entry in state.tensors if id(entry.tensor) not in apart] if apart else state.tensors)
    for entry in state.tensors if apart else ():
        if id(entry.tensor) in apart:
            source.live(entry.name, apart[id(entry.tensor)])
    for held in state.held:
        source.hold(held)


def innermost(module: nn.Module) -> nn.Module:
    """The module inside all wrappers around `module`: DDP, `torch.compile`, those of other libraries."""
    module = cast("nn.Module", unwrapped(module))
    inner = _traits(type_of(module)).wrapped
    return module if inner is None else innermost(cast("nn.Module", getattr(module, inner)))


def read_module(path: str, module: nn.Module, wants: Callable[[str], bool], *, in_engine: bool = False) -> ModuleState:
    """Walk a module. With `in_engine`, a DeepSpeed engine keeps its copies on the ranks equal, as DDP does: parameters
    are not compared, and buffers are those of the first rank; and ZeRO-3 may hold the elements of parameters
    elsewhere, where the caller finds them. Without an engine that is refused, code ``state.engine``."""
    state = ModuleState(wants, [], [], [], [], set(), [], {})
    _walk(module, "", path, frozenset() if in_engine else None, state)
    if not in_engine and any(type(owner._parameters).__name__ == _ZERO_3 for _, owner in state.modules):  # noqa: SLF001
        raise _partitioned(path)
    fsdp1.refuse_loose(path, state.tensors, state.modules, state.managed)
    if state.units:
        _add_flat(path, state)
    return state


def _note_unit(module: nn.Module, state: ModuleState) -> None:
    """Note the parameters that a module of FSDP1 manages, which lie in modules below it."""
    unit = fsdp1.flat_unit(module)
    if unit is not None:
        state.units.append(unit)
        state.managed.update(unit.places())


def _add_flat(path: str, state: ModuleState) -> None:
    """Add the parameters that units of FSDP1 manage."""
    bases: dict[int, list[str]] = {}
    for base, owner in state.modules:
        bases.setdefault(id(owner), []).append(base)
    for unit in {id(unit.handle): unit for unit in state.units}.values():
        for found in fsdp1.held_by(unit, path, bases):
            if isinstance(found, FlatMemory):
                state.held.append(found)
            else:
                state.tensors.append(found)


def _walk(module: nn.Module, prefix: str, path: str, unsynced: frozenset[int] | None, state: ModuleState) -> None:
    """Add `module` and the modules below it. `unsynced` are the tensors that DDP ignores; None outside of DDP.

    `prefix` is escaped already: a component is escaped letter by letter, so its parts may be escaped one by one.
    """
    kind: type = type(module)  # here and not by `type_of`, because there may be thousands of modules
    traits = _traits(kind)
    if traits.known is not None and isinstance(traits.known, Wrapper):
        module = cast("nn.Module", unwrapped(module))
        traits = _traits(type_of(module))
    base = join(path, prefix)
    _refuse_hidden_state(module, traits, path, prefix, state.wants)
    if traits.shards:
        # Between forward and backward, unsharded parameters may be in place, in modules below too.
        cast("FSDPModule", module).reshard()
    if traits.synchronizes:
        unsynced = _ignored(cast("nn.parallel.DistributedDataParallel", module))
    state.modules.append((base, module))
    if traits.flattens:
        _note_unit(module, state)
    if traits.routes:
        experts, first = deepspeed_experts.numbered_experts(path, module)
        state.first_experts[id(experts)] = first
    _add_own_tensors(module, base, path, unsynced, state)
    extra = _extra_of(module, path, traits) if traits.known or traits.has_extra_state else None
    if extra is not None:
        state.extras.append((f"{base}_extra_state", extra))
    number = state.first_experts.get(id(module)) if state.first_experts else None
    for name, child in module._modules.items():  # noqa: SLF001
        if child is not None:
            name = name if number is None else str(number + int(name))  # noqa: PLW2901
            inside = prefix if name == traits.wrapped else f"{prefix}{component(name, path=path)}."
            _walk(child, inside, path, unsynced, state)


def _add_own_tensors(
    module: nn.Module, base: str, path: str, unsynced: frozenset[int] | None, state: ModuleState
) -> None:
    """Add the parameters and buffers of one module, without those that FSDP1 manages."""
    for name, tensor in module._parameters.items():  # noqa: SLF001
        if tensor is not None and (id(module), name) not in state.managed:
            state.tensors.append(_entry(base + component(name, path=path), tensor, "split", unsynced))
    if module._buffers:  # noqa: SLF001
        transient = module._non_persistent_buffers_set  # noqa: SLF001
        for name, buffer in module._buffers.items():  # noqa: SLF001
            if buffer is not None and name not in transient:
                state.tensors.append(_entry(base + component(name, path=path), buffer, "first", unsynced))


def _unstored_on_meta(module: nn.Module, stored: Collection[int]) -> Iterator[str]:
    """The names of a module's own tensors on the meta device that are not part of its state: all but the `stored` ones.

    Leaves out tensors that a hook computes before each forward, as weight_norm and spectral_norm do.
    """
    computed = {getattr(hook, "name", None) for hook in module._forward_pre_hooks.values()}  # noqa: SLF001
    for name, item in chain(vars(module).items(), module._buffers.items()):  # noqa: SLF001
        if isinstance(item, torch.Tensor) and item.is_meta and id(item) not in stored and name not in computed:
            yield name


def _entry(name: str, tensor: torch.Tensor, declared: Replicas, unsynced: frozenset[int] | None) -> NamedTensor:
    """The entry of a tensor. Its replicas are as `declared` if DDP keeps its copies equal, else they are compared."""
    synced = unsynced is not None and id(tensor) not in unsynced
    return NamedTensor(name, tensor, declared if synced else "compare")


def _ignored(module: nn.parallel.DistributedDataParallel) -> frozenset[int]:
    """The tensors that this DDP module neither broadcasts nor reduces."""
    names = module.parameters_to_ignore
    if not names:
        return frozenset()
    inside = chain(module.module.named_parameters(), module.module.named_buffers())
    return frozenset(id(tensor) for name, tensor in inside if name in names)


def _extra_of(module: nn.Module, path: str, traits: _Traits) -> Description | None:
    """The state that a module has beside its parameters and buffers; None for most modules."""
    if isinstance(traits.known, WholeObject):
        own = traits.known.in_module(module)
        return None if own is None else describe(path, module, own)
    if not traits.has_extra_state:
        return None

    def read() -> object:
        with reading(path, f"{type(module).__qualname__}.get_extra_state()"):
            return module.get_extra_state()

    def write(state: object) -> None:
        with writing(path, f"{type(module).__qualname__}.set_extra_state()"):
            module.set_extra_state(state)

    return Description(read, write, is_random=False)


def _refuse_hidden_state(
    module: nn.Module, traits: _Traits, path: str, prefix: str, wants: Callable[[str], bool]
) -> None:
    """Refuse a module whose state dict is not just its parameters, buffers and extra state.

    If only the module's own part of the state dict differs, it may stay in the state as long as that part is not
    wanted.
    """
    hooks = module._state_dict_hooks or module._state_dict_pre_hooks  # noqa: SLF001
    if not (traits.known or traits.overrides or hooks or "state_dict" in module.__dict__):
        return  # as nearly all modules of thousands
    kind, refusal = type_of(module), refusal_of(module)
    action = (
        "Keep such state in persistent buffers or in get_extra_state / set_extra_state; or put module.state_dict() "
        "into the state, and pass the loaded dict to module.load_state_dict()."
    )
    is_local = False
    if refusal is not None:
        what, action, is_local = refusal.problem, refusal.action, refusal.is_local
    elif isinstance(traits.known, WholeObject | Transparent | Refused):
        return
    elif traits.overrides is not None:
        what, is_local = f"overrides {traits.overrides}", traits.overrides == "_save_to_state_dict"
    elif "state_dict" in module.__dict__:
        what = "overrides state_dict"
    elif any(getattr(hook, "__module__", None) not in _HARMLESS_HOOKS for hook in _hooks(module)):
        what = "has state-dict hooks"
    else:
        return
    own = chain(module._parameters, module._buffers, ["_extra_state"])  # noqa: SLF001
    if is_local and not any(wants(join(path, prefix) + component(name, path=path)) for name in own):
        return
    raise StateError(
        f"Module {prefix.removesuffix('.') or 'root'!r} in {path!r} ({kind.__module__}.{kind.__qualname__}) {what}, "
        "so its parameters and buffers may not be its whole state.",
        code="state.module_hooks",
        action=action,
        path=path,
    )


def _hooks(module: nn.Module) -> Iterator[object]:
    return chain(module._state_dict_hooks.values(), module._state_dict_pre_hooks.values())  # noqa: SLF001


@lru_cache(maxsize=1024)
def _traits(kind: type) -> _Traits:
    """The traits of modules of type `kind` that a walk needs."""
    plain = ("_save_to_state_dict", "state_dict")
    fsdp = sys.modules.get("torch.distributed.fsdp")
    names = [(base.__module__, base.__qualname__) for base in kind.__mro__]
    return _Traits(
        known=known_type(kind),
        wrapped=next((_WRAPPERS[name] for name in names if name in _WRAPPERS), None),
        overrides=next((name for name in plain if getattr(kind, name) is not getattr(nn.Module, name)), None),
        has_extra_state=getattr(kind, "get_extra_state", None) is not nn.Module.get_extra_state,
        synchronizes=issubclass(kind, nn.parallel.DistributedDataParallel),
        shards=fsdp is not None and issubclass(kind, fsdp.FSDPModule),
        flattens=fsdp is not None and issubclass(kind, fsdp.FullyShardedDataParallel),
        routes=deepspeed_experts.LAYER in names,
    )


def _partitioned(path: str) -> StateError:
    return StateError(
        f"DeepSpeed's ZeRO-3 holds the elements of the parameters of module {path!r} in partitions outside of it.",
        code="state.engine",
        action='Put the engine itself into the state, as {"engine": engine}.',
        path=path,
    )
