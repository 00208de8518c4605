"""Hugging Face folders, written by the stock library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

INDEX = "model.safetensors.index.json"


def some_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Tensors of several dtypes and shapes, also empty and without axes, large enough for several blocks."""
    make = torch.Generator().manual_seed(seed)
    return {
        "model.embed.weight": torch.randn(700, 512, generator=make),
        "model.layers.0.up.weight": torch.randn(48, 30, generator=make).bfloat16(),
        "model.layers.0.down.weight": torch.randn(30, 48, generator=make).half(),
        "model.scale": torch.randn((), generator=make),
        "model.none": torch.zeros(0, 7),
        "model.packed": torch.randint(0, 255, (13,), generator=make, dtype=torch.uint8),
        "model.eight": torch.randn(9, generator=make).to(torch.float8_e4m3fn),
        "a/b": torch.arange(5),
    }


def shard_name(number: int, total: int) -> str:
    """The name that transformers gives to a shard."""
    return f"model-{number + 1:05d}-of-{total:05d}.safetensors"


def write_sharded(folder: Path, tensors: Mapping[str, torch.Tensor], num_files: int) -> dict[str, str]:
    """Write `tensors` into several files with an index; returns the file of each tensor."""
    folder.mkdir(parents=True, exist_ok=True)
    weight_map = {name: shard_name(at % num_files, num_files) for at, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, folder / file)
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: Mapping[str, str]) -> None:
    """Write the index of a sharded folder."""
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
