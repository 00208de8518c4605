"""The model of the DeepSpeed fixtures. The program that writes them trains it, and the tests load into it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


class TiedNet(nn.Module):
    """Sizes that no number of ranks divides; a frozen weight, buffers, tied weights, a parameter of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.up = nn.Linear(5, 8)
        self.mid = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.frozen = nn.Linear(8, 5, bias=False)
        self.frozen.weight.requires_grad_(False)
        self.norm = nn.LayerNorm(5, bias=False)
        self.gain = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("shift", torch.arange(5, dtype=torch.float32) / 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.up(self.embed(tokens)))
        for layer in self.mid:
            hidden = hidden + torch.relu(layer(hidden))
        hidden = self.frozen(hidden)
        scaled: torch.Tensor = self.head(self.norm(hidden * self.gain + self.get_buffer("shift").to(hidden.dtype)))
        return scaled


#: The names of the trained parameters in three groups: weights, vectors, and one of a single element.
GROUPS = (
    ("embed.weight", "up.weight", "mid.0.weight", "mid.1.weight"),
    ("up.bias", "mid.0.bias", "mid.1.bias", "norm.weight"),
    ("gain",),
)
#: Two groups. DeepSpeed's loader of universal folders fails on ranks that have no element of a group.
TWO_GROUPS = (GROUPS[0], GROUPS[1] + GROUPS[2])


def grouped(model: nn.Module, groups: Sequence[Sequence[str]] = GROUPS) -> list[dict[str, Any]]:
    """The groups of a model's parameters, each with hyper-parameters of its own."""
    named = dict(model.named_parameters())
    options: list[dict[str, Any]] = [
        {"weight_decay": 0.1, "lr": 1e-2},
        {"weight_decay": 0.0, "lr": 2e-2},
        {"weight_decay": 0.0, "lr": 3e-2, "betas": (0.8, 0.9)},
    ]
    return [{"params": [named[name] for name in names], **hyper} for names, hyper in zip(groups, options, strict=False)]
