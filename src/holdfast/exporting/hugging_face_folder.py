"""Folders as Hugging Face writes them: safetensors files, an index where there are several, and the configuration."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

import msgspec

from holdfast.decoding import decode_json
from holdfast.errors import ConfigurationError
from holdfast.exporting.chosen_tensors import (
    ChosenContent,
    ChosenTensor,
    ExportTensor,
    embedding_likeness,
    unfit,
    without_common_container,
)
from holdfast.exporting.chosen_values import plain_key
from holdfast.exporting.element_source import TensorSegment
from holdfast.exporting.model_config import config_with_dtype
from holdfast.exporting.new_folder import NewFile, NewFolder
from holdfast.format.container import ALIGNMENT
from holdfast.format.dtypes import DTYPES
from holdfast.format.names import shown, split
from holdfast.geometry import Shape, whole
from holdfast.mapping.families import Family, is_family
from holdfast.mapping.family_names import FamilyConfig
from holdfast.mapping.family_shapes import SizesConfig, shape_conflict
from holdfast.wording import count

_log = logging.getLogger(__name__)
_F4: Final = "F4"
#: The codes of safetensors, also of dtypes that our own files store as bytes.
_CODES: Final[Mapping[str, str]] = {
    **{dtype.name: dtype.code for dtype in DTYPES.values() if dtype.native},
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "complex64": "C64",
    "float4_e2m1fn_x2": _F4,
}
_SINGLE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
#: The stock reader refuses a longer header.
_MAX_HEADER_NBYTES: Final = 100_000_000
_CONFIG: Final = "config.json"
#: The files of a model folder beside its weights.
_COPIED: Final = (
    "generation_config.json",
    "*token*.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template.*",
    "*processor_config.json",
)
_MAX_COPIED_NBYTES: Final = 256 << 20
_UNCOMPARED: Final = "the names of the exported tensors are not compared with those of a model: %s %s"
#: The number of tensors that a message about a folder's names lists beside the first one.
_NAMED: Final = 4


def hugging_face_folder(
    choice: ChosenContent, *, identity: str, shard_nbytes: int, config: Path | None, dtype: str | None
) -> NewFolder:
    """The folder for the chosen tensors, in files of at most `shard_nbytes` bytes of tensors, or of one tensor. `dtype`
    is what the copied configuration says of their dtype; None leaves it as it is.

    Raises `IncompatibleError`, code ``incompatible.export``, for dtypes that safetensors lacks and names that meet, and
    `ConfigurationError`, code ``config.export``, for a `config` folder without a configuration.
    """
    names = _names(choice.tensors)
    shards = list(_shards(choice.tensors, shard_nbytes))
    total = len(shards)
    homes = [_SINGLE] if total < 2 else [f"model-{at:05d}-of-{total:05d}.safetensors" for at in range(1, total + 1)]
    files = [safetensors_file(home, shard, names) for home, shard in zip(homes, shards, strict=True)]
    copied = {} if config is None else _configuration(config, dtype)
    if config is not None:
        _check_family(config, copied[_CONFIG], {names[one.name]: one.shape for _, one in choice.tensors})
    last = {} if total < 2 else {_INDEX: _index(homes, shards, names)}
    return NewFolder(identity, copied, files, last, len(choice.tensors))


def _names(chosen: Sequence[ChosenTensor]) -> dict[str, str]:
    """The new name of each tensor, by its name in the table. A tied tensor is written once."""
    kept = {one.tensor.name: min(one.names, key=embedding_likeness) for one in chosen}
    short = without_common_container(list(kept.values()))
    names = {name: "/".join(map(plain_key, split(short[of]))) for name, of in kept.items()}
    owners: dict[str, str] = {}
    for name, new in names.items():
        if owners.setdefault(new, name) != name or new == "__metadata__":
            text = "would get a name that safetensors reserves" if new == "__metadata__" else _meets(new, owners[new])
            raise unfit(name, text, "Rename it with a mapping (--mapping).")
    return names


def _meets(new: str, other: str) -> str:
    return f"and {other} would both get the name {new!r}"


def _shards(chosen: Sequence[ChosenTensor], shard_nbytes: int) -> Iterator[list[ExportTensor]]:
    shard: list[ExportTensor] = []
    held = 0
    for _, tensor in chosen:
        if shard and held + tensor.nbytes > shard_nbytes:
            yield shard
            shard, held = [], 0
        shard.append(tensor)
        held += tensor.nbytes
    yield shard


def safetensors_file(home: str, shard: Sequence[ExportTensor], names: Mapping[str, str]) -> NewFile:
    """The file `home` with the tensors of `shard`, which get the names that `names` has for theirs.

    Raises `IncompatibleError`, code ``incompatible.export``, for dtypes that safetensors lacks, and
    `ConfigurationError`, code ``config.export``, for more names than a header has room for.
    """
    segments, entries, offset = [], {}, 0
    for tensor in shard:
        code = _CODES.get(tensor.dtype)
        if code is None:
            text = f"has dtype {tensor.dtype}, which safetensors files cannot hold"
            raise unfit(tensor.name, text, "Leave it out with select (--select), or cast it with a mapping.")
        entries[names[tensor.name]] = {
            "dtype": code,
            "shape": _shape(tensor),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        if tensor.nbytes:
            segments.append(TensorSegment(offset, tensor, whole(tensor.shape)))
        offset += tensor.nbytes
    return NewFile(home, _header(entries), segments)


def _shape(tensor: ExportTensor) -> Shape:
    """The shape that the header has: safetensors counts halves of bytes in the last axis."""
    if _CODES[tensor.dtype] != _F4:
        return tensor.shape
    if not tensor.shape:
        raise unfit(tensor.name, "has no axis for its halves of bytes", "Leave it out with select (--select).")
    return (*tensor.shape[:-1], 2 * tensor.shape[-1])


def _header(entries: Mapping[str, object]) -> bytes:
    """The length of the header and the header, padded so that the data begins where a device can write it directly."""
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")).encode("ascii")
    room = len(text) + -(len(text) + 8) % ALIGNMENT
    if room > _MAX_HEADER_NBYTES:
        raise ConfigurationError(
            f"the header of a file would take {room:,} bytes, more than readers of safetensors files accept.",
            code="config.export",
            action="Choose a smaller shard size, so that each file has fewer tensors.",
        )
    return room.to_bytes(8, "little") + text.ljust(room)


def _index(homes: Sequence[str], shards: Sequence[Sequence[ExportTensor]], names: Mapping[str, str]) -> bytes:
    pairs = [(names[tensor.name], home) for home, shard in zip(homes, shards, strict=True) for tensor in shard]
    total = sum(tensor.nbytes for shard in shards for tensor in shard)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(pairs))}
    return (json.dumps(index, indent=2) + "\n").encode("ascii")


def _check_family(folder: Path, config: bytes, shapes: Mapping[str, Shape]) -> None:
    """Refuse names and shapes that are not those of the model that `config` describes: `from_pretrained` would make up
    tensors that are missing, ignore others, and refuse shapes. Only families that are known are checked; the log tells
    of others."""
    names = shapes.keys()
    try:
        known, sizes = decode_json(config, FamilyConfig), decode_json(config, SizesConfig)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        _log.warning(_UNCOMPARED, folder / _CONFIG, f"is none that holdfast knows ({error!s:.200})")
        return
    found = Family(known).difference(names) if is_family(known.model_type) else None
    if found is None:
        _log.warning(_UNCOMPARED, folder / _CONFIG, _undecided(known))
        return
    model = f"{folder / _CONFIG} describes a model of {known.model_type}"
    rules = f"holdfast.mapping.family({known.model_type!r}).write() has the rules."
    if len(found.surplus) == len(names):
        text = f"and all other tensors are none of {known.model_type}, which {folder / _CONFIG} describes"
        raise unfit(found.surplus[0], text, f"Give the configuration of this model, or map its names: {rules}")
    if found.missing:
        text = f"would be missing from the folder{_others(found.missing)}, and {model}"
        raise unfit(found.missing[0], text, f"Check select, mapping and {_CONFIG}: {rules}")
    if found.surplus:
        text = f"would be in the folder{_others(found.surplus)}, and {model} that has no such tensor"
        raise unfit(found.surplus[0], text, f"Leave it out with select, or check mapping and {_CONFIG}: {rules}")
    conflict = shape_conflict(sizes, shapes)
    if conflict is not None:
        wanted = ", ".join("any" if size is None else str(size) for size in conflict.configured)
        text = f"has the shape {list(conflict.shape)}, and {folder / _CONFIG} asks for [{wanted}], by {conflict.why}"
        raise unfit(conflict.name, text, "Give the configuration of this model, or check mapping.")


def _others(names: Sequence[str]) -> str:
    """The names after the first one, in so far as a message has room for them."""
    told = [shown(name) for name in names[1 : 1 + _NAMED]]
    rest = len(names) - len(told) - 1
    more = f" and {count(rest, 'other tensor')}" if rest else ""
    return f", as would {', '.join(told)}{more}" if told else ""


def _undecided(known: FamilyConfig) -> str:
    if not is_family(known.model_type):
        return f"has the model_type {known.model_type!r}, whose names holdfast does not know"
    return "quantises the weights" if known.quantization_config is not None else "has no number of layers"


def _configuration(folder: Path, dtype: str | None) -> dict[str, bytes]:
    copied = copied_files(folder, needed=_CONFIG, others=_COPIED)
    if dtype is not None:
        try:
            copied[_CONFIG] = config_with_dtype(copied[_CONFIG], dtype)
        except ValueError as error:
            raise no_config(folder, f"has a malformed {_CONFIG} ({error!s:.200})") from error
    return copied


def copied_files(folder: Path, *, needed: str, others: Sequence[str] = ()) -> dict[str, bytes]:
    """The file `needed` of a folder, and those whose names match `others`, by name.

    Raises `ConfigurationError`, code ``config.export``, for a folder without it, and for more than 256 MiB.
    """
    try:
        names = sorted(path.name for path in folder.iterdir() if path.is_file())
        if needed not in names:
            raise no_config(folder, f"holds no {needed}")
        chosen = [name for name in names if any(fnmatchcase(name, pattern) for pattern in (needed, *others))]
        if sum((folder / name).stat().st_size for name in chosen) > _MAX_COPIED_NBYTES:
            raise no_config(folder, "holds configuration files of more than 256 MiB")
        return {name: (folder / name).read_bytes() for name in chosen}
    except OSError as error:
        raise no_config(folder, f"cannot be read: {error.strerror or error}") from error


def no_config(folder: Path, what: str) -> ConfigurationError:
    """The error for a folder whose configuration is not one; `what` follows its path."""
    return ConfigurationError(
        f"{folder} {what}.",
        code="config.export",
        action="Name a folder with the configuration, as save_pretrained writes it.",
        path=str(folder),
    )
