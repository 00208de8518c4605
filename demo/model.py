"""A small GPT over bytes, in the manner of nanoGPT, with one matrix as both embedding and head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from demo.text import VOCABULARY

#: Three times that of GPT-2: so narrow a model learns more in few steps.
_INITIAL_STD = 0.06


@dataclass(frozen=True)
class Shape:
    """The size of a model; the default has 1.4 million parameters."""

    context: int = 64
    num_layers: int = 3
    num_heads: int = 6
    width: int = 192


class Attention(nn.Module):
    """Causal self-attention of several heads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self._num_heads = shape.num_heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) to the same."""
        batch, time, width = x.shape
        heads = self.qkv(x).view(batch, time, 3 * self._num_heads, width // self._num_heads).transpose(1, 2)
        query, key, value = heads.chunk(3, dim=1)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return cast(Tensor, self.out(mixed.transpose(1, 2).reshape(batch, time, width)))


class Block(nn.Module):
    """Attention, then an MLP, both with a residual path around them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.mlp_norm = nn.LayerNorm(shape.width)
        self.mlp = nn.Sequential(
            nn.Linear(shape.width, 4 * shape.width), nn.GELU(), nn.Linear(4 * shape.width, shape.width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) to the same."""
        x = x + self.attention(self.attention_norm(x))
        return cast(Tensor, x + self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """Bytes to the logits of the byte that follows each of them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(VOCABULARY, shape.width)
        self.position_embedding = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        self.apply(_initialize)
        self.head.weight = self.token_embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, time) of int64 to (batch, time, vocabulary)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.head(self.norm(x)))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross-entropy in nats of each byte of `tokens` (batch, time + 1) after those before it."""
    logits = model(tokens[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=_INITIAL_STD)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
