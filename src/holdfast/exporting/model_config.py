"""The configuration of a model of transformers, as far as an export changes it: the dtype of the weights."""

from __future__ import annotations

import json
from typing import Final, cast

#: The key of transformers 5, which it writes, and that of older versions, which it still reads.
_KEYS: Final = ("dtype", "torch_dtype")
#: Describes stored bits, not the dtype that a model computes in.
_QUANTIZATION: Final = "quantization_config"


def config_with_dtype(data: bytes, dtype: str) -> bytes:
    """The bytes of a ``config.json`` whose weights have `dtype`; `data` itself where it says so already.

    The model's dtype is set under the keys that it has, or as ``dtype``, and in configurations of its parts that name
    one. Everything else keeps its value and its order. Raises `ValueError` for bytes that are no JSON object.
    """
    try:
        config = json.loads(data)  # configurations may have Infinity, which msgspec refuses
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(config, dict):
        raise ValueError("it is no JSON object")  # noqa: TRY004 - the bytes are wrong, and no caller's type
    if not any(key in config for key in _KEYS):
        config["dtype"] = ""
    if not _changed(config, dtype):
        return data
    return (json.dumps(config, indent=2) + "\n").encode("ascii")


def _changed(config: dict[str, object], dtype: str) -> bool:
    """Set the dtype in a configuration and those of its parts. Returns whether that changed anything."""
    wrong = [key for key in _KEYS if key in config and config[key] != dtype]
    for key in wrong:
        config[key] = dtype
    parts = [part for key, part in config.items() if key.endswith("_config") and key != _QUANTIZATION]
    named = [cast("dict[str, object]", part) for part in parts if isinstance(part, dict)]
    changed = [_changed(part, dtype) for part in named]
    return bool(wrong) or any(changed)
