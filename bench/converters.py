"""Conversions between the formats of several systems: their inputs, who converts them, and how the outcome is read.

Optional packages are imported where they are used.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Container, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import holdfast
from bench.contenders import SYNCED, why_absent
from bench.hub import HubLike, by_parameter, write_hub
from bench.raw import RAW_WAYS, RawWay, copy_file
from bench.schema import OURS, RAW, Contender
from bench.state import Live, as_bytes, content
from bench.zero import (
    DEEPSPEED,
    ds_to_universal,
    universal_tensor,
    weights_file,
    why_no_deepspeed,
    write_zero,
    zero_to_fp32,
)
from holdfast.importing.first_checkpoint import import_state
from holdfast.interop.formats import find_state
from holdfast.run.by_path import parse_run
from holdfast.run.paths import parse
from holdfast.store.urls import open_store

#: Gives the tensor that has a name and a shape, of a folder or a file that was written; None where the tool leaves all
#: tensors out that are no weights.
ReadTensor: TypeAlias = Callable[[str, tuple[int, ...]], torch.Tensor | None]

#: The ranks that save what is converted, where ranks save it.
NUM_RANKS = 4
HUB, DCP, FILE, RUN, ZERO, PLAIN = "hub", "dcp", "file.pt", "run", "zero", "plain"
#: Those that ranks save.
SAVED = frozenset({DCP, RUN, ZERO})
DURABLE = "fsync of files and folders, sealed and committed"
#: So much that no file is divided.
_WHOLE = "1000GB"


class Converter(NamedTuple):
    """A contender's conversion of the input `source`, and the way to read its output. If it does not make
    its files durable itself, each file gets an fsync."""

    convert: Callable[[Path, Path], object]
    read: Callable[[Path], ReadTensor]
    source: str
    package: str = ""
    is_durable: bool = False

    def run(self, inputs: Path, target: Path) -> None:
        """Convert what lies among `inputs` to `target`, durably."""
        self.convert(inputs / self.source, target)
        if not self.is_durable:
            for path in [target, *target.rglob("*")]:
                if path.is_file():
                    with path.open("rb") as file:
                        os.fsync(file.fileno())


# The inputs


def write_inputs(folder: Path, recipe: HubLike, names: frozenset[str], *more: HubLike) -> list[str]:
    """Write those inputs of these names that one process writes; returns all that are there. The raw limit copies the
    bytes of `recipe`, and of `more`."""
    if HUB in names:
        write_hub(folder / HUB, recipe)
    if FILE in names:
        torch.save(_nested(recipe), folder / FILE)
    with (folder / PLAIN).open("wb") as file:
        for each in (recipe, *more):
            for about in each.contents().values():
                file.write(as_bytes(content(*about)))
    return sorted(path.name for path in folder.iterdir())


def save_inputs(folder: Path, recipe: HubLike, names: frozenset[str]) -> list[str]:
    """Save those inputs of these names that several ranks save; returns all that are there. Collective."""
    if ZERO in names:
        write_zero(folder / ZERO, recipe)
    state = recipe._replace(model_only=False).build(NUM_RANKS)
    if DCP in names:
        dcp_save(by_parameter(state), checkpoint_id=folder / DCP)
    if RUN in names:
        holdfast.save(folder / RUN, Live(state).objects, 1000)
    return sorted(path.name for path in folder.iterdir())


def _nested(recipe: HubLike) -> dict[str, Any]:
    """The state of `recipe` with whole tensors."""
    model, slots = dict[str, torch.Tensor](), dict[str, dict[str, torch.Tensor]]()
    for key, about in recipe.contents().items():
        part, _, name = key.partition(".")
        if part == "model":
            model[name], slots[name] = content(*about), {"step": torch.tensor(1000.0)}
        else:
            parameter, _, slot = name.removeprefix("state.").rpartition(".")
            slots[parameter][slot] = content(*about)
    return {"model": model, "optimizer": {"state": slots}}


# The converters


def _import(source: Path, target: Path) -> None:
    import_state(find_state(parse(source)).state, open_store(parse_run(str(target)).location), 1000)


def _export_hub(source: Path, target: Path) -> None:
    holdfast.export(source, target, "hf")


def _export_dcp(source: Path, target: Path) -> None:
    holdfast.export(source, target, "dcp")


def _export_universal(source: Path, target: Path) -> None:
    holdfast.export(source, target, "deepspeed-universal")


def _copy(way: RawWay, source: Path, target: Path) -> None:
    target.mkdir()
    copy_file(source, target / PLAIN, way)


def _through_model(source: Path, target: Path) -> None:
    llama = import_module("transformers.models.llama.modeling_llama").LlamaForCausalLM
    llama.from_pretrained(source, dtype=torch.float32).save_pretrained(target, max_shard_size=_WHOLE)


def _from_dcp(source: Path, target: Path) -> None:
    target.mkdir()
    dcp_to_torch_save(source, target / FILE)


# The outputs


def _of_plain(target: Path) -> ReadTensor:
    """The raw copy: one tensor after another."""
    whole = torch.from_file(str(target / PLAIN), size=(target / PLAIN).stat().st_size, dtype=torch.uint8)
    at = 0

    def read(_: str, shape: tuple[int, ...]) -> torch.Tensor:
        nonlocal at
        low, at = at, at + 4 * torch.Size(shape).numel()
        return whole[low:at].view(torch.float32).view(shape)

    return read


def _found(name: str, names: Container[str]) -> str:
    """The form of a name that is among `names`: a model may stand alone, and holdfast has the slots of an optimizer
    below the full name of a parameter."""
    forms = (name, name.removeprefix("model."), name.replace("optimizer.state.", "optimizer.state.model."))
    return next((form for form in forms if form in names), name)


def _of_run(target: Path) -> ReadTensor:
    view = holdfast.open(target)
    names = {name.replace("/", "."): name for name in view.names()}
    return lambda name, _: torch.from_numpy(view[names[_found(name, names)]].numpy())


def _of_hub(target: Path) -> ReadTensor:
    from safetensors import safe_open

    files: list[Any] = [safe_open(path, "pt") for path in sorted(target.glob("*.safetensors"))]
    homes = {f"model.{name}": partial(file.get_tensor, name) for file in files for name in file.keys()}  # noqa: SIM118
    return lambda name, _: homes[name]()


def _of_dcp(target: Path) -> ReadTensor:
    keys = FileSystemReader(target).read_metadata().state_dict_metadata

    def read(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        name = _found(name, keys)
        state = {name: torch.empty(shape)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # it says that this is one process
            dcp_load(state, checkpoint_id=target, no_dist=True)
        return state[name]

    return read


def _of_file(target: Path) -> ReadTensor:
    loaded = torch.load(target / FILE, mmap=True, weights_only=True)
    found: dict[str, torch.Tensor] = {f"model.{name}": tensor for name, tensor in loaded["model"].items()}
    for parameter, slots in loaded["optimizer"]["state"].items():
        found |= {f"optimizer.state.{parameter}.{slot}": tensor for slot, tensor in slots.items()}
    return lambda name, _: found[name]


def _of_weights(target: Path) -> ReadTensor:
    weights = weights_file(target)
    return lambda name, _: None if name.startswith("optimizer.") else weights[name]


def _of_universal(target: Path) -> ReadTensor:
    return lambda name, _: universal_tensor(target, name)


# Registries


class Conversion(NamedTuple):
    """One direction: the contenders beside the raw limit, whether only the model is converted, and whether its weights
    are twice in the input and in the outcome, those of the module beside the master weights."""

    title: str
    entrants: Mapping[str, Converter]
    model_only: bool = False
    weights_twice: bool = False

    @property
    def absent(self) -> dict[str, str]:
        """The contenders that cannot take part, each with the reason."""
        reasons = {
            name: why_no_deepspeed() if each.package == DEEPSPEED else why_absent(each.package)
            for name, each in self.entrants.items()
        }
        return {name: reason for name, reason in reasons.items() if reason}

    def about(self) -> tuple[Contender, ...]:
        return tuple(Contender(name, DURABLE if name == OURS else SYNCED) for name in (RAW, *self.entrants))


THROUGH_MODEL = "from_pretrained + save_pretrained"
_MODEL = Converter(_through_model, _of_hub, HUB, "transformers")
_durable = partial(Converter, is_durable=True)
CONVERSIONS = {
    "hf-import": Conversion(
        "a Hugging Face folder to a run",
        {THROUGH_MODEL: _MODEL, OURS: _durable(_import, _of_run, HUB, "safetensors")},
        model_only=True,
    ),
    "hf-export": Conversion(
        "a run to a Hugging Face folder",
        {THROUGH_MODEL: _MODEL, OURS: _durable(_export_hub, _of_hub, RUN, "safetensors")},
        model_only=True,
    ),
    "dcp-import": Conversion(
        "a DCP folder to a run",
        {"dcp_to_torch_save": Converter(_from_dcp, _of_file, DCP), OURS: _durable(_import, _of_run, DCP)},
    ),
    "dcp-export": Conversion(
        "a run to a DCP folder",
        {"torch_save_to_dcp": Converter(torch_save_to_dcp, _of_dcp, FILE), OURS: _durable(_export_dcp, _of_dcp, RUN)},
    ),
    "zero-import": Conversion(
        "a folder of ZeRO-2 to a run",
        {
            "zero_to_fp32": Converter(zero_to_fp32, _of_weights, ZERO, DEEPSPEED),
            OURS: _durable(_import, _of_run, ZERO, DEEPSPEED),  # it needs none, but nothing else writes the folder
        },
        weights_twice=True,
    ),
    "universal-export": Conversion(
        "a run to a universal folder",
        {
            "ds_to_universal": Converter(ds_to_universal, _of_universal, ZERO, DEEPSPEED),
            OURS: _durable(_export_universal, _of_universal, RUN),
        },
    ),
}
RAW_COPIES = {f"{RAW} {name}": _durable(partial(_copy, way), _of_plain, PLAIN) for name, way in RAW_WAYS.items()}
CONVERTING = dict.fromkeys((RAW, *(name for each in CONVERSIONS.values() for name in each.entrants)))
