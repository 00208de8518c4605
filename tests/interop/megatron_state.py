"""The state in the fixtures of Megatron: each weight is known from its key, and the optimizer has done one step."""

from __future__ import annotations

import torch

#: The weights of the job in `tests.trainers.megatron_job`, with a vocabulary of 16.
SHAPES: dict[str, tuple[int, ...]] = {
    "decoder.final_layernorm.bias": (16,),
    "decoder.final_layernorm.weight": (16,),
    "decoder.layers.mlp.linear_fc1.layer_norm_bias": (4, 16),
    "decoder.layers.mlp.linear_fc1.layer_norm_weight": (4, 16),
    "decoder.layers.mlp.linear_fc1.weight": (4, 48, 16),
    "decoder.layers.mlp.linear_fc2.weight": (4, 16, 24),
    "decoder.layers.self_attention.linear_proj.weight": (4, 16, 16),
    "decoder.layers.self_attention.linear_qkv.layer_norm_bias": (4, 16),
    "decoder.layers.self_attention.linear_qkv.layer_norm_weight": (4, 16),
    "decoder.layers.self_attention.linear_qkv.weight": (4, 32, 16),
    "embedding.word_embeddings.weight": (16, 16),
}


def named_weight(key: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A weight whose elements follow from its key and their places."""
    position = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)
    return torch.sin(position * 12.9898 + sum(map(ord, key))) * 0.5


def gradient(weight: torch.Tensor, step: int) -> torch.Tensor:
    """The gradient of a weight in a step, which follows from the weight, so that all layouts compute the same."""
    return weight.detach().float() * 0.5 + 0.01 * (step + 1)


def state_after_a_step(key: str, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """The moments of AdamW after one step with the gradient of the first step."""
    weight = named_weight(key, shape).bfloat16()
    master = weight.float().requires_grad_()
    optimizer = torch.optim.AdamW([master], lr=0.01)
    master.grad = gradient(weight, 0).bfloat16().float()  # the buffers of gradients have the dtype of the weights
    optimizer.step()
    state = optimizer.state[master]
    return {"exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
