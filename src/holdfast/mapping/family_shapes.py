"""The shapes that the ``config.json`` of a model of a known family gives to some of its tensors.

They are those that follow from one number or a product of two: embeddings, heads, norms, projections that are not
fused. Numbers that a configuration leaves out are those of its class, which are not known here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec

from holdfast.geometry import Shape
from holdfast.mapping.family_names import QuantizationEntry

#: Families in whose classes the size of a head does not follow from the other numbers, or the number of heads of keys
#: and values from that of the others.
_OWN_HEAD_DIM: Final = ("gemma", "gemma2", "mistral", "mixtral", "qwen3", "qwen3_moe")
_OWN_KV_HEADS: Final = ("gemma", "gemma2", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")

#: The sizes of the axes of tensors, by the ends of their names.
_AXES: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(("embed_tokens.weight", "wte.weight", "embed_in.weight"), ("vocab", "hidden")),
    **dict.fromkeys(("lm_head.weight", "embed_out.weight"), ("vocab", "hidden")),
    "wpe.weight": ("positions", "hidden"),
    **dict.fromkeys(("norm.weight", "ln_f.weight", "final_layer_norm.weight"), ("hidden",)),
    **dict.fromkeys(("input_layernorm.weight", "post_attention_layernorm.weight", "ln_1.weight"), ("hidden",)),
    "self_attn.q_proj.weight": ("queries", "hidden"),
    **dict.fromkeys(("self_attn.k_proj.weight", "self_attn.v_proj.weight"), ("keys", "hidden")),
    "self_attn.o_proj.weight": ("hidden", "queries"),
    **dict.fromkeys(("mlp.gate_proj.weight", "mlp.up_proj.weight"), ("inner", "hidden")),
    "mlp.down_proj.weight": ("hidden", "inner"),
}
#: The names of the sizes in a ``config.json``.
_TOLD: Final[Mapping[str, str]] = {
    "vocab": "vocab_size",
    "hidden": "the hidden size",
    "positions": "n_positions",
    "queries": "num_attention_heads x head_dim",
    "keys": "num_key_value_heads x head_dim",
    "inner": "intermediate_size",
}


class SizesConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers in a model's ``config.json`` from which shapes follow."""

    model_type: str = ""
    vocab_size: int | None = None
    hidden_size: int | None = None
    n_embd: int | None = None
    n_positions: int | None = None
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    quantization_config: QuantizationEntry | None = None

    def sizes(self) -> dict[str, int | None]:
        """The sizes of axes; None for those that do not follow from the configuration."""
        hidden = self.n_embd if self.hidden_size is None else self.hidden_size
        heads, head, keys = self.num_attention_heads, self.head_dim, self.num_key_value_heads
        if head is None and hidden and heads and self.model_type not in _OWN_HEAD_DIM:
            head = hidden // heads
        if keys is None and self.model_type not in _OWN_KV_HEADS:
            keys = heads
        return {
            "vocab": self.vocab_size,
            "hidden": hidden,
            "positions": self.n_positions,
            "queries": heads * head if heads and head else None,
            "keys": keys * head if keys and head else None,
            "inner": self.intermediate_size,
        }


class ShapeConflict(NamedTuple):
    """A tensor whose shape is not that of the configuration: `why` names the numbers that decide about it."""

    name: str
    shape: Shape
    configured: tuple[int | None, ...]
    why: str


def shape_conflict(config: SizesConfig, shapes: Mapping[str, Shape]) -> ShapeConflict | None:
    """The first tensor of `shapes` that the configuration gives another shape; None where there is none, and where the
    weights are quantised."""
    if config.quantization_config is not None:
        return None
    sizes = config.sizes()
    for name, shape in sorted(shapes.items()):
        axes = next((axes for end, axes in _AXES.items() if f".{name}".endswith(f".{end}")), None)
        if axes is None:
            continue
        configured = tuple(sizes[axis] for axis in axes)
        if set(configured) == {None}:
            continue
        wrong = [axis for axis, size, held in zip(axes, configured, shape, strict=False) if size not in (None, held)]
        if len(shape) != len(axes) or wrong:
            return ShapeConflict(name, shape, configured, " and ".join(_TOLD[axis] for axis in wrong or axes))
    return None
