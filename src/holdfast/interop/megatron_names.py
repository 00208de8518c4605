"""The keys in Megatron's folders, and the names that a live job of Megatron has for the same things."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from holdfast.mapping.megatron_optimizers import MASTER

#: The slot of the master weights, which a state of ours calls `MASTER`, as Megatron's optimizers name it: the
#: distributed one, and the others.
MASTERS: Final = ("param", "fp32_param")
#: The entry of a state's optimizer that has buckets of a distributed optimizer.
BUCKETS: Final = "buckets"
#: The keys by which Megatron tells parameter groups apart, whatever the layout, and the beginning that NeMo gives them.
IDENTIFIERS: Final = ("wd_mult", "lr_mult", "is_decoupled_lr")
_RENAMED: Final = "pre_"
_CHAIN: Final = r"(?:chained_[0-9]{1,4}\.)?"
_SLOT: Final = re.compile(rf"{_CHAIN}optimizer\.state\.(?P<slot>[^.]+)\.(?P<weight>.+)", re.DOTALL)
_BUCKET: Final = re.compile(
    rf"(?P<bucket>{_CHAIN}optimizer\.distributed\.dp_group_idx_[0-9]+\..+\.bucket_idx_[0-9]+)\.(?P<slot>[^.]+)"
)
_VALUE: Final = re.compile(rf"{_CHAIN}optimizer\.distributed\.dp_group_idx_[0-9]+\.(?P<entry>[^./]+)/shard_[0-9_.]+")
_RANDOM: Final = re.compile(r"rng_state/shard_([0-9]+)\.([0-9]+)_([0-9]+)\.([0-9]+)")

#: The names of weights in models of Megatron-core: below a part of the model, and in a layer below a part of that.
_MODEL_PART: Final = re.compile(
    r"(?:language_model\.|vision_model\.)?"
    r"(?:embedding|decoder|encoder|output_layer|lm_head|mtp|pooler|binary_head|vision_projection)\..+",
    re.DOTALL,
)
_LAYER_PART: Final = re.compile(r"\.layers\.(?:[0-9]+\.)?([^.]+)")
_LAYER_PARTS: Final = frozenset(
    (
        *("input_layernorm", "self_attention", "pre_cross_attn_layernorm", "cross_attention", "pre_mlp_layernorm"),
        *("mlp", "norm", "mixer", "enorm", "hnorm", "eh_proj", "transformer_layer", "mtp_model_layer"),
        *("final_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm"),
    )
)

#: The path of a tensor in a state.
NamePath = tuple[str, ...]


class RandomShard(NamedTuple):
    """The random numbers of the ranks of one pipeline stage and one tensor-parallel rank, of so many."""

    stage: int
    column: int
    stages: int
    columns: int


def tensor_path(key: str) -> NamePath:
    """The path of the tensor that has this key in a folder."""
    if (found := _SLOT.fullmatch(key)) is not None:
        slot = MASTER if found["slot"] in MASTERS else found["slot"]
        return "optimizer", "state", "model", found["weight"], slot
    if (found := _BUCKET.fullmatch(key)) is not None:
        slot = MASTER if found["slot"] in MASTERS else found["slot"]
        return "optimizer", BUCKETS, found["bucket"], slot
    return "model", key


def is_of_model(key: str) -> bool:
    """Whether a weight with this key may be one of a model of Megatron-core."""
    layer = _LAYER_PART.search(key)
    return _MODEL_PART.fullmatch(key) is not None and (layer is None or layer[1] in _LAYER_PARTS)


def buffer_name(group: str, number: int, dtypes: object) -> str:
    """The name of a buffer of a distributed optimizer; `group` is that of its data-parallel group, `dtypes` are those
    of its weights and gradients, as Megatron writes them. The keys of its buckets begin so."""
    return f"{group}.gbuf_idx_{number}.dtype_{dtypes}"


def group_of_buffers(key: str) -> str:
    """The data-parallel group whose buffers an object of the optimizer has."""
    return key.partition("/")[0].rpartition(".")[0]


def optimizer_entry(key: str) -> str | None:
    """The kind of an object of the optimizer, such as ``optimizer`` or ``grad_scaler``; None for any other object."""
    found = _VALUE.fullmatch(key)
    return None if found is None else found["entry"]


def random_shard(key: str) -> RandomShard | None:
    """The ranks whose random numbers an object has; None for any other object."""
    found = _RANDOM.fullmatch(key)
    return None if found is None else RandomShard(*map(int, found.groups()))


def group_name(group: Mapping[str, object]) -> str:
    """The values that tell a parameter group apart, as text."""
    found = [(key, group.get(key, group.get(_RENAMED + key))) for key in IDENTIFIERS]
    return ",".join(f"{key}={value}" for key, value in found if value is not None) or "all"
