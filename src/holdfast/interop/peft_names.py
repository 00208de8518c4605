"""Names of adapters of peft: those in a folder, which lack the adapter's own name, and those in a live model. Pure.

Peft computes one from the other with the live model. Here the configuration of the adapter must do.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Container
from typing import Final, NamedTuple

import msgspec

from holdfast.decoding import decode_json
from holdfast.geometry import Shape

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
    """The part of an adapter's configuration that decides about the names and the shapes of its tensors."""

    peft_type: str
    modules_to_save: tuple[str, ...] | None = None
    bias: str = "none"
    use_dora: bool = False
    trainable_token_indices: object = None
    target_modules: tuple[str, ...] | str | None = None
    target_parameters: tuple[str, ...] | None = None
    r: int | None = None
    rank_pattern: dict[str, int] | None = None


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


def conflict(name: str, shape: Shape, config: AdapterConfig) -> str | None:
    """Why an adapter with this configuration has no tensor `name` of this `shape`, or None. `name` is one of a live
    model. Peft would leave such a tensor out without an error, or compute something else with it."""
    found = _IN_MODEL.fullmatch(name)
    if found is None:
        return None
    module, _, part = found["of"].rpartition(".")
    if part == "trainable_tokens_delta":
        return None if config.trainable_token_indices is not None else "has no trainable_token_indices"
    if part.startswith("ia3_") != (config.peft_type == "IA3"):
        return f"is one of {config.peft_type}"
    if part == "lora_magnitude_vector" and not config.use_dora:
        return "has no use_dora"
    if config.target_parameters:  # peft adapts parameters of modules with other ranks, and under other names
        return None
    ranks = {config.r, *(config.rank_pattern or {}).values()}
    if part in ("lora_A", "lora_embedding_A") and config.r is not None and ranks.isdisjoint(shape[:1]):
        return f"has the rank {config.r}"
    targets = config.target_modules
    if isinstance(targets, tuple) and not f".{module}".endswith(_ends(targets)):
        return f"does not adapt {module}"
    return None


def lacks(names: Collection[str], config: AdapterConfig) -> str | None:
    """The kind of tensors that an adapter with this configuration has, and that is not among `names`; or None."""
    parts = {found["of"].rpartition(".")[2] for name in names if (found := _IN_MODEL.fullmatch(name)) is not None}
    if config.use_dora and "lora_magnitude_vector" not in parts:
        return "use_dora"
    if config.trainable_token_indices is not None and "trainable_tokens_delta" not in parts:
        return "trainable_token_indices"
    return None


def is_copy(key: str, keys: Container[str], config: AdapterConfig) -> bool:
    """Whether a folder with these `keys` has the tensor of `key` twice, and peft reads the other one.

    With ``bias="all"``, peft writes biases of modules that are saved whole also under their names in the model.
    """
    module, saved, leaf = key.rpartition(".modules_to_save.")
    other = f"{module}.{leaf}"
    return bool(saved) and other in keys and _saved_module(other, config) == module


def is_bias_of_model(name: str) -> bool:
    """Whether the tensor `name` of a live model is a bias of the plain model, which ``bias`` may say to train."""
    if _IN_MODEL.fullmatch(name) is not None or _SAVED.fullmatch(name) is not None:
        return False
    return name.endswith(".bias") and ".original_module." not in name


def _ends(targets: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f".{target}" for target in targets)


def _is_bias(name: str, config: AdapterConfig) -> bool:
    """Whether the folder has this bias of the model. Only layers that the adapter adapts have a ``base_layer``; with
    all biases come those of the modules that ``modules_to_save`` replaces, which are not trained."""
    return config.bias != "none" and name.endswith(".bias" if config.bias == "all" else ".base_layer.bias")


def _saved_module(key: str, config: AdapterConfig) -> str | None:
    """The module that an adapter has as a whole and that holds `key`: peft compares the ends of modules' names."""
    ends = config.modules_to_save or ()
    if not ends or ".original_module." in key:
        return None
    start = len(_ABOVE) if key.startswith(_ABOVE) else 0
    dots = (at for at, letter in enumerate(key) if letter == "." and at > start)
    return next((key[:at] for at in dots if key[start:at].endswith(ends)), None)
