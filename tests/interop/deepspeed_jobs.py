"""Jobs of the real DeepSpeed that save their engines with holdfast and load them on other ranks and stages.

    torchrun --standalone --nproc_per_node 3 -m tests.interop.deepspeed_jobs save FOLDER CASE...
    torchrun --standalone --nproc_per_node 2 -m tests.interop.deepspeed_jobs load FOLDER FROM:TO...
    torchrun --standalone --nproc_per_node 2 -m tests.interop.deepspeed_jobs native FOLDER FROM:TO...
    torchrun --standalone --nproc_per_node 2 -m tests.interop.deepspeed_jobs stock FOLDER FROM:TO...

``save`` trains an engine of each case for four steps, saves it into FOLDER/CASE/run, and writes what the live engine
holds beside it. It counts the bytes that collectives send meanwhile. Then the engine trains on, and what it holds two
steps later is written too. ``load`` builds a fresh engine of the case TO, loads the run of the case FROM into it, and
compares everything with these files by bits; where the case and the number of ranks are the same, after two more steps
also. ``native`` loads the folder FOLDER/FROM, which DeepSpeed wrote, into such an engine. ``stock`` has DeepSpeed's own
loader load the universal folder FOLDER/FROM/universal. Rank 0 writes what a job finds as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from torch import nn

import holdfast
from tests.interop.deepspeed_model import TWO_GROUPS
from tests.interop.write_deepspeed import BF16, CASES, FP16, SLOTS, kept_values, live_values, new_engine, train
from tests.support.collectives import counted, sent_bytes

#: Cases without ZeRO, and more options of ZeRO-3.
CASES |= {
    "zero0": {},
    "zero0-bf16": BF16,
    "zero0-fp16": FP16,
    "zero3-fp16": {**FP16, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
}
#: The optimizer's state lies in the memory of the host, and its step is torch's.
OFFLOADED: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}
CASES |= {
    f"zero{stage}-offload": {
        **BF16,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": stage,
            **OFFLOADED,
            **({"stage3_param_persistence_threshold": 0} if stage == 3 else {}),
        },
    }
    for stage in (1, 2, 3)
}
CASES |= {
    "zero1-fp16-two": {**CASES["zero2-round-robin-two"], "zero_optimization": {"stage": 1}},
    "zero3-fp16-two": {**CASES["zero3-fp16"], "groups": TWO_GROUPS},
}


def stage_of(case: str) -> int:
    """The ZeRO stage of a case."""
    return int(CASES[case].get("zero_optimization", {}).get("stage", 0))


def held(engine: Any, case: str) -> dict[str, torch.Tensor]:
    """Everything that a live engine holds, whole, in its own memory."""
    stage = stage_of(case)
    found = (live_values(engine, stage) if stage else unpartitioned_values(engine)) | kept_values(engine, stage)
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def unpartitioned_values(engine: Any) -> dict[str, torch.Tensor]:
    """As `live_values`, without ZeRO: each rank has every master weight."""
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    lower = getattr(engine.optimizer, "fp16_groups", [group["params"] for group in inner.param_groups])
    upper = getattr(engine.optimizer, "fp32_groups", lower)
    found = {}
    for parameters, masters in zip(lower, upper, strict=True):
        for parameter, master in zip(parameters, masters, strict=True):
            name = engine.param_names[parameter]
            found[f"{name}/master"] = master
            found |= {f"{name}/{slot}": inner.state[master][slot] for slot in SLOTS}
    return found


def values_of(engine: Any) -> dict[str, Any]:
    """The values of an engine that a run goes on from, in plain types."""
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    return {
        "groups": [{key: value for key, value in group.items() if key != "params"} for group in inner.param_groups],
        "scheduler": engine.lr_scheduler.state_dict()["last_epoch"],
        "counters": [engine.global_steps, engine.global_samples, engine.skipped_steps],
        "scale": [scaler.cur_scale, scaler.cur_iter] if scaler is not None and scaler.dynamic else None,
        "steps": sorted({float(slots["step"]) for slots in inner.state.values()}),
    }


def save(folder: Path, case: str) -> dict[str, Any]:
    """Train, save, train on."""
    before_steps = sent_bytes()
    engine = train(new_engine(CASES[case]), 4)
    dist.barrier()
    time.sleep(0.3)  # until the last bytes of the barrier are sent
    before_save = sent_bytes()
    with counted() as calls:
        holdfast.save(folder / case / "run", {"engine": engine, "epoch": 3}, 4)
    during = list(calls)
    sent = [between(before_steps, before_save), between(before_save, sent_bytes())]
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, sent)
    before = held(engine, case), values_of(engine)
    with counted() as calls:
        train(engine, 2, first=4)
    after = held(engine, case)
    if dist.get_rank() == 0:
        torch.save(
            {"held": before[0], "values": before[1], "after": after, "ranks": dist.get_world_size()},
            folder / case / "expected.pt",
        )
    dist.barrier()
    numel = sum(getattr(each, "ds_numel", each.numel()) for each in engine.module.parameters())
    return {"during": during, "training": len(calls), "sent": everywhere, "state": numel * 2}


def between(before: dict[int, int], after: dict[int, int]) -> int:
    """The bytes that all connections sent between two moments."""
    return sum(count - before.get(each, 0) for each, count in after.items())


def load(folder: Path, source: str, target: str) -> dict[str, Any]:
    """Load into a fresh engine, and compare."""
    torch.manual_seed(7)
    engine = new_engine(CASES[target], seed=99)
    state = {"engine": engine, "epoch": 0}
    report = holdfast.load(folder / source / "run", state, strict=not source.startswith("plain"))
    expected = torch.load(folder / source / "expected.pt", weights_only=False)
    found = held(engine, target)
    differing = list(differences(expected["held"], found))
    result: dict[str, Any] = {
        "differing": differing,
        "compared": len(found),
        "values": values_of(engine) == expected["values"],
        "epoch": state["epoch"],
        "missing": sorted(report.missing),
        "unexpected": sorted(report.unexpected),
    }
    if not result["values"]:
        result["here"], result["there"] = repr(values_of(engine)), repr(expected["values"])
    result["casts"] = list(cast_faults(engine, found))
    if source == target and expected["ranks"] == dist.get_world_size():
        train(engine, 2, first=4)
        result["after"] = list(differences(expected["after"], held(engine, target)))
    return result


def native(folder: Path, source: str, target: str) -> dict[str, Any]:
    """Load a folder of DeepSpeed itself, or a universal one, into a fresh engine, as the guide does it, and compare."""
    torch.manual_seed(7)
    engine = new_engine(CASES[target], seed=99)
    state = {"engine": engine, "client_state": {"epoch": 0}}
    page = (Path(__file__).parents[2] / "docs/guides/deepspeed.md").read_text()
    (shown,) = (part for part in page.split("```") if part.startswith("py\nrules ="))
    names: dict[str, Any] = {"holdfast": holdfast, "state": state, "folder": folder / source}
    exec(shown.removeprefix("py\n"), names)
    report: holdfast.LoadReport = names["report"]
    expected = torch.load(folder / source / "expected.pt", weights_only=True)
    found = held(engine, target)
    return {
        "differing": list(differences(expected, found)),
        "compared": len(expected.keys() & found.keys()),
        "casts": list(cast_faults(engine, found)),
        "counters": [*values_of(engine)["counters"], engine.micro_steps],
        "epoch": state["client_state"]["epoch"],
        "scale": values_of(engine)["scale"],
        "rates": [group["lr"] for group in values_of(engine)["groups"]],
        "steps": values_of(engine)["steps"],
        "scheduler": values_of(engine)["scheduler"],
        "missing": [*report.missing, *report.unexpected],
    }


def stock(folder: Path, source: str, target: str) -> dict[str, Any]:
    """Let DeepSpeed load a universal folder into a fresh engine, and compare, before and after what the guide adds."""
    universal = folder / source / "universal"
    engine = new_engine({**CASES[target], "checkpoint": {"load_universal": True}}, seed=99)
    path, client = engine.load_checkpoint(str(universal))
    expected = torch.load(folder / source / "expected.pt", weights_only=False)
    found = held(engine, target)
    by_itself = {name for name in expected["held"].keys() & found.keys() if not name.endswith("/kept")}
    result: dict[str, Any] = {
        "differing": sorted(by_itself & set(differences(expected["held"], found))),
        "compared": len(by_itself),
        "casts": list(cast_faults(engine, found)),
        "epoch": client["epoch"],
        "path": os.path.basename(path),
    }
    complete(engine, universal)
    result["kept"] = list(differences(expected["held"], held(engine, target)))
    mine, theirs = values_of(engine), expected["values"]
    result["counters"] = mine["counters"]
    result["values"] = mine == theirs
    result["here"], result["there"] = repr(mine), repr(theirs)
    if source == target and expected["ranks"] == dist.get_world_size():
        train(engine, 2, first=4)
        result["after"] = list(differences(expected["after"], held(engine, target)))
    return result


def refused(folder: Path, kind: str) -> dict[str, Any]:
    """The error of a save of an engine that holds its state in ways of its own, and of a load into it."""
    made: dict[str, Callable[[], nn.Module]] = {
        "pipeline": lambda: PipelineModule([nn.Linear(4, 4)], num_stages=1, loss_fn=nn.MSELoss()),
        "version": lambda: nn.Linear(4, 4),
    }
    model = made[kind]()
    config = {"train_micro_batch_size_per_gpu": 2}
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)
    found: list[str] = []
    tested = deepspeed.__version__
    deepspeed.__version__ = "0.20.1" if kind == "version" else tested
    for verb in (
        lambda: holdfast.save(folder / "new", {"engine": engine}, 1),
        lambda: holdfast.load(folder, {"engine": engine}),
    ):
        try:
            verb()
        except holdfast.HoldfastError as error:
            found.append(str(error))
    deepspeed.__version__ = tested
    return {"errors": found, "written": (folder / "new/checkpoints").exists()}


def complete(engine: Any, universal: Path) -> None:
    """Run the code that the guide adds to the load of a universal folder."""
    page = (Path(__file__).parents[2] / "docs/guides/deepspeed.md").read_text()
    (added,) = (part for part in page.split("```") if part.startswith("py\n# after engine.load_checkpoint"))
    exec(added.removeprefix("py\n"), {"engine": engine, "folder": universal, "torch": torch})


def differences(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> Iterator[str]:
    """The names of what both stages hold, and hold differently."""
    for name in sorted(expected.keys() & found.keys()):
        mine, theirs = found[name], expected[name]
        if mine.dtype != theirs.dtype and name.endswith("/module"):
            continue
        if mine.dtype != theirs.dtype or not torch.equal(bits(mine), bits(theirs)):
            yield name


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def cast_faults(engine: Any, found: dict[str, torch.Tensor]) -> Iterator[str]:
    """The names of parameters of the module that are not their master weights, cast."""
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            continue
        with deepspeed.zero.GatheredParameters([parameter]):
            master = found.get(f"{name}/master", parameter)
            if not torch.equal(bits(parameter), bits(master.to(parameter.dtype))):
                yield name


VERBS: dict[str, Callable[..., dict[str, Any]]] = {"save": save, "load": load, "native": native, "stock": stock}
VERBS["refused"] = refused


def run_cases(run: Callable[..., dict[str, Any]], verb: str, folder: Path, cases: list[str]) -> None:
    """Run one verb for several cases, on all ranks."""
    # Else DeepSpeed compiles C++ for its own collectives in shared memory, which takes minutes and a compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # DeepSpeed refuses fp16 on a CPU; torch computes it there.
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    deepspeed.init_distributed("gloo")
    results = {}
    for case in cases:
        results[case] = run(folder, *case.split(":"))
    if dist.get_rank() == 0:
        (folder / f"{verb}.json").write_text(json.dumps(results, default=str))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run_cases(VERBS[sys.argv[1]], sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
    sys.stderr.flush()
    os._exit(0)  # torch sometimes aborts while an interpreter ends ("terminate called without an active exception")
