"""Names of adapters of peft: those in a folder, which lack the adapter's own name, and those in a live model. Pure.

Peft computes one from the other with the live model. Here the configuration of the adapter must do.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

import msgspec

from holdfast.decoding import decode_json

CONFIG_NAME: Final = "adapter_config.json"
WEIGHTS_NAME: Final = "adapter_model.safetensors"
#: The adapter's name where a user gives none.
DEFAULT: Final = "default"
#: Above the names of the plain model in a live `PeftModel`.
_ABOVE: Final = "base_model.model."
#: The methods whose names are known here.
METHODS: Final = ("LORA", "IA3")

_OWN: Final = r"lora_\w+|ia3_l|token_adapter\.trainable_tokens_delta"
_IN_FOLDER: Final = re.compile(rf"(?P<of>.+\.(?:{_OWN}))(?P<leaf>\.weight|\.bias)?")
_IN_MODEL: Final = re.compile(rf"(?P<of>.+\.(?:{_OWN}))\.(?P<adapter>[^.]+)(?P<leaf>\.weight|\.bias)?")
_SAVED: Final = re.compile(r"(?P<of>.+)\.modules_to_save\.(?P<adapter>[^.]+)\.(?P<leaf>.+)")
#: The vector of DoRA is a module in a model, and a tensor in a folder.
_VECTOR: Final = ".lora_magnitude_vector"


class AdapterConfig(msgspec.Struct, frozen=True):
    """The part of an adapter's configuration that decides about names."""

    peft_type: str
    modules_to_save: tuple[str, ...] | None = None
    bias: str = "none"


def decoded_config(data: bytes) -> AdapterConfig:
    """The configuration in the bytes of its file. Raises `ValueError` for malformed ones."""
    try:
        return decode_json(data, AdapterConfig)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"{error!s:.200}") from error


class AdapterName(NamedTuple):
    """The name of a tensor in a folder (`key`), and the adapter that it belongs to; "" for biases, which all share."""

    key: str
    adapter: str


def live_name(key: str, config: AdapterConfig, *, adapter: str = DEFAULT) -> str:
    """The name in a live `PeftModel` of the tensor that a folder has as `key`; `key` itself where it is unknown."""
    if config.peft_type not in METHODS:
        return key
    found = _IN_FOLDER.fullmatch(key)
    if found is not None:
        leaf = ".weight" if found["of"].endswith(_VECTOR) else found["leaf"] or ""
        return f"{found['of']}.{adapter}{leaf}"
    saved = _saved_module(key, config)
    return key if saved is None else f"{saved}.modules_to_save.{adapter}{key[len(saved) :]}"


def folder_name(name: str, config: AdapterConfig) -> AdapterName | None:
    """The name in a folder of the tensor `name` of a live model; None where no adapter has it."""
    above = "" if name.startswith(_ABOVE) else _ABOVE
    found = _IN_MODEL.fullmatch(name)
    if found is not None:
        leaf = "" if found["of"].endswith(_VECTOR) else found["leaf"] or ""
        return AdapterName(above + found["of"] + leaf, found["adapter"])
    found = _SAVED.fullmatch(name)
    if found is not None:
        return AdapterName(f"{above}{found['of']}.{found['leaf']}", found["adapter"])
    return AdapterName(above + name, "") if _is_bias(name, config) else None


def _is_bias(name: str, config: AdapterConfig) -> bool:
    """Whether the adapter trains this bias of the model. Only layers that it adapts have a ``base_layer``."""
    if config.bias == "none" or ".original_module." in name:
        return False
    return name.endswith(".bias" if config.bias == "all" else ".base_layer.bias")


def _saved_module(key: str, config: AdapterConfig) -> str | None:
    """The module that an adapter has as a whole and that holds `key`: peft compares the ends of modules' names."""
    ends = config.modules_to_save or ()
    if not ends or ".original_module." in key:
        return None
    start = len(_ABOVE) if key.startswith(_ABOVE) else 0
    dots = (at for at, letter in enumerate(key) if letter == "." and at > start)
    return next((key[:at] for at in dots if key[start:at].endswith(ends)), None)
