"""DeepSpeed's universal checkpoint folders, which stock DeepSpeed loads at ZeRO stages 1, 2 and 3 on any ranks.

    latest_universal                              the name of the folder below
    global_step700_universal/
        zero/<parameter>/fp32.pt                  the master weight, whole; a file for each slot beside it
        zero/<parameter>/step.pt                  the count of steps
        zero/optimizer_state.pt                   groups, and the loss scaler
        mp_rank_00_model_states.pt                counters, scheduler, the client's values; frozen weights and buffers
        zero_pp_rank_0_mp_rank_00_model_states.pt the same without the last two, by the name that ZeRO-3 looks for

DeepSpeed's own converter writes another form for ZeRO-3 than for the other stages; this one is read by all of them.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import torch

from holdfast.checkpoint.stored_state import StoredState
from holdfast.exporting.chosen_tensors import ChosenContent, ExportTensor, unfit
from holdfast.exporting.element_source import small_contents
from holdfast.exporting.new_folder import NewFile, NewFolder
from holdfast.exporting.tensor_archives import archive_file, archived, named_object, whole_tensor
from holdfast.exporting.training_parts import TrainedParameter, TrainingParts, training_parts

#: The version of DeepSpeed whose loader this was tested with. It refuses folders that name none.
_VERSION: Final = "0.19.8"
_LATEST: Final = "latest_universal"
_SCALER_MODULE: Final = "deepspeed.runtime.fp16.loss_scaler"
#: Values of an engine that describe the job that wrote them, and are another thing in a universal folder.
_OF_RANKS: Final = frozenset(("checkpoint_parallel_dimensions", "optimizer"))
#: A dynamic loss scaler cannot go on without one of these.
_SCALER_OPTIONS: Final = ("scale_factor", "scale_window", "min_scale", "delayed_shift")


def universal_folder(choice: ChosenContent, state: StoredState) -> NewFolder:
    """The folder for the chosen content of `state`, whose counts of steps are read.

    Raises as `training_parts`, and `IncompatibleError`, code ``incompatible.export``, for parameters whose counts of
    steps differ, for names that the folder has for itself, and for what its files have no place for.
    """
    parts = training_parts(choice)
    step = _step(state, parts.trained)
    engine = _table("engine", parts.beside.get("engine", {}))
    described = _described(parts, engine, state.record.step)
    tag = f"global_step{described['global_steps']}_universal"
    first = {}
    if step is not None:
        saved = archived(step)
        first = {f"{tag}/zero/{name}/step.pt": saved for each in parts.trained for name in each.names}
    files = list(_tensor_files(f"{tag}/zero", choice, parts.trained))
    files.append(archive_file(f"{tag}/zero/optimizer_state.pt", _optimizer_state(parts, step, described["ds_version"])))
    module = {"module": OrderedDict(parts.kept)}
    files.append(archive_file(f"{tag}/mp_rank_00_model_states.pt", {**described, **module}))
    files.append(archive_file(f"{tag}/zero_pp_rank_0_mp_rank_00_model_states.pt", described))
    return NewFolder(state.record.identity, first, files, {_LATEST: tag.encode("ascii")}, len(choice.tensors))


def _tensor_files(folder: str, choice: ChosenContent, trained: Sequence[TrainedParameter]) -> Iterator[NewFile]:
    """A file for each tensor of the trained parameters, in the order in which they are stored; several for a tied one,
    of which DeepSpeed looks for one name, and no checkpoint says which."""
    files: dict[str, list[NewFile]] = {}
    for each in trained:
        for key, tensor in each.slots.items():
            if key == "fp32" or not re.fullmatch(r"\w+", str(key), re.ASCII):
                what = f"is a slot {key!r}, whose name is none of a file in the folder of a parameter"
                raise unfit(tensor.name, what, 'Leave the optimizer out: select="!optimizer".')
        for key, tensor in (("fp32", each.master), *each.slots.items()):
            content = {"param": whole_tensor(tensor), "cat_dim": 0}
            files[tensor.name] = [archive_file(f"{folder}/{name}/{key}.pt", content) for name in each.names]
    for one in choice.tensors:
        yield from files.get(one.tensor.name, ())


def _step(state: StoredState, trained: Sequence[TrainedParameter]) -> int | torch.Tensor | None:
    """The count of steps that all parameters have; None before the first one."""
    counts = {each.master.name: each.step for each in trained}
    tensors = [step for step in counts.values() if isinstance(step, ExportTensor)]
    contents = iter(small_contents(state, tensors))
    found = {
        name: (step.dtype, next(contents)) if isinstance(step, ExportTensor) else step for name, step in counts.items()
    }
    first = next(iter(found), None)
    other = next((name for name, step in found.items() if step != found[first or name]), None)
    if first is None or other is None:
        step = None if first is None else found[first]
    else:
        text = f"and {first} have counted different steps, of which DeepSpeed has one"
        raise unfit(other, text, "Export to dcp instead.")
    if isinstance(step, tuple):
        dtype, data = step
        return torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).reshape(())
    assert step is None or isinstance(step, int)
    return step


def _described(parts: TrainingParts, engine: Mapping[str, object], step: int) -> dict[str, object]:
    """The content of a file of model states, without the module."""
    groups: list[OrderedDict[str, torch.Size]] = [OrderedDict() for _ in parts.groups]
    shared = {}
    for each in sorted(parts.trained, key=lambda each: each.names):
        groups[each.group][each.names[0]] = torch.Size(each.master.shape)
        shared.update(dict.fromkeys(each.names[1:], each.names[0]))
    own: dict[str, object] = {
        "module": OrderedDict(),
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": groups,
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": shared,
        "lr_scheduler": parts.beside.get("lr_scheduler"),
        "sparse_tensor_module_names": [],
        "global_steps": max(step, 0),
        "global_samples": 0,
        "skipped_steps": 0,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": _VERSION,
    }
    own |= {key: value for key, value in engine.items() if key not in _OF_RANKS}
    own |= {"dp_world_size": 1, "mp_world_size": 1}
    if both := sorted(own.keys() & parts.client.keys()):
        raise unfit(both[0], "has a name that DeepSpeed's files have for themselves", "Rename it with a mapping.")
    return {**own, **parts.client}


def _optimizer_state(parts: TrainingParts, step: object, version: object) -> dict[str, object]:
    """The content of ``optimizer_state.pt``: what ZeRO-1 and ZeRO-2 read, and what ZeRO-3 reads.

    ZeRO-3 puts one group's hyper-parameters into all groups. So it gets those in which they are alike: the others stay
    as the job sets them.
    """
    found: dict[str, object] = {"ds_version": version, "overflow": False, "param_groups": parts.groups}
    found |= _scaling(parts.beside)
    alike = dict(parts.groups[0]) if parts.groups else {}
    for group in parts.groups[1:]:
        alike = {key: value for key, value in alike.items() if key in group and group[key] == value}
    found["optimizer_state_dict"] = {"state": {0: {} if step is None else {"step": step}}, "param_groups": [alike]}
    return found


def _scaling(beside: Mapping[str, object]) -> dict[str, object]:
    """The dynamic loss scaler, and what lies beside it. A static one is an option of the job."""
    found = _table("scaling", beside.get("scaling", {}))
    options = _table("scaler_options", beside.get("scaler_options", {}))
    scaler = {**options, **_table("scaling/loss_scaler", found.pop("loss_scaler", {}))}
    if "grad_scaler" in found:
        text = "is of torch.autocast, which DeepSpeed's folders do not hold"
        raise unfit("scaling/grad_scaler", text, "Leave it out with select (--select).")
    if "cur_iter" not in scaler:
        return found
    if lacking := [option for option in _SCALER_OPTIONS if option not in scaler]:
        text = f"lacks the options of a loss scaler, such as {lacking[0]}"
        raise unfit("scaling/loss_scaler", text, "Save the engine again, or leave scaling out with select (--select).")
    scaler["dynamic"] = True
    return {
        **found,
        "dynamic_loss_scale": True,
        "loss_scaler": named_object(_SCALER_MODULE, "DynamicLossScaler", scaler),
    }


def _table(name: str, value: object) -> dict[str, object]:
    if not isinstance(value, Mapping):
        raise unfit(name, "is no dict, as that of a DeepSpeed engine is", "Rename it with a mapping (--mapping).")
    return dict(value)
