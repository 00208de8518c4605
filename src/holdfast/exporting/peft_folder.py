"""Folders of peft: the weights of one adapter in one safetensors file, and its configuration."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from pathlib import Path

from holdfast.errors import ConfigurationError, IncompatibleError
from holdfast.exporting.chosen_tensors import ChosenContent, ExportTensor, unfit, without_common_container
from holdfast.exporting.chosen_values import plain_key
from holdfast.exporting.hugging_face_folder import copied_files, no_config, safetensors_file
from holdfast.exporting.new_folder import NewFolder
from holdfast.format.names import join, split
from holdfast.format.values import Open
from holdfast.interop.peft_names import (
    CONFIG_NAME,
    METHODS,
    WEIGHTS_NAME,
    AdapterConfig,
    conflict,
    decoded_config,
    folder_name,
    is_bias_of_model,
    lacks,
    live_name,
)
from holdfast.run.paths import some_quoted


def peft_folder(choice: ChosenContent, *, identity: str, config: Path, adapter: str | None) -> NewFolder:
    """The folder of the adapter named `adapter`, or of the only one, among the chosen tensors.

    Peft reads one file, so it has one of any size. Raises `ConfigurationError`, code ``config.export``, for a `config`
    folder without the configuration of such an adapter, and where the caller must choose one; `IncompatibleError`, code
    ``incompatible.export``, where there are no weights of an adapter, and as `safetensors_file`.
    """
    copied = copied_files(config, needed=CONFIG_NAME)
    known = _config(config, copied[CONFIG_NAME])
    names = [name for one in choice.tensors for name in one.names]
    plain = {name: "/".join(map(plain_key, split(short))) for name, short in without_common_container(names).items()}
    found = {name: made for name in names if (made := folder_name(plain[name], known)) is not None}
    chosen = _adapter({made.adapter for made in found.values()} - {""}, adapter)
    tensors: list[ExportTensor] = []
    keys: dict[str, str] = {}
    for one in choice.tensors:
        for name in one.names:  # peft looks for all names of tied tensors
            if name not in found or found[name].adapter not in ("", chosen):
                continue
            keys[name] = found[name].key
            _check(one.tensor._replace(name=name), plain[name], keys[name], known, chosen)
            tensors.append(one.tensor._replace(name=name))
    _check_trained_biases(choice, set(keys), plain, config)
    if (option := lacks([plain[name] for name in keys], known)) is not None:
        raise no_config(config, f"says {option}, and the adapter {chosen!r} has no tensors for that")
    return NewFolder(identity, copied, [safetensors_file(WEIGHTS_NAME, tensors, keys)], {}, len(tensors))


def _check_trained_biases(choice: ChosenContent, written: set[str], plain: Mapping[str, str], config: Path) -> None:
    """Refuse to leave out a bias that an optimizer of the checkpoint has trained: it has state for it."""
    optimizers = [path for path, node in choice.table.nodes.items() if node == Open("optimizer")]
    biases = [name for name in plain if is_bias_of_model(plain[name]) and name not in written]
    if not optimizers or not biases:
        return
    stored = sorted(choice.table.stored)
    for name in biases:
        states = (join(path, "state", name, "") for path in optimizers)
        if any(stored[at].startswith(state) for state in states if (at := bisect_left(stored, state)) < len(stored)):
            what = f"was trained, and the bias in {config / CONFIG_NAME} leaves it out"
            action = (
                'Name the configuration that the adapter was trained with: config (--config), with bias="all", say. '
            )
            raise unfit(name, what, action + "To leave it out, choose the weights with select (--select).")


def _config(folder: Path, data: bytes) -> AdapterConfig:
    try:
        config = decoded_config(data)
    except ValueError as error:
        raise no_config(folder, f"has a malformed {CONFIG_NAME} ({error})") from error
    if config.peft_type not in METHODS:
        what = f"has an adapter of {config.peft_type}; holdfast knows the names of {' and '.join(METHODS)}"
        raise no_config(folder, what)
    return config


def _adapter(found: set[str], wanted: str | None) -> str:
    """The adapter to write, of those that the checkpoint has."""
    if not found:
        raise IncompatibleError(
            "the tensors to write have no weights of an adapter, such as lora_A.",
            code="incompatible.export",
            action="Export to hf, or choose a checkpoint, or the part of it (select, --select), that has an adapter.",
        )
    if wanted is None and len(found) > 1:
        raise ConfigurationError(
            f"the model has several adapters: {some_quoted(sorted(found))}.",
            code="config.export",
            action=f"Choose one, such as adapter={min(found)!r} (--adapter {min(found)}).",
        )
    if wanted is not None and wanted not in found:
        raise ConfigurationError(
            f"the model has no adapter {wanted!r}.",
            code="config.export",
            action=f"Choose one of {some_quoted(sorted(found))}.",
        )
    return min(found) if wanted is None else wanted


def _check(tensor: ExportTensor, plain: str, key: str, config: AdapterConfig, adapter: str) -> None:
    """Refuse a tensor that a reader with this configuration would not find at its place, or would not use."""
    read, why = live_name(key, config, adapter=adapter), conflict(plain, tensor.shape, config)
    if read not in (plain, f"base_model.model.{plain}"):
        text = f"would be read as {read}, by its {CONFIG_NAME}"
    elif why is not None:
        text = f"does not belong to the adapter of {CONFIG_NAME}, which {why}"
    else:
        return
    raise unfit(tensor.name, text, "Name the configuration that the adapter was trained with: config (--config).")
