"""Folders of DeepSpeed: how engines on several ranks write one, its own tools, and how what they write is read.

DeepSpeed is imported where it is used: it has an environment of its own.
"""

from __future__ import annotations

import argparse
import os
from contextlib import redirect_stdout
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from bench.contenders import why_absent
from bench.hub import HubLike
from bench.state import MOMENTS, content, module_of

DEEPSPEED = "deepspeed"
#: Elements of a bucket: with DeepSpeed's default, 4 ranks need 24 GiB to write 4.2 GB.
_BUCKET = 10_000_000
_CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 2, "reduce_bucket_size": _BUCKET, "allgather_bucket_size": _BUCKET},
}
_SHARD = "model.safetensors"
#: The defaults of the tool's command line.
_EXTRACTING, _MERGING = 4, 2


def why_no_deepspeed() -> str:
    """The reason why nothing of DeepSpeed can run here; empty where it can."""
    return why_absent(DEEPSPEED) and "it is not installed here; `make test-deepspeed` installs it in `.venv-deepspeed`"


def write_zero(folder: Path, recipe: HubLike) -> None:
    """Save an engine of ZeRO-2 in single precision, which has the tensors of `recipe`. Collective."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    deepspeed: Any = import_module(DEEPSPEED)
    contents = recipe.contents()
    model = {key.removeprefix("model."): content(*each) for key, each in contents.items() if key.startswith("model.")}
    module = module_of(model)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.0, weight_decay=0.0)
    # A step that changes nothing: before the first one, an engine does not know where its moments are.
    module.forward = lambda: 0.0 * torch.stack([each.sum() for each in module.parameters()]).sum()
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=_CONFIG)
    engine.backward(engine())
    engine.step()
    for name, parameter in module.named_parameters():
        for slot in MOMENTS:
            whole = content(*contents[f"optimizer.state.{name}.{slot}"])
            deepspeed.utils.safe_set_full_optimizer_state(parameter, whole, slot)
    engine.save_checkpoint(str(folder))


# Its tools


def zero_to_fp32(source: Path, target: Path) -> None:
    """Write the weights of a folder as one file."""
    tool = import_module("deepspeed.utils.zero_to_fp32")
    with redirect_stdout(StringIO()):
        tool.convert_zero_checkpoint_to_fp32_state_dict(
            str(source), str(target), max_shard_size=None, safe_serialization=True
        )


def ds_to_universal(source: Path, target: Path) -> None:
    """Write a folder as a universal one."""
    tool = import_module("deepspeed.checkpoint.ds_to_universal")
    arguments = argparse.Namespace(
        input_folder=str(source / (source / "latest").read_text()),
        output_folder=str(target / "universal"),
        num_extract_workers=_EXTRACTING,
        num_merge_workers=_MERGING,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    with redirect_stdout(StringIO()):
        tool.main(arguments)


# The files that they wrote


def weights_file(target: Path) -> dict[str, torch.Tensor]:
    """The weights, by their names in a state."""
    from safetensors.torch import load_file

    return {f"model.{name}": tensor for name, tensor in load_file(target / _SHARD).items()}


def universal_tensor(target: Path, name: str) -> torch.Tensor:
    """The tensor that has this name in a state."""
    (folder,) = target.glob("*/zero")
    part, _, rest = name.partition(".")
    parameter, slot = (rest, "fp32") if part == "model" else rest.removeprefix("state.").rsplit(".", 1)
    tensor: torch.Tensor = torch.load(folder / parameter / f"{slot}.pt", mmap=True, weights_only=True)["param"]
    return tensor
