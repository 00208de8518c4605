"""A GPT that one framework has trained goes on in another one, on another layout, with the same bits.

The pairs of torch's own frameworks are in the default suite. ``make test-matrix`` runs all others with the real
DeepSpeed and Megatron-core, each in an environment of its own: `matrix_job` is one half of a pair. The framework of a
job assembles the tensors that the job holds (`matrix_gpt` names them); the test compares them in global coordinates.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import permutations, product
from pathlib import Path
from typing import Any

import pytest

import holdfast
from tests.jobs.matrix_gpt import from_megatron, to_megatron
from tests.jobs.matrix_job import SAVED, family, load, save
from tests.support.models import start_new_job
from tests.support.ranks import run_ranks

ROOT = Path(__file__).parents[2]
TORCH = ("ddp", "fsdp1", "fsdp2")
ENGINES = ("zero1", "zero2", "zero3")
MEGATRON = (
    *("megatron-tp2", "megatron-pp2", "megatron-tp2pp2", "megatron-vpp", "megatron-tp2-fp32", "megatron-pp2-fp16"),
    *("megatron-tp2-undistributed", "megatron-tp2-late"),
)
#: Jobs with experts. Megatron divides them among ranks; for the others, those of a layer are one tensor.
EXPERTS = ("fsdp2-moe", "zero2-moe", "megatron-ep2-moe", "megatron-pp2ep2-moe")
#: For each framework, the numbers of ranks that save and that load.
RANKS = {"torch": (2, 3), "deepspeed": (2, 3), "megatron": (4, 4)}
#: Every framework with every other one. Of Megatron's layouts, one meets each case of the others, and the others meet
#: those of their place.
PAIRS = [
    *((source, target) for source, target in permutations((*TORCH, *ENGINES, MEGATRON[0]), 2) if source not in TORCH),
    *product(TORCH, (*ENGINES, MEGATRON[0])),
    *((layout, other) for at, layout in enumerate(MEGATRON[1:]) for other in (TORCH[at % 3], ENGINES[at % 3])),
    *((other, layout) for at, layout in enumerate(MEGATRON[1:]) for other in (TORCH[at % 3], ENGINES[at % 3])),
    ("megatron-tp2", "fsdp2-padded"),
    ("fsdp2-padded", "megatron-tp2"),
    *((source, target) for source, target in permutations(EXPERTS, 2) if family(source) != family(target)),
]


def num_tensors(case: str) -> int:
    """The number of parameters and moments of a job."""
    return 3 * (2 + 1 + 4 * (12 if case.endswith("-moe") else 11))


def computes_in_fp32(case: str) -> bool:
    """Whether a job computes in fp32, not in bf16 or fp16."""
    return family(case) == "torch" or case.endswith("-fp32")


def faults(source: str, target: str, found: dict[str, Any]) -> dict[str, Any]:
    """The findings after a load and a step that are not as they must be; empty if all is well."""
    expected = {
        "compared": num_tensors(source),
        "alone": [],
        "differing": [],
        "casts": [],
        "steps": [SAVED],
        "steps_after": [SAVED + 1],
        "changed": num_tensors(source),
    }
    wrong = {key: found[key] for key, value in expected.items() if found[key] != value}
    before, after = found["losses"]
    tolerance = 1e-5 if computes_in_fp32(source) and computes_in_fp32(target) else 0.02
    # With other padding, the loss is over other tokens.
    if abs(after - before) > tolerance * before and "padded" not in source + target:
        wrong["losses"] = found["losses"]
    return wrong | ({} if 0 < found["trained"] < 10 else {"trained": found["trained"]})


def save_all(folder: str, cases: tuple[str, ...]) -> None:
    """Save a job of each case, one after the other."""
    for case in cases:
        start_new_job()
        save(Path(folder), case)


def load_all(folder: str, pairs: list[tuple[str, str]]) -> dict[str, Any]:
    """Load each pair, and return what is wrong."""
    wrong = {}
    for source, target in pairs:
        start_new_job()
        wrong[f"{source}:{target}"] = faults(source, target, load(Path(folder), source, target))
    return wrong


def test_ddp_fsdp1_and_fsdp2_go_on_from_each_other_on_other_ranks(tmp_path: Path) -> None:
    for case in TORCH:
        (tmp_path / case).mkdir()
    run_ranks(2, save_all, str(tmp_path), TORCH)
    pairs = list(permutations(TORCH, 2))
    assert run_ranks(3, load_all, str(tmp_path), pairs) == [{f"{a}:{b}": {} for a, b in pairs}] * 3


def test_the_rules_of_the_guide_are_those_that_the_matrix_uses() -> None:
    names: dict[str, Any] = {}
    for part in (ROOT / "docs/guides/matrix.md").read_text().split("```py\n")[1:]:
        exec(part.partition("```")[0], names)
    for shown, used in ((names["MINE"], from_megatron()), (names["THEIRS"], to_megatron())):
        assert set(shown) == set(used)
        assert list(map(type, shown)) == list(map(type, used))


def interpreter(framework: str) -> str:
    """The Python of the environment of a framework, which ``make test-matrix`` names."""
    if framework == "torch":
        return sys.executable
    return os.environ.get(f"{framework.upper()}_PYTHON", str(ROOT / f".venv-{framework}/bin/python"))


def half(framework: str, ranks: int, verb: str, folder: Path, *cases: str) -> list[dict[str, Any]]:
    """Run one half of pairs, and return what each rank found."""
    command = [interpreter(framework), "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={ranks}", "-m", "tests.jobs.matrix_job", verb, str(folder), *cases]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}/src:{ROOT}", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    found: list[dict[str, Any]] = json.loads((folder / f"{verb}.json").read_text())
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of all cases."""
    folder = tmp_path_factory.mktemp("matrix")
    every = sorted({source for source, _ in PAIRS})
    for framework in RANKS:
        cases = [case for case in every if family(case) == framework]
        for case in cases:
            (folder / case).mkdir()
        for found in half(framework, RANKS[framework][0], "save", folder, *cases):
            assert found == {case: {"tensors": num_tensors(case), "steps": [SAVED]} for case in cases}
    return folder


@pytest.mark.matrix
@pytest.mark.timeout(600)
@pytest.mark.parametrize("framework", RANKS)
def test_every_framework_goes_on_from_every_other_one(saved: Path, framework: str) -> None:
    pairs = [pair for pair in PAIRS if family(pair[1]) == framework]
    assert len(pairs) >= 18
    results = half(framework, RANKS[framework][1], "load", saved, *(":".join(pair) for pair in pairs))
    for rank, found in enumerate(results):
        wrong = {":".join(pair): faults(*pair, found[":".join(pair)]) for pair in pairs}
        assert wrong == {":".join(pair): {} for pair in pairs}, rank


@pytest.mark.matrix
@pytest.mark.timeout(600)
def test_stock_deepspeed_goes_on_from_an_export_of_a_run_of_megatron(saved: Path) -> None:
    source = "megatron-tp2pp2"
    options: dict[str, Any] = {"select": ["model", "optimizer"], "mapping": from_megatron()}
    holdfast.export(saved / source / "run", saved / source / "universal", "deepspeed-universal", **options)
    pairs = [(source, f"zero{stage}-universal") for stage in (1, 2, 3)]
    for rank, found in enumerate(half("deepspeed", 3, "stock", saved, *(":".join(pair) for pair in pairs))):
        assert {pair: faults(*pair, found[":".join(pair)]) for pair in pairs} == {pair: {} for pair in pairs}, rank
