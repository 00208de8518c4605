"""The configuration of a model of transformers, as far as an export changes it: the dtype of the weights."""

from __future__ import annotations

import json
import re
from typing import Final, cast

import xxhash

#: The key of transformers 5, which it writes, and that of older versions, which it still reads.
_KEYS: Final = ("dtype", "torch_dtype")
#: Describes stored bits, not the dtype that a model computes in.
_QUANTIZATION: Final = "quantization_config"


def config_with_dtype(data: bytes, dtype: str) -> bytes:
    """The bytes of a ``config.json`` whose weights have `dtype`; `data` itself where it says so already.

    The model's dtype is set under the keys that it has, or as ``dtype``, and in configurations of its parts that name
    one. A dict of dtypes for the parts stays a dict. Everything else keeps its value and its order, and numbers keep
    their text. Raises `ValueError` for bytes that are no JSON object, and for a dtype that is neither text nor null.
    """
    mark = f"holdfast {xxhash.xxh3_128_hexdigest(data)} "
    try:
        # Configurations may have Infinity, which msgspec refuses; and 1e400, which would become Infinity.
        config = json.loads(data, parse_float=mark.__add__)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(config, dict):
        raise ValueError("it is no JSON object")  # noqa: TRY004 - the bytes are wrong, and no caller's type
    if not any(key in config for key in _KEYS):
        config["dtype"] = ""
    if not _changed(config, dtype):
        return data
    return (re.sub(f'"{mark}([^"]*)"', r"\1", json.dumps(config, indent=2)) + "\n").encode("ascii")


def _changed(config: dict[str, object], dtype: str) -> bool:
    """Set the dtype in a configuration and those of its parts. Returns whether that changed anything."""
    given: dict[str, object] = {key: config[key] for key in _KEYS if key in config}
    wrong = {key: value for key, old in given.items() if (value := _renamed(key, old, dtype)) != old}
    config.update(wrong)
    parts = [part for key, part in config.items() if key.endswith("_config") and key != _QUANTIZATION]
    named = [cast("dict[str, object]", part) for part in parts if isinstance(part, dict)]
    changed = [_changed(part, dtype) for part in named]
    return bool(wrong) or any(changed)


def _renamed(key: str, old: object, dtype: str) -> object:
    """The entry `key`, which was `old`, with `dtype` in place of each dtype."""
    if isinstance(old, dict):
        return {part: _renamed(key, inner, dtype) for part, inner in old.items()}
    if old is None or (isinstance(old, str) and not old.startswith("holdfast ")):
        return dtype
    raise ValueError(f"its {key} is no name of a dtype")
