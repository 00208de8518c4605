"""The content of DeepSpeed's files: which tensors and values each has, without the tensors' bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final, NamedTuple

from holdfast.format.manifest import MAX_AXES, MAX_NUMEL
from holdfast.geometry import Shape
from holdfast.interop.pickle_machine import Globals, PickledObject, PickleError, UnknownGlobal, pickled_objects
from holdfast.interop.torch_globals import ARCHIVE_GLOBALS, PickledTensor, shape_of
from holdfast.wording import with_article

_LOSS_SCALER: Final = "deepspeed.runtime.fp16.loss_scaler"
_FRAGMENT: Final = "deepspeed.utils.tensor_fragment fragment_address"


def _number(args: tuple[Any, ...]) -> int:
    """A member of an enumeration of ints."""
    if len(args) != 1 or type(args[0]) is not int:
        raise PickleError("an enumeration has a member that is no int")
    return args[0]


#: The globals of DeepSpeed's files. Those of the client's state are not known.
GLOBALS: Final[Globals] = {
    **ARCHIVE_GLOBALS,
    "deepspeed.runtime.zero.config ZeroStageEnum": _number,
    **pickled_objects(_FRAGMENT, f"{_LOSS_SCALER} LossScaler", f"{_LOSS_SCALER} DynamicLossScaler"),
}
#: Keys of a model file that describe its tensors, and keys of DeepSpeed's own values. Others are the client's.
_TENSOR_KEYS: Final = frozenset(
    ("module", "buffer_names", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params")
)
_ENGINE_KEYS: Final = frozenset(
    (
        *("checkpoint_parallel_dimensions", "data_sampler", "dp_world_size", "ds_autoep_layers", "ds_config"),
        *("ds_version", "num_experts"),
        *("global_samples", "global_steps", "lr_scheduler", "micro_steps", "mp_world_size", "optimizer"),
        *("random_ltd", "skipped_steps", "sparse_tensor_module_names", "universal_checkpoint_info"),
    )
)
#: The state and the options of a loss scaler, where they lie beside the optimizer's state.
_SCALER_KEYS: Final = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")
#: Values beside the optimizer's state.
_SCALING_KEYS: Final = ("clip_grad", "dynamic_loss_scale", "overflow")


class ModelStates(NamedTuple):
    """A model file: `module` is the state dict of the module, and `groups` has the trained parameters in flat order."""

    module: Mapping[str, object]
    buffers: frozenset[str]
    groups: Sequence[Mapping[str, Shape]]
    frozen: Mapping[str, Shape]
    frozen_parts: Mapping[str, PickledTensor]
    shared: Mapping[str, str]
    engine: Mapping[str, object]
    client: Mapping[str, object]

    @property
    def steps(self) -> int | None:
        """The number of steps that the optimizer has done: those of the engine without those that it skipped."""
        done, skipped = self.engine.get("global_steps"), self.engine.get("skipped_steps", 0)
        return done - skipped if type(done) is int and type(skipped) is int else None

    def option(self, section: str, name: str, default: object) -> object:
        """An option of the engine's configuration, by default `default`; None where the configuration is not there."""
        config = self.engine.get("ds_config")
        options = config.get(section, {}) if isinstance(config, dict) else None
        return options.get(name, default) if isinstance(options, dict) else None


class OptimStates(NamedTuple):
    """The optimizer file of one rank: for each flat group, the master weights and the slots of the optimizer.

    `fragments` are the parts that the rank has of each parameter, as ``(start, numel)``, where the file says so; they
    are wrong under round robin. `paddings` follow the parameters of each group.
    """

    stage: int
    version: object
    world_sizes: Sequence[int]
    masters: Sequence[PickledTensor]
    slots: Sequence[Mapping[str, object]]
    param_groups: Sequence[Mapping[str, object]]
    groups_of: Mapping[int, int]
    paddings: Sequence[Sequence[int]] | None
    fragments: Sequence[Mapping[str, tuple[int, int]]] | None
    loss_scaler: Mapping[str, object] | None
    scaling: Mapping[str, object]


def model_states(content: object, *, is_universal: bool = False, has_zero: bool = True) -> ModelStates:
    """The content of a model file, which in a universal folder may lack the module, and without ZeRO has no shapes of
    parameters. Raises `PickleError` for anything else."""
    table = _dict(content, "a model file")
    module = table.get("module")
    if module is None and is_universal:
        module = {}
    if module is None and "module" in table:
        raise PickleError("it has no module, as files of pipelines")
    groups = table.get("param_shapes")
    if (groups is None) == has_zero and "module" in table:
        raise PickleError(f"it was saved with{'out' if has_zero else ''} ZeRO")
    return ModelStates(
        _named(module, "module"),
        frozenset(map(_text, _list(table.get("buffer_names", ()), "the names of buffers"))),
        [_shapes(group) for group in _list(groups, "param_shapes")] if has_zero else [],
        _shapes(table.get("frozen_param_shapes") or {}),
        _tensors(table.get("frozen_param_fragments") or {}, "frozen_param_fragments"),
        {name: _text(target) for name, target in _named(table.get("shared_params") or {}, "shared_params").items()},
        {key: value for key, value in table.items() if key in _ENGINE_KEYS and value is not None},
        {key: value for key, value in table.items() if key not in _ENGINE_KEYS | _TENSOR_KEYS},
    )


def expert_states(content: object) -> Mapping[str, object]:
    """The content of the file of one expert: its part of the module's state dict. Raises `PickleError` for anything
    else."""
    return _named(content, "the weights of an expert")


def optim_states(content: object) -> OptimStates:
    """The content of an optimizer file. Raises `PickleError` for anything else."""
    outer = _dict(content, "an optimizer file")
    table = _dict(outer.get("optimizer_state_dict"), "optimizer_state_dict")
    stage = table.get("zero_stage", 1)  # BF16_Optimizer writes none
    if stage not in (1, 2, 3):
        raise PickleError(f"it is of ZeRO stage {stage!r:.100}")
    masters = table.get("fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups")
    masters = [_tensor(each, "the master weights") for each in _list(masters, "the master weights")]
    inner = table.get("optimizer_state_dict" if stage == 3 else "base_optimizer_state")
    slots, param_groups = _optimizer(inner, len(masters))
    scaler = table.get("loss_scaler")
    return OptimStates(
        stage,
        outer.get("ds_version"),
        _world_sizes(table.get("partition_count")),
        masters,
        slots,
        [{key: value for key, value in group.items() if key != "params"} for group in param_groups],
        _groups_of(param_groups, len(masters)),
        _paddings(table.get("param_alignment_paddings")),
        _fragments(table.get("param_slice_mappings")),
        scaler.fields if isinstance(scaler, PickledObject) else None,
        {key: table[key] for key in _SCALING_KEYS if key in table},
    )


class WholeOptimizer(NamedTuple):
    """The optimizer of one expert-parallel rank of an engine without ZeRO: the state of each parameter by its number,
    and the groups with the numbers of theirs. `masters` are the master weights by these numbers, where the module has
    another dtype."""

    state: Mapping[int, Mapping[str, object]]
    param_groups: Sequence[Mapping[str, object]]
    numbers: Sequence[Sequence[int]]
    masters: Mapping[int, PickledTensor]
    loss_scaler: Mapping[str, object] | None


def whole_optimizer(content: object) -> WholeOptimizer:
    """The content of the optimizer file of an expert-parallel rank. Raises `PickleError` for anything else."""
    outer = _dict(_dict(content, "an optimizer file").get("optimizer"), "the optimizer's state")
    if "fp32_groups_flat" in outer:
        raise PickleError("its master weights lie one behind the other (FP16_Optimizer), which is read with ZeRO only")
    table = _dict(outer.get("optimizer_state_dict", outer), "the optimizer's state")
    groups = [_named(group, "a group") for group in _list(table.get("param_groups"), "the groups")]
    numbers = [_list(group.get("params"), "the parameters of a group") for group in groups]
    found: list[list[int]] = [[each for each in held if type(each) is int] for held in numbers]
    if list(chain.from_iterable(found)) != list(range(sum(map(len, numbers)))):
        raise PickleError("its groups do not count their parameters from 0 on")
    state = {}
    for number, slots in _dict(table.get("state"), "the optimizer's state").items():
        if type(number) is not int or not 0 <= number < sum(map(len, found)):
            raise PickleError("it has state of a parameter that is in no group")
        state[number] = _named(slots, "the slots")
    kept = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    masters = _list(outer.get("fp32_groups", ()), "the master weights")
    parts = chain.from_iterable(_list(group, "the master weights") for group in masters)
    held = [_tensor(each, "the master weights") for each in parts]
    if held and len(held) != sum(map(len, found)):
        raise PickleError("its groups have other parameters than the master weights")
    scaler = {key: outer[key] for key in _SCALER_KEYS if key in outer} if outer.get("dynamic_loss_scale") else None
    return WholeOptimizer(state, kept, found, dict(enumerate(held)), scaler)


def universal_states(content: object, *, num_flat: int) -> OptimStates:
    """The content of the optimizer's file in a universal folder, as that of a file without master weights. `slots` have
    the counts of steps where it has them. Raises `PickleError` for anything else."""
    table = _dict(content, "an optimizer file")
    inner = _dict(table.get("optimizer_state_dict") or {}, "the optimizer's state")
    found = _list(table.get("param_groups", inner.get("param_groups")), "the groups")
    groups = [_named(group, "a group") for group in found]
    states = _dict(inner.get("state") or {}, "the optimizer's state")
    slots = [_named(states.get(flat, {}), "the slots") for flat in range(num_flat)]
    scaler = table.get("loss_scaler")
    return OptimStates(
        0,
        table.get("ds_version"),
        [],
        [],
        [{key: value for key, value in each.items() if key == "step"} for each in slots],
        [{key: value for key, value in group.items() if key != "params"} for group in groups],
        _groups_of(groups, num_flat) if any("params" in group for group in groups) else {},
        None,
        None,
        scaler.fields if isinstance(scaler, PickledObject) else None,
        {key: table[key] for key in _SCALING_KEYS if key in table},
    )


def atom(content: object) -> PickledTensor | int:
    """The content of a parameter's file in a universal folder: a tensor, or a count of steps."""
    found = content.get("param") if isinstance(content, dict) else content
    return found if type(found) is int else _tensor(found, "the parts of a parameter")


def _world_sizes(found: object) -> list[int]:
    """The number of ranks over which each group is cut, or that of all groups."""
    sizes = [size for size in (found if isinstance(found, list) else [found]) if type(size) is int and size > 0]
    if not sizes or (isinstance(found, list) and len(sizes) < len(found)):
        raise PickleError("it does not say how many ranks there were")
    return sizes


def _optimizer(inner: object, num_flat: int) -> tuple[list[Mapping[str, object]], list[dict[str, object]]]:
    """The slots of each flat group, and the groups; elastic checkpoints have no groups."""
    if isinstance(inner, list):
        found: Mapping[object, object] = dict(enumerate(inner))
        groups: list[dict[str, object]] = []
    else:
        table = _dict(inner, "the optimizer's state")
        found = _dict(table.get("state"), "the optimizer's state")
        groups = [_named(group, "a group") for group in _list(table.get("param_groups"), "the groups")]
    if not set(found) <= set(range(num_flat)):
        raise PickleError("its optimizer has state of other tensors than the master weights")
    return [_named(found.get(index, {}), "the slots") for index in range(num_flat)], groups


def _groups_of(param_groups: Sequence[Mapping[str, object]], num_flat: int) -> dict[int, int]:
    """The group of each flat tensor."""
    groups: dict[int, int] = {}
    for index, group in enumerate(param_groups):
        for flat in _list(group.get("params"), "the tensors of a group"):
            if type(flat) is not int or not 0 <= flat < num_flat or flat in groups:
                raise PickleError("its groups have other tensors than the master weights")
            groups[flat] = index
    return groups


def _paddings(found: object) -> list[list[int]] | None:
    if found is None:
        return None
    return [list(map(_padding, _list(group, "the paddings"))) for group in _list(found, "the paddings")]


def _padding(found: object) -> int:
    if type(found) is not int or not 0 <= found <= MAX_NUMEL:
        raise PickleError("a padding is no count")
    return found


def _fragments(found: object) -> list[dict[str, tuple[int, int]]] | None:
    if found is None:
        return None
    return [dict(_addresses(group)) for group in _list(found, "the fragments")]


def _addresses(group: object) -> Iterator[tuple[str, tuple[int, int]]]:
    for name, address in _named(group, "the fragments").items():
        if not isinstance(address, PickledObject) or address.name != _FRAGMENT:
            raise PickleError("a fragment has no address")
        start, numel = shape_of((address.fields.get("start"), address.fields.get("numel")))
        yield name, (start, numel)


def _shapes(found: object) -> dict[str, Shape]:
    shapes = {name: shape_of(shape) for name, shape in _named(found, "the shapes").items()}
    if any(
        len(shape) > MAX_AXES or max((*shape, 0)) > MAX_NUMEL or _numel(shape) > MAX_NUMEL for shape in shapes.values()
    ):
        raise PickleError("a parameter has an impossible shape")
    return shapes


def _numel(shape: Shape) -> int:
    numel = 1
    for extent in shape:
        numel *= extent
    return numel


def _tensors(found: object, what: str) -> dict[str, PickledTensor]:
    return {name: _tensor(each, what) for name, each in _named(found, what).items()}


def _tensor(found: object, what: str) -> PickledTensor:
    if not isinstance(found, PickledTensor):
        raise PickleError(f"it has {_said(found)} among {what} instead of a tensor")
    return found


def _dict(found: object, what: str) -> dict[Any, object]:
    if not isinstance(found, dict):
        raise PickleError(f"it has {_said(found)} instead of {what}")
    return found


def _named(found: object, what: str) -> dict[str, object]:
    table = _dict(found, what)
    if not all(isinstance(name, str) for name in table):
        raise PickleError(f"{what} has a name that is no text")
    return table


def _list(found: object, what: str) -> Sequence[object]:
    if not isinstance(found, list | tuple):
        raise PickleError(f"it has {_said(found)} instead of {what}")
    return found


def _text(found: object) -> str:
    if not isinstance(found, str):
        raise PickleError(f"it has {_said(found)} instead of a name")
    return found


def _said(found: object) -> str:
    """Describe an object for a message; an unknown global by its name."""
    if isinstance(found, PickledObject | UnknownGlobal):
        return f"{found.name!r:.200}, which is not data,"
    return "nothing" if found is None else with_article(type(found).__name__)
