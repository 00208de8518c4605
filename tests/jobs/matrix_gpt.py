"""The small GPT of the cross-framework matrix as a module of torch, and the rules between its names and Megatron's.

It has grouped queries, SwiGLU, rotary embeddings, tied embeddings, and experts where asked. It computes what the GPT of
Megatron-core in `tests.trainers.megatron_job` computes. `Whole` is its trained state in global coordinates:
``<parameter>/<slot>`` with the slots of `SLOTS`, of which ``master`` is the weight in fp32. Each framework's side of
the matrix assembles it from its own buffers and collectives, without holdfast.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from holdfast.mapping import Crop, Drop, FromMegatron, Fuse, Rename, Rule, Split, Stack, ToMegatron, Unstack

WIDTH, LAYERS, HEADS, GROUPS, HEAD, HIDDEN, LENGTH = 16, 4, 4, 2, 4, 24, 8
SLOTS = ("master", "exp_avg", "exp_avg_sq")

#: ``<parameter>/<slot>`` to the whole tensor.
Whole = dict[str, torch.Tensor]


class GatedMlp(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(functional.silu(self.gate(hidden)) * self.up(hidden))
        return found


class Experts(nn.Module):
    """Two experts for each token, each a SwiGLU; the weights of all experts are one tensor."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, number, bias=False)
        self.gate = nn.Parameter(torch.randn(number, HIDDEN, WIDTH) / 8)
        self.up = nn.Parameter(torch.randn(number, HIDDEN, WIDTH) / 8)
        self.down = nn.Parameter(torch.randn(number, WIDTH, HIDDEN) / 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        best, chosen = self.router(hidden).topk(2)
        shares = torch.zeros(*hidden.shape[:2], len(self.gate), dtype=hidden.dtype).scatter(2, chosen, best.softmax(-1))
        inner = functional.silu(torch.einsum("bsw,efw->bsef", hidden, self.gate))
        inner = inner * torch.einsum("bsw,efw->bsef", hidden, self.up)
        return torch.einsum("bsef,ewf,bse->bsw", inner, self.down, shares)


class Block(nn.Module):
    """A layer of the transformer."""

    def __init__(self, experts: int | None) -> None:
        super().__init__()
        self.input_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q = nn.Linear(WIDTH, HEADS * HEAD, bias=False)
        self.k = nn.Linear(WIDTH, GROUPS * HEAD, bias=False)
        self.v = nn.Linear(WIDTH, GROUPS * HEAD, bias=False)
        self.o = nn.Linear(HEADS * HEAD, WIDTH, bias=False)
        self.mlp = GatedMlp() if experts is None else Experts(experts)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = self.input_norm(hidden)
        q, k, v = (_heads(layer(normed)) for layer in (self.q, self.k, self.v))
        k, v = (each.repeat_interleave(HEADS // GROUPS, dim=1) for each in (k, v))
        seen = functional.scaled_dot_product_attention(_rotated(q), _rotated(k), v, is_causal=True)
        hidden = hidden + self.o(seen.transpose(1, 2).flatten(2))
        found: torch.Tensor = hidden + self.mlp(self.mlp_norm(hidden))
        return found


class Gpt(nn.Module):
    """The model: logits of the tokens that follow."""

    def __init__(self, vocabulary: int = 64, *, experts: int | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.layers = nn.ModuleList(Block(experts) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


def _heads(projected: torch.Tensor) -> torch.Tensor:
    return projected.view(*projected.shape[:2], -1, HEAD).transpose(1, 2)


def _rotated(heads: torch.Tensor) -> torch.Tensor:
    angles = torch.arange(heads.shape[-2])[:, None] / 10000 ** (torch.arange(0, HEAD, 2) / HEAD)
    cos, sin = (table.repeat(1, 2).to(heads.dtype) for table in (angles.cos(), angles.sin()))
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The mean loss where each token is its own label, as the GPT of Megatron gets them here."""
    return functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


def batch(step: int, rank: int, vocabulary: int) -> torch.Tensor:
    """The tokens that a rank trains on in a step."""
    make = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(vocabulary, (2, LENGTH), generator=make)


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices with weight decay, vectors without it, by name: FSDP1 changes shapes."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    vectors = [parameter for name, parameter in named if "norm" in name]
    matrices = [parameter for name, parameter in named if "norm" not in name]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


# --- Megatron's names ------------------------------------------------------------------------------------------------

_LAYER, _THEIRS = "model/layers.{i}", "model/decoder.layers.{i}"
#: Names of ours and of Megatron that differ in nothing but the name.
_ALIKE = [
    ("model/embed.weight", "model/embedding.word_embeddings.weight"),
    ("model/norm.{w}", "model/decoder.final_layernorm.{w}"),
    (f"{_LAYER}.input_norm.{{w}}", f"{_THEIRS}.self_attention.linear_qkv.layer_norm_{{w}}"),
    (f"{_LAYER}.mlp_norm.{{w}}", f"{_THEIRS}.mlp.linear_fc1.layer_norm_{{w}}"),
    (f"{_LAYER}.o.weight", f"{_THEIRS}.self_attention.linear_proj.weight"),
]
_QKV = [f"{_LAYER}.{x}.weight" for x in "qkv"]
_GATED = [f"{_LAYER}.mlp.{x}.weight" for x in ("gate", "up")]
_OF_EXPERTS = f"{_THEIRS}.mlp.experts.experts"


def _feed_forward(*, experts: bool) -> tuple[list[tuple[str, str]], Sequence[str], str, int]:
    """The parts of the rules that differ between dense layers and those of experts: names that are alike, the two
    tensors that Megatron fuses, its name for the result, and the axis."""
    if not experts:
        down = (f"{_LAYER}.mlp.down.weight", f"{_THEIRS}.mlp.linear_fc2.weight")
        return [*_ALIKE, down], _GATED, f"{_THEIRS}.mlp.linear_fc1.weight", 0
    router = (f"{_LAYER}.mlp.router.weight", f"{_THEIRS}.mlp.router.weight")
    down = (f"{_LAYER}.mlp.down", f"{_OF_EXPERTS}.linear_fc2.weight")
    gated = [f"{_LAYER}.mlp.{x}" for x in ("gate", "up")]
    return [*_ALIKE, router, down], gated, f"{_OF_EXPERTS}.linear_fc1.weight", 1


def to_megatron(*, experts: bool = False) -> list[Rule]:
    """The rules for a load of our names into a job of Megatron, which pads a vocabulary as it needs to."""
    alike, gated, fused, axis = _feed_forward(experts=experts)
    return [
        ToMegatron(),
        Drop("model/head.weight"),
        Fuse(_QKV, f"{_THEIRS}.self_attention.linear_qkv.weight", groups=GROUPS),
        Fuse(gated, fused, axis=axis),
        *(Rename(mine, theirs) for mine, theirs in alike),
        Stack("model/decoder.layers.{i}.{w:*}", "model/decoder.layers.{w}"),
    ]


def from_megatron(vocabulary: int | None = None, *, experts: bool = False) -> list[Rule]:
    """The rules for a load of a run of Megatron under our names, without the padding of a vocabulary."""
    alike, gated, fused, axis = _feed_forward(experts=experts)
    return [
        FromMegatron(),
        Unstack("model/decoder.layers.{w:*}", "model/decoder.layers.{i}.{w}"),
        Split(f"{_THEIRS}.self_attention.linear_qkv.weight", _QKV, shares=(HEADS // GROUPS, 1, 1), groups=GROUPS),
        Split(fused, gated, axis=axis),
        *(Rename(theirs, mine) for mine, theirs in alike),
        *([] if vocabulary is None else [Crop("model/embed.weight", size=vocabulary)]),
    ]
