"""Folders of ``megatron.core.dist_checkpointing``: those that Megatron wrote load into live jobs, and exports load into
Megatron, on other layouts, compared bit by bit with a job on one rank. ``make test-megatron`` runs these."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast.errors import HoldfastError
from holdfast.trainers.megatron import megatron_state
from tests.support.bound import bits
from tests.support.ranks import run_ranks
from tests.trainers.megatron_folders import BUCKETS, FULL, GATHERED, ON_FIRST, load_folder, save_folder
from tests.trainers.megatron_job import Kind, Layout, fill, gather_weights, megatron_job, train, weights
from tests.trainers.test_megatron_jobs import MOE, differing, save, stored_differences, write_reference

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),  # Megatron warns of what is not installed, and torch of old functions
]

FIXTURES = Path(__file__).parents[1] / "interop" / "fixtures" / "megatron"
JOB = ["model", "optimizer", "scheduler"]
FP32 = Kind(bf16=False)
FP16 = Kind(bf16=False, fp16=True)
ONE = Layout(bucket=None)
#: The time that a save by Megatron may take: each rank starts a process that gets its results and imports torch for
#: that.
STOCK_TIMEOUT_S = 200.0


class Stock(NamedTuple):
    """A folder that Megatron writes: of which job, and in which format of the distributed optimizer."""

    kind: Kind
    ranks: int
    layout: Layout
    sharding: str | None


#: Megatron's own fully reshardable format is wrong where there are several buckets (design note 002, trap 6).
READ = [
    ("gathered", Stock(Kind(), 4, Layout(tp=2, bucket=None), FULL), 4, Layout(pp=2)),
    ("gathered, virtual stages", Stock(Kind(), 4, Layout(tp=2, bucket=None), FULL), 4, Layout(pp=2, vpp=2)),
    (
        "gathered, to a plain optimizer",
        Stock(Kind(), 4, Layout(tp=2, bucket=None), FULL),
        2,
        Layout(tp=2, distributed=False),
    ),
    ("gathered, fp16", Stock(FP16, 2, ONE, FULL), 4, Layout(tp=2)),
    ("gathered, fp32", Stock(FP32, 4, Layout(pp=2, bucket=None), FULL), 2, Layout(tp=2)),
    ("gathered experts", Stock(MOE, 4, Layout(tp=2, ep=2, bucket=None), FULL), 2, Layout(pp=2)),
    ("plain", Stock(Kind(), 2, Layout(pp=2, distributed=False), None), 4, Layout(tp=2)),
    ("plain, fp32", Stock(FP32, 2, Layout(pp=2, distributed=False), None), 4, Layout(tp=2)),
    ("buckets", Stock(Kind(), 4, Layout(tp=2), BUCKETS), 2, Layout(tp=2)),
    ("buckets, more ranks", Stock(Kind(), 2, Layout(pp=2), BUCKETS), 6, Layout(pp=2)),
    ("buckets, fp16", Stock(FP16, 4, Layout(tp=2), BUCKETS), 2, Layout(tp=2)),
    ("buckets, fp32", Stock(FP32, 4, Layout(tp=2), BUCKETS), 2, Layout(tp=2)),
    ("buckets of experts", Stock(MOE, 4, Layout(tp=2, ep=2), BUCKETS), 2, Layout(tp=2, ep=2)),
    ("gathered on one rank", Stock(Kind(), 4, Layout(tp=2, bucket=None), ON_FIRST), 2, Layout(pp=2)),
    ("buffers", Stock(Kind(), 4, Layout(tp=2, bucket=None), GATHERED), 2, Layout(tp=2, bucket=None)),
    ("buffers, to buckets", Stock(Kind(), 4, Layout(tp=2, bucket=None), GATHERED), 4, Layout(tp=2, bucket=400)),
    ("buffers, fp32", Stock(FP32, 2, Layout(pp=2, bucket=None), GATHERED), 6, Layout(pp=2, bucket=None)),
    (
        "buffers of experts",
        Stock(MOE, 4, Layout(tp=2, ep=2, bucket=None), GATHERED),
        2,
        Layout(tp=2, ep=2, bucket=None),
    ),
]
WRITTEN = [
    ("stages", Kind(), 4, Layout(tp=2), 4, Layout(pp=2, bucket=None)),
    ("virtual stages", Kind(), 4, Layout(pp=2), 4, Layout(tp=2, pp=2, vpp=2, bucket=None)),
    ("a plain optimizer", Kind(), 4, Layout(tp=2), 2, Layout(tp=2, distributed=False)),
    ("fp32", FP32, 4, Layout(tp=2), 4, Layout(pp=2, bucket=None)),
    ("fp32, a plain optimizer", FP32, 4, Layout(tp=2), 2, Layout(pp=2, distributed=False)),
    ("fp16 with a scaler", FP16, 4, Layout(tp=2), 2, Layout(pp=2, bucket=None)),
    ("experts", MOE, 2, Layout(tp=2), 4, Layout(pp=2, ep=2, bucket=None)),
]


def save_stock(folder: str, layout: Layout, kind: Kind, sharding: str | None) -> None:
    """Save by Megatron after three steps."""
    with megatron_job(layout, kind, seed=1) as job:
        fill(job)
        train(job, 3)
        gather_weights(job)
        save_folder(job, f"{folder}/stock", 3, sharding)


def load_stock(folder: str, layout: Layout, kind: Kind) -> tuple[int, list[str]]:
    """Load what Megatron saved, save it again, and train on; returns the next step and the weights that differ."""
    with megatron_job(layout, kind, seed=2) as job:
        state = megatron_state(job.chunks, job.optimizer, job.scheduler)
        report = holdfast.load(f"{folder}/stock", into=state, select=JOB)
        holdfast.save(f"{folder}/again", state, 3)
        train(job, 1, first=3)
        gather_weights(job)
        return report.next_step, differing(weights(job), f"{folder}/after-4.pt")


@pytest.mark.parametrize(
    ("stock", "ranks", "layout"),
    [case[1:] for case in READ],
    ids=[case[0] for case in READ],
)
def test_a_job_goes_on_bit_by_bit_from_a_folder_of_megatron(
    tmp_path: Path, stock: Stock, ranks: int, layout: Layout
) -> None:
    run_ranks(1, write_reference, str(tmp_path), stock.kind)
    run_ranks(
        stock.ranks, save_stock, str(tmp_path), stock.layout, stock.kind, stock.sharding, timeout_s=STOCK_TIMEOUT_S
    )
    assert run_ranks(ranks, load_stock, str(tmp_path), layout, stock.kind) == [(4, [])] * ranks
    assert stored_differences(f"{tmp_path}/again", f"{tmp_path}/after-3.pt") == []


def load_export(folder: str, layout: Layout, kind: Kind) -> tuple[int, list[str]]:
    """Load an export by Megatron alone, save the job by holdfast, and train on."""
    with megatron_job(layout, kind, seed=2) as job:
        load_folder(job, f"{folder}/folder", FULL if layout.distributed else None)
        steps = job.scheduler.num_steps
        holdfast.save(f"{folder}/again", megatron_state(job.chunks, job.optimizer, job.scheduler), 3)
        train(job, 1, first=3)
        gather_weights(job)
        return steps, differing(weights(job), f"{folder}/after-4.pt")


@pytest.mark.parametrize(
    ("kind", "ranks", "layout", "ranks_after", "layout_after"),
    [case[1:] for case in WRITTEN],
    ids=[case[0] for case in WRITTEN],
)
def test_megatron_goes_on_bit_by_bit_from_an_export(
    tmp_path: Path, kind: Kind, ranks: int, layout: Layout, ranks_after: int, layout_after: Layout
) -> None:
    run_ranks(1, write_reference, str(tmp_path), kind)
    run_ranks(ranks, save, str(tmp_path), layout, kind, None)
    report = holdfast.export(tmp_path / "run", tmp_path / "folder", "megatron")
    assert report.verified
    assert run_ranks(ranks_after, load_export, str(tmp_path), layout_after, kind) == [(3, [])] * ranks_after
    assert stored_differences(f"{tmp_path}/again", f"{tmp_path}/after-3.pt") == []


def load_fixture(folder: str, layout: Layout, kind: Kind) -> int:
    """Load what an older Megatron has saved, and save it again."""
    with megatron_job(layout, kind, seed=2) as job:
        state = megatron_state(job.chunks, job.optimizer, job.scheduler)
        report = holdfast.load(f"{folder}/ranges-on-4", into=state, select=JOB)
        holdfast.save(f"{folder}/again", state, 1)
        return report.next_step


@pytest.mark.parametrize(("ranks", "layout"), [(4, Layout(pp=2)), (2, Layout(tp=2, distributed=False))])
def test_ranges_of_megatron_0_14_load_on_any_layout(tmp_path: Path, ranks: int, layout: Layout) -> None:
    with tarfile.open(FIXTURES / "ranges-on-4.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    assert run_ranks(ranks, load_fixture, str(tmp_path), layout, Kind(vocabulary=16)) == [2] * ranks
    old, new = holdfast.open(tmp_path / "ranges-on-4"), holdfast.open(tmp_path / "again")
    names = [name for name in old.names() if name.startswith(("model/", "optimizer/"))]
    assert len(names) == 44
    assert [name for name in names if bits(old[name][...]) != bits(new[name][...])] == []


def refuse_buckets(folder: str, layout: Layout) -> str:
    with megatron_job(layout, Kind(), seed=2) as job:
        before = [parameter.detach().clone() for chunk in job.chunks for parameter in chunk.parameters()]
        with pytest.raises(HoldfastError) as caught:
            holdfast.load(f"{folder}/stock", megatron_state(job.chunks, job.optimizer, job.scheduler), select=JOB)
        after = [parameter for chunk in job.chunks for parameter in chunk.parameters()]
        assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
        return f"{caught.value.code}: {caught.value}"


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(tp=2, bucket=None), Layout(tp=2, distributed=False)])
def test_buckets_of_another_layout_are_refused_and_nothing_is_loaded(tmp_path: Path, layout: Layout) -> None:
    run_ranks(2, save_stock, str(tmp_path), Layout(tp=2), Kind(), BUCKETS, timeout_s=STOCK_TIMEOUT_S)
    for text in run_ranks(2, refuse_buckets, str(tmp_path), layout):
        assert text.startswith("incompatible.megatron_buckets:")
        assert "dp_reshardable" in text


@pytest.mark.parametrize("layout", [Layout(pp=2, bucket=None), Layout(tp=2, bucket=10), Layout(distributed=False)])
def test_buffers_of_another_layout_or_of_other_buckets_are_refused(tmp_path: Path, layout: Layout) -> None:
    """Buffers of other buckets can have as many elements, at other places, where weights need padding."""
    run_ranks(2, save_stock, str(tmp_path), Layout(tp=2, bucket=None), Kind(), GATHERED, timeout_s=STOCK_TIMEOUT_S)
    for text in run_ranks(2, refuse_buckets, str(tmp_path), layout):
        assert text.startswith("incompatible.megatron_buckets:")
        assert "dp_zero_gather_scatter" in text


def finetune(folder: str, layout: Layout) -> tuple[list[str], list[str], int]:
    """Load a part of a folder as the flags of Megatron-LM do; returns the weights that differ after ``--finetune`` and
    after ``--no-load-optim``, and the steps of the scheduler after the first."""
    with megatron_job(layout, Kind(), seed=2) as job:
        state = megatron_state(job.chunks, job.optimizer, job.scheduler)
        holdfast.load(f"{folder}/stock", into=state, select="model")
        first, steps = differing(weights(job), f"{folder}/after-3.pt"), job.scheduler.num_steps
        masters = [
            torch.equal(main.to(weight.dtype), weight.detach().reshape(-1)[held.start : held.stop])
            for weight, main, held in _masters(job)
        ]
        assert masters
        assert all(masters)
    with megatron_job(layout, Kind(), seed=3) as job:
        holdfast.load(f"{folder}/stock", megatron_state(job.chunks, job.optimizer, job.scheduler), select=JOB[::2])
        assert job.scheduler.num_steps == 3
        return first, differing(weights(job), f"{folder}/after-3.pt"), steps


def _masters(job: Any) -> list[tuple[torch.Tensor, torch.Tensor, slice]]:
    found = []
    for optimizer in job.optimizer.chained_optimizers:
        for weight, (group, place) in optimizer.model_param_group_index_map.items():
            held = optimizer._get_model_param_range_map(weight)["param"]
            main = optimizer.optimizer.param_groups[group]["params"][place]
            found.append((weight, main, slice(held.start, held.end)))
    return found


def test_selections_do_what_the_flags_of_megatron_do(tmp_path: Path) -> None:
    run_ranks(1, write_reference, str(tmp_path), Kind())
    run_ranks(2, save_stock, str(tmp_path), Layout(tp=2), Kind(), BUCKETS, timeout_s=STOCK_TIMEOUT_S)
    assert run_ranks(4, finetune, str(tmp_path), Layout(pp=2)) == [([], [], 0)] * 4


def random_numbers(folder: str, layout: Layout) -> bool:
    """Save random numbers by Megatron, lose them, load them, and return whether the next ones are the same."""
    with megatron_job(layout, Kind()) as job:
        torch.manual_seed(dist.get_rank())
        save_folder(job, f"{folder}/stock", 3, None)
        expected = torch.rand(4)
        state = megatron_state(job.chunks)
        holdfast.load(f"{folder}/stock", into=state, select=["model", "random", "model_parallel_random"])
        return torch.equal(torch.rand(4), expected)


def test_random_numbers_go_on_where_each_rank_has_its_own(tmp_path: Path) -> None:
    assert run_ranks(4, random_numbers, str(tmp_path), Layout(tp=2, pp=2, distributed=False)) == [True] * 4
