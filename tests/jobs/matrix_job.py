"""One half of a pair of the cross-framework matrix, in the environment of one framework.

    torchrun --standalone --nproc_per_node 2 -m tests.jobs.matrix_job save FOLDER CASE...
    torchrun --standalone --nproc_per_node 3 -m tests.jobs.matrix_job load FOLDER FROM:TO...
    torchrun --standalone --nproc_per_node 3 -m tests.jobs.matrix_job stock FOLDER FROM:TO...

``save`` trains a job of each case for three steps, saves it into FOLDER/CASE/run, and writes its state in global
coordinates beside that. ``load`` loads the run of the case FROM into a fresh job of the case TO, compares what that
holds with the written state, by bits, and trains a step. ``stock`` has DeepSpeed's own loader load a folder.
Rank 0 writes what the job finds as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

import holdfast
from holdfast.mapping import Rename, Rule
from tests.jobs.matrix_gpt import Whole, from_megatron, to_megatron

SAVED = 3


class MatrixJob(Protocol):
    """A job of one framework."""

    state: dict[str, Any]
    #: The tensors that a load may cast: the low-precision weights beside master weights.
    cast: str | None

    def train(self, steps: int, *, first: int) -> float: ...

    def loss(self) -> float: ...

    def steps(self) -> set[float]: ...

    def whole(self) -> Whole: ...

    def low_precision_faults(self) -> list[str]: ...

    def catch_up(self, steps: int) -> None: ...


def new_job(case: str, *, seed: int) -> AbstractContextManager[MatrixJob]:
    """A fresh job of a case."""
    module = import_module(f"tests.jobs.matrix_{family(case)}")
    return cast("AbstractContextManager[MatrixJob]", module.job(case, seed=seed))


def family(case: str) -> str:
    """The framework of a case: torch, deepspeed or megatron."""
    return "deepspeed" if case.startswith("zero") else "megatron" if case.startswith("megatron") else "torch"


def rules(source: str, target: str) -> list[Rule]:
    """The mapping of a load: to the names of torch, and from these."""
    parts, experts = ("model", "optimizer"), target.endswith("-moe")
    into: dict[str, list[Rule]] = {
        "torch": [],
        "deepspeed": [Rename(f"engine/{part}", part) for part in parts],
        "megatron": from_megatron(61 if "padded" in target else None, experts=experts),
    }
    out: dict[str, list[Rule]] = {
        "torch": [],
        "deepspeed": [Rename(part, f"engine/{part}") for part in parts],
        "megatron": to_megatron(experts=experts),
    }
    return [] if family(source) == family(target) else into[family(source)] + out[family(target)]


def save(folder: Path, case: str) -> dict[str, Any]:
    """Train and save."""
    with new_job(case, seed=0) as job:
        job.train(SAVED, first=0)
        holdfast.save(folder / case / "run", job.state, SAVED)
        found: dict[str, Any] = {"whole": job.whole(), "loss": job.loss(), "steps": sorted(job.steps())}
    if dist.get_rank() == 0:
        torch.save(found, folder / case / "expected.pt")
    dist.barrier()
    return {"tensors": len(found["whole"]), "steps": found["steps"]}


def load(folder: Path, source: str, target: str) -> dict[str, Any]:
    """Load into a fresh job, compare, and train a step."""
    prefix = "engine/" if family(target) == "deepspeed" else ""
    with new_job(target, seed=99) as job:
        report = holdfast.load(
            folder / source / "run",
            job.state,
            mapping=rules(source, target),
            select=[f"{prefix}model", f"{prefix}optimizer"],
            cast=job.cast if family(source) != family(target) else None,
        )
        assert report.next_step == SAVED + 1
        return went_on(folder, source, job)


def stock(folder: Path, source: str, target: str) -> dict[str, Any]:
    """Let DeepSpeed itself load the folder FOLDER/FROM/universal into a fresh engine, as the guide does it, and go
    on."""
    with new_job(target, seed=99) as job:
        engine = job.state["engine"]
        # The head is tied to the embedding, and a run of Megatron has one name for both.
        engine.load_checkpoint(str(folder / source / "universal"), load_module_strict=False)
        import_module("tests.interop.deepspeed_jobs").complete(engine, folder / source / "universal")
        return went_on(folder, source, job)


def went_on(folder: Path, source: str, job: MatrixJob) -> dict[str, Any]:
    """Compare what a job holds with what was saved, take a step, and return the findings before and after it."""
    expected = torch.load(folder / source / "expected.pt", weights_only=True)
    found = job.whole()
    result: dict[str, Any] = {
        "compared": len(found.keys() & expected["whole"].keys()),
        "alone": sorted(found.keys() ^ expected["whole"].keys()),
        "differing": sorted(differing(expected["whole"], found)),
        "casts": job.low_precision_faults(),
        "steps": sorted(job.steps()),
        "losses": [expected["loss"], job.loss()],
    }
    job.catch_up(SAVED)
    result["trained"] = job.train(1, first=SAVED)
    result["steps_after"] = sorted(job.steps())
    result["changed"] = sum(not torch.equal(after, found[name]) for name, after in job.whole().items())
    return result


def differing(expected: Whole, found: Whole) -> set[str]:
    """The names of the tensors that both have and that differ in a bit. Padding of a vocabulary must be 0."""
    names = set()
    for name in expected.keys() & found.keys():
        mine, theirs = found[name].contiguous(), expected[name].contiguous()
        if mine.shape != theirs.shape and name.startswith("embed.weight/"):
            rows = min(len(mine), len(theirs))
            if len(mine) > rows and mine[rows:].any():
                names.add(name)
            mine, theirs = mine[:rows], theirs[:rows]
        if mine.dtype != theirs.dtype or not torch.equal(bits(mine), bits(theirs)):
            names.add(name)
    return names


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def main(verb: str, folder: Path, cases: list[str]) -> None:
    """Run one verb for several cases."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    verbs: dict[str, Callable[..., dict[str, Any]]] = {"save": save, "load": load, "stock": stock}
    results = {case: verbs[verb](folder, *case.split(":")) for case in cases}
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, results)
    if dist.get_rank() == 0:
        (folder / f"{verb}.json").write_text(json.dumps(every))
    dist.barrier()
    dist.destroy_process_group()
    sys.stderr.flush()
    os._exit(0)  # torch sometimes aborts while an interpreter ends ("terminate called without an active exception")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
