"""DeepSpeed engines: what a run goes on from, under the names that the plain model and its optimizer have.

Below an engine's path: ``model/<name>`` has the master weights of the trained parameters, and frozen parameters and
buffers in their own dtypes; ``optimizer`` is the optimizer as a plain one names it; ``lr_scheduler`` is the engine's
scheduler, ``scaling`` a dynamic loss scaler, ``engine`` the counters. So ``{"model": model, "optimizer": optimizer}``
loads what an engine saved at the same path, and the other way round. The low-precision parameters are not saved:
DeepSpeed makes them by a cast of the master weights, and so does a load. `holdfast.interop.deepspeed` gives the same
names to DeepSpeed's own folders.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from holdfast.errors import StateError
from holdfast.format.names import join
from holdfast.format.values import TableNode
from holdfast.frameworks import BindingSource, Finish, Sink
from holdfast.frameworks.deepspeed_experts import has_made_layers
from holdfast.frameworks.deepspeed_flats import EngineFlats, engine_flats, is_known
from holdfast.frameworks.deepspeed_slots import bind_slots, describe_slots
from holdfast.frameworks.module import ModuleState, bind_module_state, describe_module, read_module
from holdfast.frameworks.piecewise import Piecewise
from holdfast.frameworks.tested_versions import require_tested
from holdfast.wording import with_article

_ENGINE: Final = ("deepspeed.runtime.engine", "DeepSpeedEngine")
#: Engines that are derived from it and hold their model in other ways.
_OTHERS: Final = frozenset(("PipelineEngine", "DeepSpeedHybridEngine"))
_COUNTERS: Final = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
#: The attributes of loss scalers that change while a job trains; all others are options of the job. A save notes the
#: options, for DeepSpeed's own folders have them; a load leaves them as they are.
_SCALER: Final = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
_OPTIONS: Final = "scaler_options"
#: A value that only DeepSpeed's own folders have.
_VERSION: Final = "ds_version"


class DeepSpeedAdapter:
    """The adapter for DeepSpeed engines: ZeRO 0 to 3, `BF16_Optimizer`, and the fp16 optimizers without ZeRO."""

    needs_names = False
    is_divisible = True
    spans_ranks = True

    def accepts(self, kind: type) -> bool:
        """As `Adapter.accepts`."""
        return _ENGINE in _names_of(kind)

    def describe(self, path: str, item: Any, sink: Sink) -> bool:
        """As `Adapter.describe`."""
        _refuse(path, item)
        _refuse_open_step(path, item)
        found = [*_describe(path, item, sink)]
        if not found and not sink.wants(path):
            return False
        sink.node(path, TableNode("dict", tuple(found)))
        return True

    def bind(self, path: str, item: Any, source: BindingSource) -> Finish:
        """As `Adapter.bind`. The last step makes the low-precision parameters from the master weights, as a step of
        the engine does, with the same communication."""
        _refuse(path, item)
        return _bind(path, item, source)


def _describe(path: str, engine: Any, sink: Sink) -> Iterator[str]:
    """Add the parts that are selected, and yield the key of each."""
    module, optimizer, scheduler = (join(path, key) for key in ("model", "optimizer", "lr_scheduler"))
    flats = engine_flats(engine)
    if flats is None:
        yield from _describe_live(module, engine.module, sink)
        yield from _describe_live(optimizer, engine.optimizer, sink)
    else:
        state = read_module(module, engine.module, sink.wants, in_engine=True)
        if describe_module(module, state, sink, apart=_apart(flats)):
            yield "model"
        if sink.wants(optimizer):
            describe_slots(optimizer, flats, _canonical(state), sink)
            yield "optimizer"
    yield from _describe_live(scheduler, engine.lr_scheduler, sink)
    noted = (("scaling", _scaling(engine)), (_OPTIONS, _scaler_options(engine)), ("engine", _counters(engine)))
    for key, values in noted:
        if values and sink.wants(join(path, key)):
            sink.tree(join(path, key), values)
            yield key


def _describe_live(path: str, item: object, sink: Sink) -> Iterator[str]:
    if item is not None and sink.wants(path):
        sink.live(path, item)
        yield path.rpartition("/")[2]


def _bind(path: str, engine: Any, source: BindingSource) -> Finish:
    node = source.nodes.get(path)
    if node is not None and not isinstance(node, TableNode):
        source.differs(path, "a DeepSpeed engine")
        return lambda: engine
    module, optimizer, scheduler = (join(path, key) for key in ("model", "optimizer", "lr_scheduler"))
    flats = engine_flats(engine)
    steps: list[Finish] = []
    if engine.lr_scheduler is not None:
        source.live(scheduler, engine.lr_scheduler)
    if flats is None:
        steps.append(source.live(module, engine.module))
        if engine.optimizer is not None:
            source.live(optimizer, engine.optimizer)
    else:
        state = read_module(module, engine.module, source.wants, in_engine=True)
        steps.append(bind_module_state(module, state, source, apart=_apart(flats)))
        if source.wants(optimizer):
            steps.append(bind_slots(optimizer, flats, _canonical(state), source))
        steps.append(flats.refresh)
    scaling, counters = _scaling(engine), _counters(engine)
    if join(path, "engine", _VERSION) in source.nodes:
        _take_folder(path, counters, source)
    if scaling:
        steps.append(source.live(join(path, "scaling"), scaling))
    steps.append(source.live(join(path, "engine"), counters))
    for name in source.stored_below(join(path, _OPTIONS)):
        source.mark(name)

    def finish() -> object:
        for step in steps:
            step()
        _set(engine, scaling, counters)
        return engine

    return finish


def _take_folder(path: str, counters: dict[str, object], source: BindingSource) -> None:
    """Take what DeepSpeed's own folders have at `path`: options and descriptions, which the load leaves as they are,
    and no count of micro-batches."""
    for above in ("engine", "scaling"):
        for name in source.stored_below(join(path, above)):
            if name.rpartition("/")[2] not in (*_COUNTERS, *_SCALER):
                source.mark(name)
    if join(path, "scaling", "loss_scaler", "cur_iter") not in source.nodes:  # a static scale, which is an option
        source.mark(join(path, "scaling", "loss_scaler", "cur_scale"))
    if join(path, "engine", "micro_steps") not in source.nodes:
        del counters["micro_steps"]


def _apart(flats: EngineFlats) -> dict[int, Piecewise]:
    return {**flats.untrained, **flats.masters}


def _canonical(state: ModuleState) -> dict[int, str]:
    """The canonical name of each tensor of the module: the first of its names."""
    names: dict[int, str] = {}
    for entry in state.tensors:
        known = names.setdefault(id(entry.tensor), entry.name)
        names[id(entry.tensor)] = min(known, entry.name)
    return names


def _scalers(engine: Any) -> Sequence[Any]:
    optimizer = engine.optimizer
    scaler = getattr(optimizer, "loss_scaler", None)
    config = getattr(optimizer, "loss_scale_config", None)
    if scaler is not None and scaler.dynamic:
        return [scaler]
    return [config] if config is not None and config.dynamic_loss_scale else []


def _scaling(engine: Any) -> dict[str, object]:
    """The state of a dynamic loss scaler; empty without one."""
    found: dict[str, object] = {}
    for scaler in _scalers(engine):
        found["loss_scaler"] = {key: getattr(scaler, key) for key in _SCALER if hasattr(scaler, key)}
    autocast = getattr(engine.optimizer, "torch_autocast_gradscaler", None)
    if autocast is not None:
        found["grad_scaler"] = autocast
    return found


def _scaler_options(engine: Any) -> dict[str, object]:
    """The options of a dynamic loss scaler that DeepSpeed writes as an object; empty without one."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    found = {} if scaler is None or not scaler.dynamic else vars(scaler)
    return {key: value for key, value in found.items() if key not in _SCALER}


def _counters(engine: Any) -> dict[str, object]:
    return {key: int(getattr(engine, key)) for key in _COUNTERS}


def _set(engine: Any, scaling: Mapping[str, object], counters: Mapping[str, object]) -> None:
    """Put the loaded values into the engine."""
    for scaler in _scalers(engine):
        values = scaling["loss_scaler"]
        assert isinstance(values, dict)
        for key, value in values.items():
            setattr(scaler, key, value)
    for key, value in counters.items():
        setattr(engine, key, value)
    # A save lies between two steps. With another number of micro-batches for each step, count whole steps. DeepSpeed's
    # own folders do not have the number of micro-batches.
    per_step = engine.gradient_accumulation_steps()
    if engine.micro_steps % per_step or "micro_steps" not in counters:
        engine.micro_steps = engine.global_steps * per_step


def _names_of(kind: type) -> list[tuple[str, str]]:
    return [(base.__module__, base.__qualname__) for base in kind.__mro__]


def _refuse(path: str, engine: Any) -> None:
    """Refuse an engine whose state lies elsewhere than this module looks for it."""
    require_tested("deepspeed", code="state.engine", action="save with engine.save_checkpoint")
    optimizer = engine.optimizer
    offloaded = getattr(optimizer, "offloaded_states", None)
    action = "Save with engine.save_checkpoint, and tell us that you need it."
    if others := _OTHERS.intersection(name for _, name in _names_of(type(engine))):
        problem = f"is {with_article(min(others))}, which holds the model in parts of its own"
    elif engine.mp_world_size > 1:
        problem = f"divides the model itself among {engine.mp_world_size} ranks (tensor or pipeline parallelism)"
    elif engine.has_moe_layers and has_made_layers(engine.module.modules()):
        problem = "has layers of experts that DeepSpeed made of those of another library (AutoEP)"
        action = "Save with engine.save_checkpoint, or build the layers with deepspeed.moe.layer.MoE."
    elif not is_known(optimizer):
        problem = f"has an optimizer of type {type(optimizer).__qualname__}, which holdfast does not know"
    elif offloaded:
        problem, action = "has moved state off the device", "Call engine.reload_states() before the save or the load."
    elif getattr(optimizer, "swap_optimizer", False) or getattr(optimizer, "params_in_nvme_and_cpu", False):
        problem, action = "keeps state on NVMe", "Offload to the CPU instead, or save with engine.save_checkpoint."
    elif getattr(optimizer, "zenflow", False):
        problem = "updates parameters in the background (ZenFlow)"
    else:
        return
    raise StateError(f"The DeepSpeed engine {path!r} {problem}.", code="state.engine", action=action, path=path)


def _refuse_open_step(path: str, engine: Any) -> None:
    """Refuse a save between the micro-batches of one step: their gradients would be lost."""
    per_step = engine.gradient_accumulation_steps()
    if engine.micro_steps % per_step:
        raise StateError(
            f"The DeepSpeed engine {path!r} has gradients of {engine.micro_steps % per_step} of {per_step} "
            "micro-batches, which a checkpoint does not hold.",
            code="state.engine",
            action="Save after the step of the optimizer, where engine.micro_steps is a multiple of "
            "engine.gradient_accumulation_steps().",
            path=path,
        )
