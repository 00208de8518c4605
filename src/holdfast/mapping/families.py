"""Families of models of transformers: the names in their folders, and the rules from and to the names of live models.

A family knows three forms of one model. ``"folder"``: the names of published folders, which `save_pretrained` writes.
``"transformers"``: those of the live class of transformers 5, which fuses experts. ``"separate"``: each projection and
each expert is a linear layer of its own, as plans of tensor parallelism want it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from holdfast.decoding import decode_json
from holdfast.mapping.family_names import FAMILY_NAMES, FamilyConfig, NameDifference
from holdfast.mapping.rules import Fuse, Rename, Rule, Split, Stack, Transpose, Unstack
from holdfast.wording import kind_of

Form = Literal["transformers", "separate"]
#: The rules from a folder to a form, or from it to a folder.
_Rules = Callable[["FamilyConfig"], list[Rule]]


def _none(_: FamilyConfig) -> list[Rule]:
    return []


@dataclass(frozen=True)
class _Known:
    """The rules of a family, by form."""

    read: Mapping[str, _Rules]
    write: Mapping[str, _Rules]


@dataclass(frozen=True)
class Family:
    """A family of models of transformers, as `family` makes it: the rules between the names of its folders and those of
    live models. In the form ``"transformers"`` these are the names of the class of transformers 5; in ``"separate"``
    each projection and each expert is a linear layer of its own, named ``q_proj`` and so on.
    """

    config: FamilyConfig

    def read(self, form: Form = "transformers", *, under: str = "model") -> list[Rule]:
        """The rules for a load of a folder into a model of that form, which is the entry `under` of the state."""
        rules = self._rules("read", form)
        return [Rename("{x:**}", f"{under}/{{x}}"), *rules] if under else rules

    def write(self, form: Form = "transformers") -> list[Rule]:
        """The rules for an export of a model of that form to the names of the family's folders."""
        return self._rules("write", form)

    def difference(self, names: Collection[str]) -> NameDifference | None:
        """The names that a folder with just `names` lacks, and those that it has too many; None where the configuration
        does not decide it, as without a number of layers, or with quantised weights."""
        return FAMILY_NAMES[self.config.model_type].difference(self.config, names)

    def _rules(self, direction: Literal["read", "write"], form: str) -> list[Rule]:
        known = _FAMILIES[self.config.model_type]
        forms = known.read if direction == "read" else known.write
        if form not in forms:
            raise ValueError(f"{self.config.model_type} has the forms {', '.join(map(repr, forms))}, not {form!r}")
        return forms[form](self.config)


def family(config: str | Mapping[str, object]) -> Family:
    """The family of a model of transformers, by the content of its ``config.json``, or by its ``model_type`` alone,
    such as ``"mixtral"``, where the rules need no numbers.

    Raises `ValueError` for a family that is not known here, and for a configuration that is malformed; `TypeError` for
    anything but a dict or a text.
    """
    item: object = config
    if not isinstance(item, str | Mapping):
        how = "; write family(config.to_dict())" if hasattr(item, "to_dict") else ""
        raise TypeError(f"family takes the content of a config.json, or a model_type, not {kind_of(item)}{how}")
    given: Mapping[str, object] = {"model_type": config} if isinstance(config, str) else config
    needed = {name: given[name] for name in FamilyConfig.__struct_fields__ if name in given}
    try:
        known = decode_json(json.dumps(needed).encode(), FamilyConfig)
    except (msgspec.MsgspecError, TypeError) as error:
        raise ValueError(f"this is no configuration of a model: {error}") from error
    if known.model_type not in _FAMILIES:
        names = ", ".join(sorted(_FAMILIES))
        if isinstance(config, str) and ("/" in config or config.endswith(".json")):
            how = "; of a file, give its content as a dict: family(json.loads(path.read_text()))"
        else:
            how = "; write rules"
        raise ValueError(f"{known.model_type!r} is none of the families {names}{how}")
    return Family(known)


def is_family(model_type: str) -> bool:
    """Whether `family` knows the `model_type` of a configuration."""
    return model_type in _FAMILIES


def _number(config: FamilyConfig, name: Literal["num_attention_heads", "num_key_value_heads"]) -> int:
    number = getattr(config, name)
    if not isinstance(number, int) or number < 1:
        raise ValueError(f"the rules of {config.model_type} need {name}: give family() the content of config.json")
    return number


def _has_experts(config: FamilyConfig) -> bool:
    """Whether any layer has experts, as far as the configuration says: rules for them must match some."""
    return config.num_layers is None or any(map(config.has_experts, range(config.num_layers)))


def _stacked(one: str, gate: str, up: str, down: str) -> tuple[_Rules, _Rules]:
    """The rules that stack the experts of a layer and fuse their `gate` and `up`, and those back. `one` is the block
    that they have in a folder; a live class calls it ``mlp``."""
    rename = "{x:**}.mlp.{y:**}", f"{{x}}.{one}.{{y}}"
    experts = "{x}.mlp.experts"

    def read(config: FamilyConfig) -> list[Rule]:
        if not _has_experts(config):
            return []
        stacks: list[Rule] = [
            Stack(f"{{x:**}}.mlp.experts.{{e}}.{each}.weight", f"{experts}.{each}") for each in (gate, up, down)
        ]
        rules: list[Rule] = [] if one == "mlp" else [Rename(f"{{x:**}}.{one}.{{y:**}}", "{x}.mlp.{y}")]
        halves = [f"{{x:**}}.mlp.experts.{each}" for each in (gate, up)]
        rules += [*stacks, Fuse(halves, f"{experts}.gate_up_proj", axis=1)]
        return rules if down == "down_proj" else [*rules, Rename(halves[0].replace(gate, down), f"{experts}.down_proj")]

    def write(config: FamilyConfig) -> list[Rule]:
        if not _has_experts(config):
            return []
        rules: list[Rule] = [
            Split("{x:**}.mlp.experts.gate_up_proj", [f"{experts}.{each}" for each in (gate, up)], axis=1)
        ]
        if down != "down_proj":
            rules.append(Rename("{x:**}.mlp.experts.down_proj", f"{experts}.{down}"))
        rules += [
            Unstack(f"{{x:**}}.mlp.experts.{each}", f"{experts}.{{e}}.{each}.weight") for each in (gate, up, down)
        ]
        return rules if one == "mlp" else [*rules, Rename(*rename)]

    return read, write


_CONV1D: Final = ("attn.c_proj", "mlp.c_fc", "mlp.c_proj")
_QKV: Final = ("q_proj", "k_proj", "v_proj")


def _gpt2_read(_: FamilyConfig) -> list[Rule]:
    attention = "{x:**}.attn.c_attn."
    return [
        *(Transpose(f"**.{layer}.weight") for layer in ("attn.c_attn", *_CONV1D)),
        *(Split(f"{attention}{leaf}", [f"{{x}}.attn.{each}.{leaf}" for each in _QKV]) for leaf in ("weight", "bias")),
    ]


def _gpt2_write(_: FamilyConfig) -> list[Rule]:
    return [
        *(
            Fuse([f"{{x:**}}.attn.{each}.{leaf}" for each in _QKV], f"{{x}}.attn.c_attn.{leaf}")
            for leaf in ("weight", "bias")
        ),
        *(Transpose(f"**.{layer}.weight") for layer in ("attn.c_attn", *_CONV1D)),
    ]


def _neox_head(config: FamilyConfig, *, is_read: bool) -> list[Rule]:
    """The class of transformers 5 calls the head otherwise than its folders do; a tied one is in no folder."""
    if config.tie_word_embeddings:
        return []
    names = "{x:**}embed_out.weight", "{x:**}lm_head.weight"
    old, new = names if is_read else names[::-1]
    return [Rename(old, new.replace("{x:**}", "{x}"))]


def _neox_read(config: FamilyConfig) -> list[Rule]:
    names, heads = "{x:**}.attention.query_key_value.{leaf}", _number(config, "num_attention_heads")
    to = [f"{{x}}.attention.{each}.{{leaf}}" for each in _QKV]
    return [*_neox_head(config, is_read=True), Split(names, to, groups=heads)]


def _neox_write(config: FamilyConfig) -> list[Rule]:
    names = [f"{{x:**}}.attention.{each}.{{leaf}}" for each in _QKV]
    heads = _number(config, "num_attention_heads")
    to = "{x}.attention.query_key_value.{leaf}"
    return [Fuse(names, to, groups=heads), *_neox_head(config, is_read=False)]


def _phi3_read(config: FamilyConfig) -> list[Rule]:
    heads, kv_heads = _number(config, "num_attention_heads"), _number(config, "num_key_value_heads")
    attention, mlp = "self_attn.", "mlp."
    return [
        Split(
            f"{{x:**}}.{attention}qkv_proj.weight",
            [f"{{x}}.{attention}{each}.weight" for each in _QKV],
            shares=(heads, kv_heads, kv_heads),
        ),
        Split(f"{{x:**}}.{mlp}gate_up_proj.weight", [f"{{x}}.{mlp}{each}_proj.weight" for each in ("gate", "up")]),
    ]


def _phi3_write(_: FamilyConfig) -> list[Rule]:
    return [
        Fuse([f"{{x:**}}.self_attn.{each}.weight" for each in _QKV], "{x}.self_attn.qkv_proj.weight"),
        Fuse([f"{{x:**}}.mlp.{each}_proj.weight" for each in ("gate", "up")], "{x}.mlp.gate_up_proj.weight"),
    ]


_SAME: Final[Mapping[str, _Rules]] = {"transformers": _none, "separate": _none}
_LLAMA: Final = _Known(_SAME, _SAME)


def _mixture(one: str, gate: str, up: str, down: str) -> _Known:
    """A family with experts."""
    read, write = _stacked(one, gate, up, down)
    return _Known({"transformers": read, "separate": _none}, {"transformers": write, "separate": _none})


_QWEN_MOE: Final = _mixture("mlp", "gate_proj", "up_proj", "down_proj")
_FAMILIES: Final[Mapping[str, _Known]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2"), _LLAMA),
    "mixtral": _mixture("block_sparse_moe", "w1", "w3", "w2"),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "olmoe"), _QWEN_MOE),
    "gpt2": _Known(
        {"transformers": _none, "separate": _gpt2_read},
        {"transformers": _none, "separate": _gpt2_write},
    ),
    "gpt_neox": _Known(
        {"transformers": lambda config: _neox_head(config, is_read=True), "separate": _neox_read},
        {"transformers": lambda config: _neox_head(config, is_read=False), "separate": _neox_write},
    ),
    "phi3": _Known(
        {"transformers": _none, "separate": _phi3_read},
        {"transformers": _none, "separate": _phi3_write},
    ),
}
