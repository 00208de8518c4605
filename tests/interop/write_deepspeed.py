"""Writes folders of DeepSpeed with the real package, for the fixtures beside it and for ``make test-deepspeed``.

    torchrun --standalone --nproc_per_node 3 -m tests.interop.write_deepspeed FOLDER CASE

Trains a small model for four steps, saves it by `DeepSpeedEngine.save_checkpoint` into FOLDER/CASE-on-3, and writes
what the live engine holds, assembled from its own buffers, into ``expected.pt`` there. Before that it compares these
values with those of DeepSpeed's own readers: `zero_to_fp32`, and `safe_get_full_fp32_param` where that is right. A
fixture is such a folder, as an archive: ``tar -cJf fixtures/CASE-on-3.tar.xz CASE-on-3``.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch.optim.lr_scheduler import LambdaLR

from tests.interop.deepspeed_model import GROUPS, TWO_GROUPS, TiedNet, grouped

BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 3}}
#: For each case, what its configuration has besides the common part.
CASES: dict[str, dict[str, Any]] = {
    "zero1": {**BF16, "zero_optimization": {"stage": 1}},
    "zero1-fp32": {"zero_optimization": {"stage": 1}},
    "zero1-aligned": {**BF16, "zero_optimization": {"stage": 1, "parameter_alignment": True}},
    "zero1-elastic": {**BF16, "zero_optimization": {"stage": 1, "elastic_checkpoint": True}},
    "zero2": {**BF16, "zero_optimization": {"stage": 2}},
    "zero2-round-robin": {**FP16, "zero_optimization": {"stage": 2, "round_robin_gradients": True}},
    "bf16-optimizer": {**BF16, "zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}},
    "zero3": {
        **BF16,
        "zero_optimization": {"stage": 3, "sub_group_size": 10, "stage3_param_persistence_threshold": 10},
    },
}
#: The optimizer is DeepSpeed's own, which it compiles from C++ first.
CASES["zero2-own-adam"] = {
    **BF16,
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
}
CASES |= {
    f"{case}-two": {**CASES[case], "groups": TWO_GROUPS}
    for case in ("zero1", "zero2", "zero2-round-robin", "zero3", "bf16-optimizer")
}
#: The learning rates are tensors.
CASES |= {f"{case}-tensor-rates": {**CASES[case], "tensor_rates": True} for case in ("zero1", "zero3")}
SLOTS = ("exp_avg", "exp_avg_sq")


def new_engine(config: dict[str, Any], *, seed: int = 0) -> Any:
    """An engine with the weights that `seed` draws, and with the groups and the kind of rates of `config`, which are no
    keys of DeepSpeed."""
    config = dict(config)
    groups = config.pop("groups", GROUPS)
    has_tensors = config.pop("tensor_rates", False)
    torch.manual_seed(seed)
    model = TiedNet()
    parts = grouped(model, groups)
    for part in parts if has_tensors else ():
        part["lr"] = torch.tensor(part["lr"])
    common = {"train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True, "gradient_clipping": 1.0}
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=None if "optimizer" in config else torch.optim.AdamW(parts, lr=1e-2),
        model_parameters=parts,
        lr_scheduler=lambda optimizer: LambdaLR(optimizer, [lambda step: 1 / (1 + step)] * len(groups)),
        config={**common, **config},
    )
    return engine


def train(engine: Any, steps: int, *, first: int = 0) -> Any:
    """Train on the batches of these steps."""
    make = torch.Generator().manual_seed(1 + dist.get_rank())
    for step in range(first + steps):
        tokens = torch.randint(11, (2, 3), generator=make)
        if step >= first:
            loss = engine(tokens).float().square().mean()
            engine.backward(loss)
            engine.step()
    engine.module.seen += steps
    return engine


def flat_groups(engine: Any) -> list[tuple[list[Any], list[int], torch.Tensor]]:
    """For each group of ZeRO-1/2 or `BF16_Optimizer`: its parameters, where they begin, and this rank's flat master."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "round_robin_bit16_groups"):
        columns = (optimizer.round_robin_bit16_groups, optimizer.round_robin_bit16_offsets)
        return list(zip(*columns, optimizer.single_partition_of_fp32_groups, strict=True))
    found = []
    for group, flat in zip(optimizer.bf16_groups, optimizer.fp32_groups_flat_partition, strict=True):
        numels = [parameter.numel() for parameter in group]
        found.append((group, [sum(numels[:index]) for index in range(len(group))], flat))
    return found


def joined(flat: torch.Tensor) -> torch.Tensor:
    """The flat tensor of a group from the equal parts of all ranks."""
    parts = [torch.empty_like(flat.detach()) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, flat.detach().contiguous())
    return torch.cat(parts)


def live_values(engine: Any, stage: int) -> dict[str, torch.Tensor]:
    """The master weights and both moments of all trained parameters, as the live engine holds them."""
    found = {}
    if stage == 3:
        for name, parameter in engine.module.named_parameters():
            if parameter.requires_grad:
                found[f"{name}/master"] = safe_get_full_fp32_param(parameter)
                found |= {f"{name}/{slot}": safe_get_full_optimizer_state(parameter, slot) for slot in SLOTS}
        return found
    for group, starts, flat in flat_groups(engine):
        state = engine.optimizer.optimizer.state[flat]
        for slot, tensor in (("master", flat), *((slot, state[slot]) for slot in SLOTS)):
            whole = joined(tensor)
            for parameter, start in zip(group, starts, strict=True):
                values = whole[start : start + parameter.numel()].view(parameter.shape)
                found[f"{engine.param_names[parameter]}/{slot}"] = values
    return found


def kept_values(engine: Any, stage: int) -> dict[str, torch.Tensor]:
    """The buffers, the frozen weight, and the module's own copies of the trained parameters."""
    found = {f"{name}/kept": buffer for name, buffer in engine.module.named_buffers()}
    frozen = engine.module.frozen.weight
    if stage == 3:
        with deepspeed.zero.GatheredParameters([frozen]):
            return found | {"frozen.weight/kept": frozen.detach().clone()}
    trained = {f"{name}/module": p for name, p in engine.module.named_parameters() if p.requires_grad}
    return found | {"frozen.weight/kept": frozen} | trained


def compare_getters(engine: Any, found: dict[str, torch.Tensor], case: str) -> None:
    """Compare with DeepSpeed's own getters; under round robin they are wrong."""
    if "round-robin" in case:
        return
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(safe_get_full_fp32_param(parameter), found[f"{name}/master"]), name


def compare_script(folder: Path, found: dict[str, torch.Tensor], case: str) -> None:
    """Compare with the script that DeepSpeed puts beside its checkpoints; it reads no folder of `BF16_Optimizer`."""
    if case != "bf16-optimizer":
        for name, tensor in get_fp32_state_dict_from_zero_checkpoint(str(folder)).items():
            master = found.get(f"{name}/master")
            assert master is None or torch.equal(tensor, master), name


def main(folder: Path, case: str) -> None:
    """Write one case."""
    # Else DeepSpeed compiles C++ for its own collectives in shared memory, which takes minutes and a compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # DeepSpeed refuses fp16 on a CPU; torch computes it there.
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    deepspeed.init_distributed("gloo")
    config = CASES[case]
    stage = config["zero_optimization"]["stage"]
    engine = train(new_engine(config), 4)
    client = {
        "epoch": 3,
        "name": "a/b",
        "rng": torch.arange(5, dtype=torch.uint8),
        "nested": {"seen": [1, 2.5, None], "pair": (True, b"x")},
        "args": argparse.Namespace(lr=0.1),
    }
    target = folder / f"{case}-on-{dist.get_world_size()}"
    engine.save_checkpoint(str(target), client_state=client)
    found = live_values(engine, stage)
    compare_getters(engine, found, case)
    found |= kept_values(engine, stage)
    if dist.get_rank() == 0:
        compare_script(target, found, case)
        torch.save({name: tensor.detach().clone() for name, tensor in found.items()}, target / "expected.pt")
        for name in ("zero_to_fp32.py", "zero_to_torch.py"):  # copies of its scripts
            (target / name).unlink(missing_ok=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
    sys.stderr.flush()
    os._exit(0)  # torch sometimes aborts while an interpreter ends ("terminate called without an active exception")
