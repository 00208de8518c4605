"""Jobs of the real DeepSpeed whose ranks are killed while an engine trains in the loop of a `Checkpointer`.

    torchrun --standalone --nproc_per_node 4 -m tests.interop.killed_engines die FOLDER CASE MOMENT
    torchrun --standalone --nproc_per_node 2 -m tests.interop.killed_engines resume FOLDER CASE

``die`` trains an engine of a case of `deepspeed_jobs`, and saves into FOLDER/run every three steps. Rank 0 writes what
the live engine holds after each step to FOLDER/held. After the third save the job gets to MOMENT. There each rank
writes its number of process to FOLDER/ready-RANK, and waits to be killed:

between   inside the second step after the save, between its gradients and the step of the optimizer
copying   the thread that copies for the save has copied a half of a tensor, and the step of the optimizer waits for it
staged    the snapshots of all ranks are whole, and their keeper writes them to storage

``resume`` goes on with a fresh engine of another case on other ranks, to FOLDER/resumed.json: how the restored engine
differs from what was written; how the one that trained on differs from one that loaded the same checkpoint with
`holdfast.load` and trained as far; and how an engine that loads the last checkpoint differs from it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist

import holdfast
from tests.interop.deepspeed_jobs import cast_faults, differences, held, values_of
from tests.interop.write_deepspeed import CASES, new_engine

#: The job dies after so many saves, one every `EVERY` steps.
NUM_SAVES = 3
EVERY = 3
#: The job that goes on makes so many steps.
MORE = 4


def gradients(engine: Any, step: int) -> None:
    """The first part of a step: the gradients of its batch, which every rank has its own of."""
    make = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
    engine.backward(engine(torch.randint(11, (2, 3), generator=make)).float().square().mean())


def train(engine: Any, step: int) -> None:
    """One step."""
    gradients(engine, step)
    engine.step()
    engine.module.seen += 1


def all_values(engine: Any) -> dict[str, Any]:
    """The values of an engine, with its count of micro-batches."""
    return {**values_of(engine), "micro_steps": engine.micro_steps}


def checkpointer(folder: Path, state: dict[str, Any]) -> holdfast.Checkpointer:
    """The object of both jobs, with the memory of one node."""
    memory = holdfast.Memory(node_dir=folder / "node")
    return holdfast.Checkpointer(folder / "run", state, save=holdfast.EverySteps(EVERY), memory=memory)


def sign(folder: Path, name: str) -> None:
    """Write the number of this process to a file, which is there when it is whole."""
    new = folder / f"{name}-{dist.get_rank()}.new"
    new.write_text(str(os.getpid()))
    new.rename(new.with_suffix(""))


def wait_for_death(folder: Path) -> None:
    """Say that this rank has got to its moment."""
    sign(folder, "ready")
    time.sleep(300)


def copy_half(folder: Path) -> None:
    """Let the threads of saves stop for ever in the middle of their first copy from now on."""
    copy = torch._foreach_copy_

    def half(targets: list[torch.Tensor], sources: list[torch.Tensor], **options: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            copy(targets, sources, **options)
            return
        for target, source in zip(targets, sources, strict=True):
            if target.numel() > 1:
                middle = target.shape[0] // 2
                copy([target[:middle]], [source[:middle]], **options)
                wait_for_death(folder)

    patch.object(torch, "_foreach_copy_", half).start()


def note(folder: Path, engine: Any, case: str, step: int, seen: int) -> None:
    """Write what the engine holds after a step."""
    found = {"held": held(engine, case), "values": all_values(engine), "seen": seen}
    if dist.get_rank() == 0:
        torch.save(found, folder / "held" / f"{step}.pt")


def die(folder: Path, case: str, moment: str) -> None:
    """Train until the third save, and wait at the moment after it."""
    engine = new_engine(CASES[case])
    state = {"engine": engine, "seen": 0}
    num_saves = 0
    with checkpointer(folder, state) as saver:
        for step in saver.steps(100):
            train(engine, step)
            state["seen"] += 2 * dist.get_world_size()
            note(folder, engine, case, step, state["seen"])
            if num_saves == NUM_SAVES - 1 and moment == "copying":
                copy_half(folder)
            handle = saver.step(step)
            num_saves += handle is not None
            if handle is None or num_saves < NUM_SAVES:
                continue
            if moment == "copying":
                gradients(engine, step + 1)
                sign(folder, "stepping")
                engine.step()
                sign(folder, "stepped")
            handle.staged.wait()
            if moment == "between":
                train(engine, step + 1)
                assert saver.step(step + 1) is None
                gradients(engine, step + 2)
            wait_for_death(folder)


def resume(folder: Path, case: str) -> None:
    """Go on, and compare."""
    engine = new_engine(CASES[case], seed=99)
    state = {"engine": engine, "seen": 0}
    with checkpointer(folder, state) as saver:
        report = saver.restore()
        assert report.step is not None
        expected = torch.load(folder / "held" / f"{report.step}.pt", weights_only=False)
        found = held(engine, case)
        result = {
            "step": report.step,
            "tier": report.tier,
            "compared": len(expected["held"].keys() & found.keys()),
            "differing": list(differences(expected["held"], found)),
            "casts": list(cast_faults(engine, found)),
            "values": [repr(all_values(engine)), repr(expected["values"])],
            "seen": [state["seen"], expected["seen"]],
        }
        steps = range(report.next_step, report.next_step + MORE)
        trained = []
        for step in saver.steps(steps.stop):
            train(engine, step)
            saver.step(step)
            trained.append(step)
    after = held(engine, case)
    result["trained"] = trained == [*steps]
    moments = {name: tensor for name, tensor in after.items() if "/exp_avg" in name}
    result["still"] = [name for name, tensor in moments.items() if torch.equal(tensor, found[name])]
    twin = new_engine(CASES[case], seed=98)
    holdfast.load(f"{folder / 'run'}@step={report.step}", {"engine": twin, "seen": 0})
    for step in steps:
        train(twin, step)
    result["twin"] = list(differences(after, held(twin, case)))
    result["twin_values"] = [repr(all_values(twin)), repr(all_values(engine))]
    last = new_engine(CASES[case], seed=97)
    result["last_step"] = holdfast.load(folder / "run", {"engine": last, "seen": 0}).step == steps[-1]
    result["last"] = list(differences(after, held(last, case)))
    if dist.get_rank() == 0:
        (folder / "resumed.json").write_text(json.dumps(result))


VERBS: dict[str, Callable[..., None]] = {"die": die, "resume": resume}


def main(verb: str, folder: Path, *arguments: str) -> None:
    """Run one job."""
    # Else DeepSpeed compiles C++ for its own collectives in shared memory, which takes minutes and a compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # DeepSpeed refuses fp16 on a CPU; torch computes it there.
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    deepspeed.init_distributed("gloo")
    VERBS[verb](folder, *arguments)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
    sys.stderr.flush()
    os._exit(0)  # torch sometimes aborts while an interpreter ends ("terminate called without an active exception")
