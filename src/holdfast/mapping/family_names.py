"""The names of all tensors in the folder of a model of a known family, as they follow from its ``config.json``.

They are those of causal language models of transformers 5, which the tests compare with its classes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Final, NamedTuple

import msgspec

#: Families whose layers may be without experts.
_MIXED: Final = ("qwen2_moe", "qwen3_moe")


class QuantizationEntry(msgspec.Struct, frozen=True):
    """The entry of a configuration that says how the weights are quantised. Its content decides nothing here."""


class FamilyConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a model's ``config.json`` that decides about names and about the division of tensors."""

    model_type: str = ""
    architectures: tuple[str, ...] | None = None
    num_hidden_layers: int | None = None
    n_layer: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    num_local_experts: int | None = None
    num_experts: int | None = None
    n_routed_experts: int | None = None
    decoder_sparse_step: int | None = None
    mlp_only_layers: tuple[int, ...] | None = None
    tie_word_embeddings: bool | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    qkv_bias: bool | None = None
    quantization_config: QuantizationEntry | None = None

    @property
    def num_layers(self) -> int | None:
        """The number of layers, whatever the family calls it."""
        return self.num_hidden_layers if self.n_layer is None else self.n_layer

    @property
    def count_experts(self) -> int:
        """The number of experts of a layer, whatever the family calls it."""
        return self.num_local_experts or self.num_experts or self.n_routed_experts or 1

    @property
    def is_causal(self) -> bool:
        """Whether the model is a causal language model, as far as the configuration says."""
        return all(each.endswith(("ForCausalLM", "LMHeadModel")) for each in self.architectures or ())

    def has_experts(self, layer: int) -> bool:
        """Whether a layer of a family with experts has them."""
        if self.model_type not in _MIXED:
            return True
        is_dense = layer in (self.mlp_only_layers or ()) or self.num_experts == 0
        return not is_dense and (layer + 1) % max(self.decoder_sparse_step or 1, 1) == 0


class NameDifference(NamedTuple):
    """The names that a folder lacks, and those that the configured model does not have, sorted."""

    missing: tuple[str, ...]
    surplus: tuple[str, ...]


@dataclass(frozen=True)
class FamilyNames:
    """The names of a family. `above` is what the names of a whole model begin with, which folders may leave out, and
    `block` the list of layers. `layer` gives the alternatives for the names of a layer, as folders and as live classes
    have them; `heads` those of the head, the first of which folders have. `optional` are names in a layer that some
    folders have and no class needs: tables that are computed."""

    above: str
    block: str
    outside: tuple[str, ...]
    layer: Callable[[FamilyConfig, int], list[tuple[str, ...]]]
    heads: tuple[str, ...] = ("lm_head.weight",)
    is_tied: bool = False
    optional: tuple[str, ...] = ("self_attn.rotary_emb.inv_freq",)

    def difference(self, config: FamilyConfig, names: Collection[str]) -> NameDifference | None:
        """The names that are missing in `names`, and those that are too many; None where the configuration does not
        decide it: it has no number of layers, or quantises the weights. Heads of models that are no causal ones may
        have any names."""
        number = config.num_layers
        if number is None or config.quantization_config is not None:
            return None
        above = self._above(names)
        wanted = {f"{above}{name}" for name in self.outside} | self._head(config, names)
        ignored: set[str] = set()
        for at in range(number):
            prefix = f"{above}{self.block}.{at}."
            held = {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
            layer = min(self.layer(config, at), key=lambda each: len(held.symmetric_difference(each)))
            wanted.update(prefix + name for name in layer)
            ignored.update(prefix + name for name in self.optional)
        surplus = set(names) - wanted - ignored
        if not config.is_causal:
            surplus = {name for name in surplus if name.startswith(f"{above}{self.block}.")}
        return NameDifference(_sorted(wanted - set(names)), _sorted(surplus))

    def _above(self, names: Collection[str]) -> str:
        is_bare = any(name.startswith(f"{self.block}.") for name in names)
        return "" if is_bare else self.above

    def _head(self, config: FamilyConfig, names: Collection[str]) -> set[str]:
        is_tied = self.is_tied if config.tie_word_embeddings is None else config.tie_word_embeddings
        if is_tied or not config.is_causal:
            return set()
        return {next((each for each in self.heads if each in names), self.heads[0])}


def _sorted(names: Collection[str]) -> tuple[str, ...]:
    """Names in their order, with layer 2 before layer 10."""
    return tuple(sorted(names, key=lambda name: [part.zfill(9) for part in re.split("([0-9]+)", name)]))


def _weights(*layers: str) -> tuple[str, ...]:
    return tuple(f"{layer}.weight" for layer in layers)


def _biases(*layers: str) -> tuple[str, ...]:
    return tuple(f"{layer}.bias" for layer in layers)


def _both(*layers: str) -> tuple[str, ...]:
    return tuple(f"{layer}.{leaf}" for layer, leaf in product(layers, ("weight", "bias")))


_QKV: Final = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_QKVO: Final = (*_QKV, "self_attn.o_proj")
_QK_NORMS: Final = _weights("self_attn.q_norm", "self_attn.k_norm")
_MLP: Final = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_NORMS: Final = _weights("input_layernorm", "post_attention_layernorm")
_SHARED: Final = _weights(
    *(f"mlp.shared_expert.{each}" for each in ("gate_proj", "up_proj", "down_proj")), "mlp.shared_expert_gate"
)
#: The attention and the norms of a layer.
_Base = Callable[[FamilyConfig], tuple[str, ...]]


def _attention(*others: str, has_bias: bool = False) -> _Base:
    """With ``attention_bias`` where the family `has_bias`, and `others`."""
    return lambda config: (
        *(*_weights(*_QKVO), *_NORMS, *others),
        *(_biases(*_QKVO) if has_bias and config.attention_bias else ()),
    )


def _attention_of_qwen2(config: FamilyConfig) -> tuple[str, ...]:
    return (*_weights(*_QKVO), *_NORMS, *(_biases(*_QKV) if config.qkv_bias is not False else ()))


def _attention_of_phi3(_: FamilyConfig) -> tuple[str, ...]:
    return (*_weights("self_attn.qkv_proj", "self_attn.o_proj"), *_NORMS)


def _dense(base: _Base, *mlp: str, has_bias: bool = False) -> FamilyNames:
    """A family without experts; `has_bias`: with ``mlp_bias``."""
    names = mlp or _MLP

    def layer(config: FamilyConfig, _: int) -> list[tuple[str, ...]]:
        biases = _biases(*names) if has_bias and config.mlp_bias else ()
        return [(*base(config), *_weights(*names), *biases)]

    return FamilyNames("model.", "layers", _OUTSIDE, layer)


_OUTSIDE: Final = _weights("embed_tokens", "norm")


def _tied(names: FamilyNames) -> FamilyNames:
    return FamilyNames(names.above, names.block, names.outside, names.layer, is_tied=True)


def _mixture(base: _Base, one: str, parts: tuple[str, str, str], *shared: str) -> FamilyNames:
    """A family with experts, which its folders have in the block `one`, as `parts`, and its class fused."""

    def layer(config: FamilyConfig, at: int) -> list[tuple[str, ...]]:
        if not config.has_experts(at):
            return [(*base(config), *_weights(*_MLP))]
        each = product(range(config.count_experts), parts)
        apart = _weights(f"{one}.gate", *(f"{one}.experts.{expert}.{part}" for expert, part in each))
        fused = ("mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj")
        return [(*base(config), *experts, *shared) for experts in (apart, fused)]

    return FamilyNames("model.", "layers", _OUTSIDE, layer)


def _gpt2_layer(_config: FamilyConfig, _at: int) -> list[tuple[str, ...]]:
    return [_both("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")]


def _neox_layer(config: FamilyConfig, _: int) -> list[tuple[str, ...]]:
    attention = ("attention.query_key_value", "attention.dense")
    has_bias = config.attention_bias is not False
    others = ("input_layernorm", "post_attention_layernorm", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
    return [(*_both(*others), *(_both if has_bias else _weights)(*attention))]


def _iterate_names() -> Iterator[tuple[str, FamilyNames]]:
    parts = ("gate_proj", "up_proj", "down_proj")
    norms = _weights("pre_feedforward_layernorm", "post_feedforward_layernorm")
    yield "llama", _dense(_attention(has_bias=True), has_bias=True)
    yield "mistral", _dense(_attention())
    yield "qwen2", _dense(lambda config: _attention_of_qwen2(msgspec.structs.replace(config, qkv_bias=True)))
    yield "qwen3", _dense(_attention(*_QK_NORMS, has_bias=True))
    yield "gemma", _tied(_dense(_attention(has_bias=True)))
    yield "gemma2", _tied(_dense(_attention(*norms, has_bias=True)))
    yield "mixtral", _mixture(_attention(), "block_sparse_moe", ("w1", "w3", "w2"))
    yield "qwen2_moe", _mixture(_attention_of_qwen2, "mlp", parts, *_SHARED)
    yield "qwen3_moe", _mixture(_attention(*_QK_NORMS, has_bias=True), "mlp", parts)
    yield "olmoe", _mixture(_attention(*_QK_NORMS, has_bias=True), "mlp", parts)
    yield "phi3", _dense(_attention_of_phi3, "mlp.gate_up_proj", "mlp.down_proj")
    outside = (*_weights("wte", "wpe"), *_both("ln_f"))
    tables: tuple[str, ...] = ("attn.bias", "attn.masked_bias")
    yield "gpt2", FamilyNames("transformer.", "h", outside, _gpt2_layer, is_tied=True, optional=tables)
    outside = (*_weights("embed_in"), *_both("final_layer_norm"))
    tables = ("attention.bias", "attention.masked_bias", "attention.rotary_emb.inv_freq")
    heads = ("embed_out.weight", "lm_head.weight")
    yield "gpt_neox", FamilyNames("gpt_neox.", "layers", outside, _neox_layer, heads=heads, optional=tables)


#: By `model_type`.
FAMILY_NAMES: Final[Mapping[str, FamilyNames]] = dict(_iterate_names())
