"""Families of models of transformers: the names in their folders, and the rules from and to the names of live models.

A family knows three forms of one model. ``"folder"``: the names of published folders, which `save_pretrained` writes.
``"transformers"``: those of the live class of transformers 5, which fuses experts. ``"separate"``: each projection and
each expert is a linear layer of its own, as plans of tensor parallelism want it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Final, Literal

import msgspec

from holdfast.decoding import decode_json
from holdfast.mapping.rules import Fuse, Rename, Rule, Split, Stack, Transpose, Unstack

Form = Literal["transformers", "separate"]
#: The rules from a folder to a form, or from it to a folder.
_Rules = Callable[["FamilyConfig"], list[Rule]]


class FamilyConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a model's ``config.json`` that decides about names and about the division of tensors."""

    model_type: str = ""
    num_hidden_layers: int | None = None
    n_layer: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    num_local_experts: int | None = None
    num_experts: int | None = None
    n_routed_experts: int | None = None
    tie_word_embeddings: bool | None = None

    @property
    def num_layers(self) -> int | None:
        """The number of layers, whatever the family calls it."""
        return self.num_hidden_layers if self.n_layer is None else self.n_layer


def _none(_: FamilyConfig) -> list[Rule]:
    return []


@dataclass(frozen=True)
class _Known:
    """The facts about a family. `layer` matches the name of a layer's tensor, up to its name in the layer; `needed` has
    alternatives of names that each layer must have."""

    layer: str
    needed: tuple[tuple[str, ...], ...]
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

    def lacks(self, names: Collection[str]) -> str | None:
        """A name that a folder of this model lacks, if it has just `names`; None where each layer is whole, or where
        the configuration does not count the layers."""
        known, number = _FAMILIES[self.config.model_type], self.config.num_layers
        if number is None:
            return None
        layer = re.compile(known.layer)
        found: dict[int, set[str]] = {at: set() for at in range(number)}
        above = ""
        for name in names:
            match = layer.match(name)
            if match is not None:
                above = match["above"]
                found.setdefault(int(match["at"]), set()).add(name[match.end() :])
        for at, held in found.items():
            missing = min((self._missing(needed, held) for needed in known.needed), key=len)
            if missing:
                return f"{above}{at}.{missing[0]}"
        return None

    def _missing(self, needed: tuple[str, ...], held: Collection[str]) -> list[str]:
        return [name for name in self._each(needed) if name not in held]

    def _each(self, names: tuple[str, ...]) -> Iterator[str]:
        config = self.config
        experts = config.num_local_experts or config.num_experts or config.n_routed_experts or 1
        for name in names:
            yield from (name.replace("{e}", str(at)) for at in range(experts)) if "{e}" in name else (name,)

    def _rules(self, direction: Literal["read", "write"], form: str) -> list[Rule]:
        known = _FAMILIES[self.config.model_type]
        forms = known.read if direction == "read" else known.write
        if form not in forms:
            raise ValueError(f"{self.config.model_type} has the forms {', '.join(map(repr, forms))}, not {form!r}")
        return forms[form](self.config)


def family(config: str | Mapping[str, object]) -> Family:
    """The family of a model of transformers, by the content of its ``config.json``, or by its ``model_type`` alone,
    such as ``"mixtral"``, where the rules need no numbers.

    Raises `ValueError` for a family that is not known here, and for a configuration that is malformed.
    """
    given: Mapping[str, object] = {"model_type": config} if isinstance(config, str) else config
    needed = {name: given[name] for name in FamilyConfig.__struct_fields__ if name in given}
    try:
        known = decode_json(json.dumps(needed).encode(), FamilyConfig)
    except (msgspec.MsgspecError, TypeError) as error:
        raise ValueError(f"this is no configuration of a model: {error}") from error
    if known.model_type not in _FAMILIES:
        raise ValueError(f"{known.model_type!r} is none of the families {', '.join(sorted(_FAMILIES))}; write rules")
    return Family(known)


def is_family(model_type: str) -> bool:
    """Whether `family` knows the `model_type` of a configuration."""
    return model_type in _FAMILIES


def _number(config: FamilyConfig, name: Literal["num_attention_heads", "num_key_value_heads"]) -> int:
    number = getattr(config, name)
    if not isinstance(number, int) or number < 1:
        raise ValueError(f"the rules of {config.model_type} need {name}: give family() the content of config.json")
    return number


def _stacked(one: str, gate: str, up: str, down: str) -> tuple[_Rules, _Rules]:
    """The rules that stack the experts of a layer and fuse their `gate` and `up`, and those back. `one` is the block
    that they have in a folder; a live class calls it ``mlp``."""
    rename = "{x:**}.mlp.{y:**}", f"{{x}}.{one}.{{y}}"
    experts = "{x}.mlp.experts"

    def read(_: FamilyConfig) -> list[Rule]:
        stacks: list[Rule] = [
            Stack(f"{{x:**}}.mlp.experts.{{e}}.{each}.weight", f"{experts}.{each}") for each in (gate, up, down)
        ]
        rules: list[Rule] = [] if one == "mlp" else [Rename(f"{{x:**}}.{one}.{{y:**}}", "{x}.mlp.{y}")]
        halves = [f"{{x:**}}.mlp.experts.{each}" for each in (gate, up)]
        rules += [*stacks, Fuse(halves, f"{experts}.gate_up_proj", axis=1)]
        return rules if down == "down_proj" else [*rules, Rename(halves[0].replace(gate, down), f"{experts}.down_proj")]

    def write(_: FamilyConfig) -> list[Rule]:
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


def _experts(one: str, gate: str, up: str, down: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of a layer's experts: those of folders, and those of a live class, which transformers reads, too."""
    apart = tuple(f"{one}.experts.{{e}}.{each}.weight" for each in (gate, up, down))
    return (f"{one}.gate.weight", *apart), ("mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj")


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


_LAYERS: Final = r"(?P<above>.*\blayers\.)(?P<at>[0-9]+)\."
_NORMS: Final = ("input_layernorm.weight", "post_attention_layernorm.weight")
_ATTENTION: Final = tuple(f"self_attn.{each}_proj.weight" for each in "qkvo")
_MLP: Final = tuple(f"mlp.{each}_proj.weight" for each in ("gate", "up", "down"))
_SAME: Final[Mapping[str, _Rules]] = {"transformers": _none, "separate": _none}
_LLAMA: Final = _Known(_LAYERS, ((*_ATTENTION, *_MLP, *_NORMS),), _SAME, _SAME)


def _mixture(one: str, gate: str, up: str, down: str, *, norms: tuple[str, ...], is_mixed: bool) -> _Known:
    """A family with experts. `is_mixed`: some of its layers have none."""
    read, write = _stacked(one, gate, up, down)
    needed = tuple((*_ATTENTION, *norms, *experts) for experts in _experts(one, gate, up, down))
    if is_mixed:
        needed = (*needed, (*_ATTENTION, *norms, *_MLP))
    return _Known(
        _LAYERS, needed, {"transformers": read, "separate": _none}, {"transformers": write, "separate": _none}
    )


def _with_leaves(*layers: str) -> tuple[str, ...]:
    return tuple(f"{layer}.{leaf}" for layer, leaf in product(layers, ("weight", "bias")))


_QWEN_MOE: Final = _mixture("mlp", "gate_proj", "up_proj", "down_proj", norms=_NORMS, is_mixed=True)
_FAMILIES: Final[Mapping[str, _Known]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2"), _LLAMA),
    "mixtral": _mixture("block_sparse_moe", "w1", "w3", "w2", norms=_NORMS, is_mixed=False),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "olmoe"), _QWEN_MOE),
    "gpt2": _Known(
        r"(?P<above>(?:.*\.)?h\.)(?P<at>[0-9]+)\.",
        (_with_leaves("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"),),
        {"transformers": _none, "separate": _gpt2_read},
        {"transformers": _none, "separate": _gpt2_write},
    ),
    "gpt_neox": _Known(
        _LAYERS,
        (
            _with_leaves(
                *("input_layernorm", "post_attention_layernorm", "attention.query_key_value", "attention.dense"),
                *("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
            ),
        ),
        {"transformers": lambda config: _neox_head(config, is_read=True), "separate": _neox_read},
        {"transformers": lambda config: _neox_head(config, is_read=False), "separate": _neox_write},
    ),
    "phi3": _Known(
        _LAYERS,
        (
            (
                *("self_attn.qkv_proj.weight", "self_attn.o_proj.weight"),
                *("mlp.gate_up_proj.weight", "mlp.down_proj.weight", *_NORMS),
            ),
        ),
        {"transformers": _none, "separate": _phi3_read},
        {"transformers": _none, "separate": _phi3_write},
    ),
}
